"""Track the launcher's own servers in an attempt: which have left or are lost, and whether all servers have failed.
The policy's servers are one such set, those of each reward model another.

Owns the report of each such server, once: to the user, and to the pool through the server's registration where the
server did not write it itself. `gspo-mega serve` restarts servers; when its process ends or registers `failed`, it has
given up. A server that was asked to end registers `stopped` and exits with 0: it has left, and nothing failed.

Only where every server of the attempt has failed, joined ones included, does the launcher end the run. Otherwise one
serves, or may join: the pool decides, by `rollout.no_server_deadline_seconds`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.launcher.children import Child
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.server.reward_server import reward_folder

logger = logging.getLogger(__name__)


class RemainingServers:
    """`children`: the processes of an attempt; only those of the kind `server` count, or the servers of the reward
    model `of`, which register in a folder of their own.
    """

    def __init__(
        self, attempt: Attempt, children: Iterable[Child], say: Callable[[str], None], of: str | None = None
    ) -> None:
        self._attempt, self._say = attempt if of is None else reward_folder(attempt, of), say
        wanted = ("server", "") if of is None else ("reward server", of)
        self._servers = [child for child in children if (child.spec.kind, child.spec.of) == wanted]
        self._failed: list[Child] = []
        self._left: list[Child] = []
        self._all_failed = False

    def lost(self) -> list[Child]:
        """Report each server that is gone since the last call. Once all servers have failed, those that joined too,
        returns the launcher's own in the order of their loss; before that, and without own servers, an empty list.
        """
        for child in self._servers:
            if child in self._failed or child in self._left:
                continue
            if self._has_left(child):
                self._left.append(child)
                self._report(child, f"{child.name} has left, as it was asked to")
            elif (why := self._end_of(child)) is not None:
                self._failed.append(child)
                self._report(child, f"{child.name} is given up: {why.strip().splitlines()[0]}", logging.WARNING)
        if self._failed and len(self._failed) == len(self._servers) and not self._all_failed:
            self._all_failed = not self._others_may_serve()
        # It stays so: the run is ending, and a server that joins now is too late.
        return list(self._failed) if self._all_failed else []

    def _others_may_serve(self) -> bool:
        """Has a server joined whose registration does not say `failed`? One without a state may serve."""
        own = {self._attempt.server_file(f"server-{child.spec.index}") for child in self._servers}
        joined = [path for path in self._attempt.servers_dir.glob("[!.]*.json") if path not in own]
        return any((read_json(path) or {}).get("state") != "failed" for path in joined)

    def _has_left(self, child: Child) -> bool:
        return child.exit_code == 0 and self._record(child).get("state") == "stopped"

    def _end_of(self, child: Child) -> str | None:
        """Why this server has ended for good, or None while it has not."""
        record = self._record(child)
        if record.get("state") == "failed":
            return str(record.get("error"))
        if child.exit_code is None:
            return None
        # Whatever its exit code: it did not end in order. Nothing else writes its registration, and the pool would
        # wait for it.
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

    def _report(self, child: Child, what: str, level: int = logging.INFO) -> None:
        num_left, total = len(self._servers) - len(self._failed) - len(self._left), len(self._servers)
        left = {0: f"no server of {total} is left", 1: f"1 of {total} servers is left"}.get(
            num_left, f"{num_left} of {total} servers are left"
        )
        text = f"{what}; {left} (log: {child.spec.log})"
        logger.log(level, "%s", text)
        self._say(f"warning  {text}" if level == logging.WARNING else text)
