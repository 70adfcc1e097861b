"""Ask all ranks of an attempt for their Python stacks: on SIGUSR2, when the watchdog gives up, by `gspo-mega status`.

Owns the request and the wait for the answers. The ranks answer by `train/stack_dump.py`, whatever their main threads
do. A rank that does not answer is stopped, gone, or in a call that holds the interpreter: SIGUSR2 to that process
itself writes its main thread's stack to its log even then.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from gspo_mega.base.guarded_files import read_text
from gspo_mega.base.run_folder import Attempt, atomic_write_text
from gspo_mega.train.stack_dump import poll_seconds

logger = logging.getLogger(__name__)

# Above the time until the ranks look: reading stacks, writing a file to a shared folder.
_MARGIN_SECONDS = 3.0
_POLL_SECONDS = 0.05
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_MOST_NAMED = 16


class StackRequest:
    """One request to the `num_ranks` ranks of an attempt. Raises OSError where it cannot be written."""

    def __init__(self, attempt: Attempt, num_ranks: int) -> None:
        number = attempt.stacks_asked() + 1
        self.folder = attempt.stacks_dir(number)
        self._files = [self.folder / f"rank_{rank}.txt" for rank in range(num_ranks)]
        self._deadline = time.monotonic() + 2 * poll_seconds(num_ranks) + _MARGIN_SECONDS
        atomic_write_text(attempt.stacks_request_file, f"{number}\n")

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank, file in enumerate(self._files) if not file.exists()]

    @property
    def is_over(self) -> bool:
        """Whether all answered, or had the time to."""
        return time.monotonic() > self._deadline or not self.missing

    def wait(self) -> None:
        while not self.is_over:
            time.sleep(_POLL_SECONDS)

    def text(self) -> str:
        """What came of it, in one line."""
        silent, total = self.missing, len(self._files)
        text = f"stacks of {'all ' * (not silent)}{total - len(silent)}{f' of {total}' if silent else ''} ranks:"
        text += f" {self.folder}"
        if silent:
            named = f"{', '.join(map(str, silent[:_MOST_NAMED]))}{' ...' * (len(silent) > _MOST_NAMED)}"
            text += f"; no answer from rank{'s' * (len(silent) > 1)} {named}"
        return text

    def places(self) -> list[str]:
        """A line per rank that answered: its phase, and where its main thread is."""
        return [f"{_title(file)}; at {_innermost(file)}" for file in self._files if file.exists()]


def _title(file: Path) -> str:
    """ "rank 3, phase train" """
    return ",".join(read_text(file).split(",", 2)[:2])


def _innermost(file: Path) -> str:
    """ "file:line in function" of the main thread, whose stack is the last."""
    found = _FRAME.search(read_text(file).rpartition("Thread 0x")[2])
    return "an unknown place" if found is None else f"{found[1]}:{found[2]} in {found[3]}"


class StacksOnSignal:
    """What a supervisor does on SIGUSR2: `signals` is filled by `signals_taken` while they arrive. `say` shows the user
    a line.
    """

    def __init__(self, attempt: Attempt, num_ranks: int, signals: list[int], say: Callable[[str], None]) -> None:
        self._attempt, self._num_ranks, self._signals, self._say = attempt, num_ranks, signals, say
        self._open: StackRequest | None = None

    def look(self) -> None:
        """Begin what a signal asks for, and tell what came of it. Call it at any rate; it returns at once."""
        if self._signals and self._open is None:
            self._signals.clear()
            self._open = self._ask()
        if self._open is not None and self._open.is_over:
            self._say(f"SIGUSR2: {self._open.text()}")
            self._open = None

    def now(self) -> str:
        """Ask and wait a few seconds, for ranks that are about to be ended. Returns the line about it."""
        request = self._ask()
        if request is None:
            return "their stacks could not be asked for"
        request.wait()
        return request.text()

    def _ask(self) -> StackRequest | None:
        try:
            return StackRequest(self._attempt, self._num_ranks)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._attempt.stacks_request_file, error.strerror)
            return None
