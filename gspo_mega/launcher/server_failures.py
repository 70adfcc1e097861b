"""Shows each failed start of a server to the user when it happens, once: the cause, its log, and how many are left.

Owns the words. `gspo-mega serve` starts a server again by itself, and nobody looks into its log meanwhile. Servers that
joined are shown as the launcher's own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable

from gspo_mega.base.errors import RolloutError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.rollout.registration import Registration, read_registrations

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class ServerFailures:
    """`folders`: in each of which servers register, with their common name in words; empty for the policy's."""

    def __init__(self, folders: Iterable[tuple[Attempt, str]], say: Callable[[str], None]) -> None:
        self._folders, self._say = list(folders), say
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        self._look_again = 0.0

    def look(self) -> None:
        """Show what has failed since the last call; costs little to call often."""
        if time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + _LOOK_SECONDS
        for attempt, of in self._folders:
            # A file that cannot be read now is read later, or its readers say what is wrong with it.
            with contextlib.suppress(RolloutError, OSError):
                for server in read_registrations(attempt.servers_dir, on_error=lambda path, error: None):
                    self._look_at(server, attempt, of)

    def _look_at(self, server: Registration, attempt: Attempt, of: str) -> None:
        pid, seen = self._seen.get((of, server.server_id), (server.pid, 0))
        seen = seen if pid == server.pid else 0  # another `serve` counts anew
        self._seen[of, server.server_id] = server.pid, server.num_failures
        number = server.server_id.rpartition("-")[2]
        log = attempt.server_log(int(number)) if number.isdecimal() else attempt.logs_dir
        new = min(server.num_failures - seen, len(server.recent_failures))
        for before, cause in zip(range(new - 1, -1, -1), server.recent_failures[len(server.recent_failures) - new :]):
            where = "" if str(log) in cause else f" (log: {log})"
            attempts = f"attempt {max(1, server.failed_starts - before)} of {server.most_starts}"
            text = f"{server.server_id}{of} failed ({attempts}): {cause}; it is started again{where}"
            logger.warning("%s", text)
            self._say(f"warning  {text}")
