"""Writes the Python stacks of this rank when somebody asks for those of all ranks.

Owns the text of a dump and its file, logs/stacks_<n>/rank_<r>.txt. Who asks is `launcher/stack_request.py`'s: the
request is a file, because a rank may run on another node and wait in a collective, where no Python handler of a signal
runs. Stacks of a rank without progress are `beat_writer.py`'s, which writes them unasked.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback

from gspo_mega.base import beats
from gspo_mega.base.run_folder import Attempt, atomic_write_text

POLL_SECONDS = 0.5


def poll_seconds(num_ranks: int) -> float:
    """Seconds between two looks for a request: at most about a hundred looks per second in all."""
    return max(POLL_SECONDS, num_ranks / 100)


def all_stacks(title: str) -> str:
    """The Python stacks of all threads as `faulthandler` writes them: the most recent call first, the main thread
    last. Holds the interpreter lock, so no running thread changes them meanwhile.
    """
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
    lines = [title]
    for thread, frame in frames:
        lines.append(f"Thread {thread:#018x} (most recent call first):")
        lines += [
            f'  File "{entry.filename}", line {entry.lineno} in {entry.name}'
            for entry in reversed(traceback.extract_stack(frame))
        ]
        lines.append("")
    return "\n".join(lines) + "\n"


class StackDumps:
    """A thread that answers each request once, from when it is made until the process ends."""

    def __init__(self, attempt: Attempt, rank: int, num_ranks: int) -> None:
        self._attempt, self._rank, self._interval = attempt, rank, poll_seconds(num_ranks)
        self._answered = attempt.stacks_asked()
        threading.Thread(target=self._run, name="stacks", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._interval)
            number = self._attempt.stacks_asked()
            if number > self._answered:
                self._answered = number
                self._write(number)

    def _write(self, number: int) -> None:
        phase, count = beats.now()
        path = self._attempt.stacks_dir(number) / f"rank_{self._rank}.txt"
        title = f"rank {self._rank}, phase {phase}, {count} pieces of work done; asked for, request {number}"
        try:
            path.parent.mkdir(exist_ok=True)
            atomic_write_text(path, all_stacks(title))
        except OSError:
            return  # a full disk loses the stacks
