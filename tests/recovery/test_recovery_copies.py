"""`checkpoint.peer_copies`: two ranks, killed at every point of their copies in memory, go on from these copies and end where
an undisturbed run does, to the bit. Copies that are lost are replaced by the neighbour's, then by the last checkpoint.
"""

from __future__ import annotations

import pytest
from live_support import BATCH, NUM_STEPS
from recovery_support import KILLED, outcome
from test_recovery_critic import PPO
from test_recovery_live import check_steps

from gspo_mega.base import failpoints
from gspo_mega.checkpoint import memory_files
from gspo_mega.metrics.writer import read_metrics

# With a critic, so two models; the policy is not trained in the first step.
COPIES = ("checkpoint.peer_copies=1", "checkpoint.every_steps=2", "checkpoint.export_every_steps=0")
OVERRIDES = (*COPIES, *PPO)
# In the order in which one run comes to them. The first kill leaves whole copies of step 1 and the beginning of those of
# step 2. After that of `copy.commit.after` a step has some copies more than the one that is gone on from.
KILLS = (
    "copy.captured,hit=2,rank=1",
    "copy.begin.before,hit=2,rank=1",
    "copy.begin.after,rank=1",
    "copy.chosen,rank=0",
    "copy.commit.before,rank=1",
    "copy.commit.after,rank=1",
    "copy.drop.before,rank=1",
    "copy.drop.after,rank=1",
    "copy.arrived,rank=1",
)


@pytest.fixture(scope="module")
def undisturbed(ranks):
    """The outcome of two ranks that nothing interrupts. A run's copies in memory go with it."""
    assert ranks.train("copies", "", *OVERRIDES, num_ranks=2) == [0, 0], ranks.log("copies")
    folder = ranks.folder("copies")
    assert memory_files.held_copies(memory_files.copies_folder(folder.path)) == [], "the run ended in order"
    lines = read_metrics(folder.metrics_file)
    assert all(0 < one["time/checkpoint/peer_pause_seconds"] < one["time/checkpoint/peer_seconds"] for one in lines[1:])
    assert 0 < lines[1]["checkpoint/peer_bytes"] < lines[2]["checkpoint/peer_bytes"], "then the policy has moments too"
    yield outcome(folder)
    for run in ranks.runs.glob("*copies*"):
        memory_files.remove_copies(run / "run")


def without_copies(end: dict) -> dict:
    """Without the figures of copies: a start of the run has none of a copy that an earlier one made."""
    lines = [{k: v for k, v in line.items() if not k.startswith("checkpoint/peer_")} for line in end["metrics"]]
    return {**end, "metrics": lines}


def assert_same_end(ranks, name: str, want: dict) -> None:
    assert ranks.train(name, "", *OVERRIDES, num_ranks=2) == [0, 0], ranks.log(name)
    found, want = without_copies(outcome(ranks.folder(name))), without_copies(want)
    assert {key for key in found.keys() | want.keys() if found.get(key) != want.get(key)} == set()


def test_killed_at_each_point_of_the_copies(ranks, undisturbed):
    name, said = "copies-killed", []
    for kill in KILLS:
        rank = int(kill[-1])
        codes = ranks.train(name, f"point={kill}", *OVERRIDES, num_ranks=2)
        assert codes[rank] == KILLED, f"{kill} was not reached: {ranks.log(name)}"
        console = ranks.folder(name).latest_attempt().console_log
        said.append(console.read_text() if console.exists() else "")
    points = {kill.partition(",")[0] for kill in KILLS}
    assert points == {point for point in failpoints.POINTS if point.startswith("copy.")}
    assert [text for text in said if "notice" in text] == []
    for text in said[1:3] + said[4:6]:  # (the one between is killed before it says anything)
        assert "resumed from the ranks' copies in memory: step 1, weight version 1" in text
    assert_same_end(ranks, name, undisturbed)


def kill_in_the_last_step(ranks, name: str):
    """Two ranks that have whole copies of step 2 and trained step 3, and their folder of copies."""
    codes = ranks.train(name, "point=copy.captured,hit=3,rank=0", *OVERRIDES, num_ranks=2)
    assert codes[0] == KILLED, ranks.log(name)
    folder = memory_files.copies_folder(ranks.folder(name).path)
    assert {one.step for one in memory_files.held_copies(folder) if one.rank == 0} == {2}
    return folder


def lose(folder, rank: int, *places: str) -> None:
    for copy in memory_files.held_copies(folder):
        if copy.rank == rank and copy.place in places:
            (folder / copy.name).unlink()


def test_from_the_neighbour_and_without_both_from_the_last_checkpoint(ranks, undisturbed):
    folder = kill_in_the_last_step(ranks, "copies-neighbour")
    lose(folder, 1, "own")
    # The copies are as new as the checkpoint of step 2, which is not read.
    damaged = ranks.folder("copies-neighbour").checkpoint_dir(2) / "rng" / "rank_00000.safetensors"
    damaged.write_bytes(b"")
    assert_same_end(ranks, "copies-neighbour", undisturbed)
    said = ranks.console("copies-neighbour")
    assert "from the ranks' copies in memory: step 2, of rank 1 from the neighbour's, weight version 2" in said

    folder = kill_in_the_last_step(ranks, "copies-lost")
    lose(folder, 1, "own", "peer")
    assert_same_end(ranks, "copies-lost", undisturbed)
    said = ranks.console("copies-lost")
    assert (
        "notice   no copies in memory to go on from (rank 1: neither its own copy nor its neighbour's is there): the run"
        " goes on from the checkpoint step_00000002" in said
    )
    assert "resumed from step_00000002: step 2" in said


def test_with_a_live_server_nothing_is_sampled_twice(live):
    """Killed in the rollout of step 3, without any checkpoint: the step's first trajectory is in the journal."""
    overrides = ("checkpoint.peer_copies=1", "checkpoint.every_steps=0")
    before = len(live.scores.all())
    codes = live.train("live-copies", f"point=rollout.trajectory,hit={2 * BATCH + 2}", *overrides, num_ranks=2)
    assert codes[0] == KILLED, live.ranks.log("live-copies")
    assert live.train("live-copies", "", *overrides, num_ranks=2) == [0, 0], live.ranks.log("live-copies")
    said = live.ranks.console("live-copies")
    assert "resumed from the ranks' copies in memory: step 2, weight version 2" in said
    assert "step 3: 1 trajectories of the journal, in 1 groups, are taken over" in said
    assert len(live.scores.all()) - before <= NUM_STEPS * BATCH + 2, "what was under way at the kill is scored again"
    folder = live.ranks.folder("live-copies")
    check_steps(live, "live-copies")
    replayed = (f"train.from_rollouts={folder.path}", "checkpoint.every_steps=0")
    assert live.train("live-copies-replay", "", *replayed, num_ranks=2) == [0, 0]
    want, got = outcome(live.ranks.folder("live-copies-replay")), outcome(folder)
    compared = [name for name in want.keys() | got.keys() if name.startswith(("checkpoint/megatron", "hf/", "journal"))]
    assert [name for name in compared if want.get(name) != got.get(name)] == []
