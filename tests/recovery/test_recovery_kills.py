"""kill -9 at every declared point: the same command again ends where an uninterrupted run does, to the bit."""

from __future__ import annotations

import pytest
from recovery_support import KILLED, NUM_STEPS, leftovers, outcome

from gspo_mega.base import failpoints
from gspo_mega.metrics.writer import read_metrics

# What a replayed run of one rank does not come to: publishing to servers (test_recovery_publish.py, and with live
# servers), an index of several files, a journal of another history or with routed experts (test_recovery_journal.py), and
# copies in memory, which take two ranks (test_recovery_copies.py).
ELSEWHERE = {
    point
    for point in failpoints.POINTS
    if point.startswith(
        ("publish.commit.", "publish.prune.", "publish.index.", "journal.aside.", "journal.routes.", "copy.")
    )
    or point in ("rollout.admitted", "rollout.turn", "publish.paused", "publish.sent", "publish.committed")
}
# Points that only a run after another kill comes to.
AFTER = {
    "save.clear": "save.tensors.after",
    "save.aside": "save.rename.after",
    "publish.aside": "publish.rename.after",
    "journal.drop": "",
}
# Kills that follow each other in one run before its end is compared.
KILLS_A_RUN = 6


def points() -> list[str]:
    return [point for point in failpoints.POINTS if point not in ELSEWHERE]


def before(point: str) -> str:
    return AFTER.get(point.rpartition(".")[0], "")


def test_an_uninterrupted_run_reaches_every_point_but_those_after_a_kill(straight):
    _, reached = straight
    missed = set(points()) - set(reached)
    assert {point.rpartition(".")[0] for point in missed} <= set(AFTER), missed
    assert not set(reached) & ELSEWHERE


def test_twice_the_same_run_is_the_same(ranks, straight):
    ranks.copy("one_step", "again")
    assert ranks.train("again") == [0]
    assert outcome(ranks.folder("again")) == straight[0]


@pytest.mark.parametrize(
    "chosen", [points()[i : i + 12] for i in range(0, len(points()), 12)], ids=lambda chosen: chosen[0]
)
def test_killed_at_each_point_and_continued(ranks, straight, chosen):
    name, num_kills = "", 0

    def finish():
        assert ranks.train(name) == [0], ranks.log(name)
        compare(name)

    def compare(name):
        found = outcome(ranks.folder(name))
        different = {key for key in found.keys() | straight[0].keys() if found.get(key) != straight[0].get(key)}
        assert not different, f"{name}: {sorted(different)}"
        assert leftovers(ranks.folder(name)) == []

    def kill_at(point: str) -> bool:
        (code,) = ranks.train(name, f"point={point}")
        assert code in (0, KILLED), f"{point}: {ranks.log(name)}"
        return code == KILLED

    for point in chosen:
        if not name or num_kills >= KILLS_A_RUN:
            if name:
                finish()
            name, num_kills = ranks.copy("one_step", f"killed-at-{point}"), 0
        if before(point):
            kill_at(before(point))
        if not kill_at(point):
            # The kills before it had let the run come to its end: the same point in a run that has steps left.
            compare(name)
            name, num_kills = ranks.copy("one_step", f"killed-again-at-{point}"), 0
            if before(point):
                kill_at(before(point))
            assert kill_at(point), f"{point} was not reached"
        num_kills += 1
    finish()


@pytest.mark.parametrize(
    "point", ["journal.append.after", "step.optimizer", "save.tensors.after", "save.latest.rename.before"]
)
def test_written_beside_training_and_killed_at_a_later_time(ranks, straight, point):
    name = ranks.copy("one_step", f"asynchronous-{point}")
    hit = 9 if point == "journal.append.after" else 2
    assert ranks.train(name, f"point={point},hit={hit}", "checkpoint.asynchronous=true") == [KILLED]
    assert ranks.train(name, "", "checkpoint.asynchronous=true") == [0], ranks.log(name)
    assert outcome(ranks.folder(name)) == straight[0]


def test_written_beside_training_it_says_how_long_training_stood_still(ranks, straight):
    assert ranks.train("beside", "", "checkpoint.asynchronous=true") == [0], ranks.log("beside")
    assert outcome(ranks.folder("beside")) == straight[0]
    *_, last = read_metrics(ranks.folder("beside").metrics_file)
    pause, write = (last[f"time/checkpoint/{name}_seconds"] for name in ("pause", "write"))
    assert 0 < pause < write, "step 1 was saved while step 2 trained, and step 3 reports it"


def test_a_rank_that_is_not_the_first_is_killed(ranks):
    overrides = ("train.num_steps=2",)
    assert ranks.train("two-straight", "", *overrides, num_ranks=2) == [0, 0], ranks.log("two-straight")
    want = outcome(ranks.folder("two-straight"))
    for number, point in enumerate(("step.old_pass", "step.optimizer", "save.tensors.after")):
        codes = ranks.train("two-killed", f"point={point},hit={1 + number % 2},rank=1", *overrides, num_ranks=2)
        assert codes[1] == KILLED and codes[0] != 0
    assert ranks.train("two-killed", "", *overrides, num_ranks=2) == [0, 0], ranks.log("two-killed")
    assert outcome(ranks.folder("two-killed")) == want


def test_metrics_of_steps_that_are_trained_again_are_kept_aside(ranks, straight):
    assert ranks.train("superseded", "point=step.published,hit=3", f"checkpoint.every_steps={NUM_STEPS}") == [KILLED]
    folder = ranks.folder("superseded")
    lost = read_metrics(folder.metrics_file)
    assert [line["step"] for line in lost] == [1, 2]
    assert ranks.train("superseded") == [0], ranks.log("again")
    assert outcome(folder) == straight[0]
    assert read_metrics(folder.superseded_metrics_file) == lost


def test_a_run_without_any_checkpoint_trains_on_what_its_journal_has(ranks, straight):
    assert ranks.train("early", "point=journal.append.after,hit=5") == [KILLED]
    assert ranks.train("early") == [0], ranks.log("early")
    assert "step 1: 5 trajectories of the journal, in 3 groups, are taken over" in ranks.console("early")
    assert outcome(ranks.folder("early")) == straight[0]
    assert ranks.folder("early").latest_checkpoint_file.read_text() == f"step_{NUM_STEPS:08d}"
