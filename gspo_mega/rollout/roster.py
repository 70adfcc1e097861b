"""The servers' registrations as the pool reads them, again and again: who is there, who was heard of lately.

Owns what a file system's failure means: nothing is concluded from a file that cannot be read. What it said before holds
until its heartbeat is too old.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from gspo_mega.rollout.registration import Registration, read_registrations

logger = logging.getLogger(__name__)

STALE_SECONDS = 60.0


class Roster:
    """Read it from one thread at a time.

    `registrations`: the latest of every server. `num_errors`: readings that failed for the file system, one a file and
    time; `last_error`: what the latest reading could not read, or None.
    """

    def __init__(self, servers_dir: Path) -> None:
        self._servers_dir = servers_dir
        self._heard: dict[
            str, tuple[float, float]
        ] = {}  # server: its latest heartbeat, and our monotonic time when it came
        self._told: set[tuple[str, str]] = set()
        self.registrations: list[Registration] = []
        self.num_errors = 0
        self.last_error: str | None = None

    def read(self) -> list[Registration]:
        """Read all files; returns the ready servers whose heartbeat goes on. Raises RolloutError for a file that is no
        registration.
        """
        errors: dict[Path, OSError] = {}
        try:
            found = read_registrations(self._servers_dir, on_error=errors.__setitem__)
        except OSError as error:  # of the folder itself
            errors[self._servers_dir] = error
            found = list(self.registrations)
        unread = {path.stem for path in errors}
        found += [r for r in self.registrations if r.server_id in unread and r not in found]
        self._note(errors)
        self.registrations = sorted(found, key=lambda r: r.server_id)
        return [r for r in self.registrations if self._is_heard(r) and r.state == "ready"]

    def silent_seconds(self, server_id: str) -> float:
        return time.monotonic() - self._heard[server_id][1]

    def _note(self, errors: dict[Path, OSError]) -> None:
        self.num_errors += len(errors)
        self.last_error = None
        for path, error in errors.items():
            text = f"{path}: cannot be read: {error.strerror or error}"
            self.last_error = text
            if (str(path), text) not in self._told:  # once, not every quarter of a second
                self._told.add((str(path), text))
                logger.warning("%s; tried again until it can be", text)
        self._told = {(path, text) for path, text in self._told if Path(path) in errors}

    def _is_heard(self, registration: Registration) -> bool:
        """Whether the server's heartbeat goes on. Clocks of two machines differ, and one may be set: its changes count,
        by our own monotonic time; only a heartbeat that is seen for the first time is compared with the clock on the
        wall.
        """
        now, beat = time.monotonic(), registration.heartbeat
        last = self._heard.get(registration.server_id, (beat, now - max(0.0, time.time() - beat)))
        self._heard[registration.server_id] = last if last[0] == beat else (beat, now)
        return now - self._heard[registration.server_id][1] < STALE_SECONDS
