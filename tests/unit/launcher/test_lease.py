"""One holder of a run folder: with locks, without them, with locks of one node alone, and across machines. Real
processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HOLDER = Path(__file__).with_name("lease_holder.py")
# Far longer than the beats; how long nobody waits that needs not.
NEVER_SECONDS = 600.0
BEAT_SECONDS = 0.1


@pytest.fixture
def start(tmp_path):
    """start(flock, host) is a process that holds, or is refused, the same folder."""
    started = []

    def launch(flock="works", host="", lease_seconds=NEVER_SECONDS):
        command = [
            sys.executable,
            str(HOLDER),
            str(tmp_path / "run"),
            flock,
            host,
            str(lease_seconds),
            str(BEAT_SECONDS),
        ]
        started.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


def line(process):
    return process.stdout.readline().strip()


# Without locks, with locks that another node does not see, and as it should be.
LOCKS = ("ENOLCK", "ENOSYS", "local", "works")


@pytest.mark.parametrize("flock", LOCKS)
def test_a_second_process_is_refused_and_told_who_has_it(start, flock):
    first = start(flock)
    assert line(first) == "held"
    said = line(start(flock))
    assert (
        said.startswith("refused run folder")
        and f"in use by another run (process {first.pid} on {os.uname().nodename})" in said
    )
    first.stdin.close()
    first.wait()
    assert line(start(flock)) == "held", "what was released is free at once"


@pytest.mark.parametrize("flock", LOCKS)
def test_a_killed_holder_of_this_machine_is_recognised_at_once(start, flock):
    first = start(flock)
    assert line(first) == "held"
    first.kill()
    first.wait()
    assert line(start(flock)) == "held"


def test_a_killed_holder_that_nobody_has_reaped_is_dead_too(start):
    first = start("ENOLCK")
    assert line(first) == "held"
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert line(start("ENOLCK")) == "held"


def test_a_process_that_has_the_number_of_a_dead_holder_is_another(start, tmp_path):
    first = start("ENOLCK")
    assert line(first) == "held"
    first.kill()
    first.wait()
    (record,) = (tmp_path / "run/lease").iterdir()
    record.write_text(record.read_text().replace(f'"pid": {first.pid}', f'"pid": {os.getpid()}'))
    assert line(start("ENOLCK")) == "held"


def test_a_holder_on_another_machine_is_let_be_while_its_heart_beats(start):
    first = start("ENOLCK", "node1")
    assert line(first) == "held"
    second = start("ENOLCK", "node2")
    assert line(second).startswith("said run folder") and "process" in line(second)
    assert second.wait(60) == 0


def test_a_dead_holder_on_another_machine_is_given_up_after_the_lease(start):
    first = start("ENOLCK", "node1")
    assert line(first) == "held"
    first.kill()
    first.wait()
    second = start("ENOLCK", "node2", lease_seconds=1.0)
    assert "waiting 1 s for a sign of life" in line(second)
    assert line(second) == "held"


def test_whoever_lost_the_folder_stops_and_says_so(start):
    first = start("ENOLCK", "node1")
    assert line(first) == "held"
    first.send_signal(signal.SIGSTOP)
    second = start("ENOLCK", "node2", lease_seconds=1.0)
    line(second)
    assert line(second) == "held"
    first.send_signal(signal.SIGCONT)
    said = line(first)
    assert said.startswith("lost") and f"was taken over by process {second.pid} on node2" in said
    time.sleep(5 * BEAT_SECONDS)
    assert second.poll() is None, "who has it keeps it"
    assert "in use by another run" in line(start("ENOLCK", "node2"))


def test_of_many_at_once_one_has_it(start):
    first = start("ENOLCK", "node0")
    assert line(first) == "held"
    first.kill()
    first.wait()
    # Longer than who has it may stand still while the others start.
    processes = [start("ENOLCK", f"node{number % 3 + 1}", lease_seconds=4.0) for number in range(6)]

    def verdict(process):
        while (said := line(process)).startswith("said"):
            pass
        return said.split()[0]

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(verdict, processes)) == ["held"] + ["refused"] * 5


def test_where_the_file_system_has_no_links(start, tmp_path, monkeypatch):
    from gspo_mega.base.errors import ConfigError
    from gspo_mega.base.run_folder import RunFolder
    from gspo_mega.launcher.lease import hold

    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    with hold(RunFolder(tmp_path / "run")):
        assert line(start("ENOLCK")).startswith("refused")
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"), hold(RunFolder(tmp_path / "run")):
            raise AssertionError
    assert line(start("ENOLCK")) == "held"
