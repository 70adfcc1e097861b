"""The ranks' link to the servers: wait for them, publish weights to them, bring those that came back up to date.

Owns these collective acts and what follows when servers fail in them. Sending weights is `gspo_mega.checkpoint`',
knowing the servers the pool's. A run that trains on a record has the `NoServers` link.

Open requests around a publish: none begins, and those that are open end with their tokens so far, or go on.

Owns what `rollout.on_publish` says. A request that ended goes on after the publish, like one that was moved to another
server: its tokens so far are its prompt then, read by the new weights, and every part is of one version by
construction. That also holds where the server dies meanwhile. Sending weights is `gspo_mega.checkpoint`'.

GPUs that ranks and servers use in turns (`cluster.colocated`): who holds what in each phase, and the moves between.

    sample   servers: all                 ranks: nothing          rollouts, evaluation
    publish  servers: weights             ranks: parameters       the ranks' weights to disk, from there to the servers
    train    servers: nothing             ranks: all              passes, optimizer steps, checkpoints, exports

Owns the order: whoever gives memory does so first, on all ranks and servers, and only then does anyone take. How memory
moves is `engine/memory.py`'s and SGLang's. A run whose servers have GPUs of their own has `OwnGpus`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch.distributed as dist

from gspo_mega.base import failpoints, progress
from gspo_mega.base.errors import PublishError, RolloutError
from gspo_mega.config.derived import OnPublish, on_publish
from gspo_mega.config.schema import Config, Rollout, Server
from gspo_mega.engine.memory import PARTS, DeviceMemory, Part
from gspo_mega.rollout.client.server_client import ServerError
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.registration import give_turn, read_registrations
from gspo_mega.sync.publish import Publisher, PublishResult
from gspo_mega.train.context import StopRequested
from gspo_mega.train.phases import Phases
from gspo_mega.train.rank0 import Rank0
from gspo_mega.train.scatter import RankLink

if TYPE_CHECKING:
    from gspo_mega.train.rank0 import Rank0


_OPEN_REQUESTS_POLL_SECONDS = 0.005
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
            time.sleep(_OPEN_REQUESTS_POLL_SECONDS)
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


Turn = Literal["sample", "publish", "train"]
SERVER_PARTS = ("weights", "kv_cache", "cuda_graph")
# A server that does not answer is found dead, and its memory free, within this time.
_END_SECONDS = 30.0
_POLL_SECONDS = 0.05
_HOLDER = "shared GPUs"


class _Holds(NamedTuple):
    ranks: tuple[Part, ...]
    servers: tuple[str, ...]


HOLDS: dict[Turn, _Holds] = {
    "sample": _Holds((), SERVER_PARTS),
    "publish": _Holds(("parameters",), ("weights",)),
    "train": _Holds(PARTS, ()),
}


class Gpus(Protocol):
    """One on every rank."""

    def turn(self, turn: Turn) -> None:
        """What follows needs these GPUs in this way. Collective."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What the moves took since this was asked before, as metrics of rank 0."""
        ...


class OwnGpus:
    """Ranks and servers have GPUs of their own: nothing moves."""

    def turn(self, turn: Turn) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {}


class SharedGpus:
    """Begins in the turn `train`: the ranks hold all, and no server may start (`give_turn` by the launcher)."""

    def __init__(
        self,
        config: Config,
        memory: DeviceMemory,
        ranks: RankLink,
        host_group: dist.ProcessGroup,
        lead: Rank0 | None,
        phases: Phases,
    ) -> None:
        """`host_group`: all ranks, through their hosts."""
        self._config, self._memory, self._host_group = config, memory, host_group
        self._ranks, self._lead, self._phases = ranks, lead, phases
        self._now: Turn = "train"
        # What each start of a server has given away, on rank 0; a new start holds everything.
        self._released: dict[tuple[str, int], frozenset[str]] = {}
        self._metrics = _no_metrics()
        if lead is not None:
            lead.rollouts.pool.hold(True, _HOLDER)

    def turn(self, turn: Turn) -> None:
        """As `Gpus.turn`. Raises RolloutError on every rank where a server neither gives its memory nor ends, or none
        is up to publish to.
        """
        if turn == "publish" and self._ranks.agree(self._lead is not None and not self._controls()):
            self.turn("sample")  # the only turn in which servers start
            self._agree_on(self._wait_for_a_server)
        if turn == self._now:
            return
        before, holds = self._now, HOLDS[turn]
        with self._phases.phase("share"):
            progress.beat()
            # Ranks give before servers take, and the other way round.
            self._time("offload_seconds", lambda: self._note("offloaded_bytes", self._memory.keep(holds.ranks)))
            dist.barrier(group=self._host_group)
            if before == "sample":
                self._agree_on(self._stop_sampling)
            self._agree_on(lambda: self._time("release_seconds", lambda: self._release(holds.servers)))
            progress.beat()
            self._time("onload_seconds", lambda: self._memory.restore(holds.ranks))
            self._agree_on(lambda: self._time("resume_seconds", lambda: self._resume(holds.servers)))
            self._now = turn
            if turn == "sample" and self._lead is not None:
                give_turn(self._lead.attempt, "servers")
                self._lead.rollouts.pool.hold(False, _HOLDER)

    def take_metrics(self) -> dict[str, float]:
        taken, self._metrics = self._metrics, _no_metrics()
        return {f"colocated/{name}": value for name, value in taken.items()}

    def _agree_on(self, act: Callable[[], object]) -> None:
        """Rank 0 acts while the others wait; its error is raised on every rank. Collective."""
        problem = None
        if self._lead is not None:
            try:
                act()
            except (RolloutError, PublishError) as error:
                problem = str(error)
        problem = self._ranks.agree(problem)
        if problem is not None:
            raise RolloutError(problem)

    # --- rank 0 --------------------------------------------------------------------------------------------

    def _controls(self) -> list[HttpServerControl]:
        assert self._lead is not None
        return self._lead.rollouts.pool.controls()

    def _wait_for_a_server(self) -> None:
        assert self._lead is not None
        self._lead.rollouts.pool.wait_ready(1, self._config.rollout.no_server_deadline_seconds, progress.beat)

    def _stop_sampling(self) -> None:
        """No request is open or begins, and no server starts or ends: each is up and known, or has no memory."""
        assert self._lead is not None
        pool, attempt = self._lead.rollouts.pool, self._lead.attempt
        give_turn(attempt, "ranks")
        pool.hold(True, _HOLDER)
        with paused(pool, "continue"):
            pass
        server = self._config.server
        deadline = time.monotonic() + server.start_deadline_seconds + server.drain_seconds + _END_SECONDS
        while True:
            progress.beat()
            pool.check()
            found = read_registrations(attempt.servers_dir, on_error=lambda path, error: None)
            between = [r for r in found if r.state in ("starting", "restarting", "draining") and not r.is_preparing]
            up = {(r.server_id, r.generation) for r in found if r.state == "ready"}
            known = {_start_of(control) for control in self._controls()}
            if not between and up == known:
                return
            if time.monotonic() > deadline:
                names = ", ".join(f"{r.server_id} is {r.state}" for r in between) or "their registrations keep changing"
                raise RolloutError(f"cluster.colocated: the ranks cannot have their GPUs back: {names}")
            time.sleep(_POLL_SECONDS)

    def _release(self, kept: tuple[str, ...]) -> None:
        self._each(
            "give its GPU memory to the ranks",
            lambda released: [part for part in SERVER_PARTS if part not in kept and part not in released],
            lambda control, parts, seconds: control.release_memory(parts, deadline_seconds=seconds),
            lambda released, parts: released | set(parts),
        )

    def _resume(self, wanted: tuple[str, ...]) -> None:
        self._each(
            "take its GPU memory again",
            lambda released: [part for part in SERVER_PARTS if part in wanted and part in released],
            lambda control, parts, seconds: control.resume_memory(parts, deadline_seconds=seconds),
            lambda released, parts: released - set(parts),
        )

    def _each(
        self,
        what: str,
        parts_of: Callable[[frozenset[str]], list[str]],
        act: Callable[[HttpServerControl, list[str], float], None],
        after: Callable[[frozenset[str], list[str]], frozenset[str]],
    ) -> None:
        """`act` on all servers at the same time. One that fails must end, or the run does."""
        controls = self._controls()
        self._released = {_start_of(c): self._released.get(_start_of(c), frozenset()) for c in controls}
        parts = {_start_of(c): parts_of(self._released[_start_of(c)]) for c in controls}
        todo = [control for control in controls if parts[_start_of(control)]]
        if not todo:
            return
        seconds = self._config.publish.deadline_seconds

        def run(control: HttpServerControl) -> PublishError | None:
            try:
                act(control, parts[_start_of(control)], seconds)
            except PublishError as error:
                return error
            return None

        with ThreadPoolExecutor(len(todo), thread_name_prefix="shared GPUs") as threads:
            problems = list(threads.map(run, todo))
        for control, problem in zip(todo, problems, strict=True):
            start = _start_of(control)
            if problem is None:
                self._released[start] = after(self._released[start], parts[start])
            elif not self._ends(start):
                raise RolloutError(f"cluster.colocated: {control.server_id} does not {what}: {problem}")

    def _ends(self, start: tuple[str, int]) -> bool:
        """Whether this start of a server is over within a while: then its memory is free."""
        assert self._lead is not None
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            progress.beat()
            found = read_registrations(self._lead.attempt.servers_dir, on_error=lambda path, error: None)
            if not any((r.server_id, r.generation) == start and r.state in ("ready", "restarting") for r in found):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _time(self, name: str, act: Callable[[], object]) -> None:
        started = time.monotonic()
        act()
        self._note(name, time.monotonic() - started)

    def _note(self, name: str, value: float) -> None:
        self._metrics[name] += value


def _start_of(control: HttpServerControl) -> tuple[str, int]:
    return control.server_id, control.generation


def _no_metrics() -> dict[str, float]:
    return dict.fromkeys(
        ("offload_seconds", "offloaded_bytes", "release_seconds", "onload_seconds", "resume_seconds"), 0.0
    )


# A server that could not take the committed weights is tried again after this time.
CATCH_UP_PAUSE_SECONDS = 5.0
# The pool notices a dead server within this time.
DEATH_NOTICE_SECONDS = 5.0
_PUBLISH_AGAIN = "publish_again"


class ServerLink(Protocol):
    """One on every rank."""

    def wait(self) -> str | None:
        """Wait until every server of the run is up. Returns the reason where a stop was asked for meanwhile.
        Collective.
        """
        ...

    def publish(self, weight_version: int) -> PublishResult | None:
        """Send the engine's weights to all servers as `weight_version`; None where the run has no servers. Collective.

        Raises FolderError on rank 0 where another start of the run holds its folder.
        """
        ...

    def catch_up(self) -> None:
        """Rank 0, while the other ranks wait for it: publish the committed weights to servers that came back."""
        ...

    def metrics(self) -> dict[str, float]:
        """Rank 0: the metrics of the servers."""
        ...


class NoServers:
    """The link of a run that trains on a record."""

    def __init__(self, lead: Rank0 | None) -> None:
        self._lead = lead

    def wait(self) -> str | None:
        progress.enter("other")  # the start is over
        return None

    def publish(self, weight_version: int) -> PublishResult | None:
        if self._lead is not None:
            self._lead.check_held()
        return None

    def catch_up(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


class LiveServers:
    """The link of a run that samples."""

    def __init__(
        self,
        server: Server,
        rollout: Rollout,
        publisher: Publisher,
        ranks: RankLink,
        lead: Rank0 | None,
        phases: Phases,
        gpus: Gpus,
    ) -> None:
        self._server, self._rollout = server, rollout
        self._publisher, self._ranks, self._lead, self._phases = publisher, ranks, lead, phases
        self._gpus = gpus
        self._committed_version = 0
        self._catch_up_after = 0.0
        self.pause = Pause()
        ranks.on_request(_PUBLISH_AGAIN, lambda: self._publish_again([]))

    def wait(self) -> str | None:
        stop = None
        self._gpus.turn("sample")  # they start now, where they share the ranks' GPUs
        if self._lead is not None:
            # Servers have a deadline of their own to start in.
            deadline_seconds = self._server.start_deadline_seconds * (1 + self._server.max_restarts)
            try:
                self._lead.rollouts.pool.wait_ready(self._server.num_servers, deadline_seconds, self._on_wait_for_start)
                self._publisher.check_servers(self._lead.attempt.software_dir)
            except StopRequested as request:
                stop = str(request)
        stop = self._ranks.agree(stop)
        progress.enter("other")  # the start is over
        return stop

    def _on_wait_for_start(self) -> None:
        progress.beat()
        if self._lead is not None:
            self._lead.check_stop()

    def publish(self, weight_version: int) -> PublishResult | None:
        """As `ServerLink.publish`.

        Waits while all servers are being restarted, and begins again when all of them died meanwhile. A server that
        fails otherwise gets no work until it holds a committed version. Raises PublishError on every rank when no
        server is left, RolloutError when none comes back.
        """
        if self._lead is not None:
            self._lead.check_held()
        with self._phases.phase("publish"), self._pause():
            result = None
            while result is None:
                progress.beat()
                self._gpus.turn("publish")
                servers = self._servers_up()
                try:
                    result = self._publisher.publish(
                        weight_version, servers, self._announce, on_publish(self._rollout) == "continue_with_cache"
                    )
                except PublishError as error:
                    # Every rank is here, with the same error. Each round costs all servers a restart, so
                    # server.max_restarts ends it.
                    if not self._ranks.agree(self._are_gone(servers)):
                        raise
                    self._say(f"warning  {error}\nwarning  published again as soon as a server is back")
            self._commit(result)
        return result

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Rank 0: while the block publishes, no request begins, and what is open does as `rollout.on_publish` says."""
        if self._lead is None:
            self._ranks.agree(None)  # open requests may take longer than a collective may
            yield
            return
        mode, pool = on_publish(self._rollout), self._lead.rollouts.pool
        with paused(pool, mode, self._on_wait_for_open) as pause:
            failpoints.reached("publish.paused")
            self.pause = pause
            self._ranks.agree(None)
            yield

    def _on_wait_for_open(self) -> bool:
        """Whether open requests are to end now, because a stop was asked for. The publish itself goes on: the step's
        weights are checkpointed behind it.
        """
        progress.beat()
        return self._lead is not None and self._lead.stop_request.check() is not None

    def catch_up(self) -> None:
        assert self._lead is not None
        behind = self._lead.rollouts.pool.servers_behind()
        if behind and time.monotonic() >= self._catch_up_after:
            self._ranks.request(_PUBLISH_AGAIN)
            self._publish_again(behind)

    def metrics(self) -> dict[str, float]:
        assert self._lead is not None
        return {
            "rollout/num_servers_given_up": self._lead.rollouts.pool.num_given_up,
            "publish/num_open_requests": self.pause.num_open,
            "publish/pause_seconds": self.pause.seconds,
            **self._gpus.take_metrics(),
        }

    def _servers_up(self) -> list[HttpServerControl]:
        """Rank 0: all servers that are up, at least one; elsewhere none."""
        if self._lead is None:
            return []
        pool = self._lead.rollouts.pool
        pool.wait_ready(1, self._rollout.no_server_deadline_seconds)
        return pool.controls()

    def _are_gone(self, servers: Sequence[HttpServerControl]) -> bool:
        """Rank 0: whether no server of these generations runs any more, once their deaths could be noticed."""
        if self._lead is None or not servers:
            return False
        tried, deadline = _generations(servers), time.monotonic() + DEATH_NOTICE_SECONDS
        while tried & _generations(self._lead.rollouts.pool.controls()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _announce(self, weight_version: int) -> None:
        """Rank 0: the version is committed, and servers are about to serve it."""
        assert self._lead is not None
        self._lead.rollouts.pool.announce(weight_version)

    def _commit(self, result: PublishResult) -> None:
        self._committed_version = result.weight_version
        if self._lead is not None:
            self._lead.rollouts.pool.commit(result.weight_version, result.verified)
            for server, why in result.failed.items():
                self._say(
                    f"warning  {server} does not hold weight version {result.weight_version} and gets no work until it"
                    f" does: {why}"
                )

    def _publish_again(self, servers: Sequence[HttpServerControl]) -> None:
        """Send the committed weights once more, to servers that came back (known on rank 0). Collective."""
        result = self._publisher.publish_again(self._committed_version, servers)
        self._commit(result)
        if result.failed:
            self._catch_up_after = time.monotonic() + CATCH_UP_PAUSE_SECONDS

    def _say(self, line: str) -> None:
        if self._lead is not None:
            self._lead.console(line)


def _generations(servers: Sequence[HttpServerControl]) -> set[tuple[str, int]]:
    return {(server.server_id, server.generation) for server in servers}


def local_address(server_host: str) -> str:
    """This machine's address as a server bound to `server_host` reaches it: the source address of a connection to
    there.
    """
    family, kind, _, _, there = socket.getaddrinfo(server_host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # a datagram socket sends nothing on connect
        return probe.getsockname()[0]
