"""Servers that serve an evaluation beside training: taken from the pool at one weight version, and held at it.

Owns which servers those are, and that they get requests of the evaluation alone. Training, publishes and the balance
between servers pass them by until they are given back; they are then behind, like a server that came back, and the
runtime publishes the committed weights to them again.
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

# How often a request looks whether a server that rests after a failure may work again.
_LOOK_SECONDS = 0.25


class EvalServers:
    """What the sampler asks in place of the pool (`sampling.Servers`). Give the servers back with `give_back`.

    Attributes:
        weight_version: of every token that they sample.
        server_ids: the servers.
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
        """They serve training again, once they hold the committed weights. Not on the pool's loop."""
        for server in self._servers:
            server.is_set_aside = False
        self._pool.wake()

    def load(self, folder: Path, deadline_seconds: float) -> None:
        """Bring the servers to the version, which `folder` holds. Those that fail are given back. Raises RolloutError
        where none is left. Not on the pool's loop.
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
        """As `ServerPool.acquire`; a publish does not hold it up. Raises RolloutError once no server is left that holds
        the version.
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
            logger.warning("%s: serves the evaluation no more: %s", server.server_id, error)
        async with self._changed:
            self._changed.notify(1)

    def _serves(self, server: PooledServer) -> bool:
        return not (server.is_gone or server.is_draining) and server.verified_version == self.weight_version

    async def _wait(self, is_resting: bool) -> None:
        try:
            async with asyncio.timeout(_LOOK_SECONDS if is_resting else None):
                await self._changed.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:  # as in the pool: the place is another's now
            self._changed.notify(1)
            raise


def reserve_for_eval(
    pool: ServerPool, most_requests: int, num_servers: int, weight_version: int, keep: int = 1, loads: bool = False
) -> EvalServers | None:
    """`num_servers` of those that hold `weight_version`, fewer where training would keep fewer than `keep`; None where
    there is none to take. With `loads` any server that is up, to `load` the version. Their open requests go on
    elsewhere, with their tokens so far. Not while a publish runs.
    """
    able = [one for one in pool.ready_servers() if loads or one.verified_version == weight_version]
    # Those that training lacks anyway come first.
    able.sort(key=lambda one: (one.verified_version == pool.committed_version, one.load.num_tokens))
    chosen = able[: max(0, min(num_servers, len(able) - keep))]
    if not chosen:
        return None
    pool.loop.run(_drain(chosen))
    pool.wake()
    return EvalServers(pool, most_requests, chosen, weight_version)


async def _drain(servers: list[PooledServer]) -> None:
    """On the pool's loop: they get no request of training any more, and what is open on them ends."""
    for server in servers:
        server.is_set_aside = True
        for flight in list(server.load.flights):
            flight.end("drained")
