"""Starts a process as the head of its own process group, and ends the whole group.

Owns signals and waiting, for one group at a time. It does not know what runs in the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def start_group(command: list[str], *, log: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start `command` in a new session, so that its pid names the group of all it spawns.

    Standard output and error are appended to `log`; standard input is closed. Call it from the main thread: the
    kernel ties a child's parent-death signal to the thread that started it.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def group_members(group: int) -> list[int]:
    """Pids of the live (not zombie) processes in process group or session `group`."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # "pid (command) state parent group session ...", and the command may hold spaces and parentheses.
        state, _parent, process_group, session = stat.rpartition(")")[2].split()[:4]
        if state not in "ZX" and group in (int(process_group), int(session)):
            members.append(int(entry.name))
    return members


def end_group(process: subprocess.Popen, grace_seconds: float) -> None:
    """End `process` and everything in its group or session: SIGTERM, `grace_seconds`, SIGKILL. Waits until all are
    gone.

    Also right when the head is dead already and left children behind.
    """
    group = process.pid
    _signal_all(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline:
        process.poll()
        if not group_members(group):
            break
        time.sleep(0.05)
    while members := group_members(group):
        for pid in members:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _signal_all(group: int, number: int) -> None:
    for pid in group_members(group):
        _signal(pid, number)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended between the listing and the signal
