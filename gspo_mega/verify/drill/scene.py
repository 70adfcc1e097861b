"""A run under way in a drill: starting `gspo-mega train`, finding its processes, watching what it has reached.

`Scene` has one run's folder, disk, network and current command. All processes are descendants of the drill, which
adopts orphans, so that none is missed after a supervisor was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gspo_mega.base import failpoints, processes
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import printable
from gspo_mega.train.standby import NAME as STANDBY_NAME
from gspo_mega.verify.drill.machine import OWN_NETWORK, Disk, Network

POLL_SECONDS = 0.005
TRAIN = (sys.executable, "-m", "gspo_mega", "train")
# After its supervisor has ended, a run's processes have this long to end.
_LEFT_SECONDS = 20.0
_ROLES = {
    "rank": re.compile(r"gspo_mega\.train\.(worker|standby)\b"),
    "serve": re.compile(r"\bgspo_mega serve\b"),
    "server": re.compile(r"gspo_mega\.rollout\.server\.entry\b"),
    "scheduler": re.compile(r"sglang::scheduler"),
    "detokenizer": re.compile(r"sglang::detoken"),
    "scorer": re.compile(r"gspo_mega\.rewards\.scoring_worker\b"),
    "episode worker": re.compile(r"gspo_mega\.agents\.\w*worker\b"),
}


class NotThereError(Exception):
    """What a fault would strike does not exist now."""


@dataclass
class Command:
    """A started `gspo-mega train`. `record`: the file of the points that rank 0 reaches; `reached`: how often each.
    `is_over`: it has ended, and what it left was looked at.
    """

    process: subprocess.Popen[bytes]
    started: float
    record: Path
    errors: Path
    reached: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    first_reached: float | None = None
    _offset: int = 0

    def look(self) -> None:
        """Read the points that were reached since the last look."""
        try:
            with self.record.open("rb") as file:
                file.seek(self._offset)
                new, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return
        if newline:
            self._offset += len(new) + 1
            self.reached.update(new.decode(errors="replace").split("\n"))
            self.first_reached = self.first_reached or time.monotonic()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        """How it ended, and the line of the error that it showed."""
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with contextlib.suppress(OSError):
            lines = [line for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
            if lines and code > 0:
                return printable(f"{how}: {lines[-1] if self.has_traceback() else lines[0]}"[:240])
        return how

    def has_traceback(self) -> bool:
        """Whether it ended with an error that is not written for a person."""
        with contextlib.suppress(OSError):
            return "Traceback (most recent call last)" in self.errors.read_text(errors="replace")
        return False


class Scene:
    """One run of the command `words`, whose folder is `root`/runs/`name`."""

    def __init__(self, root: Path, name: str, words: Sequence[str], own_network: bool, disk_bytes: int | None) -> None:
        """`disk_bytes`: put the run on a file system of its own, of this size."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self.root, self.words, self._own_network = root, list(words), own_network
        self.disk = None if disk_bytes is None else Disk(root / "image", root / "runs", disk_bytes)
        self.run = RunFolder(root / "runs" / name)
        self.network: Network | None = None
        self.command: Command | None = None
        self.stopped: set[int] = set()
        self.stopped_for_good: set[int] = set()
        self.must_mount_again = False
        self._num_commands = 0

    def start(self, prefix: Sequence[str] = (), fault: str = "") -> Command:
        """Start the run, or continue it. `prefix`: words before the command. `fault`: of `failpoints`."""
        self._num_commands += 1
        log = self.root / f"command-{self._num_commands}"
        record = log.with_suffix(".reached")
        variable = f"{failpoints.VARIABLE}={fault or 'rank=0'},record={record}"
        words = [*(OWN_NETWORK if self._own_network else ()), "env", variable, *prefix]
        words += self.words
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as errors:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
            )
        self.command = Command(process, time.monotonic(), record, log.with_suffix(".err"))
        return self.command

    # --- processes ---------------------------------------------------------------------------------------

    def pids(self, role: str) -> list[int]:
        """The processes of a role, in the order in which they were started; `supervisor` and `everything` too."""
        assert self.command is not None
        own = self.command.process.pid
        if role == "supervisor":
            return [] if self.command.has_ended() else [own]
        parents = processes.parents()
        below = sorted(processes.living_below(os.getpid()))
        if role == "everything":
            return below
        found = [pid for pid in below if _ROLES["rank" if role == "standby" else role].search(_command_line(pid))]
        if role in ("rank", "standby"):  # a standby that took over is a rank
            found = [pid for pid in found if (_name(pid) == STANDBY_NAME) == (role == "standby")]
        # A rank's and a scorer's forks have their command line.
        return [pid for pid in found if parents.get(pid) not in found]

    def signal(self, pids: Sequence[int], number: int, for_good: bool = False) -> None:
        """Send a signal to all of `pids`. `for_good`: `wake` must leave what this stops as it is."""
        if not pids:
            raise NotThereError
        for pid in pids:
            processes.send_signal(pid, number)
        if number == signal.SIGSTOP:
            (self.stopped_for_good if for_good else self.stopped).update(pids)

    def wake(self) -> None:
        """Let the processes go on that were stopped for a while."""
        for pid in self.stopped - self.stopped_for_good:
            processes.send_signal(pid, signal.SIGCONT)
        self.stopped.clear()

    def left_running(self) -> list[str]:
        """End what still runs after the command has ended, and say what it was."""
        deadline = time.monotonic() + _LEFT_SECONDS
        while (left := processes.living_below(os.getpid())) and time.monotonic() < deadline:
            time.sleep(0.05)
        named = [f"process {pid} still runs: {_command_line(pid)[:80]}" for pid in sorted(left)]
        processes.kill_below()
        return named

    # --- disk and network --------------------------------------------------------------------------------

    def own_network(self) -> Network:
        if self.network is None:
            assert self.command is not None
            try:
                self.network = Network(self.command.process.pid)
            except OSError:
                raise NotThereError from None
        return self.network

    def mend(self) -> None:
        """Undo every fault. The command has ended."""
        self.stopped.clear()
        self.stopped_for_good.clear()
        if self.network is not None:
            self.network.close()
            self.network = None
        if self.disk is not None:
            if self.must_mount_again:
                self.disk.mend()
                self.must_mount_again = False
            self.disk.free()

    def points(self) -> Counter[str]:
        """How often rank 0 has reached each point in the current command."""
        assert self.command is not None
        self.command.look()
        return self.command.reached.copy()

    def close(self, remove: bool) -> None:
        """End everything. `remove`: also the run's folder; what is on a disk of its own is copied before if not."""
        processes.kill_below()
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # a disk that cannot be mended is shown as it is
            self.mend()
        if self.disk is not None:
            if not remove:
                with contextlib.suppress(OSError, shutil.Error):
                    shutil.copytree(self.root / "runs", self.root / "kept", symlinks=True, dirs_exist_ok=True)
            self.disk.close()
        if remove:
            shutil.rmtree(self.root, ignore_errors=True)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="ascii", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
