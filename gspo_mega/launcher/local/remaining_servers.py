"""Track the servers that are left in an attempt: the run continues without a lost server and ends with the last one.

Owns the report of each lost server, once: to the user, and to the pool through the server's registration where the
server did not write it itself. `gspo-mega serve` restarts servers; when its process ends or registers `failed`, it has
given up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from gspo_mega.launcher.children import Child
from gspo_mega.rollout.registration import Registration
from gspo_mega.run_folder import Attempt, read_json

logger = logging.getLogger(__name__)


class RemainingServers:
    """`children`: the processes of an attempt; only those of the kind `server` count."""

    def __init__(self, attempt: Attempt, children: Iterable[Child], say: Callable[[str], None]) -> None:
        self._attempt, self._say = attempt, say
        self._servers = [child for child in children if child.spec.kind == "server"]
        self._gone: list[Child] = []

    def lost(self) -> list[Child]:
        """Report each server lost since the last call. Once no server is left, returns all of them in the order of
        their loss; before that, and in an attempt without servers, an empty list.
        """
        for child in self._servers:
            if child not in self._gone and (why := self._end_of(child)) is not None:
                self._gone.append(child)
                self._report(child, why)
        return list(self._gone) if len(self._gone) == len(self._servers) else []

    def _end_of(self, child: Child) -> str | None:
        """Why this server has ended for good, or None while it has not."""
        record = self._record(child)
        if record.get("state") == "failed":
            return str(record.get("error"))
        if child.exit_code is None:
            return None
        # Whatever its exit code: nobody asked it to end. Nothing else writes its registration, and the pool would wait
        # for it.
        why = f"its process {child.end_described}"
        server_id = f"server-{child.spec.index}"
        Registration(
            server_id,
            record.get("address", ""),
            child.pid,
            "failed",
            record.get("generation", 0),
            None,
            time.time(),
            error=why,
        ).write(self._attempt.servers_dir)
        return why

    def _record(self, child: Child) -> dict:
        return read_json(self._attempt.server_file(f"server-{child.spec.index}")) or {}

    def _report(self, child: Child, why: str) -> None:
        num_left, total = len(self._servers) - len(self._gone), len(self._servers)
        left = {0: f"no server of {total} is left", 1: f"1 of {total} servers is left"}.get(
            num_left, f"{num_left} of {total} servers are left"
        )
        text = f"{child.name} is given up: {why.strip().splitlines()[0]}; {left} (log: {child.spec.log})"
        logger.warning("%s", text)
        self._say(f"warning  {text}")
