"""Processes that end with others: real forks, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from gspo_mega.base import processes

LONGEST_SECONDS = 20.0


def program(body: str) -> subprocess.Popen:
    """A Python process that imports `processes` and runs `body`; its lines are pids."""
    text = (
        "import os, signal, subprocess, sys, threading, time, multiprocessing\nfrom gspo_mega.base import processes\n"
        + textwrap.dedent(body)
    )
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
    )


def is_alive(pid: int) -> bool:
    return pid in processes.parents()


def wait_gone(pids: list[int]) -> list[int]:
    """Those that still live in the end."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def read_pids(process: subprocess.Popen, count: int) -> list[int]:
    return [int(process.stdout.readline()) for _ in range(count)]


def test_forks_of_a_killed_process_end_with_it_whatever_they_wait_for():
    """A writer of Megatron's: a fork that waits for a semaphore whose other holder is dead."""
    parent = program("""
        processes.forks_die_with_us()
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire()

        def work():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                print(f"{os.getpid()}\\n", end="", flush=True)
            else:
                print(f"{os.getpid()}\\n", end="", flush=True)
            lock.acquire()

        multiprocessing.get_context("fork").Process(target=work).start()
        time.sleep(1000)
        """)
    forks = read_pids(parent, 2)
    assert all(map(is_alive, forks))
    parent.kill()
    parent.wait()
    assert wait_gone(forks) == []


def test_a_fork_whose_parent_is_gone_before_it_is_tied_ends_too():
    parent = program("""
        # As if the parent had ended between the fork and the request: the child's parent is another than the one noted.
        # (What is registered first is called last before a fork.)
        os.register_at_fork(before=lambda: setattr(processes, "_forking_pid", 1))
        processes.forks_die_with_us()
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        print(pid, os.waitpid(pid, 0)[1], flush=True)
        """)
    out, _ = parent.communicate(timeout=LONGEST_SECONDS)
    assert int(out.split()[1]) == signal.SIGKILL


def test_everything_below_is_killed_and_reaped_in_sessions_of_its_own_too():
    process = program("""
        processes.adopt_orphans()
        stranger = subprocess.Popen(["sleep", "1000"])
        start = "import subprocess, sys; [subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'], start_new_session=True) for _ in range(5)]"
        subprocess.run([sys.executable, "-S", "-c", start], check=True)
        assert len(processes.living_below(os.getpid(), {stranger.pid})) == 5
        assert processes.kill_below(without={stranger.pid}) == set()
        assert processes.children() == {stranger.pid}, processes.children()
        assert stranger.poll() is None
        stranger.kill()
        print("done")
        """)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n")


def test_adopted_children_that_ended_are_collected_and_own_ones_are_not():
    process = program("""
        processes.adopt_orphans()
        own = subprocess.Popen(["true"])
        # 50 orphans that end at once, in one go.
        start = "import subprocess; [subprocess.Popen(['sleep', '1']) for _ in range(50)]"
        subprocess.run([sys.executable, "-S", "-c", start], check=True)
        reaper, deadline, collected = processes.Reaper(), time.monotonic() + 60, []
        while processes.children() != {own.pid} and time.monotonic() < deadline:
            collected += reaper.collect_ended({own.pid})
            time.sleep(0.05)
        assert collected and processes.children() == {own.pid}, (len(collected), processes.children())
        assert own.wait() == 0
        print("done")
        """)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ends_with_the_parent_it_named(number):
    parent = program(f"""
        child = "import os, time; from gspo_mega.base import processes; processes.die_with_parent(os.getppid(), {int(number)}); print(os.getpid(), flush=True); time.sleep(1000)"
        subprocess.Popen([sys.executable, "-c", child])
        time.sleep(1000)
        """)
    (child,) = read_pids(parent, 1)
    parent.kill()
    parent.wait()
    assert wait_gone([child]) == []
