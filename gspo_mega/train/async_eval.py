"""Evaluation while training goes on (`eval.blocking: false`): it begins after a step and runs while later steps train.

`AsyncEvaluations` keeps which evaluations are due and unfinished, and which weights each one measures. That list is
part of the run's state, so a checkpoint has it. If an evaluation loses its servers, it begins again with the same
weights, from the published version or from the checkpoint of its step. `rollout/eval_servers.py` takes servers from
training. Rank 0 only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_mega.base import atomic_io, processes
from gspo_mega.base.errors import GspoMegaError, PublishError, RolloutError
from gspo_mega.checkpoint.convert import to_huggingface
from gspo_mega.checkpoint.quantized import published_form
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.config.schema import Config
from gspo_mega.rollout.eval_servers import EvalServers, reserve_for_eval
from gspo_mega.sync.versions import PublishedVersions
from gspo_mega.train.held_out import Evaluation

if TYPE_CHECKING:
    from gspo_mega.checkpoint.load import TrainState
    from gspo_mega.train.rank0 import Rank0


# The key of the run's summary that lists the evaluations that are due or running.
DUE = "evaluations_due"
_MOST_TRIES = 3
_CLOSE_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class EvaluationResult:
    """The results of the evaluation of one step's weights. `found`: by the set's name. `num_begun`: how often it was
    begun. `seconds`: how long the last attempt took.
    """

    step: int
    found: dict[str, Evaluation]
    seconds: float
    num_servers: int
    num_begun: int


@dataclass
class _Running:
    """What a thread does for the evaluation `due`: measure on `servers`, or without servers make the folder to load."""

    due: dict[str, Any]
    servers: EvalServers | None
    future: concurrent.futures.Future[Any]


class _ClosedError(Exception):
    """The run ends before the evaluation does."""


class _LostError(Exception):
    """The weights to evaluate no longer exist anywhere."""


class AsyncEvaluations:
    """The asynchronous evaluations of a run; one runs at a time. `state`: the run's state, whose summary keeps what is
    due. Close this object before the parts of `lead`.
    """

    def __init__(self, config: Config, lead: Rank0, state: TrainState) -> None:
        assert config.eval is not None
        self._config, self._lead, self._num_servers = config, lead, config.eval.servers
        self._due: list[dict[str, Any]] = state.summary.setdefault(DUE, [])
        self._versions = PublishedVersions(lead.run_folder.weights_dir)
        self._running: _Running | None = None
        self._folders: dict[int, Path] = {}
        self._num_begun: dict[int, int] = {}
        self._measured: list[EvaluationResult] = []
        self._keep = 1
        self._is_closed = False

    @property
    def steps_due(self) -> list[int]:
        """The steps whose evaluation has not ended."""
        return [one["step"] for one in self._due]

    def versions(self) -> set[int]:
        """The weight versions that may still be loaded for an evaluation, so they must stay on disk."""
        return {one["weight_version"] for one in self._due}

    def start(self, step: int, weight_version: int, names: list[str], on_wait: Callable[[], None]) -> bool:
        """Begin to measure the sets `names` with `weight_version`, the committed version, before training replaces it.

        Waits for an earlier evaluation and calls `on_wait` while it waits. If `on_wait` raises, this evaluation stays
        due and begins later. Returns False if no server can be spared now; the caller then evaluates while training
        waits.
        """
        due = {"step": step, "weight_version": weight_version, "sets": names}
        self._due.append(due)
        while len(self._due) > 1:
            self._poll_once(on_wait)
        if self._running is not None:
            return True  # `poll` began it as soon as the earlier one had ended
        servers = self._reserve_servers(weight_version, loads=False)
        if servers is None and self._lead.rollouts.pool.servers_behind():
            on_wait()  # it updates servers with older weights, such as those of the evaluation before
            servers = self._reserve_servers(weight_version, loads=False)
        if servers is None:
            self._due.remove(due)
            self._lead.console(
                f"notice   eval.blocking: fewer than 2 servers hold the weights of step {step} now; training waits"
                " while they are measured"
            )
            return False
        self._measure(due, servers, None)
        return True

    def poll(self) -> None:
        """Collect the evaluation that has ended, and begin the next one that is due. Must not be called during a
        publish. Raises RewardError as `Rollouts.evaluate`.
        """
        if self._running is not None and self._running.future.done():
            running, self._running = self._running, None
            self._finish(running)
        if self._running is None and self._due:
            self._begin_due(self._due[0])

    def take_results(self) -> list[EvaluationResult]:
        """The results of the evaluations that ended since the last call, in the order of steps."""
        measured, self._measured = self._measured, []
        return measured

    def wait_for_all(self, on_wait: Callable[[], None]) -> None:
        """Training is over: wait until everything that is due has been measured. Raises what `on_wait` raises."""
        self._keep = 0
        while self._due:
            self._poll_once(on_wait)

    def close(self) -> None:
        """End the running evaluation. What is due stays in the run's state."""
        self._is_closed = True
        if self._running is not None:
            concurrent.futures.wait([self._running.future], timeout=_CLOSE_SECONDS)

    def _poll_once(self, on_wait: Callable[[], None]) -> None:
        self.poll()
        on_wait()
        time.sleep(_POLL_SECONDS)

    # --- beginning an evaluation ------------------------------------------------------------------------------------

    def _reserve_servers(self, weight_version: int, loads: bool) -> EvalServers | None:
        most = self._config.rollout.max_concurrent_requests
        pool = self._lead.rollouts.pool
        return reserve_for_eval(pool, most, self._num_servers, weight_version, self._keep, loads)

    def _begin_due(self, due: dict[str, Any]) -> None:
        version = due["weight_version"]
        if self._lead.rollouts.pool.committed_version == version:
            if (servers := self._reserve_servers(version, loads=False)) is not None:
                self._measure(due, servers, None)
            return
        if version not in self._folders:
            self._run(due, None, partial(self._find_or_make_folder, due))
        elif (servers := self._reserve_servers(version, loads=True)) is not None:
            self._measure(due, servers, self._folders[version])

    def _measure(self, due: dict[str, Any], servers: EvalServers, folder: Path | None) -> None:
        self._num_begun[due["step"]] = self._num_begun.get(due["step"], 0) + 1
        self._run(due, servers, partial(self._evaluate, due, servers, folder))

    def _run(self, due: dict[str, Any], servers: EvalServers | None, work: Callable[[], Any]) -> None:
        self._running = _Running(due, servers, processes.run_in_thread("evaluation", work))

    # --- in the evaluation's thread --------------------------------------------------------------------

    def _evaluate(
        self, due: dict[str, Any], servers: EvalServers, folder: Path | None
    ) -> tuple[dict[str, Evaluation], float]:
        """The results by the set's name, and the seconds that they took."""
        began = time.monotonic()
        try:
            if folder is not None:
                servers.load(folder, self._config.publish.deadline_seconds)
            found = self._lead.evaluate(due["step"], self._check_open, due["sets"], servers)
            return found, time.monotonic() - began
        finally:
            with contextlib.suppress(RolloutError):  # the pool's thread has ended, which was reported
                servers.give_back()

    def _check_open(self) -> None:
        if self._is_closed:
            raise _ClosedError

    def _find_or_make_folder(self, due: dict[str, Any]) -> Path:
        """A folder with the weights of an earlier version as servers load it: the published folder, the model that the
        run started from, or a folder made from the checkpoint of the step. Raises _LostError if there is none.
        """
        published = self._versions.path(due["weight_version"])
        if published.is_dir():
            return published
        checkpoint = self._lead.run_folder.checkpoint_dir(due["step"])
        if due["step"] == 0 and self._config.model.weights is None and published_form(self._config).stored is None:
            return Path(self._config.model.path)
        if not checkpoint.is_dir():
            raise _LostError(f"neither {published} nor {checkpoint} exists")
        made = self._made_folder(due["weight_version"])
        if not made.is_dir():
            source = open_checkpoint(checkpoint, Path(self._config.model.path))
            to_huggingface(
                source, made, form=published_form(self._config), progress=lambda done, total, name: self._check_open()
            )
        return made

    def _made_folder(self, weight_version: int) -> Path:
        return self._lead.run_folder.weights_dir / f"evaluated_{weight_version:08d}"

    # --- after the thread has ended -----------------------------------------------------------------------------------

    def _finish(self, running: _Running) -> None:
        due, step = running.due, running.due["step"]
        try:
            result = running.future.result()
        except _ClosedError:
            return
        except (RolloutError, PublishError) as error:
            self._lead.console(f"warning  the evaluation of step {step} failed: {error}")
            if self._num_begun.get(step, 0) >= _MOST_TRIES:
                self._give_up(due, f"it was begun {_MOST_TRIES} times")
        except (_LostError, GspoMegaError, OSError) as error:
            if running.servers is not None:
                raise
            self._give_up(due, f"weight version {due['weight_version']} is no longer available: {error}")
        else:
            if running.servers is None:
                self._folders[due["weight_version"]] = result
                return
            (found, seconds), num_servers = result, len(running.servers.server_ids)
            self._measured.append(EvaluationResult(step, found, seconds, num_servers, self._num_begun[step]))
            self._forget(due)

    def _give_up(self, due: dict[str, Any], why: str) -> None:
        self._lead.console(f"warning  the weights of step {due['step']} are not measured: {why}")
        self._forget(due)

    def _forget(self, due: dict[str, Any]) -> None:
        self._due.remove(due)
        self._folders.pop(due["weight_version"], None)
        made = self._made_folder(due["weight_version"])
        if made.is_dir():
            atomic_io.remove_tree(made, at="publish.prune")
