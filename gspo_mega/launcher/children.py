"""The processes of one run on this machine: starting them tied to us, and ending all of them with all they started.

Owns processes, sessions and signals. It does not know what a rank or a server does, nor why they must end.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gspo_mega import process_death

logger = logging.getLogger(__name__)

_EXEC_TIED_TO_PARENT = Path(__file__).with_name("exec_tied_to_parent.py")
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ChildSpec:
    """One process to start. `kind` and `index` name it: rank 3, server 0. `environment` is added to ours.

    Under Slurm a process is an srun: `ranks` are all of them, `watch` looks after the supervisor's own node, `doctor`
    at one.
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
        tied = [sys.executable, "-I", "-S", str(_EXEC_TIED_TO_PARENT), str(os.getpid()), str(int(on_our_death))]
        with spec.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*tied, *spec.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )

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
        # Whatever this process had started before is none of our business.
        self._strangers = process_death.children()
        self._reaper = process_death.Reaper()
        process_death.adopt_orphans()

    def start(self, spec: ChildSpec) -> Child:
        """Start one process. Call from the main thread. Raises OSError."""
        child = Child(spec)
        self.children.append(child)
        return child

    def reap(self) -> None:
        """Collect what ended of that which the children left behind; to be called now and then."""
        self._reaper.look({*self._strangers, *self._own()})

    def close(self, grace_seconds: float) -> None:
        """SIGTERM to the children that run, up to `grace_seconds`, SIGKILL to everything that is left, in whatever
        session.
        """
        for child in self.children:
            # The heads alone: a server ends its own processes in order, a rank takes its own along.
            if child.exit_code is None:
                process_death.send_signal(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and any(child.exit_code is None for child in self.children):
            time.sleep(_POLL_SECONDS)
        left = process_death.kill_below(self._strangers, self._own())
        for pid in left:
            logger.error("process %d cannot be killed: it waits for a device or a file server", pid)
        while not left and any(child.exit_code is None for child in self.children):
            time.sleep(_POLL_SECONDS)
        process_death.adopt_orphans(False)

    def _own(self) -> list[int]:
        return [child.pid for child in self.children]
