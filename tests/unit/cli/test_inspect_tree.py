"""`gspo-mega inspect` of episodes of several turns: for people on a narrow terminal, and whole as JSON."""

from __future__ import annotations

import json

import pytest
from episode_trees import TASK, context, sampled
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.base.episodes import Episode, Group, RolloutBatch, ToolRecord
from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.cli.inspect import WIDTH, describe_episode, tree_text
from gspo_mega.cli.main import main
from gspo_mega.config import load_config, render_config
from gspo_mega.data.journal.journal import Journal

TOOLS = [{"type": "function", "function": {"name": "calculator"}}]


def tree(name: str, reward: float | None, **more) -> Episode:
    """Two turns with a tool between them, and a branch whose history was edited."""
    nodes = [
        context(0, -1, [3, 1, 4]),
        sampled(1, 0, [5, 6], 2, reward=0.5),
        context(2, 1, [7]),
        sampled(3, 2, [8, 9], 2, finish_reason="length"),
        context(4, 0, [2, 2], cause="edited"),
        sampled(5, 4, [8], 3),
    ]
    nodes[2].messages = [{"role": "tool", "content": "84"}]
    nodes[3].weight_versions = [2, 3]
    calls = [ToolRecord(0, "calculator", {"expression": "12*7"}, "84", None, 0.25)]
    return Episode(name, 0, TASK, nodes, tools=TOOLS, tool_calls=calls, reward=reward, **more)


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    atomic_write_text(folder.config_file, render_config(load_config("configs/quickstart.yaml").config))
    plain = [
        Episode(f"g1-s00{k}", 1, TASK, [context(0, -1, [3, 1, 4]), sampled(1, 0, [5], 3)], reward=float(k))
        for k in range(2)
    ]
    failed = Episode("g0-s002", 0, TASK, [context(0, -1, [3])], failure="crash: agent.py:7: KeyError: 'x'")
    group = Group(0, TASK, [tree("g0-s000", 1.5, correct=True, info={"tries": 2}), tree("g0-s001", 1.0), failed])
    groups = {0: group, 1: Group(1, TASK, plain)}
    with Journal(folder.journal_dir).begin(0, 3, 3, groups) as writer:
        writer.finish(RolloutBatch(0, list(groups.values()), {}, {}), {})
    return str(folder.path)


def test_a_tree_is_shown_turn_by_turn(run, capsys):
    assert main(["inspect", run, "--step", "1"]) == 0
    text = capsys.readouterr().out
    start = text.index("--- g0-s000")
    assert text[start : text.index("--- g0-s001")].splitlines() == [
        "--- g0-s000",
        "    reward 1.5  3 turns  5 sampled tokens  2 rows  correct  tools calculator",
        '    info {"tries": 2}',
        "#0  user: 3 tokens, mask 0",
        "    m0",
        "#1  turn 0: 2 tokens, mask 1, stop, version 2, log-prob per token -1.0005",
        "    (lowest -1.00), reward 0.5, server-0",
        "    t1",
        '    tool calculator {"expression": "12*7"} -> 84 (0.25 s)',
        "#2  tool: 1 token, mask 0",
        "    84",
        "#3  turn 1: 2 tokens, mask 1, length, versions 2 (1 token), 3 (1 token),",
        "    log-prob per token -3.0005 (lowest -3.00), server-0",
        "    t3",
        "#4  user: 2 tokens, mask 0  after #0  branch: edited",
        "    m4",
        "#5  turn 2: 1 token, mask 1, stop, version 3, log-prob per token -5.0000 (lowest",
        "    -5.00), server-0",
        "    t5",
        "    row 0: #0 #1 #2 #3; advantage +1.000; weight 0.8; mask after the first 3",
        "    tokens: 1x2 0x1 1x2",
        "    row 1: #0 #4 #5; advantage +1.000; weight 0.2; mask after the first 5",
        "    tokens: 1x1",
    ]
    assert "    not trained on, because it failed: crash: agent.py:7: KeyError: 'x'" in text


def test_an_episode_of_one_turn_looks_as_ever(run, capsys):
    main(["inspect", run, "--step", "1"])
    assert (
        "--- g1-s000  reward 0  advantage -1.000  1 tokens, stop  log-prob per token -1.0000 (lowest -1.00)\nt1"
        in capsys.readouterr().out
    )


def test_a_failed_episode_is_no_failed_scoring(run, capsys):
    assert main(["inspect", run]) == 0
    assert capsys.readouterr().out == (
        "step      1  groups     2  trajectories      5  reward 0.875  failed episodes 1\n"
    )


def test_as_json_it_has_every_token(run, capsys):
    assert main(["inspect", run, "--step", "1", "--json"]) == 0
    group, plain = json.loads(capsys.readouterr().out)["groups"]
    assert [one["trajectory_id"] for one in group["trajectories"]] == [
        *("g0-s000", "g0-s000-b001"),
        *("g0-s001", "g0-s001-b001"),
    ]
    assert "episodes" not in plain
    whole, _, failed = group["episodes"]
    assert [node["token_ids"] for node in whole["nodes"]] == [[3, 1, 4], [5, 6], [7], [8, 9], [2, 2], [8]]
    assert whole["nodes"][3]["weight_versions"] == [2, 3] and whole["nodes"][3]["log_probs"] == [-3.0, -3.001]
    assert whole["nodes"][4]["cause"] == "edited" and whole["tool_calls"][0]["result"] == "84"
    assert [row["mask"] for row in whole["rows"]] == [[[1, 2], [0, 1], [1, 2]], [[1, 1]]]
    assert failed["failure"].startswith("crash") and failed["rows"] == []


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_no_text_of_an_agent_acts_on_the_terminal_or_is_wider_than_it(text):
    episode = tree("g0-s000", None, reward_error=text, info={"said": text})
    episode.nodes[1].text = text
    episode.nodes[2].messages = [{"role": "tool", "content": text, "tool_calls": [{"function": {"name": text}}]}]
    episode.tool_calls[0].error = text
    for line in tree_text(describe_episode(episode)):
        assert len(line) <= WIDTH and line.expandtabs().isprintable(), repr(line)
