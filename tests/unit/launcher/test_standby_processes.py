"""Standby processes as a supervisor has them, with stand-ins that import nothing: prepared once a step is made, used or
refused by the next attempt, and gone with the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gspo_mega.base import processes
from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.launcher import standby
from gspo_mega.launcher.children import ChildSpec, ProcessFamily, StandbySpec
from gspo_mega.launcher.standby import Standbys

# Ranks, and standbys that become ranks: both note their process and port in the attempt's folder, and wait.
STAND_IN = """
import json, os, pathlib, sys, time
attempt, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
if behaviour != "rank":
    folder = attempt / "standby"
    folder.mkdir(exist_ok=True)
    ready = folder / f"ready_{rank}.json"
    if behaviour != "slow":
        ready.with_suffix(".new").write_text('{"seconds": 1.0, "resident_bytes": 1073741824}')
        os.rename(ready.with_suffix(".new"), ready)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    if behaviour == "deaf":
        time.sleep(600)
    order = json.loads(line)
    os.environ.update(order["environment"])
    attempt = pathlib.Path(order["arguments"][0])
    (attempt / "standby").mkdir(exist_ok=True)
    start = attempt / "standby" / f"start_{rank}.json"
    why = "x.py was changed after its imports" if behaviour == "changed" else None
    start.with_suffix(".new").write_text(json.dumps({"used": why is None, "why": why}))
    os.rename(start.with_suffix(".new"), start)
(attempt / f"ran_{rank}").write_text(json.dumps([os.getpid(), os.environ["MASTER_PORT"]]))
time.sleep(600)
"""
DEADLINE_SECONDS = 60.0


def wait_until(true) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


class Run:
    """Attempts of two ranks; `said`: what the user is told."""

    def __init__(self, folder) -> None:
        self.folder = RunFolder(folder)
        self.program = folder / "stand_in.py"
        self.program.write_text(STAND_IN)
        self.said: list[str] = []
        self.standbys = Standbys(self.said.append)

    def begin(self, behaviours=("good", "good")) -> tuple[ProcessFamily, Attempt, list[ChildSpec]]:
        attempt = self.folder.new_attempt()
        command = [sys.executable, "-I", "-S", str(self.program), str(attempt.path)]
        specs = []
        for rank, behaviour in enumerate(behaviours):
            prepared = StandbySpec([*command, behaviour], [str(attempt.path)], attempt.standby_log(rank), [rank])
            environment = {"RANK": str(rank), "MASTER_PORT": str(14_000 + attempt.number)}
            specs.append(
                ChildSpec("rank", rank, [*command, "rank"], attempt.rank_log(rank), environment, standby=prepared)
            )
        family = ProcessFamily()
        self.standbys.start(family, attempt, specs)
        wait_until(lambda: all((attempt.path / f"ran_{rank}").exists() for rank in range(len(specs))))
        return family, attempt, specs

    def step(self, family, attempt, specs, is_ready=True) -> list[int]:
        """Let the attempt make a step; returns the processes that are then prepared."""
        line = {"step": attempt.number, "time": time.time()}
        self.folder.metrics_file.write_text(json.dumps(line) + "\n")
        before = processes.children()
        self.watch(family, attempt, specs)
        prepared = sorted(processes.children() - before)
        if is_ready:
            wait_until(lambda: self.watch(family, attempt, specs) or any("are ready" in line for line in self.said))
        return prepared

    def watch(self, family, attempt, specs) -> None:
        self.standbys._next_look = 0.0
        self.standbys.watch(family, attempt, specs)


def ran(attempt: Attempt, rank: int) -> tuple[int, str]:
    """The process that was the rank of the attempt, and its port."""
    return tuple(json.loads((attempt.path / f"ran_{rank}").read_text()))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(standby, "ANSWER_SECONDS", 0.5)
    run = Run(tmp_path)
    with run.standbys:
        yield run
    assert not processes.living_below(os.getpid())


def test_ranks_that_fail_go_on_in_processes_that_were_prepared_after_a_step(run):
    family, attempt, specs = run.begin()
    run.watch(family, attempt, specs)
    assert not list(attempt.path.glob("standby/*")), "nothing is prepared before a step is made"
    prepared = run.step(family, attempt, specs)
    assert len(prepared) == 2
    (said,) = run.said
    assert said.startswith("standby  2 processes are ready") and "2.0 GiB of host memory" in said
    family.reap()
    family.close(0.0)
    assert all(is_gone(ran(attempt, rank)[0]) for rank in range(2)) and not any(map(is_gone, prepared))

    family, attempt, specs = run.begin()
    assert [ran(attempt, rank) for rank in range(2)] == [(pid, "14002") for pid in prepared]
    assert [(child.name, child.pid) for child in family.children] == [("rank 0", prepared[0]), ("rank 1", prepared[1])]
    assert run.said[1:] == ["standby  ranks 0, 1 started in processes that had imported everything"]
    assert attempt.num_standby_ranks() == 2
    # An attempt that fails before its first step has none, because the last ones are used.
    family.close(0.0)
    assert all(map(is_gone, prepared))
    family, attempt, specs = run.begin()
    assert run.said[2:] == ["notice   ranks 0, 1 started in new processes: no standby process was prepared yet"]
    assert attempt.num_standby_ranks() == 0
    family.close(0.0)


@pytest.mark.parametrize(
    "behaviour, why",
    [
        ("slow", "its standby process was not ready yet"),
        ("deaf", "its standby process did not answer within 0.5 s"),
        ("killed", "its standby process was killed by SIGKILL (log: "),
        ("changed", "x.py was changed after its imports"),
    ],
)
def test_one_that_cannot_be_used_is_named_and_the_other_is_used(run, behaviour, why):
    family, attempt, specs = run.begin(("good", behaviour))
    prepared = run.step(family, attempt, specs, is_ready=behaviour != "slow")
    if behaviour == "killed":
        os.kill(prepared[1], signal.SIGKILL)
        wait_until(lambda: run.watch(family, attempt, specs) or len(run.said) > 1)
        assert run.said[1].startswith("warning  standby 1 was killed by SIGKILL; a restart does without it (log: ")
    wait_until((attempt.path / "standby" / "ready_0.json").exists)
    family.close(0.0)
    run.said.clear()
    family, attempt, _ = run.begin()
    assert ran(attempt, 0)[0] == prepared[0]
    # What has imported something else becomes a new program itself.
    assert (ran(attempt, 1)[0] == prepared[1]) == (behaviour == "changed")
    used, notice = run.said
    assert used == "standby  rank 0 started in processes that had imported everything"
    assert notice.startswith(f"notice   rank 1 started in new processes: {why}")
    assert [child.name for child in family.children] == ["rank 0", "rank 1"] and attempt.num_standby_ranks() == 1
    family.close(0.0)
    assert all(map(is_gone, prepared))


def test_a_rank_with_other_gpus_starts_anew(run):
    family, attempt, specs = run.begin(("good",))
    run.step(family, attempt, specs)
    one = run.standbys._standing[0]
    one.stands_for = replace(one.stands_for, environment={**one.stands_for.environment, "CUDA_VISIBLE_DEVICES": "3"})
    family.close(0.0)
    family, *_ = run.begin(("good",))
    assert run.said[-1] == "notice   rank 0 started in new processes: its environment has changed"
    family.close(0.0)


def test_a_run_whose_disk_takes_no_log_goes_on_without(run):
    family, attempt, (spec,) = run.begin(("good",))
    unwritable = replace(spec, standby=replace(spec.standby, log=attempt.path / "no folder" / "log"))
    assert run.step(family, attempt, [unwritable], is_ready=False) == []
    (said,) = run.said
    assert said.startswith("warning  rank 0: no standby process can be started: [Errno 2] No such file or directory")
    family.close(0.0)
    family, *_ = run.begin(("good",))
    assert run.said[1:] == ["notice   rank 0 started in new processes: no standby process was prepared yet"]
    family.close(0.0)


def test_standbys_end_with_a_supervisor_that_is_killed(tmp_path):
    program = (
        "import sys, time; sys.path[:0] = sys.argv[2:]; from pathlib import Path; from test_standby_processes import Run\n"
        "run = Run(Path(sys.argv[1])); print(*run.step(*run.begin()), flush=True); time.sleep(600)"
    )
    folder = os.path.dirname(__file__)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), folder], stdout=subprocess.PIPE, text=True
    )
    prepared = [int(pid) for pid in supervisor.stdout.readline().split()]
    assert len(prepared) == 2 and not any(map(is_gone, prepared))
    supervisor.kill()
    supervisor.communicate()
    wait_until(lambda: all(map(is_gone, prepared)))
