"""Saving a run's state: copy, write, commit. With `checkpoint.asynchronous`, training continues during the write.

Ranks write to a draft folder, which becomes a checkpoint (`folders.py`) after every rank has written. Collectives run
only on the caller's thread.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint import folders
from gspo_mega.checkpoint.collectives import all_gather_json, broadcast_json, raise_together
from gspo_mega.checkpoint.load import (
    CRITIC_FOLDER,
    TrainedModel,
    TrainState,
    base_stamp,
    fp8_folder,
    is_untrained,
    layout_of,
    model_of,
    random_state,
    sharded_state,
)
from gspo_mega.checkpoint.safe_pickle import first_cause
from gspo_mega.checkpoint.tensor_sources import MEGATRON_FOLDER
from gspo_mega.config.schema import Checkpoint
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.precision import asynchronous_save

# The space for metadata, random state, state.json and the rounding of a file system, in addition to the tensors.
_SPACE_FACTOR, _SPACE_BYTES = 1.02, 16 * 1024**2
_WAIT_SECONDS = 0.05


@dataclass(frozen=True)
class SaveReport:
    """One committed save. Training waited `pause_seconds` for it. It took `write_seconds` from start to commit."""

    folder: Path
    pause_seconds: float
    write_seconds: float


class _Writing:
    """An uncommitted save. A thread writes this rank's files, or the caller's thread has written them."""

    def __init__(self, final: Path, draft: Path, record: dict[str, Any], requests: list[Any], started: float) -> None:
        self.final, self.draft, self.record, self.requests, self.started = final, draft, record, requests, started
        self.pause_seconds = 0.0
        self.problem: str | None = None
        self.thread: threading.Thread | None = None

    @property
    def is_written(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class Saver:
    """The saves of one run: of its policy, and of the critic if there is one. Every rank has a saver. At most one save
    is uncommitted.
    """

    def __init__(
        self, run_folder: RunFolder, engine: PolicyEngine, settings: Checkpoint, critic: CriticEngine | None = None
    ) -> None:
        self._run_folder, self._engine, self._settings = run_folder, engine, settings
        self._models: dict[str, TrainedModel] = {MEGATRON_FOLDER: engine}
        if critic is not None:
            self._models[CRITIC_FOLDER] = critic
        self._groups = engine.groups
        self._writing: _Writing | None = None

    def tidy(self, step: int) -> None:
        """Remove remains of interrupted saves, and prune. The run continues from the checkpoint of `step`.

        Collective.
        """

        def remove() -> None:
            folders.remove_drafts(self._run_folder)
            folders.prune(self._run_folder, step, self._settings.keep_last, self._settings.keep_every)

        self._together(remove, self._run_folder.checkpoints_dir, only_lead=True)

    def save(self, state: TrainState) -> list[SaveReport]:
        """Save the models and `state` as `checkpoints/step_N`. Collective over all ranks.

        Returns the saves that this call committed: this one, or with `checkpoint.asynchronous` at most the previous
        one; `poll` or `finish` then commits this one. Raises CheckpointError if the checkpoint cannot be written or
        does not fit on the disk: on every rank, or if the others wait in Megatron at once on the rank that failed.
        Earlier checkpoints stay untouched.
        """
        reports = self.finish()
        started = time.monotonic()
        self._writing = self._begin(state, started)
        if self._settings.asynchronous:
            self._writing.pause_seconds = time.monotonic() - started
            return reports
        return [*reports, *self.finish()]

    def poll(self) -> list[SaveReport]:
        """Commit the current save if every rank has written its part. This does not wait. Returns the committed saves.
        Collective.
        """
        if self._writing is None:
            return []
        done = all(all_gather_json(self._writing.is_written, self._groups.host))
        return self.finish() if done else []

    def finish(self) -> list[SaveReport]:
        """Wait for the current save, if any, and commit it. Returns the committed saves. Collective. Raises
        CheckpointError as `save` does.
        """
        if self._writing is None:
            return []
        writing, self._writing = self._writing, None
        waited = time.monotonic()
        while not writing.is_written:
            time.sleep(_WAIT_SECONDS)
        self._commit(writing)
        now = time.monotonic()
        pause = now - (waited if self._settings.asynchronous else writing.started)
        return [SaveReport(writing.final, writing.pause_seconds + pause, now - writing.started)]

    # --- the parts of a save ---------------------------------------------------------------------------------

    def _begin(self, state: TrainState, started: float) -> _Writing:
        groups, final = self._groups, self._run_folder.checkpoint_dir(state.step)
        with_critic = len(self._models) > 1
        tensors = {
            name: sharded_state(model, loading=False, with_optimizer=not is_untrained(state, name, with_critic))
            for name, model in self._models.items()
        }
        scales = {fp8_folder(name): one.scales for name, one in self._models.items() if one.scales.is_active}
        # Writers of a killed process may still write to its draft, so every process has its own draft.
        draft = folders.draft_folder(final, broadcast_json(f"{os.getpid():x}", groups.host))
        self._check_room(tensors, final)

        def make_room() -> None:
            folders.remove_drafts(self._run_folder)
            for name in (*self._models, "rng", *scales):
                atomic_io.make_folder(draft / name, at="save.folder")

        self._together(make_room, final, only_lead=True)
        record = {
            "format_version": folders.FORMAT_VERSION,
            "state": asdict(state),
            "layout": layout_of(groups),
            "model": model_of(self._engine),
        }
        if groups.is_lead and (base := base_stamp(self._engine)) is not None:
            record["base"] = base
        record |= {name: model_of(one) for name, one in self._models.items() if name != MEGATRON_FOLDER}
        prepared: list[Any] = []

        def keep_random_state() -> None:
            with atomic_io.operation("save.random"):
                states = {"rng": random_state()} | {name: one.state() for name, one in scales.items()}
                for name, tensors_of_rank in states.items():
                    file = draft / folders.rank_file(name, groups.world.rank)
                    save_file(tensors_of_rank, file)
                    atomic_io.follow_umask(file)

        self._together(keep_random_state, final)

        def prepare() -> None:
            for name, model in self._models.items():
                prepared.append(copied(model, tensors[name], draft / name, self._settings))

        self._waiting_inside(prepare, final)
        writing = _Writing(final, draft, record, [request for request, _ in prepared], started)

        def write() -> None:
            try:
                with atomic_io.operation("save.tensors"):
                    for request, buckets in prepared:
                        if request.async_fn is not None:
                            rank, _, results = request.async_fn_args
                            request.async_fn(rank, buckets, results)
            except (OSError, RuntimeError) as error:
                writing.problem = f"rank {groups.world.rank}: {first_cause(error)}"

        if self._settings.asynchronous:
            writing.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
            writing.thread.start()
        else:
            write()
        return writing

    def _check_room(self, tensors: dict[str, Any], final: Path) -> None:
        kinds = (ShardedTensor, ShardedTensorFactory)
        own = sum(
            t.data.nbytes
            for t in nested_values(tensors)
            if isinstance(t, kinds) and t.data is not None and is_main_replica(t.replica_id)
        )
        needed = int(sum(all_gather_json(own, self._groups.host)) * _SPACE_FACTOR) + _SPACE_BYTES

        def check() -> None:
            atomic_io.make_folder(final.parent, at="save.folder")
            free = shutil.disk_usage(final.parent).free
            if free < needed:
                raise OSError(
                    errno.ENOSPC,
                    f"it needs {needed / 1024**3:.2f} GiB, and {free / 1024**3:.2f} GiB are free there. Nothing was"
                    " written, and earlier checkpoints are untouched. Free some space, or lower checkpoint.keep_last,"
                    " and start the same command again",
                )

        self._together(check, final, only_lead=True)

    def _commit(self, writing: _Writing) -> None:
        groups, final, draft = self._groups, writing.final, writing.draft
        raise_together(
            [writing.problem] if writing.problem else [], groups.host, CheckpointError, f"{final} cannot be written"
        )

        def finalize() -> None:
            with atomic_io.operation("save.index"):
                for action in (action for request in writing.requests for action in request.finalize_fns):
                    action()

        self._waiting_inside(finalize, final)
        sums: list[dict[str, Any]] = []
        self._together(lambda: sums.append(folders.checksums(draft, self._own_files(draft))), final)
        writing.record["files"] = {
            name: value for part in all_gather_json(sums[0], groups.host) for name, value in part.items()
        }

        def commit() -> None:
            atomic_io.atomic_write_json(draft / "state.json", writing.record, at="save.state")
            atomic_io.sync_tree(draft, at="save.sync")
            folders.commit_draft(self._run_folder, draft, final)
            folders.prune(
                self._run_folder, writing.record["state"]["step"], self._settings.keep_last, self._settings.keep_every
            )

        self._together(commit, final, only_lead=True)

    def _own_files(self, draft: Path) -> list[Path]:
        """Return the files that this rank wrote. Rank 0 also has the files that belong to no rank."""
        rank = self._groups.world.rank
        own = [draft / folders.rank_file("rng", rank)]
        for name, model in self._models.items():
            own += (draft / name).glob(f"__{rank}_*.distcp")
            if model.scales.is_active:
                own.append(draft / folders.rank_file(fp8_folder(name), rank))
            if rank == 0:
                own += [file for file in (draft / name).iterdir() if not file.name.startswith("__")]
        return own

    def _together(self, action: Callable[[], None], target: Path, *, only_lead: bool = False) -> None:
        """Run `action`, with `only_lead` only on rank 0. If it fails on one rank, all ranks raise CheckpointError.

        Ranks must not wait for each other in `action`.
        """
        problems: list[str] = []
        rank = self._groups.world.rank
        if rank == 0 or not only_lead:
            try:
                action()
            except (CheckpointException, OSError, RuntimeError) as error:
                problems.append(f"rank {rank}: {first_cause(error)}")
        raise_together(problems, self._groups.host, CheckpointError, f"{target} cannot be written")

    def _waiting_inside(self, action: Callable[[], None], target: Path) -> None:
        """Run `action`, in which Megatron's ranks wait for each other.

        A rank that fails raises CheckpointError at once. The others wait in Megatron and cannot receive the error; they
        end when its process ends.
        """
        try:
            action()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{target} cannot be written:\n  rank {self._groups.world.rank}: {first_cause(error)}"
            ) from error


def copied(model: TrainedModel, tensors: dict[str, Any], folder: Path, settings: Checkpoint) -> tuple[Any, Any]:
    """Copy what this rank writes of one model to the host. `tensors`: its `sharded_state`. Returns Megatron's request
    to write it into `folder`, and the data to write; None if this rank writes nothing. Collective.
    """
    _keep_results_here()
    # Look at the memory before and after the call, because it replaces factories by the tensors that they make, and
    # most of those are views.
    trained = tensors
    if model.config.optimizer.distributed:  # the optimizer's tensors are copies already
        trained = {key: part for key, part in tensors.items() if key != "optimizer"}
    changing = _memory_of(trained)
    with atomic_io.operation("save.common"):
        request = dist_checkpointing.save(tensors, str(folder), **asynchronous_save())
    return request, _copies(request, changing | _memory_of(trained), settings)


def _copies(request: Any, changing: set[int], settings: Checkpoint) -> Any:
    """Return the data to write, on the host.

    If training continues, tensors in the memory `changing` are copied. Tensors that Megatron has already copied, from a
    GPU or out of a larger buffer, are not copied again.
    """
    if request.preload_fn is None:
        return None
    buckets = request.preload_fn()
    if not settings.asynchronous:
        return buckets
    return [
        (file, key, (data, [(item, t.clone() if _address(t) in changing else t) for item, t in tensors]))
        for file, key, (data, tensors) in buckets
    ]


def _memory_of(tensors: dict[str, Any]) -> set[int]:
    """Return the addresses of the storages that the parts of a sharded state use. Training may change this memory."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    return {_address(t.data) for t in nested_values(tensors) if isinstance(t, kinds) and t.data is not None}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _keep_results_here() -> None:
    """Make Megatron pass its writer's results in this process's memory, because the writer runs in this process.

    Megatron's own queue is a separate process, for writers in other processes. It takes seconds to start, and it
    survives a rank that is killed.
    """
    filesystem_async._results_queue = queue.SimpleQueue()
