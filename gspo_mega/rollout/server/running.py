"""One start of SGLang on one machine: its process group, its scratch folder, and what it loads.

Owns starting and ending it, and how its end reads. Restarts are `supervise_server.py`'s and `supervise_part.py`'s.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.guarded_files import open_regular
from gspo_mega.base.proxies import without_proxies
from gspo_mega.rollout.server.process_tree import end_group, start_group
from gspo_mega.rollout.server.scratch import Scratch
from gspo_mega.rollout.server.server_spec import ServerSpec

_MOST_TAIL_BYTES = 256 * 1024
_MOST_WORD = 400
# As the last line of a traceback has it: a class, perhaps of a module, and its message.
_ERROR = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)\b:? .*$")


@dataclass(frozen=True)
class Running:
    """The process is the head of a process group. Its standard output and error are appended to `log`."""

    process: subprocess.Popen[bytes]
    scratch: Scratch
    model_path: str
    log: Path
    log_start: int = 0  # where in its log this start begins, in bytes

    @classmethod
    def start(cls, entry: Sequence[str], log: Path, make_spec: Callable[[Path], ServerSpec]) -> Running:
        """Run `entry` with the spec that `make_spec` makes for a new scratch folder. Call from the main thread."""
        # A killed SGLang leaves sockets and marker files in its temporary folder: each start gets a folder of its own.
        scratch = Scratch()
        try:
            spec, spec_file = make_spec(scratch.path), scratch.path / "spec.json"
            spec.write(spec_file)
            command = [*entry, "--spec", str(spec_file), "--parent", str(os.getpid())]
            # SGLang asks itself whether it serves, and its parts ask each other: never through a proxy.
            environment = without_proxies(os.environ) | {"TMPDIR": str(scratch.path)}
            log_start = log.stat().st_size if log.exists() else 0
            process = start_group(command, log=log, environment=environment)
        except BaseException:
            scratch.remove()
            raise
        return cls(process, scratch, spec.model_path, log, log_start)

    def note_shared_memory(self) -> None:
        self.scratch.note(self.process.pid)

    @property
    def how_it_ended(self) -> str | None:
        """In words; None while the process runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"SGLang {how} (see {self.log})"

    @property
    def last_word(self) -> str | None:
        """The line of this start's log that says best why it failed: its last error, else its last line."""
        return last_word(self.log, self.log_start)

    def end(self) -> None:
        self.note_shared_memory()
        # Its requests have left, or are lost with it, and its scratch folder goes: there is nothing to do in order. At
        # SIGTERM, SGLang takes the end of its own scheduler for a crash, and sleeps before it reports that.
        end_group(self.process, grace_seconds=0)
        self.scratch.remove()


def last_word(log: Path, start: int = 0) -> str | None:
    """The last line from byte `start` on that names an error, else the last one; None where there is no line."""
    try:
        text = _end_of(log, start)
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [found[0] for line in lines if (found := _ERROR.search(line)) is not None]
    last = named[-1] if named else lines[-1] if lines else None
    return None if last is None else last[:_MOST_WORD]


def log_tail(log: Path, num_lines: int = 30) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        lines = _end_of(log).splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


def _end_of(log: Path, start: int = 0) -> str:
    """The text of the last bytes from byte `start` on, for a log may have any size. Raises OSError."""
    with open_regular(log) as file:
        file.seek(max(start, log.stat().st_size - _MOST_TAIL_BYTES))
        return file.read(_MOST_TAIL_BYTES).decode("utf-8", errors="replace")
