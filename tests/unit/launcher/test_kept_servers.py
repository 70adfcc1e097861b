"""Servers that outlive a failed attempt, as a supervisor has them, with stand-ins for `gspo-mega serve` that import nothing:
taken over or started anew by the next attempt, and gone with the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import alive, until

from gspo_mega.base import processes
from gspo_mega.base.errors import FolderError, PlanError, PublishError, RankError, StuckError
from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.config import load_config
from gspo_mega.launcher import kept_servers, local
from gspo_mega.launcher.children import ChildSpec, ProcessFamily
from gspo_mega.launcher.kept_servers import KeptServers
from gspo_mega.launcher.slurm.size import Site, job_size
from gspo_mega.rollout.server.reward_server import make_reward_folder, reward_folder

# A server: it notes its process and key in the folder of each attempt, and has a child that ignores SIGTERM.
STAND_IN = """
import json, os, pathlib, signal, subprocess, sys, time
index, behaviour = sys.argv[2:4]
def write(path, record):
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(record))
    os.rename(path.with_suffix(".new"), path)
def serve(folder):
    key = folder / "api_key"
    (folder / f"ran_{index}").write_text(json.dumps([os.getpid(), key.read_text() if key.exists() else None]))
    write(folder / "servers" / f"server-{index}.json", {"state": "starting" if behaviour == "slow" else "ready"})
    print("serves in", folder.name, flush=True)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
deaf_child = subprocess.Popen([sys.executable, "-I", "-S", "-c", child])
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (deaf_child.kill(), os._exit(0)))
serve(pathlib.Path(sys.argv[1]))
for line in sys.stdin:
    if behaviour in ("deaf", "stubborn"):
        time.sleep(600)
    folder = pathlib.Path(json.loads(line)["attempt"])
    why = "its SGLang does not answer\\nby HTTP" if behaviour == "refuses" else None
    if why is None:
        serve(folder)
    write(folder / "kept_servers" / f"server-{index}.json", {"is_kept": why is None, "why": why, "seconds": 0.25})
    if why is not None:
        deaf_child.kill(), sys.exit(0)
time.sleep(600)
"""
CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"
SUPPORT = str(Path(__file__).parents[2] / "support")
FAILURE = RankError("rank 0 was killed by SIGKILL")


def is_gone(pid: int) -> bool:
    return not alive([pid])


class Run:
    """Attempts whose servers are stand-ins; `said`: what the user is told."""

    def __init__(self, folder, of: str = "") -> None:
        self.folder, self.of = RunFolder(folder), of
        self.program = folder / "stand_in.py"
        self.program.write_text(STAND_IN)
        self.said: list[str] = []
        self.kept = KeptServers(self.said.append)
        self.family: ProcessFamily | None = None

    def place(self, attempt: Attempt) -> Attempt:
        return reward_folder(attempt, self.of) if self.of else attempt

    def begin(self, behaviours=("good",), takes_orders=True, **changes) -> Attempt:
        attempt = self.folder.new_attempt()
        if self.of:
            make_reward_folder(attempt, self.of)
        folder, kind = self.place(attempt), "reward server" if self.of else "server"
        specs = []
        for index, behaviour in enumerate(behaviours):
            command = [sys.executable, "-I", "-S", str(self.program), str(folder.path), str(index), behaviour]
            spec = ChildSpec(kind, index, command, folder.server_log(index), {}, of=self.of, takes_orders=takes_orders)
            specs.append(replace(spec, **changes))
        self.family = ProcessFamily()
        self.kept.begin(self.family, attempt, specs)
        self.kept.take_over(self.family, attempt)
        until(lambda: all((folder.path / f"ran_{index}").exists() for index in range(len(specs))))
        until(lambda: len(list(folder.servers_dir.glob("server-?.json"))) == len(specs))
        return attempt

    def fail(self, attempt, error=FAILURE) -> None:
        self.kept.keep(self.family, attempt, error)
        self.family.close(0.5)

    def ran(self, attempt: Attempt, index: int = 0) -> int:
        return self.noted(attempt, index)[0]

    def noted(self, attempt: Attempt, index: int = 0):
        return json.loads((self.place(attempt).path / f"ran_{index}").read_text())


@pytest.fixture
def run(tmp_path, monkeypatch, request):
    monkeypatch.setattr(kept_servers, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(kept_servers, "_END_SECONDS", 0.3)
    run = Run(tmp_path, getattr(request, "param", ""))
    with run.kept:
        yield run
    run.family.close(0.5)
    assert not processes.living_below(os.getpid())


@pytest.mark.parametrize("run", ["", "judge"], indirect=True)
def test_servers_of_an_attempt_that_fails_go_on_in_the_next_ones(run):
    first = run.begin(("good", "good"))
    pids = [run.ran(first, index) for index in range(2)]
    key = "a key that the server made"
    run.place(first).api_key_file.write_text(key)
    assert run.said == []
    run.fail(first)
    second = run.begin(("good", "good"))
    assert [run.noted(second, index) for index in range(2)] == [[pid, key] for pid in pids]
    assert run.place(second).api_key_file.stat().st_mode & 0o777 == 0o600
    assert run.said == ["servers  2 of 2 kept, ready after 0.2 s"]
    assert run.place(second).num_kept_servers() == 2 and run.place(first).num_kept_servers() == 0
    of = f" of {run.of}" if run.of else ""
    assert [child.name for child in run.family.children] == [f"{'reward ' * bool(of)}server {n}{of}" for n in range(2)]
    assert [child.spec.log for child in run.family.children] == [run.place(second).server_log(n) for n in range(2)]
    words = run.place(second).server_log(0).read_text().split("\n")
    assert words == [f"serves in {run.place(one).path.name}" for one in (first, second)] + [""], "one log goes on"
    # And again, also after a rank that hung.
    run.fail(second, StuckError("rank 1 is stuck"))
    third = run.begin(("good", "good"))
    assert [run.ran(third, index) for index in range(2)] == pids
    run.family.close(0.5)
    assert all(map(is_gone, pids)), "without `keep` they end with the attempt"


@pytest.mark.parametrize(
    "behaviour, why",
    [
        ("deaf", "it did not answer within 0.5 s"),
        ("stubborn", "it did not answer within 0.5 s"),
        ("refuses", "its SGLang does not answer"),
        ("slow", "it is starting"),
        ("killed", "it was killed by SIGKILL"),
    ],
)
def test_one_that_cannot_go_on_is_named_ended_and_started_anew(run, behaviour, why):
    first = run.begin(("good", behaviour))
    pids = [run.ran(first, index) for index in range(2)]
    run.kept.keep(run.family, first, FAILURE)
    if behaviour == "killed":
        os.kill(pids[1], signal.SIGKILL)
    run.family.close(0.5)
    second = run.begin(("good", behaviour))
    assert run.ran(second) == pids[0] and is_gone(pids[1]) and not is_gone(run.ran(second, 1))
    kept, notice = run.said
    assert kept == "servers  1 of 2 kept, ready after 0.2 s"
    assert notice == f"notice   server 1 is started anew: {why}"
    assert run.place(second).num_kept_servers() == 1
    assert run.place(second).server_log(1).read_text() == f"serves in {run.place(second).path.name}\n", "its own log"
    assert {child.pid for child in run.family.children} == {run.ran(second, index) for index in range(2)}


def test_other_arguments_or_another_environment_need_another_server(run):
    first = run.begin()
    run.fail(first)
    second = run.begin(environment={"CUDA_VISIBLE_DEVICES": "3"})
    assert run.ran(second) != run.ran(first) and is_gone(run.ran(first))
    assert run.said[0] == "servers  0 of 1 kept"
    assert run.said[1].endswith("is started anew: it would be started with other arguments now")


def test_none_is_kept_by_a_failure_of_the_servers_or_by_one_without_a_restart(run):
    first = run.begin()
    error = RankError("no server holds weight version 3")
    error.exit_code = PublishError.exit_code
    run.fail(first, error)
    assert is_gone(run.ran(first))
    second = run.begin()
    assert run.said == ["notice   servers are started anew: the run failed at them"]
    run.fail(second, FolderError("another process has the run"))
    assert is_gone(run.ran(second))
    third = run.begin(takes_orders=False)
    run.fail(third)
    assert is_gone(run.ran(third)) and len(run.said) == 1


def test_what_is_kept_for_a_restart_that_does_not_come_ends_with_the_command(run):
    first = run.begin(("good", "stubborn"))
    run.fail(first)
    pids = processes.living_below(os.getpid())
    assert len(pids) == 4
    run.kept.__exit__()
    until(lambda: all(map(is_gone, pids)))


def test_kept_servers_end_with_a_supervisor_that_is_killed_between_two_attempts(tmp_path):
    program = (
        "import sys, time; sys.path[:0] = sys.argv[2:]; from pathlib import Path; from test_kept_servers import Run\n"
        "run = Run(Path(sys.argv[1])); first = run.begin(); run.fail(first); print(run.ran(first), flush=True)\n"
        "time.sleep(600)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), os.path.dirname(__file__), SUPPORT],
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(supervisor.stdout.readline())
    assert not is_gone(pid)
    supervisor.kill()
    supervisor.communicate()
    until(lambda: is_gone(pid))


def load(*overrides: str):
    return load_config(CONFIG, ["train.keep_servers=true", *overrides], "train")


def test_in_a_slurm_job_it_is_refused_before_the_job_begins():
    refused = (
        "train.keep_servers: true: the servers of a Slurm job are steps that end .*; valid: false, or a run without"
    )
    with pytest.raises(PlanError, match=refused):
        local.dry_run(load(), "train", print, in_job=True)
    with pytest.raises(PlanError, match=refused):
        job_size(load(), Site.read({}))
