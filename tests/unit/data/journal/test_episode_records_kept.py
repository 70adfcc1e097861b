"""Episodes of any shape come back from the journal as they were; so do those of files that earlier releases wrote."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
from episode_trees import TASK, context, episodes, routed, sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_groups import whole_groups

from gspo_mega.base.episodes import Episode, Group, Node, RolloutBatch
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.frames import MAGIC, FrameFile, decode_episode, encode_episode, tools_id
from gspo_mega.data.journal.journal import Journal

FIRST_FORMAT = Path(__file__).with_name("data")
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]


def same_nodes(one: list[Node], other: list[Node]) -> bool:
    """To the field and the bit, types of numbers included."""

    def plain(node):
        values = {f.name: getattr(node, f.name) for f in fields(Node)}
        routes = values.pop("routed_experts")
        return repr(values), None if routes is None else (routes.tolist(), routes.dtype.str)

    return [plain(node) for node in one] == [plain(node) for node in other]


def same(one: Episode, other: Episode) -> bool:
    apart = [repr(replace(episode, nodes=[])) for episode in (one, other)]
    return apart[0] == apart[1] and same_nodes(one.nodes, other.nodes)


def kept(tmp_path: Path, *written: Episode) -> list[Episode]:
    """The episodes of one group as they come back."""
    journal = Journal(tmp_path / "journal")
    with journal.begin(3, 3, len(written), {}, {"rewards": "r"}) as writer:
        for episode in reversed(written):
            writer.add(episode)
        writer.finish(RolloutBatch(3, [Group(written[0].group_id, written[0].prompt, list(written))]), {})
    return journal.read(3).batch.groups[0].episodes


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(
    episode=episodes(),
    tools=st.sampled_from([[], TOOLS]),
    correct=st.sampled_from([None, False, True]),
    failure=st.sampled_from([None, "deadline: the agent made no turn for 60 s"]),
    info=st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    call=st.sampled_from(["", "tool_calls"]),
    counts=st.sampled_from([{}, {"num_broken_calls": 2}]),
)
def test_any_tree_comes_back(tmp_path_factory, episode, tools, correct, failure, info, call, counts):
    episode.tools, episode.correct, episode.failure, episode.info = tools, correct, failure, info
    episode.counts = counts
    if call:
        function = {"name": "calculator", "arguments": {"expression": "2+2"}}
        episode.nodes[0].messages[0] |= {"tool_calls": [{"id": "0", "type": "function", "function": function}]}
    path = tmp_path_factory.getbasetemp() / "frames"
    path.write_bytes(MAGIC + encode_episode(episode))
    ((values, arrays),) = FrameFile(path).frames()
    back = decode_episode(values, arrays, episode.prompt, {tools_id(TOOLS): TOOLS})
    assert same(back, episode)
    assert repr(back.rows()) == repr(episode.rows()), "and so do the rows that are trained on"


def test_a_failed_episode_is_recorded_with_what_it_sampled(tmp_path):
    whole = Episode("s3-g0-s000", 0, TASK, [context(0, -1, [3, 1, 4]), sampled(1, 0, [5, 6])], reward=1.0)
    failed = replace(whole, episode_id="s3-g0-s001", reward=None, failure="crashed: agent.py:7: KeyError: 'x'")
    nothing = Episode("s3-g0-s002", 0, TASK, [], failure="memory: its process was ended at 2 GiB")
    back = kept(tmp_path, whole, failed, nothing)
    assert all(same(one, other) for one, other in zip(back, (whole, failed, nothing), strict=True))
    assert [one.is_scored for one in back] == [True, False, False]


def test_schemas_of_tools_and_tokens_of_the_prompt_are_written_once(tmp_path):
    prompt = replace(TASK, token_ids=tuple(range(1000)))
    written = [
        Episode(
            f"g0-s{k:03d}", 0, prompt, [context(0, -1, list(range(1000))), sampled(1, 0, [7])], tools=TOOLS, reward=1.0
        )
        for k in range(8)
    ]
    assert all(one.tools == TOOLS for one in kept(tmp_path, *written))
    file = FrameFile(Journal(tmp_path / "journal").file(3))
    frames = list(file.frames())
    assert [values["kind"] for values, _ in frames].count("tools") == 1
    assert file.path.stat().st_size < 4 * 1000 + 8 * 800


def test_routes_are_taken_out_of_every_node_and_nothing_else(tmp_path):
    tree = [context(0, -1, [3, 1]), sampled(1, 0, [5, 6]), context(2, 1, [7]), sampled(3, 2, [8]), sampled(4, 0, [9])]
    episode = routed(Episode("g0-s000", 0, TASK, tree, reward=1.0))
    episode.nodes[4].routed_experts = None
    journal = Journal(tmp_path / "journal")
    (back,) = kept(tmp_path, episode)
    assert same(back, episode) and not journal.has_pruned_routes(3)
    before = journal.read(3)
    journal.prune_routes(4)
    after = journal.read(3)
    assert after.routes_pruned and after.checksums == before.checksums
    (pruned,) = after.batch.episodes
    assert all(node.routed_experts is None for node in pruned.nodes)
    for node in episode.nodes:
        node.routed_experts = None
    assert same(pruned, episode)


@pytest.mark.parametrize("change", [dict(log_probs=[-1.0]), dict(finish_reason=""), dict(parent=-1)])
def test_a_tree_that_no_recorder_makes_is_refused_before_it_is_written(tmp_path, change):
    tree = [context(0, -1, [3, 1]), replace(sampled(1, 0, [5, 6]), **change)]
    journal = Journal(tmp_path)
    with (
        journal.begin(3, 3, 1, {}) as writer,
        pytest.raises(JournalError, match="g0-s000, of prompt tasks:7, cannot be written: episode g0-s000, node 1"),
    ):
        writer.add(Episode("g0-s000", 0, TASK, tree, reward=1.0))
    assert journal.read(3).groups == {}


def test_a_record_with_a_right_checksum_and_wrong_content_is_named(tmp_path, monkeypatch):
    tree = [context(0, -1, [3, 1]), replace(sampled(1, 0, [5, 6]), finish_reason="")]
    monkeypatch.setattr("gspo_mega.data.journal.frames.check_episode", lambda episode: None)
    with Journal(tmp_path).begin(3, 3, 1, {}) as writer:
        writer.add(Episode("g0-s000", 0, TASK, tree, reward=1.0))
    monkeypatch.undo()
    with pytest.raises(
        JournalError, match="step_00000003: the record of g0-s000 is no episode: ValueError.*finish_reason"
    ):
        Journal(tmp_path).read(3)


def test_of_one_turn_nothing_is_written_that_follows_from_the_prompt():
    episode = Episode("g0-s000", 0, TASK, [context(0, -1, [3, 1, 4]), sampled(1, 0, [5])], reward=0.0)
    episode.nodes[0].messages = [{"role": "user", "content": TASK.text}]
    frame = encode_episode(episode)
    assert TASK.text.encode() not in frame and frame.count(b"t1") == 1


def test_a_second_attempt_at_a_sample_takes_the_place_of_the_first(tmp_path):
    tree = [context(0, -1, [3, 1, 4]), sampled(1, 0, [5, 6])]
    other = Episode("step000003-g00000-s000", 0, TASK, tree, reward=1.0)
    first = replace(other, episode_id="step000003-g00000-s001", reward=None, failure="crash: it fell")
    again = replace(other, episode_id="step000004-g00000-s001", reward=0.0)
    with Journal(tmp_path).begin(4, 4, 2, {}) as writer:
        for one in (first, other, again):
            writer.add(one)
        writer.finish(RolloutBatch(4, [Group(0, TASK, [other, again])]), {})
    assert [(one.episode_id, one.reward) for one in Journal(tmp_path).read(4).batch.episodes] == [
        ("step000003-g00000-s000", 1.0),
        ("step000004-g00000-s001", 0.0),
    ]


@pytest.fixture
def earlier(tmp_path):
    """The journal that a release with format 1 has left: step 1 complete, step 2 cut short."""
    shutil.copytree(FIRST_FORMAT, tmp_path / "journal")
    return Journal(tmp_path / "journal")


def test_files_of_format_1_are_read(earlier):
    record = earlier.read(0)
    assert (record.weight_version, record.group_size) == (3, 2)
    assert record.made_by == {"weights": "w0", "rewards": "r", "sampling": "s"}
    assert record.prompts == {"sources": {"train": {"position": 2}}}
    first = record.batch.groups[0].prompt
    assert first == Prompt("train:5", "train", (7, 8, 9), "1+1=", {"answer": 2}, {"n": [1]})
    found = {row.trajectory_id: row for row in record.batch.trajectories}
    assert list(found) == [f"step000000-g0000{g}-s00{s}" for g in (0, 1) for s in (0, 1)]
    assert [row.reward for row in found.values()] == [1.0, 0.0, None, 0.25]
    assert [row.finish_reason for row in found.values()] == ["length", "stop", "length", "stop"]
    assert found["step000000-g00001-s000"].reward_error == "judge: it hung"
    assert found["step000000-g00000-s001"].response_text == "text 1 é"
    assert found["step000000-g00000-s000"].routed_experts.shape == (5, 2, 2)
    longest = found["step000000-g00000-s000"]
    assert (longest.response_token_ids, longest.response_mask) == ([1, 2, 3], [1, 1, 1])
    assert (longest.rollout_log_probs, longest.weight_versions) == ([-0.1, -0.2, -0.30000000000000004], [3, 3, 4])
    torn = earlier.read(1)
    assert torn.batch is None
    assert {number: len(group.episodes) for number, group in torn.groups.items()} == {0: 1, 1: 2}


def test_a_file_of_format_1_is_continued_in_format_2_and_has_its_routes_pruned(earlier):
    record = earlier.read(1)
    with earlier.begin(1, 4, 2, whole_groups(record), record.made_by) as writer:
        writer.finish(RolloutBatch(1, list(whole_groups(record).values())), {})
    again = earlier.read(1)
    assert [same(a, b) for a, b in zip(again.batch.episodes, record.groups[1].episodes, strict=True)] == [True, True]
    before = earlier.read(0)
    earlier.prune_routes(1)
    pruned = earlier.read(0)
    assert pruned.routes_pruned and all(row.routed_experts is None for row in pruned.batch.trajectories)
    assert pruned.checksums == before.checksums
