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
from run_configs import smallest_yaml

SHAPE = str(Path(__file__).parents[3] / "configs" / "models" / "quickstart_dense.json")
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


def test_a_dry_run_says_that_another_run_has_the_folder_and_leaves_it_as_it_is(start, tmp_path, capsys):
    from gspo_mega.cli.main import main

    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "c.yaml").write_text(
        smallest_yaml(model=SHAPE, data=tmp_path / "train.jsonl", more="train: {num_steps: 2}\n")
    )
    command = ["train", str(tmp_path / "c.yaml"), f"run.dir={tmp_path}", "run.name=run", "--dry-run"]
    first = start("works")
    assert line(first) == "held"
    assert main(command) == 2
    shown = capsys.readouterr()
    assert f"run folder {tmp_path}/run is in use by another run (process {first.pid} on" in shown.err
    assert shown.out == "", "no plan of what is refused"
    first.stdin.close()
    first.wait()
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*"))
    assert main(command) == 2, "of rows without a prompt"
    assert "in use" not in capsys.readouterr().err
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*")) == before
    assert line(start("works")) == "held"


def test_who_only_asks_is_told_of_a_holder_that_is_not_to_be_seen_from_here(start, tmp_path):
    from gspo_mega.base.run_folder import RunFolder
    from gspo_mega.launcher.lease import refuse_if_held

    folder = RunFolder(tmp_path / "run")
    assert refuse_if_held(folder) is None and not folder.path.exists()
    other = start("local", "node7")
    assert line(other) == "held"
    said = refuse_if_held(folder)
    assert f"is held by process {other.pid} on node7" in said and "waits 60 s for a sign of life" in said
    other.stdin.close()
    other.wait()
    assert refuse_if_held(folder) is None
