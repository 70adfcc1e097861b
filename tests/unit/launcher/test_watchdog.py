"""When ranks count as stuck, and what is said of them: records as ranks write them, a clock of the test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.launcher.watchdog import RankWatchdog
from gspo_mega.plan.watchdog_bounds import Patience

BOUNDS = {
    "start": 3600.0,
    "rollout": 2000.0,
    "eval": 2000.0,
    "train": 900.0,
    "publish": 900.0,
    "checkpoint": 1800.0,
    "other": 900.0,
}
INTERVAL = 5.0


class Ranks:
    def __init__(self, folder, num_ranks=2, pids=None):
        self.attempt = RunFolder(folder / "run").new_attempt()
        self.attempt.beats_dir.mkdir()
        self.now, self.ticks = 0.0, [0] * num_ranks
        self.where = [("train", 0)] * num_ranks
        self.alive = [True] * num_ranks
        self.dog = RankWatchdog(self.attempt, num_ranks, Patience(BOUNDS, 300.0), pids, clock=lambda: self.now)

    def go(self, seconds, works=()):
        """Let time pass; ranks in `works` get something done in every interval. Returns the first verdict."""
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL
            for rank, (phase, count) in enumerate(self.where):
                if rank in works:
                    self.where[rank] = (phase, count + 1)
                if self.alive[rank]:
                    self.ticks[rank] += 1
                phase, count = self.where[rank]
                record = {"tick": self.ticks[rank], "pid": 100 + rank, "host": "n1", "phase": phase, "count": count}
                self.attempt.beat_file(rank).write_text(json.dumps(record))
            if (error := self.dog.check()) is not None:
                return error
        return None


def stack(*frames):
    lines = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in frames)
    return (
        'Timeout (0:07:30)!\nThread 0x00007f01 (most recent call first):\n  File "threading.py", line 9 in'
        f" wait\n\nThread 0x00007f02 (most recent call first):\n{lines}\n"
    )


def test_slow_work_is_no_stuck_work(tmp_path):
    ranks = Ranks(tmp_path)
    assert ranks.go(20_000, works=(0,)) is None, "the others wait for it"
    assert ranks.go(895) is None
    assert ranks.go(100, works=(1,)) is None
    assert ranks.go(895) is None


def test_the_most_patient_phase_counts_and_a_rank_that_waits_has_none(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.where = [("rollout", 7), ("wait", 7)]
    assert ranks.go(1990) is None and ranks.go(50) is not None
    ranks = Ranks(tmp_path)
    ranks.where = [("assemble", 7), ("wait", 7)]
    assert ranks.go(890) is None
    assert (
        "rank 0 (process 100 on n1) is stuck: nothing got done for 905 s in phase assemble (watchdog.other_seconds)"
        in str(ranks.go(50))
    )


def test_the_rank_that_does_not_wait_is_named_with_its_place(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.attempt.stacks_file(0).write_text(
        stack(("/env/torch/distributed/distributed_c10d.py", 2810, "all_reduce"), ("/x/loop.py", 3, "run"))
    )
    ranks.attempt.stacks_file(1).write_text(stack(("/x/reward.py", 33, "spin"), ("/x/loop.py", 3, "run")))
    said = str(ranks.go(1000))
    assert said.startswith(
        "rank 1 (process 101 on n1) is stuck: nothing got done for 905 s in phase train (watchdog.train_seconds); it is"
        " at /x/reward.py:33 in spin\n"
    )
    assert "\nrank 0 waits for it\n" in said and "  /x/loop.py:3 in run" in said and "all_reduce" not in said


def test_no_sign_of_life_is_named_though_others_work(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.alive[1] = False
    assert ranks.go(295, works=(0,)) is None
    assert str(ranks.go(50, works=(0,))).startswith(
        "rank 1 (process 101 on n1) is stuck: no sign of life for 305 s (watchdog.silence_seconds)"
    )


def test_a_supervisor_that_was_stopped_with_its_ranks_goes_on(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.go(50, works=(0, 1))
    ranks.now += 100_000
    assert ranks.go(200) is None


def test_ranks_that_are_done_are_not_waited_for(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.where = [("done", 9), ("done", 9)]
    ranks.alive = [False, False]
    assert ranks.go(50_000) is None


def test_before_a_rank_writes_anything_the_bound_of_the_start_holds(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.go = lambda seconds: next(
        (error for _ in range(int(seconds / INTERVAL)) if (error := tick()) is not None), None
    )

    def tick():
        ranks.now += INTERVAL
        return ranks.dog.check()

    assert ranks.go(3595) is None
    assert "in phase start (watchdog.start_seconds)" in str(ranks.go(50))


@pytest.mark.parametrize("has_beats", [True, False])
def test_a_stopped_process_of_this_machine_is_called_stopped(tmp_path, has_beats):
    process = subprocess.Popen(["sleep", "1000"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        ranks = Ranks(tmp_path, 1, {0: process.pid})
        ranks.alive[0] = False
        if not has_beats:
            ranks.where = []
        assert "its process stopped (T)" in str(ranks.go(400))
    finally:
        process.kill()
        process.wait()


def test_of_two_phases_the_more_patient_one_counts(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.where = [("train", 3), ("checkpoint", 3)]
    assert ranks.go(1795) is None, "of 900 s and 1800 s"
    assert "nothing got done for 1805 s" in str(ranks.go(20))


def test_most_looks_read_nothing(tmp_path, monkeypatch):
    ranks, read = Ranks(tmp_path), []
    interval = Patience(BOUNDS, 300.0).interval(2)
    monkeypatch.setattr("gspo_mega.launcher.watchdog.read_json", lambda path: read.append(path))
    for _ in range(40):
        ranks.now += interval / 4
        assert ranks.dog.check() is None
    assert len(read) == 20, "two ranks at every fourth look"


def test_a_new_phase_is_progress_whatever_the_count(tmp_path):
    ranks = Ranks(tmp_path)
    assert ranks.go(895) is None
    ranks.where = [("publish", 0), ("publish", 0)]
    assert ranks.go(895) is None and "in phase publish" in str(ranks.go(50))


def test_where_all_ranks_wait_the_one_with_the_least_progress_is_named(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.where = [("train", 7), ("train", 5)]
    for rank in (0, 1):
        waits = stack(("/env/torch/distributed/distributed_c10d.py", 2810, "all_reduce"), ("/x/loop.py", 3, "run"))
        ranks.attempt.stacks_file(rank).write_text(waits)
    said = str(ranks.go(1000))
    assert said.startswith("rank 1 (process 101 on n1) is stuck") and "\nrank 0 waits for it\n" in said


def test_a_process_that_has_ended_is_not_waited_for_though_nobody_has_collected_it(tmp_path):
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table of processes
    ranks = Ranks(tmp_path, 1, pids={0: process.pid})
    ranks.alive = [False]
    assert ranks.go(2000) is None
    process.wait()
