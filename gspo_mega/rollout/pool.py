"""The servers of an attempt: which there are, which may work, how much each has open.

Owns discovery (it reads registrations, it never starts a server), the rule that only a server known to hold the
committed weights is given work, the bound on open requests, and taking requests from a slow server. Retrying is the
collector's; sending weights is the publisher's, through `controls()`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
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
from gspo_mega.rollout.freshness import Freshness
from gspo_mega.rollout.load import Load, least_loaded, to_move
from gspo_mega.rollout.loop_thread import LoopThread
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.roster import Roster
from gspo_mega.rollout.secret import read_secret
from gspo_mega.run_folder import Attempt

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_SECONDS = 0.25
_NONSENSE_LIMIT = 3
_MAX_REST_SECONDS = 5.0


class Entry:
    """One generation of one server. `verified_version` is the version it is known to hold in full, or None.

    A server that started from a committed version holds that one; from anything else, none. Whoever begins to change
    its weights sets None; only `ServerPool.commit` sets it again. `gone` is set when the server of this generation is
    no more.
    """

    def __init__(self, registration: Registration, client: ServerClient):
        self.registration = registration
        self.client = client
        self.verified_version: int | None = registration.weight_version
        self.gone = asyncio.Event()
        self.num_open = 0
        self.load = Load()
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
        self._roster = Roster(attempt.servers_dir)
        self._api_key = read_secret(attempt.api_key_file)
        self._vocab_size = spec.vocab_size
        self._routing = None
        if config.rollout.return_routed_experts:
            if spec.moe is None:
                raise RolloutError("rollout.return_routed_experts: the model has no experts")
            self._routing = RoutingShape(
                spec.num_layers, spec.moe.experts_per_token, spec.moe.num_experts, spec.moe.num_dense_layers
            )
        self.freshness = Freshness(config.rollout.max_staleness)
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._committed_version = 0
        self._problem: RolloutError | None = None
        self._lonely_since: float | None = None
        self._closed = False
        self.loop = LoopThread("rollout")
        try:
            self._changed = self.loop.run(_make(asyncio.Condition))
            self.loop.run(self._refresh())
        except BaseException:
            self.loop.close()
            raise
        self._watching = self.loop.submit(self._watch())
        self._watching.add_done_callback(self._watch_ended)

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the pool's thread and connections; open requests are dropped."""

        async def close_clients():
            await asyncio.sleep(0)  # the watch ends first: it would add servers
            for entry in list(self._entries.values()):
                await entry.client.close()

        if not self._closed:
            self._closed = True
            self._watching.cancel()
            with contextlib.suppress(RolloutError):  # its thread has ended, and was reported
                self.loop.run(close_clients())
            self.loop.close()

    @property
    def num_registration_errors(self) -> int:
        """How often the file system did not give a server's registration, so far."""
        return self._roster.num_errors

    @property
    def returns_routed_experts(self) -> bool:
        return self._routing is not None

    @property
    def capacity(self) -> int:
        """Requests that all servers together take at once."""
        return len(self._ready_entries()) * self._config.rollout.max_concurrent_requests

    def check(self) -> None:
        """Raise what ended the pool's own work, if something did: nobody would be told otherwise that servers come and
        go.
        """
        self._raise_problem()
        self.loop.check()

    @property
    def committed_version(self) -> int:
        """The weight version that the run has committed; `freshness` says which ones samples may come from."""
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
        """Servers of this attempt that failed more often than allowed, or refused their configuration, and are not
        started again.
        """
        return sum(registration.state == "failed" for registration in self._roster.registrations)

    def controls(self) -> list[HttpServerControl]:
        """A control of every server that is up, whatever weights it holds; for the publisher."""
        return [HttpServerControl(self, entry) for entry in self._ready_entries()]

    def servers_behind(self) -> list[HttpServerControl]:
        """Servers that are up and not known to hold the committed version: the runtime publishes it to them again."""
        return [
            HttpServerControl(self, e) for e in self._ready_entries() if e.verified_version != self._committed_version
        ]

    def wait_ready(self, num_servers: int, deadline_seconds: float, on_wait: Callable[[], None] = lambda: None) -> None:
        """Block until `num_servers` are up, or all of them but those that gave up or were stopped and at least one,
        calling `on_wait` meanwhile. Raises RolloutError at the deadline, or as soon as all have given up.
        """
        deadline = time.monotonic() + deadline_seconds
        while len(self._ready_entries()) < max(
            1, num_servers - sum(r.state in ("failed", "stopped") for r in self._roster.registrations)
        ):
            self.check()
            if len(self._roster.registrations) >= num_servers:
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

    async def acquire(self, avoid: frozenset[str] = frozenset(), num_tokens: int = 0) -> Entry:
        """Wait for a server that may work and has room, rather none of `avoid`; the least loaded by tokens in flight
        and speed. `num_tokens`: of the request's prompt. Give it back with `release`. Raises RolloutError when for
        `rollout.no_server_deadline_seconds` none may work.
        """
        limit = self._config.rollout.no_server_deadline_seconds
        started = time.monotonic()
        async with self._changed:
            while True:
                self._raise_problem()
                now = time.monotonic()
                able = self._able(now)
                room = {e.server_id: e for e in able if e.num_open < self._config.rollout.max_concurrent_requests}
                if room:
                    entry = room[least_loaded({name: e.load for name, e in room.items()}, avoid)]
                    entry.num_open += 1
                    entry.load.num_tokens += num_tokens + 1
                    return entry
                if not able:
                    self._raise_if_all_failed()
                    if self._lonely_since is not None and now - max(started, self._lonely_since) > limit:
                        raise RolloutError(
                            f"no server could take a request for {limit:g} s (rollout.no_server_deadline_seconds);"
                            f" {self._describe()}"
                        )
                await self._changed.wait()

    async def release(self, entry: Entry, error: ServerError | None = None, num_tokens: int = 0) -> None:
        """Give `entry` back; with the error of the request, if it failed. A failing server rests, longer each time.
        `num_tokens`: of the prompt and the response.
        """
        entry.num_open -= 1
        entry.load.num_tokens -= num_tokens + 1
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
        return [
            e
            for e in self._ready_entries()
            if self.freshness.admits(e.verified_version, self._committed_version) and e.rest_until <= now
        ]

    def _raise_if_all_failed(self) -> None:
        if self._roster.registrations and all(r.state == "failed" for r in self._roster.registrations):
            raise RolloutError(_failed_text(self._roster.registrations))

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _describe(self) -> str:
        unread = f"; {self._roster.last_error}" if self._roster.last_error else ""
        if not self._roster.registrations:
            return f"none is registered in {self._servers_dir}{unread}"
        return "; ".join(map(self._describe_one, self._roster.registrations)) + unread

    def _describe_one(self, registration: Registration) -> str:
        with self._lock:
            entry = self._entries.get(registration.server_id)
        if entry is not None:
            what = f"holds version {entry.verified_version} of {self._committed_version}"
        else:
            what = f"last heard of {self._roster.silent_seconds(registration.server_id):.0f} s ago"
        error = f" ({registration.error})" if registration.error else ""
        return f"{registration.server_id}: {registration.state}, {what}{error}"

    def _watch_ended(self, watch: concurrent.futures.Future) -> None:
        """Called on the loop when `_watch` is over, which it never is but for `close`: whoever waits for samples is
        told.
        """
        error = None if watch.cancelled() else watch.exception()
        if error is not None and not isinstance(error, RolloutError):
            logger.error("the watch over the servers ended", exc_info=error)
            problem = RolloutError(f"the watch over the servers ended: {type(error).__name__}: {error}")
            problem.__cause__ = error
            error = problem
        self._problem = error

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
                raise
            now = time.monotonic()
            self._balance()
            rested = any(last < e.rest_until <= now for e in self._ready_entries())
            last = now
            if self._able(now):
                self._lonely_since = None
            elif self._lonely_since is None:
                self._lonely_since = now
            limit = self._config.rollout.no_server_deadline_seconds
            if rested or (self._lonely_since is not None and now - self._lonely_since > limit):
                await self._notify()

    def _balance(self) -> None:
        """Measure all servers, and take from the slow ones what others have room for."""
        entries, now = self._ready_entries(), asyncio.get_running_loop().time()
        for entry in entries:
            entry.load.measure(now, self._config.rollout.progress_deadline_seconds)
        able, limit = self._able(time.monotonic()), self._config.rollout.max_concurrent_requests
        room = {place: limit - e.num_open for place, e in enumerate(entries) if e in able}
        for flight in to_move([e.load for e in entries], room, now):
            flight.end("moved")

    async def _refresh(self) -> None:
        before = [r.state for r in self._roster.registrations]
        fresh = {r.server_id: r for r in await asyncio.to_thread(self._roster.read)}
        changed = before != [r.state for r in self._roster.registrations]
        with self._lock:
            replaced = []
            for server_id, entry in list(self._entries.items()):
                seen = fresh.get(server_id)
                if (
                    seen is None
                    or seen.generation != entry.registration.generation
                    or seen.address != entry.registration.address
                ):
                    replaced.append(self._entries.pop(server_id))
            added = [r for r in fresh.values() if r.server_id not in self._entries]
            for registration in added:
                client = ServerClient(
                    registration.server_id,
                    registration.address,
                    self._api_key,
                    vocab_size=self._vocab_size,
                    routing=self._routing,
                )
                self._entries[registration.server_id] = Entry(registration, client)
        for entry in replaced:
            entry.gone.set()
            await entry.client.close()
        if changed or replaced or added:
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _make(factory: Callable[[], T]) -> T:
    return factory()


def _failed_text(failed: list[Registration]) -> str:
    return "\n".join(f"{r.server_id} gave up: {r.error}" for r in failed)
