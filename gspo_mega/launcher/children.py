"""The processes of one run on this machine: starting them tied to us, and ending all of them with all they started.

Owns processes, sessions and signals. It does not know what a rank or a server does, nor why they must end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_TETHER = Path(__file__).with_name("tether.py")
_POLL_SECONDS = 0.02
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ChildSpec:
    """One process to start. `kind` and `index` name it: rank 3, server 0. `environment` is added to ours.

    Under Slurm a process is an srun: `ranks` are all of them, `watch` looks after the supervisor's own node, `doctor` at one.
    """

    kind: Literal["rank", "server", "ranks", "watch", "doctor"]
    index: int
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A started process, head of its own session. Standard output and error go to the end of its log."""

    def __init__(self, spec: ChildSpec) -> None:
        """Start it. Call from the main thread: the kernel's parent is the thread, and the child would die with it."""
        self.spec = spec
        # A server is asked to end, for its own children must end before it; a rank may sit in a collective, deaf.
        on_our_death = signal.SIGKILL if spec.kind in ("rank", "ranks") else signal.SIGTERM
        tether = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(int(on_our_death))]
        with spec.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*tether, *spec.command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **spec.environment}, start_new_session=True,
            )  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.spec.kind} {self.spec.index}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """To the process alone, if it still runs."""
        self._process.send_signal(number)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.poll()

    @property
    def end_described(self) -> str:
        code = self.exit_code
        if code is None:
            return "runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class Family:
    """All processes of one run: those we start, all they start, and all that those leave behind.

    While it is open this process adopts orphans below it (PR_SET_CHILD_SUBREAPER), so that a grandchild in a
    session of its own is found even after its parent is gone. `close` returns when none of them is left.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._us = os.getpid()
        # Whatever this process had started before is none of our business.
        self._strangers = {pid for pid, parent in _parents().items() if parent == self._us}
        _adopt_orphans(True)

    def start(self, spec: ChildSpec) -> Child:
        """Start one process. Call from the main thread. Raises OSError."""
        child = Child(spec)
        self.children.append(child)
        return child

    def close(self, grace_seconds: float) -> None:
        """SIGTERM to the children that run, up to `grace_seconds`, SIGKILL to everything that is left."""
        for child in self.children:
            # The heads alone: a server ends its own processes in order, a rank takes its own along.
            if child.exit_code is None:
                _signal(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and any(child.exit_code is None for child in self.children):
            time.sleep(_POLL_SECONDS)
        while members := self._members():
            for pid in members:
                _signal(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
            for child in self.children:
                child.exit_code  # noqa: B018  reaps it
        _adopt_orphans(False)

    def _members(self) -> set[int]:
        """Pids of all living processes below this one, but for the strangers' families."""
        parents = _parents()
        members: set[int] = set()
        below = {pid for pid, parent in parents.items() if parent == self._us and pid not in self._strangers}
        while below:
            members |= below
            below = {pid for pid, parent in parents.items() if parent in below}
        return members


def _parents() -> dict[int, int]:
    """The parent of every live (not zombie) process of this machine, by pid."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # "pid (command) state parent ...", and the command may hold anything.
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            table[int(name)] = int(parent)
    return table


def _adopt_orphans(on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended between the look and the signal
