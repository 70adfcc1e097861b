"""The processes of one run on this machine, and the signals and the output of their supervisor.

`ProcessFamily` starts processes that are tied to this one and ends them with all that they started; it knows neither
what a rank or server does nor why it must end. `stop_signals` and `stack_signals` collect the signals that the
supervisor receives; `local.py` and `slurm/stop.py` decide what a signal means. `ConsoleTail` passes rank 0's
console.log on to the user (`cli/screen.py` writes to the terminal), and `log_to` sends the launcher's log lines to
supervisor.log.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gspo_mega.base import processes
from gspo_mega.base.untrusted import open_regular

logger = logging.getLogger(__name__)
_EXEC_TIED_TO_PARENT = Path(__file__).with_name("exec_tied_to_parent.py")
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ChildSpec:
    """One process to start. `kind`, `index` and `of` name it, as in "rank 3" or "reward server 0 of NAME".
    `environment` is added to this process's environment.

    Under Slurm a process is an srun: `ranks` runs all ranks, `watch` watches the supervisor's node, `doctor` checks one
    node. `standby`: the process that may be prepared to do this one's work in a later attempt (`standby.py`).
    `takes_orders`: it reads orders from its input, one per line (`kept_servers.py`).
    """

    kind: Literal["rank", "server", "reward server", "ranks", "watch", "doctor", "standby"]
    index: int
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    of: str = ""
    standby: StandbySpec | None = None
    takes_orders: bool = False


@dataclass(frozen=True)
class StandbySpec:
    """How the standby of a process is started, in the environment of that process. `arguments`: those of a rank, which
    the standby is given when it takes over. `ranks`: the ranks that the process runs.
    """

    command: Sequence[str]
    arguments: Sequence[str]
    log: Path
    ranks: Sequence[int]


class Child:
    """A started process, the leader of its own session. Its standard output and error are appended to its log."""

    def __init__(self, spec: ChildSpec) -> None:
        """Start the process. Call from the main thread: to the kernel the parent is a thread, and the child ends when
        that thread does.
        """
        self.spec = spec
        # A server gets SIGTERM, because it must end its own children first. A rank gets SIGKILL, because in a
        # collective it would not react to SIGTERM.
        on_our_death = signal.SIGKILL if spec.kind in ("rank", "ranks", "standby") else signal.SIGTERM
        tied = [sys.executable, "-I", "-S", str(_EXEC_TIED_TO_PARENT), str(os.getpid()), str(int(on_our_death))]
        with spec.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*tied, *spec.command],
                stdin=subprocess.PIPE if spec.kind == "standby" or spec.takes_orders else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )

    @property
    def name(self) -> str:
        return f"{self.spec.kind} {self.spec.index}" + (f" of {self.spec.of}" if self.spec.of else "")

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Send a signal to this process, not to its children, if it still runs."""
        self._process.send_signal(number)

    def order(self, line: bytes) -> None:
        """Write a line to a process that takes orders. Raises OSError if it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def hand_over(self, line: bytes) -> None:
        """Write the only line that a standby is ever sent. Raises OSError if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        finally:
            self.close_input()

    def close_input(self) -> None:
        """Close the process's input, if it has one. A standby that has been sent nothing ends."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of this process; returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; -N if signal N ended it."""
        return self._process.poll()

    @property
    def end_described(self) -> str:
        code = self.exit_code
        if code is None:
            return "runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class ProcessFamily:
    """All processes of one run: those started here, their descendants, and orphaned descendants.

    While the family is open, this process adopts orphaned descendants (PR_SET_CHILD_SUBREAPER), so that a grandchild in
    its own session is found even after its parent is gone. `close` returns when no process is left.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        # Processes started before are not part of the run.
        self._strangers = processes.children()
        self._reaper = processes.Reaper()
        processes.adopt_orphans()

    def start(self, spec: ChildSpec) -> Child:
        """Start one process. Call from the main thread. Raises OSError."""
        child = Child(spec)
        self.children.append(child)
        return child

    def leave_out(self, child: Child) -> None:
        """Make a child, and what it starts, no part of the run: `close` does not end it."""
        self._strangers.add(child.pid)
        self.children = [other for other in self.children if other is not child]

    def take_in(self, child: Child) -> None:
        """Make a child that was no part of the run one of its processes."""
        self._strangers.discard(child.pid)
        self.children.append(child)

    def reap(self) -> None:
        """Collect adopted orphans that have ended. Call it regularly."""
        self._reaper.collect_ended({*self._strangers, *self._own()})

    def close(self, grace_seconds: float) -> None:
        """Send SIGTERM to the running children, wait up to `grace_seconds`, then send SIGKILL to every process that is
        left, in any session.
        """
        for child in self.children:
            # Only to session leaders: a server ends its own processes, and a rank's processes end with it.
            if child.exit_code is None:
                processes.send_signal(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and any(child.exit_code is None for child in self.children):
            time.sleep(_POLL_SECONDS)
        left = processes.kill_below(self._strangers, self._own())
        for pid in left:
            logger.error("process %d cannot be killed: it waits for a device or a file server", pid)
        while not left and any(child.exit_code is None for child in self.children):
            time.sleep(_POLL_SECONDS)
        processes.adopt_orphans(False)

    def _own(self) -> list[int]:
        return [child.pid for child in self.children]


@contextmanager
def collect_signals(numbers: Iterable[int], received: list[int]) -> Iterator[None]:
    """Within this context, each of these signals is appended to `received` and has no other effect. Main thread
    only.
    """
    before = {number: signal.signal(number, lambda arrived, _: received.append(arrived)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list to which stop signals are appended while the context lasts. Signals that were ignored before stay ignored,
    as under `nohup` and in background jobs of a script. Main thread only.
    """
    received: list[int] = []
    with collect_signals([number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN], received):
        yield received


def ignored_interrupt_notice(stop_file: Path) -> str | None:
    """Return how to stop the run if this process ignores SIGINT, else None. The parent decides it: a shell starts the
    background jobs of a script so. `stop_file`: the file that stops the run.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        return None
    return (
        "SIGINT (Ctrl-C, kill -INT) does not stop this run: the process that started it ignores it, as a script does"
        f" for its background jobs. To stop after a checkpoint: touch {stop_file}, or send SIGTERM"
    )


@contextmanager
def stack_signals() -> Iterator[list[int]]:
    """A list to which SIGUSR2, the request for all ranks' stacks, is appended while the context lasts. Main thread
    only.
    """
    received: list[int] = []
    with collect_signals([signal.SIGUSR2], received):
        yield received


class ConsoleTail:
    """Passes on each line that rank 0 appends to console.log, once and whole."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._offset = 0

    def pump(self) -> None:
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:  # the file does not exist yet, or the disk does not answer: a later call reads it
            return
        whole, newline, _ = new.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        if newline:
            for line in whole.decode("utf-8", errors="replace").split("\n"):
                self._say(line)


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send the launcher's log lines to `path`, an attempt's supervisor.log, and nowhere else.

    A disk that refuses the last lines loses them, and not the error with which the block ends.
    """
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    launcher = logging.getLogger("gspo_mega.launcher")
    launcher.addHandler(handler)
    launcher.setLevel(logging.INFO)
    launcher.propagate = False
    try:
        yield
    finally:
        launcher.removeHandler(handler)
        with suppress(OSError):
            handler.close()
