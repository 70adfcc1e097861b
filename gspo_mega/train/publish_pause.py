"""Open requests around a publish: none begins, and those that are open end with their tokens so far, or go on.

Owns what `rollout.on_publish` says. A request that ended goes on after the publish, like one that was moved to another
server: its tokens so far are its prompt then, read by the new weights, and every part is of one version by
construction. That also holds where the server dies meanwhile. Sending weights is `gspo_mega.checkpoint`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gspo_mega.config.on_publish import OnPublish
from gspo_mega.rollout.client.server_client import ServerError
from gspo_mega.rollout.server_pool import ServerPool

_POLL_SECONDS = 0.005
_ABORT_SECONDS = 5.0
_LOOK_SECONDS = 0.25


@dataclass
class Pause:
    """What a publish met: `num_open` requests when it began, and `seconds` until it could go on."""

    num_open: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def paused(pool: ServerPool, mode: OnPublish, on_wait: Callable[[], bool] = lambda: False) -> Iterator[Pause]:
    """The block publishes: no request begins before its end, and with `wait` and `continue` none is open in it.

    `on_wait` is called a few times per second while open requests are waited for. Once it returns True, `wait` waits no
    longer and does as `continue`: the run ends soon. A request that its server does not give up within a few seconds
    is ended without it; its reported tokens are kept.
    """
    pool.hold(True)
    try:
        pause = Pause(_num_open(pool))
        started = time.monotonic()
        looked_at = -_LOOK_SECONDS
        while mode != "continue_with_cache" and _num_open(pool):
            pool.check()
            if time.monotonic() - looked_at >= _LOOK_SECONDS:
                if on_wait():
                    mode = "continue"
                if mode == "continue":
                    pool.loop.run(_end_open(pool))
                looked_at = time.monotonic()
            time.sleep(_POLL_SECONDS)
        pause.seconds = time.monotonic() - started
        yield pause
    finally:
        pool.hold(False)


def _num_open(pool: ServerPool) -> int:
    return sum(len(server.load.flights) for server in pool.ready_servers())


async def _end_open(pool: ServerPool) -> None:
    """Ask every server to end all its requests, in one call each."""

    async def end(server) -> None:
        for flight in list(server.load.flights):
            flight.end("paused", asks=False)
        with contextlib.suppress(ServerError):  # the requests end by themselves then, a little later
            await server.run(server.client.call("/abort_request", {"abort_all": True}, _ABORT_SECONDS))

    await asyncio.gather(*(end(server) for server in pool.ready_servers() if server.load.flights))
