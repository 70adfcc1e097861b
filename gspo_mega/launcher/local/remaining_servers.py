"""Which servers of an attempt are left: one that is gone for good ends no other and no run; the last one does.

Owns telling that a server is gone, once each: to the user, and to the pool by the server's registration where the
server could not write it itself. Restarting servers is `gspo-mega serve`'s; by the time its process ends, or registers
`failed`, it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from gspo_mega.launcher.children import Child
from gspo_mega.rollout.registration import Registration
from gspo_mega.run_folder import Attempt, read_json

logger = logging.getLogger(__name__)


class ServersLeft:
    """`children`: the processes of an attempt, of which those of the kind `server` count."""

    def __init__(self, attempt: Attempt, children: Iterable[Child], say: Callable[[str], None]) -> None:
        self._attempt, self._say = attempt, say
        self._servers = [child for child in children if child.spec.kind == "server"]
        self._gone: list[Child] = []

    def look(self) -> list[Child]:
        """Tell of each server that is gone since the last look. Returns all of them, the first that went first, once
        none is left; until then, and where there are none, nothing.
        """
        for child in self._servers:
            if child not in self._gone and (why := self._end_of(child)) is not None:
                self._gone.append(child)
                self._tell(child, why)
        return list(self._gone) if len(self._gone) == len(self._servers) else []

    def _end_of(self, child: Child) -> str | None:
        """Why this server will not serve any more, or None while it may."""
        record = self._record(child)
        if record.get("state") == "failed":
            return str(record.get("error"))
        if child.exit_code is None:
            return None
        # Whatever its code: the run asked for no end. Nobody is left to write its registration, and the pool would wait
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

    def _tell(self, child: Child, why: str) -> None:
        num_left, total = len(self._servers) - len(self._gone), len(self._servers)
        left = {0: f"no server of {total} is left", 1: f"1 of {total} servers is left"}.get(
            num_left, f"{num_left} of {total} servers are left"
        )
        text = f"{child.name} is given up: {why.strip().splitlines()[0]}; {left} (log: {child.spec.log})"
        logger.warning("%s", text)
        self._say(f"warning  {text}")
