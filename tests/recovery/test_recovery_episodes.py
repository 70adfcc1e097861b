"""Recorded episodes of several turns, with branches and failures: what is trained on does not depend on where the run was
killed, nor on which of the two journals it is read from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from recovery_support import GROUP_SIZE, KILLED, NUM_GROUPS, NUM_STEPS, leftovers, outcome, record

from gspo_mega.base.episodes import Episode, Group, Node, ToolRecord
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics

KILLS = (
    ("journal.append.after", 4),
    ("rollout.batch", 1),
    ("step.optimizer", 2),
    ("step.trained", 1),
    ("step.written", 1),
)


def tree_of(name: str, number: int, prompt: Prompt, reward: float, rng: np.random.Generator) -> Episode:
    """Two turns with a tool's answer between them; every second episode has a branch that edited it."""

    def tokens() -> list[int]:
        return rng.integers(3, 500, int(rng.integers(2, 7))).tolist()

    def turn(node_id: int, parent: int, version: int, **more) -> Node:
        ids = tokens()
        message = [{"role": "assistant", "content": f"turn {node_id}"}]
        log_probs = (-rng.random(len(ids))).tolist()
        versions = [version] * len(ids)
        return Node(node_id, parent, "sampled", message, ids, log_probs, versions, finish_reason="stop", **more)

    step = int(name[4:10])
    nodes = [Node(0, -1, "context", [{"role": "user", "content": prompt.text}], list(prompt.token_ids))]
    nodes.append(turn(1, 0, step, reward=0.25))
    nodes.append(Node(2, 1, "context", [{"role": "tool", "content": "84"}], tokens()))
    nodes.append(turn(3, 2, step))
    if rng.random() < 0.5:
        nodes.append(Node(4, 0, "context", [{"role": "user", "content": "again"}], tokens(), cause="edited"))
        nodes.append(turn(5, 4, step))
    schema = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
    calls = [ToolRecord(0, "calculator", {"expression": "12*7"}, "84", None, 0.25)]
    return Episode(name, number, prompt, nodes, tools=[schema], tool_calls=calls, reward=reward)


@pytest.fixture(scope="module")
def trees(ranks, tmp_path_factory):
    """The folder of a run that sampled episodes of several turns; of each step the last sample of a group failed."""
    folder = RunFolder(tmp_path_factory.mktemp("trees") / "recorded")
    journal, rng, size = Journal(folder.journal_dir), np.random.default_rng(7), GROUP_SIZE + 1
    for step in range(NUM_STEPS):
        groups = []
        for number in range(NUM_GROUPS):
            ids = tuple(rng.integers(3, 500, 5).tolist())
            prompt = Prompt(f"train:{step}-{number}", "train", ids, f"prompt {number}", answer="1")
            names = [f"step{step:06d}-g{number:05d}-s{sample:03d}" for sample in range(size)]
            episodes = [tree_of(name, number, prompt, float(s), rng) for s, name in enumerate(names)]
            episodes[-1] = replace(episodes[-1], reward=None, failure="crash: agent.py:7: KeyError: 'x'")
            groups.append(Group(number, prompt, episodes))
        record(journal, step, groups)
    return f"train.from_rollouts={folder.path}", f"batch.group_size={size}", "journal.keep_last=null"


@pytest.fixture(scope="module")
def undisturbed(ranks, trees):
    assert ranks.train("trees", "", *trees) == [0], ranks.log("trees")
    return outcome(ranks.folder("trees"))


def test_killed_again_and_again_it_trains_on_the_same_episodes(ranks, trees, undisturbed):
    for point, hit in KILLS:
        assert ranks.train("trees-killed", f"point={point},hit={hit}", *trees) == [KILLED], ranks.log("trees-killed")
    assert ranks.train("trees-killed", "", *trees) == [0], ranks.log("trees-killed")
    found = outcome(ranks.folder("trees-killed"))
    different = {key for key in found.keys() | undisturbed.keys() if found.get(key) != undisturbed.get(key)}
    assert not different and leftovers(ranks.folder("trees-killed")) == []


def test_the_replay_of_a_replays_journal_ends_with_the_same_weights(ranks, trees, undisturbed):
    own = str(ranks.folder("trees").path)
    assert ranks.train("trees-again", "", f"train.from_rollouts={own}", *trees[1:]) == [0]
    found = outcome(ranks.folder("trees-again"))
    for name in undisturbed.keys() | found.keys():
        if name.startswith(("checkpoint/megatron", "hf/", "metrics")):
            assert found.get(name) == undisturbed.get(name), name


def test_the_trees_were_trained_on_and_the_failed_ones_were_not(ranks, undisturbed):
    lines = read_metrics(ranks.folder("trees").metrics_file)
    assert len(lines) == NUM_STEPS and all(line["optimizer/grad_norm"] > 0 for line in lines)
    journal = Journal(ranks.folder("trees").journal_dir)
    for step in journal.steps():
        batch = journal.read(step).batch
        assert sum(one.failure is not None for one in batch.episodes) == NUM_GROUPS
        assert sum(one.num_branches for one in batch.episodes) > 0
        assert all(one.is_scored for one in batch.scored().episodes) and len(batch.scored().episodes) == 6
