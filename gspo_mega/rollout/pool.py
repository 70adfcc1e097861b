"""The servers of an attempt: which exist, which may work, and how much each has open.

`ServerPool` gives requests to servers. It finds servers by their registrations and never starts one. A server gets work
only if it is known to hold weights under which a request may start (`arrival_order.py`). The pool bounds the open
requests and moves requests away from a slow server. The sampler retries; the publisher sends weights, through
`controls()`.

`Roster` reads the registrations again and again: which servers exist, and which have a live heartbeat. A file that
cannot be read changes nothing; its last content holds until its heartbeat is too old.

`StallWarnings` tells the user about requests from which nothing is heard, before anything is done about them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gspo_mega.base.errors import RolloutError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.config.schema import Rollout
from gspo_mega.models.spec import ModelSpec
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.rollout.client.completion import RoutingShape
from gspo_mega.rollout.client.server_client import ServerClient, ServerError
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.rollout.pooled_server import LoopThread, PooledServer, least_loaded, requests_to_move
from gspo_mega.rollout.registration import Registration, State, read_registrations, read_secret

logger = logging.getLogger(__name__)


_POLL_SECONDS = 0.25

STALE_SECONDS = 60.0
"""A server whose heartbeat has not changed for this time gets no work."""

_SHARE = 0.5
"""The fraction of the progress deadline after which a silent request is named."""

_MOST_NAMED = 3
"""How many requests of one server are named in that time. If a server hangs, all of its requests are silent."""


class ServerPool:
    """Gives requests to the servers of an attempt.

    Use it as a context manager, or call `close()` in the end. Public methods may be called from any thread except the
    loop's, unless they say otherwise.

    Attributes:
        vocab_size: the number of tokens in the model's vocabulary.
        is_held: no request begins; those that would begin wait (`train/servers.py`).
        trainer_waits: the trainer waits for a batch, so it can publish to servers that are behind. While it cannot,
            they have no deadline.
        tell: shows a line to the user.
    """

    def __init__(self, settings: Rollout, spec: ModelSpec, attempt: Attempt, adapter: str | None = None) -> None:
        """`adapter` is that of `ServerClient`."""
        self._adapter = adapter
        self._settings = settings
        self._servers_dir = attempt.servers_dir
        self._roster = Roster(attempt.servers_dir)
        self._api_key = read_secret(attempt.api_key_file)
        self.vocab_size = spec.vocab_size
        self._routing = None
        if settings.return_routed_experts:
            if spec.moe is None:
                raise RolloutError("rollout.return_routed_experts: the model has no experts")
            self._routing = RoutingShape(
                spec.num_layers, spec.moe.experts_per_token, spec.moe.num_experts, spec.moe.num_dense_layers
            )
        self.freshness = Freshness(settings.max_staleness)
        self._lock = threading.Lock()
        self._servers: dict[str, PooledServer] = {}
        self._committed_version = 0
        self._problem: RolloutError | None = None
        self._none_able_since: float | None = None
        self._closed = False
        self.is_held, self.trainer_waits, self._holders = False, True, frozenset[str]()
        self.tell: Callable[[str], None] = logger.warning
        self._stall_warnings = StallWarnings()
        self.loop = LoopThread("rollout")
        try:
            self._changed = asyncio.Condition()
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
            await asyncio.sleep(0)  # let the watch, which adds servers, end first
            for server in list(self._servers.values()):
                await server.client.close()

        if not self._closed:
            self._closed = True
            self._watching.cancel()
            with contextlib.suppress(RolloutError):  # its thread has ended, and was reported
                self.loop.run(close_clients())
            self.loop.close()

    @property
    def num_registration_errors(self) -> int:
        """How often a server's registration could not be read from the file system so far."""
        return self._roster.num_errors

    @property
    def returns_routed_experts(self) -> bool:
        """Whether responses come with the experts that their tokens were sent to (`rollout.return_routed_experts`)."""
        return self._routing is not None

    @property
    def capacity(self) -> int:
        """How many requests all servers together take at the same time."""
        return len(self.ready_servers()) * self._settings.max_concurrent_requests

    def check(self) -> None:
        """Raise the error that ended the watch, if one did. Without the watch, nobody would notice that servers start
        and end.
        """
        self._raise_problem()
        self.loop.check()

    @property
    def committed_version(self) -> int:
        """The weight version that the run has committed; `freshness` says which ones samples may come from."""
        return self._committed_version

    def commit(self, weight_version: int, server_ids: Iterable[tuple[str, int]]) -> None:
        """Make `weight_version` the committed one. These servers, (server_id, generation), are verified to hold it.

        All others get no work until they hold it too: because they were restarted from disk, or named in another
        commit.
        """
        with self._lock:
            self._committed_version = weight_version
            for server_id, generation in server_ids:
                server = self._servers.get(server_id)
                if server is not None and server.registration.generation == generation:
                    server.note_verified(weight_version)
        self.wake()

    def wake(self) -> None:
        """Let waiting requests look for a server again. Do not call it on the loop."""
        self.loop.run(self._notify())

    @property
    def num_given_up(self) -> int:
        """How many servers of this attempt failed too often, or refused their configuration, and are not started
        again.
        """
        return self._roster.num_in("failed")

    def controls(self) -> list[HttpServerControl]:
        """Return a control of every server that is up, no matter which weights it holds. For the publisher."""
        return [server.control(self.loop) for server in self.ready_servers()]

    def servers_behind(self) -> list[HttpServerControl]:
        """Return controls of the servers that are up and not known to hold the committed version. The trainer publishes
        it to them again.
        """
        behind = [server for server in self.ready_servers() if server.verified_version != self._committed_version]
        return [server.control(self.loop) for server in behind]

    def wait_ready(self, num_servers: int, deadline_seconds: float, on_wait: Callable[[], None] = lambda: None) -> None:
        """Block until `num_servers` are up, and call `on_wait` while waiting. Servers that gave up or were stopped are
        not waited for, but at least one must be up.

        Raises RolloutError after `deadline_seconds`, counted from the last progress of the copy that servers wait for,
        if there is one; and as soon as all servers have given up.
        """
        deadline = ReadyDeadline(deadline_seconds)
        while len(self.ready_servers()) < max(1, num_servers - self._roster.num_not_coming):
            self.check()
            if len(self._roster.registrations) >= num_servers:
                self._raise_if_all_failed()
            if deadline.is_over(self._roster.registrations) and not self.num_set_aside:
                raise RolloutError(
                    f"{len(self.ready_servers())} of {num_servers} servers ready after {deadline_seconds:g} s;"
                    f" {self._describe()}"
                )
            on_wait()
            time.sleep(0.05)

    def announce(self, weight_version: int) -> None:
        """Make `weight_version` the committed one before it is known which servers hold it. None may work until
        then.
        """
        with self._lock:
            self._committed_version = weight_version

    def hold(self, is_held: bool, who: str = "publish") -> None:
        """With `is_held`, let no request begin. Otherwise let them begin again, unless somebody other than `who` still
        holds them.
        """
        self._holders = self._holders | {who} if is_held else self._holders - {who}
        self._none_able_since, self.is_held = None, bool(self._holders)
        self.wake()

    def take_idle_seconds(self) -> float:
        """Return for how many seconds servers had no request since the last call: the mean over those that are up."""
        idle = [server.take_idle_seconds() for server in self.ready_servers()]
        return sum(idle) / max(1, len(idle))

    def ready_servers(self) -> list[PooledServer]:
        """Return the servers that are up and serve training. Any thread may call it."""
        with self._lock:
            return [
                server
                for server in self._servers.values()
                if not (server.is_gone or server.is_draining or server.is_set_aside)
            ]

    @property
    def num_set_aside(self) -> int:
        """How many servers serve an evaluation at present, and come back to training after it."""
        return sum(server.is_set_aside and not server.is_gone for server in list(self._servers.values()))

    # The methods below run on the loop.

    async def acquire(
        self, avoid: frozenset[str] = frozenset(), num_tokens: int = 0, prefer: str | None = None
    ) -> PooledServer:
        """Wait for a server that may work and has room, chosen by `least_loaded`, and return it. `num_tokens` is the
        length of the request's prompt. Give the server back with `release`. Raises RolloutError if no server may work
        for `rollout.no_server_deadline_seconds`.
        """
        limit = self._settings.no_server_deadline_seconds
        started = time.monotonic()
        async with self._changed:
            while True:
                self._raise_problem()
                now = time.monotonic()
                able = self._able(now)
                room = {
                    server.server_id: server
                    for server in able
                    if server.num_open < self._settings.max_concurrent_requests
                }
                if room and not self.is_held:
                    loads = {name: server.load for name, server in room.items()}
                    server = room[least_loaded(loads, avoid, prefer, num_tokens)]
                    server.open_request(num_tokens)
                    return server
                if not able and not self.is_held:  # a publish has deadlines of its own
                    self._raise_if_all_failed()
                    if self._none_able_since is not None and now - max(started, self._none_able_since) > limit:
                        raise RolloutError(
                            f"no server could take a request for {limit:g} s (rollout.no_server_deadline_seconds);"
                            f" {self._describe()}"
                        )
                try:
                    await self._changed.wait()
                except asyncio.CancelledError:  # it may have been woken for a place, which another request can have now
                    self._changed.notify(1)
                    raise

    async def release(self, server: PooledServer, error: ServerError | None = None, num_tokens: int = 0) -> None:
        """Give `server` back, with the error of the request if it failed. A failing server rests, longer each time.
        `num_tokens` is the length of the prompt and the response.
        """
        server.close_request(num_tokens)
        if error is None:
            server.note_success()
        elif server.note_failure(error, time.monotonic()):
            logger.warning("%s: no more work until weights are published to it again: %s", server.server_id, error)
        async with self._changed:
            self._changed.notify(1)

    def _able(self, now: float) -> list[PooledServer]:
        """Return the servers that may be given work now, whether or not they have room."""
        return [
            server
            for server in self.ready_servers()
            if self._may_start(server.verified_version) and server.rest_until <= now
        ]

    def _may_start(self, weight_version: int | None) -> bool:
        """Whether a request may start under this version. It may be trained as late as one under the committed
        version.
        """
        committed = self._committed_version
        if weight_version is None or weight_version > committed:
            return False
        return self.freshness.may_start(weight_version, self.freshness.deadline(committed))

    def _raise_if_all_failed(self) -> None:
        if self._roster.registrations and all(r.state == "failed" for r in self._roster.registrations):
            raise RolloutError(failed_servers(self._roster.registrations))

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _describe(self) -> str:
        with self._lock:
            held = {server_id: server.verified_version for server_id, server in self._servers.items()}
        return describe_servers(self._roster, self._servers_dir, held, self._committed_version)

    def _watch_ended(self, watch: concurrent.futures.Future) -> None:
        """Called on the loop when `_watch` has ended, by `close` or by an error, which `check` then raises."""
        self._problem = watch_problem(None if watch.cancelled() else watch.exception())

    async def _watch(self) -> None:
        """Keep the list of servers up to date, and wake the waiting requests when a rest or a deadline has ended."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self._refresh()
            except RolloutError as problem:  # a file is not a registration: every waiting request raises this
                self._problem = problem
                await self._notify()
                raise
            now = time.monotonic()
            self._balance()
            rested = any(last < server.rest_until <= now for server in self.ready_servers())
            last = now
            if self._able(now) or self.num_set_aside or (not self.trainer_waits and self.servers_behind()):
                self._none_able_since = None
            elif self._none_able_since is None:
                self._none_able_since = now
            limit = self._settings.no_server_deadline_seconds
            if rested or (self._none_able_since is not None and now - self._none_able_since > limit):
                await self._notify()

    def _balance(self) -> None:
        """Measure all servers, and move requests of slow ones that other servers have room for."""
        servers, now = self.ready_servers(), asyncio.get_running_loop().time()
        for server in servers:
            server.load.measure(now, self._settings.progress_deadline_seconds)
        if self.is_held:  # a publish ends open requests, or waits for each where it is
            return
        self._stall_warnings.warn(servers, now, self._settings.progress_deadline_seconds, self.tell)
        able, limit = self._able(time.monotonic()), self._settings.max_concurrent_requests
        room = {place: limit - server.num_open for place, server in enumerate(servers) if server in able}
        for flight in requests_to_move([server.load for server in servers], room, now):
            flight.end("moved")

    async def _refresh(self) -> None:
        before = [r.state for r in self._roster.registrations]
        fresh = {r.server_id: r for r in await asyncio.to_thread(self._roster.read)}
        changed = before != [r.state for r in self._roster.registrations]
        with self._lock:
            replaced = []
            for server_id, server in list(self._servers.items()):
                seen = fresh.get(server_id)
                if (
                    seen is None
                    or seen.generation != server.registration.generation
                    or seen.address != server.registration.address
                ):
                    replaced.append(self._servers.pop(server_id))
                else:
                    server.note_state(seen.state)
            added = [r for r in fresh.values() if r.server_id not in self._servers and r.state == "ready"]
            for registration in added:
                client = ServerClient(
                    registration.server_id,
                    registration.address,
                    self._api_key,
                    vocab_size=self.vocab_size,
                    routing=self._routing,
                    adapter=self._adapter,
                )
                self._servers[registration.server_id] = PooledServer(registration, client)
        for server in replaced:
            server.end()
            await server.client.close()
        if changed or replaced or added:
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Roster:
    """The registrations of all servers, read repeatedly. Call `read` from one thread at a time.

    Attributes:
        registrations: the latest registration of every server.
        num_errors: how many reads of a file failed in the file system.
        last_error: what the latest `read` could not read and why, or None.
    """

    def __init__(self, servers_dir: Path) -> None:
        self._servers_dir = servers_dir
        # By server: its latest heartbeat, and this process's monotonic time when that heartbeat was first seen.
        self._heartbeats: dict[str, tuple[float, float]] = {}
        self._logged_errors: set[tuple[str, str]] = set()
        self.registrations: list[Registration] = []
        self.num_errors = 0
        self.last_error: str | None = None

    def read(self) -> list[Registration]:
        """Read all files. Return the ready and the draining servers that have a live heartbeat. Raises RolloutError for
        a file that is not a registration.
        """
        errors: dict[Path, OSError] = {}
        try:
            found = read_registrations(self._servers_dir, on_error=errors.__setitem__)
        except OSError as error:  # the folder itself cannot be read
            errors[self._servers_dir] = error
            found = list(self.registrations)
        unread = {path.stem for path in errors}
        found += [r for r in self.registrations if r.server_id in unread and r not in found]
        self._log_errors(errors)
        self.registrations = sorted(found, key=lambda r: r.server_id)
        return [r for r in self.registrations if self._is_alive(r) and r.state in ("ready", "draining")]

    def num_in(self, *states: State) -> int:
        """How many servers are in one of these states, by their latest registrations."""
        return sum(registration.state in states for registration in self.registrations)

    @property
    def num_not_coming(self) -> int:
        """How many servers nobody waits for, because they gave up, are ending, or were stopped."""
        return self.num_in("failed", "draining", "stopped")

    def silent_seconds(self, server_id: str) -> float:
        """Seconds since the server's heartbeat last changed."""
        return time.monotonic() - self._heartbeats[server_id][1]

    def _log_errors(self, errors: dict[Path, OSError]) -> None:
        self.num_errors += len(errors)
        self.last_error = None
        for path, error in errors.items():
            text = f"{path}: cannot be read: {error.strerror or error}"
            self.last_error = text
            if (str(path), text) not in self._logged_errors:  # once, not every quarter of a second
                self._logged_errors.add((str(path), text))
                logger.warning("%s; tried again until it can be", text)
        self._logged_errors = {(path, text) for path, text in self._logged_errors if Path(path) in errors}

    def _is_alive(self, registration: Registration) -> bool:
        """Whether the server's heartbeat still changes, by this process's monotonic time: the clocks of two machines
        differ, and a clock may be set. Only a heartbeat that is seen for the first time is compared with the system
        clock.
        """
        now, beat = time.monotonic(), registration.heartbeat
        last = self._heartbeats.get(registration.server_id, (beat, now - max(0.0, time.time() - beat)))
        self._heartbeats[registration.server_id] = last if last[0] == beat else (beat, now)
        return now - self._heartbeats[registration.server_id][1] < STALE_SECONDS


class ReadyDeadline:
    """When servers must be ready: `seconds` from now. Each time that the copy of the model that servers wait for
    advances or is complete, the time starts again. Nothing else that servers do counts as progress.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()
        self._done: dict[str, int] = {}
        self._preparing: set[str] = set()

    def is_over(self, registrations: list[Registration]) -> bool:
        """Whether the deadline has passed, given the registrations as they are now."""
        preparing = {r.server_id: r.done_bytes for r in registrations if r.is_preparing}
        begun = {r.server_id for r in registrations if r.state in ("waiting", "starting", "ready")} - preparing.keys()
        grown = {server_id: done for server_id, done in preparing.items() if done > self._done.get(server_id, 0)}
        if grown or begun & self._preparing:
            self._since = time.monotonic()
        self._done, self._preparing = self._done | grown, set(preparing)
        return time.monotonic() - self._since > self._seconds


class StallWarnings:
    """Tells the user about silent requests, each once. A pool has one for all its servers."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[float, int]] = {}  # by server: since when, how many lines

    def warn(
        self,
        servers: Iterable[PooledServer],
        now: float,
        progress_deadline_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        """Tell about open requests that got no token for half of their deadline: the longest silent first, a few by
        name, and then how many more there are. `now` is the loop's time in seconds.
        """
        limit = _SHARE * progress_deadline_seconds
        for server in servers:
            silent = [
                flight
                for flight in server.load.flights
                if not flight.is_named and flight.cause is None and now - flight.last_report >= limit
            ]
            since, count = self._named.get(server.server_id, (now, 0))
            if now - since >= limit:
                since, count = now, 0
            silent.sort(key=lambda flight: flight.last_report)
            for place, flight in enumerate(silent):
                flight.is_named = True
                if count < _MOST_NAMED:
                    tell(
                        f"waiting  prompt {flight.prompt}: no new token from {server.server_id} for"
                        f" {now - flight.last_report:.1f} s, after {flight.num_tokens}; at"
                        f" {progress_deadline_seconds:g} s (rollout.progress_deadline_seconds) it goes on from there"
                        " elsewhere"
                    )
                elif count == _MOST_NAMED:
                    tell(
                        f"waiting  {len(silent) - place} more requests to {server.server_id}: no new token either;"
                        f" later ones are not named for {limit:g} s"
                    )
                count += 1
            if silent:
                self._named[server.server_id] = since, count


def describe_servers(roster: Roster, servers_dir: Path, held: Mapping[str, int | None], committed_version: int) -> str:
    """Say what is known of every server, for an error message. `held` is the weight version of each server in reach."""
    unread = f"; {roster.last_error}" if roster.last_error else ""
    if not roster.registrations:
        return f"none is registered in {servers_dir}{unread}"

    def one(registration: Registration) -> str:
        server_id = registration.server_id
        if server_id in held:
            what = f"holds version {held[server_id]} of {committed_version}"
        else:
            what = f"last heard of {roster.silent_seconds(server_id):.0f} s ago"
        what = f"waits for {registration.preparation}, {what}" if registration.is_preparing else what
        error = f" ({registration.error})" if registration.error else ""
        return f"{server_id}: {registration.state}, {what}{error}"

    return "; ".join(map(one, roster.registrations)) + unread


def failed_servers(failed: list[Registration]) -> str:
    """Say why each of these servers is not started again, one line each."""
    return "\n".join(f"{r.server_id} gave up: {r.error}" for r in failed)


def watch_problem(error: BaseException | None) -> RolloutError | None:
    """Return what requests raise once the pool's watch has ended with `error`; None if it ended in order."""
    if error is None or isinstance(error, RolloutError):
        return error
    logger.error("the watch over the servers ended", exc_info=error)
    problem = RolloutError(f"the watch over the servers ended: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem
