"""kill -9 while the journal moves another history aside or takes routed experts out: no record is lost, none is half
there.
"""

from __future__ import annotations

import json

import pytest
from journal_job import NUM_STEPS, batch_of
from recovery_support import KILLED
from watch import outside_operations

from gspo_mega.base import failpoints
from gspo_mega.base.errors import JournalError
from gspo_mega.data.journal.journal import Journal

POINTS = [point for point in failpoints.POINTS if point.startswith(("journal.aside.", "journal.routes."))]


def work(ranks, folder, fault="", watch=None):
    job = {"module": "journal_job", "arguments": [str(folder)], "environment": {failpoints.VARIABLE: fault}}
    if watch is not None:
        job["watch"] = {"folders": [str(folder)], "file": str(watch)}
    (code,) = ranks.call([job])
    return code


def check_end(folder) -> None:
    journal = Journal(folder)
    assert journal.steps() == list(range(NUM_STEPS))
    for step in journal.steps():
        record = journal.read(step)
        want, (found,) = batch_of(step).trajectories[0], record.batch.trajectories
        is_pruned = step < NUM_STEPS - 1
        assert (
            record.routes_pruned == journal.has_pruned_routes(step) == is_pruned
            and record.made_by == {"rewards": "r"}
            and record.prompts == {"position": step}
        )
        assert (found.routed_experts is None) if is_pruned else (found.routed_experts == want.routed_experts).all()
        assert (found.response_token_ids, found.rollout_log_probs) == (want.response_token_ids, want.rollout_log_probs)
    (old,) = folder.glob("step_*.old-*")
    assert old.name == "step_00000009.old-0001"
    assert not list(folder.glob(".*")), "nothing half-written stays"


def test_nothing_changes_outside_the_operations(ranks, tmp_path):
    assert work(ranks, tmp_path / "journal", watch=tmp_path / "seen") == 0
    lines = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert not outside_operations(lines), "\n".join(outside_operations(lines))
    assert {line["point"] for line in lines} >= set(POINTS)
    check_end(tmp_path / "journal")


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_each_point_and_continued(ranks, tmp_path, point):
    assert work(ranks, tmp_path / "journal", f"point={point}") == KILLED
    assert work(ranks, tmp_path / "journal") == 0
    check_end(tmp_path / "journal")


@pytest.mark.parametrize("point", [point for point in POINTS if point.endswith(".before")])
@pytest.mark.parametrize("do", ["disk_full", "denied"])
def test_a_disk_that_refuses_is_named_and_harms_nothing(ranks, tmp_path, point, do):
    assert work(ranks, tmp_path / "journal", f"point={point},do={do}") == JournalError.exit_code
    assert work(ranks, tmp_path / "journal") == 0
    check_end(tmp_path / "journal")
