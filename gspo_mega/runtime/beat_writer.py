"""Shows the supervisor how far this rank has come, and leaves its stacks when nothing gets done for long.

Owns attempts/NNNN/beats/rank_<r> and logs/stacks_rank_<r>.txt. Files, because a rank may be on another node than the supervisor and
sit in a collective, where it hears nothing. What they mean is `launcher/watchdog.py`'s.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
from typing import Any

from gspo_mega import beats
from gspo_mega.plan.patience import Patience
from gspo_mega.run_folder import Attempt

# Always so long, so that it is written in place: a full disk has room for it, and a reader meets no half of it.
RECORD_BYTES = 256


class BeatWriter:
    """A thread that writes `beats.now()` every `patience.interval`. While this runs, `faulthandler`'s timer is its own: without
    progress for half of what is allowed, every Python stack is written down, by a thread that needs no interpreter for it."""

    def __init__(self, attempt: Attempt, rank: int, num_ranks: int, patience: Patience) -> None:
        """Raises OSError where the files cannot be made."""
        self._patience, self._interval = patience, patience.interval(num_ranks)
        attempt.beats_dir.mkdir(exist_ok=True)
        self._path = attempt.beat_file(rank)
        self._stacks = attempt.stacks_file(rank).open("ab")
        self._record: dict[str, Any] = {"tick": 0, "pid": os.getpid(), "host": socket.gethostname()}
        self._armed: tuple[str, int] | None = None
        self._over = threading.Event()
        self._write()
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def close(self) -> None:
        """The rank has done its work: nothing is expected of it any more."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        beats.enter(beats.DONE)
        self._write()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._write()

    def _write(self) -> None:
        phase, count = now = beats.now()
        if now != self._armed and not self._over.is_set():
            self._arm(phase)
            self._armed = now
        self._record["tick"] += 1
        text = json.dumps({**self._record, "phase": phase, "count": count}).ljust(RECORD_BYTES - 1) + "\n"
        try:
            # Opened anew: closing is what has a shared file system show it elsewhere.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, text.encode(), 0)
            finally:
                os.close(descriptor)
        except OSError:
            return  # the next one may be

    def _arm(self, phase: str) -> None:
        if os.fstat(self._stacks.fileno()).st_size:  # of a time that was over again
            os.ftruncate(self._stacks.fileno(), 0)
        bound = self._patience.longest if phase == beats.WAIT else self._patience.bound(phase)
        faulthandler.dump_traceback_later(min(bound, self._patience.silence) / 2, repeat=True, file=self._stacks)
