"""The servers of an attempt: which there are, which may work, how much each has open.

Owns discovery (it reads registrations, it never starts a server), the rule that only a server known to hold the
committed weights is given work, and the bound on open requests. Retrying is the collector's; sending weights is the
publisher's, through `controls()`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from gspo_mega.config.schema import Config
from gspo_mega.errors import RolloutError
from gspo_mega.model.spec import ModelSpec
from gspo_mega.rollout.client import ServerClient, ServerError
from gspo_mega.rollout.completion import RoutingShape
from gspo_mega.rollout.control import HttpServerControl
from gspo_mega.rollout.loop_thread import LoopThread
from gspo_mega.rollout.registration import Registration, read_registrations
from gspo_mega.rollout.secret import read_secret
from gspo_mega.run_folder import Attempt

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_SECONDS = 0.25
_STALE_SECONDS = 60.0
_NONSENSE_LIMIT = 3
_MAX_REST_SECONDS = 5.0


class Entry:
    """One generation of one server. `verified_version` is the version it is known to hold in full, or None.

    A server that started from a committed version holds that one; from anything else, none. Whoever begins to change its weights sets None; only
    `ServerPool.commit` sets it again. `gone` is set when the server of this generation is no more.
    """

    def __init__(self, registration: Registration, client: ServerClient):
        self.registration = registration
        self.client = client
        self.verified_version: int | None = registration.weight_version
        self.gone = asyncio.Event()
        self.num_open = 0
        self.num_failures = 0
        self.num_nonsense = 0
        self.rest_until = 0.0

    @property
    def server_id(self) -> str:
        return self.registration.server_id


class ServerPool:
    """Use it as a context manager, or `close()` it. Public methods may be called from any thread but the loop's."""

    def __init__(self, config: Config, spec: ModelSpec, attempt: Attempt) -> None:
        self._config = config
        self._servers_dir = attempt.servers_dir
        self._api_key = read_secret(attempt.api_key_file)
        self._vocab_size = spec.vocab_size
        self._routing = None
        if config.rollout.return_routed_experts:
            if spec.moe is None:
                raise RolloutError("rollout.return_routed_experts: the model has no experts")
            self._routing = RoutingShape(spec.num_layers, spec.moe.experts_per_token, spec.moe.num_experts, spec.moe.num_dense_layers)
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._registrations: list[Registration] = []
        self._heard: dict[str, tuple[float, float]] = {}  # server: its latest heartbeat, and our monotonic time when it came
        self._committed_version = 0
        self._problem: RolloutError | None = None
        self._lonely_since: float | None = None
        self._closed = False
        self.loop = LoopThread("rollout")
        self._changed = self.loop.run(_make(asyncio.Condition))
        self.loop.run(self._refresh())
        self.loop.submit(self._watch())

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the pool's thread and connections; open requests are dropped."""

        async def close_clients():
            for entry in self._entries.values():
                await entry.client.close()

        if not self._closed:
            self._closed = True
            self.loop.run(close_clients())
            self.loop.close()

    @property
    def committed_version(self) -> int:
        """The weight version that trajectories must come from."""
        return self._committed_version

    def commit(self, weight_version: int, server_ids: Iterable[tuple[str, int]]) -> None:
        """`weight_version` is now the committed one, and these (server_id, generation) are verified to hold it.

        All others are given no work until they hold it too: restarted from disk, or named in another commit.
        """
        with self._lock:
            self._committed_version = weight_version
            for server_id, generation in server_ids:
                entry = self._entries.get(server_id)
                if entry is not None and entry.registration.generation == generation:
                    entry.verified_version = weight_version
                    entry.num_nonsense = 0
        self.loop.run(self._notify())

    @property
    def num_given_up(self) -> int:
        """Servers of this attempt that failed more often than allowed, or refused their configuration, and are not started again."""
        return sum(registration.state == "failed" for registration in self._registrations)

    def controls(self) -> list[HttpServerControl]:
        """A control of every server that is up, whatever weights it holds; for the publisher."""
        return [HttpServerControl(self, entry) for entry in self._ready_entries()]

    def servers_behind(self) -> list[HttpServerControl]:
        """Servers that are up and not known to hold the committed version: the runtime publishes it to them again."""
        return [HttpServerControl(self, e) for e in self._ready_entries() if e.verified_version != self._committed_version]

    def wait_ready(self, num_servers: int, deadline_seconds: float, on_wait: Callable[[], None] = lambda: None) -> None:
        """Block until `num_servers` are up, or all of them but those that gave up and at least one, calling `on_wait` meanwhile.
        Raises RolloutError at the deadline, or as soon as all have given up."""
        deadline = time.monotonic() + deadline_seconds
        while len(self._ready_entries()) < max(1, num_servers - self.num_given_up):
            self._raise_problem()
            if len(self._registrations) >= num_servers:
                self._raise_if_all_failed()
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"{len(self._ready_entries())} of {num_servers} servers ready after {deadline_seconds:g} s;"
                    f" {self._describe()}"
                )
            on_wait()
            time.sleep(0.05)

    def _ready_entries(self) -> list[Entry]:
        with self._lock:
            return [e for e in self._entries.values() if not e.gone.is_set()]

    # From here on: on the loop.

    async def acquire(self, avoid: frozenset[str] = frozenset()) -> Entry:
        """Wait for a server that may work and has room, rather none of `avoid`; the least loaded. Give it back with
        `release`. Raises RolloutError when for `rollout.no_server_deadline_seconds` none may work."""
        limit = self._config.rollout.no_server_deadline_seconds
        started = time.monotonic()
        async with self._changed:
            while True:
                self._raise_problem()
                now = time.monotonic()
                able = self._able(now)
                room = [e for e in able if e.num_open < self._config.rollout.max_concurrent_requests]
                if room:
                    entry = min(room, key=lambda e: (e.server_id in avoid, e.num_open, random.random()))
                    entry.num_open += 1
                    return entry
                if not able:
                    self._raise_if_all_failed()
                    if self._lonely_since is not None and now - max(started, self._lonely_since) > limit:
                        raise RolloutError(
                            f"no server could take a request for {limit:g} s (rollout.no_server_deadline_seconds);"
                            f" {self._describe()}"
                        )
                await self._changed.wait()

    async def release(self, entry: Entry, error: ServerError | None = None) -> None:
        """Give `entry` back; with the error of the request, if it failed. A failing server rests, longer each time."""
        entry.num_open -= 1
        if error is None:
            entry.num_failures = entry.num_nonsense = 0
        else:
            now = time.monotonic()
            if now >= entry.rest_until:  # requests that fail together are one failure of the server
                entry.num_failures += 1
                entry.rest_until = now + min(_MAX_REST_SECONDS, 0.1 * 2 ** min(entry.num_failures, 10))
            if error.kind == "nonsense":
                entry.num_nonsense += 1
                if entry.num_nonsense == _NONSENSE_LIMIT:  # in a row
                    logger.warning("%s: no more work until its weights are published anew: %s", entry.server_id, error)
                    entry.verified_version = None
        async with self._changed:
            self._changed.notify(1)

    async def run_on(self, entry: Entry, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await `coroutine`, a call of `entry`'s server; raises ServerError at once when that server is found gone."""
        call = asyncio.ensure_future(coroutine)
        gone = asyncio.ensure_future(entry.gone.wait())
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ServerError(entry.server_id, "request", "connection", "the server went down")
            return call.result()
        finally:
            gone.cancel()
            call.cancel()

    def _able(self, now: float) -> list[Entry]:
        """Servers that may be given work now, whether or not they have room."""
        return [e for e in self._ready_entries() if e.verified_version == self._committed_version and e.rest_until <= now]

    def _raise_if_all_failed(self) -> None:
        if self._registrations and all(r.state == "failed" for r in self._registrations):
            raise RolloutError(_failed_text(self._registrations))

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _describe(self) -> str:
        if not self._registrations:
            return f"none is registered in {self._servers_dir}"
        return "; ".join(map(self._describe_one, self._registrations))

    def _describe_one(self, registration: Registration) -> str:
        with self._lock:
            entry = self._entries.get(registration.server_id)
        if entry is not None:
            what = f"holds version {entry.verified_version} of {self._committed_version}"
        else:
            what = f"last heard of {time.monotonic() - self._heard[registration.server_id][1]:.0f} s ago"
        error = f" ({registration.error})" if registration.error else ""
        return f"{registration.server_id}: {registration.state}, {what}{error}"

    async def _watch(self) -> None:
        """Keeps the list of servers, and wakes those who wait for one when time alone has changed something."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self._refresh()
            except RolloutError as problem:  # a file that is no registration: tell whoever waits for servers
                self._problem = problem
                await self._notify()
                return
            now = time.monotonic()
            rested = any(last < e.rest_until <= now for e in self._ready_entries())
            last = now
            if self._able(now):
                self._lonely_since = None
            elif self._lonely_since is None:
                self._lonely_since = now
            limit = self._config.rollout.no_server_deadline_seconds
            if rested or (self._lonely_since is not None and now - self._lonely_since > limit):
                await self._notify()

    async def _refresh(self) -> None:
        registrations = await asyncio.to_thread(read_registrations, self._servers_dir)
        changed = [r.state for r in registrations] != [r.state for r in self._registrations]
        fresh = {r.server_id: r for r in registrations if self._is_heard(r) and r.state == "ready"}
        with self._lock:
            self._registrations = registrations
            replaced = []
            for server_id, entry in list(self._entries.items()):
                seen = fresh.get(server_id)
                if seen is None or seen.generation != entry.registration.generation or seen.address != entry.registration.address:
                    replaced.append(self._entries.pop(server_id))
            added = [r for r in fresh.values() if r.server_id not in self._entries]
            for registration in added:
                client = ServerClient(
                    registration.server_id, registration.address, self._api_key,
                    vocab_size=self._vocab_size, routing=self._routing,
                )  # fmt: skip
                self._entries[registration.server_id] = Entry(registration, client)
        for entry in replaced:
            entry.gone.set()
            await entry.client.close()
        if changed or replaced or added:
            await self._notify()

    def _is_heard(self, registration: Registration) -> bool:
        """Whether the server's heartbeat goes on. Clocks of two machines differ, and one may be set: its changes count, by our own
        monotonic time; only a heartbeat that is seen for the first time is compared with the clock on the wall."""
        now, beat = time.monotonic(), registration.heartbeat
        last = self._heard.get(registration.server_id, (beat, now - max(0.0, time.time() - beat)))
        self._heard[registration.server_id] = last if last[0] == beat else (beat, now)
        return now - self._heard[registration.server_id][1] < _STALE_SECONDS

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _make(factory: Callable[[], T]) -> T:
    return factory()


def _failed_text(failed: list[Registration]) -> str:
    return "\n".join(f"{r.server_id} gave up: {r.error}" for r in failed)
