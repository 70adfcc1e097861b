"""`gspo-mega train` that loses its standard output, error or input while it runs: no line is worth a run, and its exit
code is its own.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from launcher_runs import DEADLINE_SECONDS, PATIENCE_SECONDS, Launched, write_config

# Rank 0 shows lines for as long as the test needs, then both end in order.
STEADY = {"rank 0": "chatty", "rank 1": "finish_later"}


@pytest.fixture
def start(tmp_path):
    """start(behaviours, **streams) runs the command; at the end of the test nothing may be left of it."""
    write_config(tmp_path)
    launched = []

    def launch(behaviours, **streams):
        launched.append(Launched.command(tmp_path, behaviours, **streams))
        return launched[-1]

    yield launch
    for run in launched:
        run.leaves_nothing()


def release(run):
    """Have the stand-in ranks end."""
    (run.folder.latest_attempt().path / "release").touch()


def wait_for_lines(run, count):
    console, deadline = run.folder.latest_attempt().console_log, time.monotonic() + PATIENCE_SECONDS
    while not console.exists() or console.read_text().count("\n") < count:
        assert time.monotonic() < deadline and run.process.poll() is None, run.process.returncode
        time.sleep(0.02)


def test_a_reader_that_is_gone_changes_nothing(start):
    run = start(STEADY)
    run.wait_started()
    run.process.stdout.close()
    wait_for_lines(run, 20)
    release(run)
    assert run.process.wait(PATIENCE_SECONDS) == 0
    assert run.process.stderr.read() == ""
    assert (run.folder.latest_attempt().path / "ended in order").exists(), "rank 0 came to its own end"
    assert "Broken pipe" in run.folder.latest_attempt().supervisor_log.read_text()
    assert run.left_running() == []


def test_a_failure_is_a_failure_though_nobody_reads_of_it(start):
    run = start({"rank 0": "chatty", "rank 1": "defect_on_release"})
    run.wait_started()
    run.process.stdout.close()
    run.process.stderr.close()
    wait_for_lines(run, 5)
    release(run)
    assert run.process.wait(PATIENCE_SECONDS) == 7


def test_a_reader_that_stands_still_holds_nothing_up(start):
    """Ctrl-S on a terminal, `| less`: a full pipe blocks whoever writes to it, and that must not be who watches over
    the ranks.
    """
    run = start({"rank 0": "flood", "rank 1": "defect_on_release"})
    run.wait_started()
    wait_for_lines(run, 5000)
    time.sleep(0.5)
    release(run)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while [pid for pid in run.left_running() if pid != run.process.pid] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.left_running() in ([run.process.pid], []), "the failure was seen, and everything ended"
    code, out, err = run.finish()
    assert code == 7 and "ZeroDivisionError" in err
    assert out.count("line") > 100


def test_a_full_disk_behind_standard_output_changes_nothing(start):
    with open("/dev/full", "w") as full:
        run = start(STEADY, stdout=full)
        run.wait_started()
        wait_for_lines(run, 5)
        release(run)
        assert run.process.wait(PATIENCE_SECONDS) == 0, run.process.stderr.read()
        said = run.process.stderr.read() + run.folder.latest_attempt().supervisor_log.read_text()
        assert said.count("output cannot be written: No space left") == 1


def test_closed_descriptors_are_no_files_of_the_run(start):
    run = start(STEADY, stdout=None, stderr=None, preexec_fn=lambda: [os.close(number) for number in (0, 1, 2)])
    run.wait_started()
    wait_for_lines(run, 5)
    release(run)
    assert run.process.wait(PATIENCE_SECONDS) == 0
    attempt = run.folder.latest_attempt()
    for file in (run.folder.lock_file, attempt.supervisor_log, attempt.state_file):
        assert "line 1 of rank 0" not in file.read_text()


@pytest.mark.parametrize("after", [(), (signal.SIGHUP,), (signal.SIGTERM,)], ids=["alone", "SIGHUP", "SIGTERM"])
def test_a_closed_terminal_ends_the_run_with_a_checkpoint(start, after):
    """The terminal's shell may hang up once more, and a session's end sends SIGTERM: none of it is somebody who
    insists.
    """
    terminal, inside = pty.openpty()

    def become_leader():
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    run = start(
        {"rank 0": "stop_slowly", "rank 1": "stop"},
        stdin=inside,
        stdout=inside,
        stderr=inside,
        preexec_fn=become_leader,
    )
    os.close(inside)
    run.wait_started()
    os.close(terminal)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while run.folder.latest_attempt().stop_reason() is None:
        assert time.monotonic() < deadline and run.process.poll() is None, run.process.returncode
        time.sleep(0.02)
    for number in after:
        run.process.send_signal(number)
    assert run.process.wait(PATIENCE_SECONDS) == 128 + signal.SIGHUP
    attempt = run.folder.latest_attempt()
    assert attempt.stop_reason() == "SIGHUP"
    assert (attempt.path / "ended in order").exists(), "rank 0 saved before it ended"
    assert run.left_running() == []


def test_under_nohup_a_closed_terminal_is_nothing(start):
    terminal, inside = pty.openpty()
    run = start(
        STEADY,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        preexec_fn=lambda: (os.setsid(), signal.signal(signal.SIGHUP, signal.SIG_IGN)),
    )
    os.close(inside)
    run.wait_started()
    os.close(terminal)
    run.process.send_signal(signal.SIGHUP)
    wait_for_lines(run, 20)
    release(run)
    assert run.process.wait(PATIENCE_SECONDS) == 0
    assert run.folder.latest_attempt().stop_reason() is None


def test_reading_commands_end_quietly_with_their_reader_and_say_that_the_disk_is_full(tmp_path):
    command = [sys.executable, "-m", "gspo_mega", "plan", "--json-schema"]
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "gspo-mega plan: standard output cannot be written: No space left on device\n",
    )
