"""Shows the supervisor the progress of this rank, and writes its stacks when it makes none for long.

Owns attempts/NNNN/beats/rank_<r> and logs/stacks_rank_<r>.txt. They are files because a rank may run on another node
than the supervisor and wait in a collective, where it answers nothing. Their meaning is `launcher/watchdog.py`'s.

Writes the Python stacks of this rank when somebody asks for those of all ranks.

Owns the text of a dump and its file, logs/stacks_<n>/rank_<r>.txt. Who asks is `launcher/watchdog.py`'s: the
request is a file, because a rank may run on another node and wait in a collective, where no Python handler of a signal
runs. Stacks of a rank without progress are `signals.py`'s, which writes them unasked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

from gspo_mega.base import progress
from gspo_mega.base.run_folder import Attempt, atomic_write_text
from gspo_mega.plan.watchdog_bounds import Patience

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
        self._answered = attempt.last_stacks_request()
        threading.Thread(target=self._run, name="stacks", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._interval)
            number = self._attempt.last_stacks_request()
            if number > self._answered:
                self._answered = number
                self._write(number)

    def _write(self, number: int) -> None:
        phase, count = progress.current()
        path = self._attempt.stacks_dir(number) / f"rank_{self._rank}.txt"
        title = f"rank {self._rank}, phase {phase}, {count} pieces of work done; asked for, request {number}"
        try:
            path.parent.mkdir(exist_ok=True)
            atomic_write_text(path, all_stacks(title))
        except OSError:
            return  # a full disk loses the stacks


# A constant length, so that it is written in place: a full disk has room for it, and a reader never sees a part.
RECORD_BYTES = 256


class BeatWriter:
    """A thread that writes `beats.now()` every `patience.interval`, and all Python stacks after half of the allowed
    time without progress.

    It holds the interpreter lock while it reads the stacks. `faulthandler`'s timer reads them without the lock, where
    a running thread may change them and crash the process. This object owns that timer while it runs and restarts it
    at every interval, so it fires only if this thread cannot run: a call holds the lock then, and all stacks stand
    still.
    """

    def __init__(self, attempt: Attempt, rank: int, num_ranks: int, patience: Patience) -> None:
        """Raises OSError where the files cannot be created."""
        self._patience, self._interval = patience, patience.interval(num_ranks)
        attempt.beats_dir.mkdir(exist_ok=True)
        self._path = attempt.beat_file(rank)
        self._stacks = attempt.stacks_file(rank).open("ab", buffering=0)
        self._record: dict[str, Any] = {"tick": 0, "pid": os.getpid(), "host": socket.gethostname()}
        self._seen: tuple[str, int] | None = None
        self._stacks_due = 0.0
        self._over = threading.Event()
        self._write()
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def close(self) -> None:
        """The rank has done its work; no progress is expected any more."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        progress.enter(progress.DONE)
        self._write()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._write()

    def _write(self) -> None:
        now = progress.current()
        if not self._over.is_set():
            self._keep_stacks(now)
        self._record["tick"] += 1
        text = json.dumps({**self._record, "phase": now[0], "count": now[1]}).ljust(RECORD_BYTES - 1) + "\n"
        try:
            # Opened each time: a shared file system shows the content elsewhere once the file is closed.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, text.encode(), 0)
            finally:
                os.close(descriptor)
        except OSError:
            return  # the next write may succeed

    def _keep_stacks(self, now: tuple[str, int]) -> None:
        phase = now[0]
        bound = self._patience.longest if phase == progress.WAIT else self._patience.bound(phase)
        half = min(bound, self._patience.silence) / 2
        if now != self._seen:
            self._seen, self._stacks_due = now, time.monotonic() + half
            if os.fstat(self._stacks.fileno()).st_size:  # from a pause that ended
                os.ftruncate(self._stacks.fileno(), 0)
        elif time.monotonic() >= self._stacks_due:
            self._stacks_due = time.monotonic() + half
            with contextlib.suppress(OSError):  # a full disk loses the stacks
                self._stacks.write(all_stacks(f"Timeout ({half:g} s)!").encode(errors="replace"))
        faulthandler.dump_traceback_later(self._patience.silence / 2, repeat=True, file=self._stacks)
