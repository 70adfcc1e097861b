"""Servers that serve an evaluation while training continues: taken from the pool, and held at one weight version.

They get only requests of the evaluation. Training, publishes and the balance between servers leave them out until they
are given back. They then have old weights, like a restarted server, and the trainer publishes the committed ones to
them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from gspo_mega.base.errors import PublishError, RolloutError
from gspo_mega.rollout.client.server_client import ServerError
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.pooled_server import PooledServer, least_loaded

logger = logging.getLogger(__name__)

# How often a request checks whether a server that rests after a failure may work again.
_CHECK_SECONDS = 0.25


def reserve_for_eval(
    pool: ServerPool, most_requests: int, num_servers: int, weight_version: int, keep: int = 1, loads: bool = False
) -> EvalServers | None:
    """Take `num_servers` of the servers that hold `weight_version` out of training, and return them.

    It takes fewer if training would keep fewer than `keep`, and returns None if there is none to take. With `loads` it
    takes any server that is up, which then has to `load` the version. Their open requests continue elsewhere, with
    their tokens so far. Do not call it while a publish runs.
    """
    able = [one for one in pool.ready_servers() if loads or one.verified_version == weight_version]
    # Prefer servers that training cannot use anyway.
    able.sort(key=lambda one: (one.verified_version == pool.committed_version, one.load.num_tokens))
    chosen = able[: max(0, min(num_servers, len(able) - keep))]
    if not chosen:
        return None
    pool.loop.run(_drain(chosen))
    pool.wake()
    return EvalServers(pool, most_requests, chosen, weight_version)


async def _drain(servers: list[PooledServer]) -> None:
    """Let the servers get no more requests of training, and end those that are open. Runs on the pool's loop."""
    for server in servers:
        server.is_set_aside = True
        for flight in list(server.load.flights):
            flight.end("drained")


class EvalServers:
    """The servers that the sampler uses in place of the pool (`SamplingServers`). Give them back with `give_back`.

    Attributes:
        weight_version: the version of every token that they sample.
        server_ids: the ids of the servers.
    """

    def __init__(self, pool: ServerPool, max_concurrent_requests: int, servers: list[PooledServer], version: int):
        self._pool, self._most, self._servers = pool, max_concurrent_requests, servers
        self.weight_version = version
        self.server_ids = [server.server_id for server in servers]
        self._changed = asyncio.Condition()

    @property
    def committed_version(self) -> int:
        return self.weight_version

    @property
    def returns_routed_experts(self) -> bool:
        return self._pool.returns_routed_experts

    @property
    def num_registration_errors(self) -> int:
        return self._pool.num_registration_errors

    def give_back(self) -> None:
        """Give the servers back: they serve training again once they hold the committed weights. Do not call it on the
        pool's loop.
        """
        for server in self._servers:
            server.is_set_aside = False
        self._pool.wake()

    def load(self, folder: Path, deadline_seconds: float) -> None:
        """Load `folder`, which holds the weights of `weight_version`, into the servers. Those that fail are given back.
        Raises RolloutError if none is left. Do not call it on the pool's loop.
        """
        problems = []
        for server in list(self._servers):
            control = server.control(self._pool.loop)
            try:
                control.pause(deadline_seconds=deadline_seconds)
                control.update_from_disk(str(folder), self.weight_version, deadline_seconds=deadline_seconds)
                control.resume(deadline_seconds=deadline_seconds)
            except PublishError as error:
                problems.append(str(error))
                self._servers.remove(server)
                server.is_set_aside = False
            else:
                server.note_verified(self.weight_version)
        if not self._servers:
            raise RolloutError(f"no server could load weight version {self.weight_version}: {'; '.join(problems)}")

    # The methods below run on the pool's loop.

    async def acquire(
        self, avoid: frozenset[str] = frozenset(), num_tokens: int = 0, prefer: str | None = None
    ) -> PooledServer:
        """As `ServerPool.acquire`, but a publish does not hold it up. Raises RolloutError once no server is left that
        holds the version.
        """
        async with self._changed:
            while True:
                left = [one for one in self._servers if self._serves(one)]
                if not left:
                    self._changed.notify_all()
                    raise RolloutError(
                        f"no server is left that holds weight version {self.weight_version}:"
                        f" {', '.join(self.server_ids)} went down while an evaluation ran on it"
                    )
                now = time.monotonic()
                room = {one.server_id: one for one in left if one.num_open < self._most and one.rest_until <= now}
                if room:
                    loads = {name: one.load for name, one in room.items()}
                    server = room[least_loaded(loads, avoid, prefer, num_tokens)]
                    server.open_request(num_tokens)
                    return server
                await self._wait(any(one.rest_until > now for one in left))

    async def release(self, server: PooledServer, error: ServerError | None = None, num_tokens: int = 0) -> None:
        """As `ServerPool.release`."""
        server.close_request(num_tokens)
        if error is None:
            server.note_success()
        elif server.note_failure(error, time.monotonic()):
            logger.warning("%s: no longer serves the evaluation: %s", server.server_id, error)
        async with self._changed:
            self._changed.notify(1)

    def _serves(self, server: PooledServer) -> bool:
        return not (server.is_gone or server.is_draining) and server.verified_version == self.weight_version

    async def _wait(self, is_resting: bool) -> None:
        try:
            async with asyncio.timeout(_CHECK_SECONDS if is_resting else None):
                await self._changed.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:  # as in the pool: another request can have the place now
            self._changed.notify(1)
            raise
