"""GPUs that ranks and servers use in turns (`cluster.colocated`): who holds what in each phase, and the moves between.

    sample   servers: all                 ranks: nothing          rollouts, evaluation
    publish  servers: weights             ranks: parameters       the ranks' weights to disk, from there to the servers
    train    servers: nothing             ranks: all              passes, optimizer steps, checkpoints, exports

Owns the order: whoever gives memory does so first, on all ranks and servers, and only then does anyone take. How memory
moves is `engine/device_memory.py`'s and SGLang's. A run whose servers have GPUs of their own has `OwnGpus`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch.distributed as dist

from gspo_mega.base import beats
from gspo_mega.base.errors import PublishError, RolloutError
from gspo_mega.config.schema import Config
from gspo_mega.engine.device_memory import PARTS, DeviceMemory, Part
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.rollout.gpu_turn import give_turn
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.train.phases import Phases
from gspo_mega.train.publish_pause import paused
from gspo_mega.train.rank_link import RankLink

if TYPE_CHECKING:
    from gspo_mega.train.lead import Lead

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
        lead: Lead | None,
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
            beats.beat()
            # Ranks give before servers take, and the other way round.
            self._time("offload_seconds", lambda: self._note("offloaded_bytes", self._memory.keep(holds.ranks)))
            dist.barrier(group=self._host_group)
            if before == "sample":
                self._agree_on(self._stop_sampling)
            self._agree_on(lambda: self._time("release_seconds", lambda: self._release(holds.servers)))
            beats.beat()
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
        self._lead.rollouts.pool.wait_ready(1, self._config.rollout.no_server_deadline_seconds, beats.beat)

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
            beats.beat()
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
            beats.beat()
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
