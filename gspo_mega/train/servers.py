"""The ranks' link to the servers: wait for them, publish weights to them, and bring servers that came back up to date.

`LiveServers` is the link of a run that samples, `NoServers` that of a run that trains on a record. Its methods are
collective, and decide what follows when servers fail in them. `gspo_mega.sync` sends the weights, and the pool of
`gspo_mega.rollout` knows the servers. Below are `paused`, which says what happens to open requests around a publish,
and `SharedGpus`, which moves the memory of GPUs that ranks and servers use in turns (`cluster.colocated`). A run whose
servers have GPUs of their own has `OwnGpus`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch.distributed as dist

from gspo_mega.base import failpoints, progress
from gspo_mega.base.errors import PublishError, RolloutError
from gspo_mega.config.derived import OnPublish, on_publish
from gspo_mega.config.schema import Publish, Rollout, Server
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

# A server that could not take the committed weights is tried again after this time.
CATCH_UP_PAUSE_SECONDS = 5.0
# The pool notices a dead server within this time.
DEATH_NOTICE_SECONDS = 5.0
_PUBLISH_AGAIN = "publish_again"


class ServerLink(Protocol):
    """A rank's link to the servers; one object on every rank."""

    def wait(self) -> str | None:
        """Wait until every server of the run is up. Returns the reason if a stop was requested while waiting, else
        None. Collective.
        """
        ...

    def publish(self, weight_version: int) -> PublishResult | None:
        """Send the engine's weights to all servers as `weight_version`. Returns None if the run has no servers.
        Collective.

        Raises FolderError on rank 0 if a later start of the run has taken over its folder.
        """
        ...

    def catch_up(self) -> None:
        """Rank 0: publish the committed weights to servers that came back. The other ranks must be waiting for rank 0,
        so that they can take part.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Rank 0: the metrics of the servers and of the last publish."""
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
            self._lead.check_newest_attempt()
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
        self._gpus.switch_to("sample")  # servers that share the ranks' GPUs can start only now
        if self._lead is not None:
            # Each start of a server has its own deadline.
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

        Waits while all servers are being restarted, and begins again if all of them died during the publish. A server
        that fails in another way gets no work until it holds a committed version. Raises PublishError on every rank if
        no server is left, and RolloutError if none comes back.
        """
        if self._lead is not None:
            self._lead.check_newest_attempt()
        with self._phases.phase("publish"), self._pause():
            result = None
            while result is None:
                progress.beat()
                self._gpus.switch_to("publish")
                servers = self._servers_up()
                try:
                    result = self._publisher.publish(
                        weight_version, servers, self._announce, on_publish(self._rollout) == "continue_with_cache"
                    )
                except PublishError as error:
                    # Every rank gets here with the same error. Each round costs all servers a restart, so
                    # server.max_restarts bounds the number of rounds.
                    if not self._ranks.agree(self._have_died(servers)):
                        raise
                    self._say(f"warning  {error}\nwarning  the weights are published again as soon as a server is back")
            self._commit(result)
        return result

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """A context manager: the block publishes. On rank 0 no request begins in it, and `rollout.on_publish` decides
        what open requests do. Collective.
        """
        if self._lead is None:
            self._ranks.agree(None)  # open requests may take longer than the timeout of a collective
            yield
            return
        mode, pool = on_publish(self._rollout), self._lead.rollouts.pool
        with paused(pool, mode, self._on_wait_for_open) as pause:
            failpoints.reached("publish.paused")
            self.pause = pause
            self._ranks.agree(None)
            yield

    def _on_wait_for_open(self) -> bool:
        """Whether open requests should end now because a stop was requested. The publish itself goes on, because the
        step's weights are checkpointed after it.
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
        """Rank 0: wait for at least one server and return all that are up. Other ranks get an empty list."""
        if self._lead is None:
            return []
        pool = self._lead.rollouts.pool
        pool.wait_ready(1, self._rollout.no_server_deadline_seconds)
        return pool.controls()

    def _have_died(self, servers: Sequence[HttpServerControl]) -> bool:
        """Rank 0: whether none of these starts of servers runs any more. Waits until the pool can have noticed their
        deaths. False on other ranks.
        """
        if self._lead is None or not servers:
            return False
        tried, deadline = set(map(_start_of, servers)), time.monotonic() + DEATH_NOTICE_SECONDS
        while tried & set(map(_start_of, self._lead.rollouts.pool.controls())):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _announce(self, weight_version: int) -> None:
        """Rank 0: tell the pool that the version is committed and servers are about to serve it."""
        assert self._lead is not None
        self._lead.rollouts.pool.announce(weight_version)

    def _commit(self, result: PublishResult) -> None:
        self._committed_version = result.weight_version
        if self._lead is not None:
            if result.fallback is not None:
                self._say(
                    f"warning  weight version {result.weight_version} was published in full, because no server took"
                    f" what changed (publish.full_every): {result.fallback}"
                )
            self._lead.rollouts.pool.commit(result.weight_version, result.verified)
            for server, why in result.failed.items():
                self._say(
                    f"warning  {server} does not hold weight version {result.weight_version} and gets no work until it"
                    f" does: {why}"
                )

    def _publish_again(self, servers: Sequence[HttpServerControl]) -> None:
        """Send the committed weights again to servers that came back. Rank 0 names the servers; other ranks pass an
        empty list. Collective.
        """
        result = self._publisher.publish_again(self._committed_version, servers)
        self._commit(result)
        if result.failed:
            self._catch_up_after = time.monotonic() + CATCH_UP_PAUSE_SECONDS

    def _say(self, line: str) -> None:
        if self._lead is not None:
            self._lead.console(line)


def local_address(server_host: str) -> str:
    """This machine's address as a server bound to `server_host` sees it: the source address of a connection to that
    host.
    """
    family, kind, _, _, there = socket.getaddrinfo(server_host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # a datagram socket sends nothing on connect
        return probe.getsockname()[0]


# While requests are open, a publish checks them and calls `on_wait` at these intervals.
_OPEN_REQUESTS_POLL_SECONDS = 0.005
_ON_WAIT_SECONDS = 0.25
# A server that has not ended its requests after this time is not waited for.
_ABORT_SECONDS = 5.0


@dataclass
class Pause:
    """`num_open`: requests that were open when a publish began. `seconds`: how long the publish waited for them."""

    num_open: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def paused(pool: ServerPool, mode: OnPublish, on_wait: Callable[[], bool] = lambda: False) -> Iterator[Pause]:
    """A context manager: the block publishes. No request begins before its end. With the modes `wait` and `continue`
    no request is open in the block.

    With `continue`, open requests end with their tokens so far and go on after the publish, like requests that moved to
    another server: their tokens so far are part of their prompt then, the new weights read them, and each part has one
    version by construction. That also holds if a server dies in between.

    While open requests are waited for, `on_wait` is called a few times per second. If it returns True, because the run
    ends soon, the mode `wait` becomes `continue`. If a server does not end a request within a few seconds, the request
    is ended without it, and the tokens that it reported are kept.
    """
    pool.hold(True)
    try:
        pause = Pause(_num_open(pool))
        started = time.monotonic()
        looked_at = -_ON_WAIT_SECONDS
        while mode != "continue_with_cache" and _num_open(pool):
            pool.check()
            if time.monotonic() - looked_at >= _ON_WAIT_SECONDS:
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
        with contextlib.suppress(ServerError):  # then the requests end on their own a little later
            await server.run(server.client.call("/abort_request", {"abort_all": True}, _ABORT_SECONDS))

    await asyncio.gather(*(end(server) for server in pool.ready_servers() if server.load.flights))


Turn = Literal["sample", "publish", "train"]
# SGLang has a third, `cuda_graph`, and 0.5.23 frees nothing for it: it puts graphs under its memory saver only with
# SGLANG_MEMORY_SAVER_CUDA_GRAPH (`full_cuda_graph_backend.py:121`), and then refuses the graphs that it captures of
# prefills by default (`breakable_cuda_graph_backend.py:84`). So graphs stay, and the plan counts them.
SERVER_PARTS = ("weights", "kv_cache")
# Within this time a server that does not answer is found dead and its memory is free.
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
    """Who holds the GPUs' memory; one object on every rank."""

    def switch_to(self, turn: Turn) -> None:
        """Give the GPUs to whoever needs them in `turn`. Collective."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Rank 0: the seconds and bytes of the moves since the last call, as metrics."""
        ...


class OwnGpus:
    """The GPUs of ranks and servers are different ones, so nothing moves."""

    def switch_to(self, turn: Turn) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {}


class SharedGpus:
    """GPUs that ranks and servers use in turns. Who holds memory in each turn:

        sample   servers: all        ranks: nothing       rollouts, evaluation
        publish  servers: weights    ranks: parameters    the ranks' weights to disk, from there to the servers
        train    servers: nothing    ranks: all           passes, optimizer steps, checkpoints, exports

    All ranks and servers that give memory do so before any of them takes memory. `engine/memory.py` and SGLang move it.
    It begins in the turn `train`: the ranks hold all memory, and no server may start (the launcher calls `give_turn`).
    """

    def __init__(
        self,
        server: Server,
        rollout: Rollout,
        publish: Publish,
        memory: DeviceMemory,
        ranks: RankLink,
        host_group: dist.ProcessGroup,
        lead: Rank0 | None,
        phases: Phases,
    ) -> None:
        """`host_group`: the process group of all ranks for host tensors."""
        self._server, self._rollout, self._publish = server, rollout, publish
        self._memory, self._host_group = memory, host_group
        self._ranks, self._lead, self._phases = ranks, lead, phases
        self._now: Turn = "train"
        # Rank 0: what each start of a server has given away. A new start holds everything.
        self._released: dict[tuple[str, int], frozenset[str]] = {}
        self._metrics = _no_metrics()
        if lead is not None:
            lead.rollouts.pool.hold(True, _HOLDER)

    def switch_to(self, turn: Turn) -> None:
        """As `Gpus.switch_to`. Raises RolloutError on every rank if a server neither gives its memory nor ends, or if
        no server is up to publish to.
        """
        if turn == "publish" and self._ranks.agree(self._lead is not None and not self._controls()):
            self.switch_to("sample")  # the only turn in which servers start
            self._agree_on(self._wait_for_a_server)
        if turn == self._now:
            return
        before, holds = self._now, HOLDS[turn]
        with self._phases.phase("share"):
            progress.beat()
            # Ranks give before servers take, and servers give before ranks take.
            self._time("offload_seconds", lambda: self._add_metric("offloaded_bytes", self._memory.keep(holds.ranks)))
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
        """Rank 0 calls `act` while the others wait. Raises its error on every rank. Collective."""
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
        self._lead.rollouts.pool.wait_ready(1, self._rollout.no_server_deadline_seconds, progress.beat)

    def _stop_sampling(self) -> None:
        """Wait until no request is open and none begins, and no server is starting or ending: each server is up and
        known to the pool, or holds no memory.
        """
        assert self._lead is not None
        pool, attempt = self._lead.rollouts.pool, self._lead.attempt
        give_turn(attempt, "ranks")
        pool.hold(True, _HOLDER)
        with paused(pool, "continue"):
            pass
        server = self._server
        deadline = time.monotonic() + server.start_deadline_seconds + server.drain_seconds + _END_SECONDS
        while True:
            progress.beat()
            pool.check()
            found = read_registrations(attempt.servers_dir, on_error=lambda path, error: None)
            between = [r for r in found if r.state in ("starting", "restarting", "draining") and not r.is_preparing]
            up = {(r.server_id, r.generation) for r in found if r.state == "ready"}
            known = set(map(_start_of, self._controls()))
            if not between and up == known:
                return
            if time.monotonic() > deadline:
                names = ", ".join(f"{r.server_id} is {r.state}" for r in between) or "their registrations keep changing"
                raise RolloutError(f"cluster.colocated: the ranks cannot get their GPUs back: {names}")
            time.sleep(_POLL_SECONDS)

    def _release(self, kept: tuple[str, ...]) -> None:
        self._on_each_server(
            "give its GPU memory to the ranks",
            lambda released: [part for part in SERVER_PARTS if part not in kept and part not in released],
            lambda control, parts, seconds: control.release_memory(parts, deadline_seconds=seconds),
            lambda released, parts: released | set(parts),
        )

    def _resume(self, wanted: tuple[str, ...]) -> None:
        self._on_each_server(
            "take its GPU memory back",
            lambda released: [part for part in SERVER_PARTS if part in wanted and part in released],
            lambda control, parts, seconds: control.resume_memory(parts, deadline_seconds=seconds),
            lambda released, parts: released - set(parts),
        )

    def _on_each_server(
        self,
        what: str,
        parts_of: Callable[[frozenset[str]], list[str]],
        act: Callable[[HttpServerControl, list[str], float], None],
        after: Callable[[frozenset[str], list[str]], frozenset[str]],
    ) -> None:
        """Call `act` on all servers at the same time, with the parts that `parts_of` names for each. If one fails and
        does not end, raises RolloutError, which ends the run.

        `what`: the action, for the message. `after`: the parts that a server has given away once `act` succeeded.
        """
        controls = self._controls()
        self._released = {_start_of(c): self._released.get(_start_of(c), frozenset()) for c in controls}
        parts = {_start_of(c): parts_of(self._released[_start_of(c)]) for c in controls}
        todo = [control for control in controls if parts[_start_of(control)]]
        if not todo:
            return
        seconds = self._publish.deadline_seconds

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
            elif not self._ends_soon(start):
                raise RolloutError(f"cluster.colocated: {control.server_id} does not {what}: {problem}")

    def _ends_soon(self, start: tuple[str, int]) -> bool:
        """Wait for this start of a server to end. Returns False if it has not after `_END_SECONDS`; once it has ended,
        its memory is free.
        """
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
        self._add_metric(name, time.monotonic() - started)

    def _add_metric(self, name: str, value: float) -> None:
        self._metrics[name] += value


def _start_of(control: HttpServerControl) -> tuple[str, int]:
    """One start of a server: its id and its generation, which every restart raises."""
    return control.server_id, control.generation


def _no_metrics() -> dict[str, float]:
    return dict.fromkeys(
        ("offload_seconds", "offloaded_bytes", "release_seconds", "onload_seconds", "resume_seconds"), 0.0
    )
