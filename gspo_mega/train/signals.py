"""Threads of a rank that show the supervisor its progress and its Python stacks.

`BeatWriter` writes attempts/NNNN/beats/rank_<r> all the time, and logs/stacks_rank_<r>.txt when the rank has made no
progress for long. `StackDumps` writes logs/stacks_<n>/rank_<r>.txt when somebody asks for the stacks of all ranks.

Requests and answers are files, because a rank may run on another node than the supervisor and may wait in a collective,
where it answers nothing and runs no Python handler of a signal. `launcher/watchdog.py` makes the requests and
interprets the files.
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
# A beat has a constant length and is written in place, so a full disk has room for it and a reader never sees a part.
RECORD_BYTES = 256


class BeatWriter:
    """A thread that writes `progress.now()` every `patience.interval`, and all Python stacks after half of the allowed
    time without progress.

    The thread holds the interpreter lock while it reads the stacks. `faulthandler`'s timer reads them without the lock,
    and a running thread that changes them at that time can crash the process. So this object owns that timer and
    restarts it at every interval. It fires only if this thread cannot run, and then another call holds the lock and no
    stack changes.
    """

    def __init__(self, attempt: Attempt, rank: int, num_ranks: int, patience: Patience) -> None:
        """Raises OSError if the files cannot be created."""
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
        """Call this when the rank has done its work and no more progress is expected."""
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
            self._write_stacks_when_due(now)
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

    def _write_stacks_when_due(self, now: tuple[str, int]) -> None:
        phase = now[0]
        bound = self._patience.longest if phase == progress.WAIT else self._patience.bound(phase)
        half = min(bound, self._patience.silence) / 2
        if now != self._seen:
            self._seen, self._stacks_due = now, time.monotonic() + half
            if os.fstat(self._stacks.fileno()).st_size:  # stacks of a pause that has ended
                os.ftruncate(self._stacks.fileno(), 0)
        elif time.monotonic() >= self._stacks_due:
            self._stacks_due = time.monotonic() + half
            with contextlib.suppress(OSError):  # a full disk loses the stacks
                self._stacks.write(all_stacks(f"Timeout ({half:g} s)!").encode(errors="replace"))
        faulthandler.dump_traceback_later(self._patience.silence / 2, repeat=True, file=self._stacks)


class StackDumps:
    """A thread that answers each request for stacks once. It runs until the process ends."""

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


def poll_seconds(num_ranks: int) -> float:
    """Seconds between two checks for a request. All ranks together make at most about a hundred checks per second."""
    return max(POLL_SECONDS, num_ranks / 100)


def all_stacks(title: str) -> str:
    """The Python stacks of all threads in the format of `faulthandler`: the most recent call first, the main thread
    last. It runs with the interpreter lock, so no running thread changes the stacks while it reads them.
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
