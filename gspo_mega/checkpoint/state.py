"""A run's state on disk: everything it needs to go on as if it had not stopped.

One folder a checkpoint: `megatron/` (weights and optimizer in Megatron's `torch_dist` format), `rng/` (one file a
rank) and `state.json` (counters, prompt order, what the run's progress depends on). Written beside under a
temporary name, synced, renamed; `latest` names a complete one or nothing. Weights for the outside world are
`gspo_mega.weights`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from gspo_mega.engine.cpu import is_cpu_backend
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.errors import CheckpointError
from gspo_mega.run_folder import RunFolder, atomic_write_json, atomic_write_text, read_json
from gspo_mega.weights.collectives import raise_together

FORMAT_VERSION = 1
_PART_SUFFIX = ".part"


@dataclass
class TrainState:
    """The counters and host-side state of a run.

    `step`: rollout batches trained on. `num_optimizer_steps`: applied optimizer steps, which drive the
    schedule. `skipped_in_a_row`: non-finite gradients since the last applied one. `prompts`, `demonstrations`: the
    orders' own state. `summary`: what the final table needs of earlier attempts.
    """

    step: int = 0
    num_optimizer_steps: int = 0
    weight_version: int = 0
    skipped_in_a_row: int = 0
    prompts: dict[str, Any] = field(default_factory=dict)
    demonstrations: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def _metadata(groups: ParallelGroups) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.data_context.group,
    }


def _sharded_state(engine: PolicyEngine, *, loading: bool) -> dict[str, Any]:
    metadata = _metadata(engine.groups)
    names = ["model"] if len(engine.chunks) == 1 else [f"model{i}" for i in range(len(engine.chunks))]
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, engine.chunks)}
    state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"torch": torch.get_rng_state()}
    state |= {f"tracker/{name}": value.cpu() for name, value in get_cuda_rng_tracker().get_states().items()}
    if not is_cpu_backend():
        state["cuda"] = torch.cuda.get_rng_state().cpu()
    # The trackers may share one buffer, which safetensors refuses to write twice.
    return {name: value.clone() for name, value in state.items()}


def _restore_rng(state: dict[str, torch.Tensor]) -> None:
    get_cuda_rng_tracker().set_states({n.partition("/")[2]: v for n, v in state.items() if n.startswith("tracker/")})
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])


def _layout(groups: ParallelGroups) -> dict[str, int]:
    names = ("world", "tensor", "pipeline", "context", "data", "expert", "expert_tensor")
    return {name: getattr(groups, name).size for name in names}


def save_checkpoint(run_folder: RunFolder, engine: PolicyEngine, state: TrainState, keep_last: int) -> Path:
    """Write `checkpoints/step_N` and make it `latest`; then delete all but the newest `keep_last`.

    Returns its folder. Raises CheckpointError, the same on every rank, where it cannot be written; the
    checkpoints before it are untouched then. Collective over all ranks.
    """
    groups = engine.groups
    final = run_folder.checkpoint_dir(state.step)
    part = final.with_name(final.name + _PART_SUFFIX)

    def make_room() -> None:
        for leftover in (part, final):
            if leftover.exists():
                shutil.rmtree(leftover)
        (part / "megatron").mkdir(parents=True)
        (part / "rng").mkdir()

    _on_rank_0(groups, make_room, final)
    problems: list[str] = []
    try:
        dist_checkpointing.save(_sharded_state(engine, loading=False), str(part / "megatron"))
        save_file(_rng_state(), part / "rng" / f"rank_{groups.world.rank:05d}.safetensors")
    except (CheckpointException, OSError, RuntimeError) as error:
        problems.append(f"rank {groups.world.rank}: {_first_cause(error)}")
    raise_together(problems, groups.host, CheckpointError, f"{final} cannot be written")

    def commit() -> None:
        record = {"format_version": FORMAT_VERSION, "state": asdict(state), "layout": _layout(groups), "model": _model(engine)}
        atomic_write_json(part / "state.json", record)
        _sync_tree(part)
        os.replace(part, final)
        atomic_write_text(run_folder.latest_checkpoint_file, final.name)
        for old in _complete(run_folder)[:-keep_last]:
            shutil.rmtree(old)

    _on_rank_0(groups, commit, final)
    return final


def latest_checkpoint(run_folder: RunFolder) -> Path | None:
    """The folder that `latest` names, or None for a run without checkpoint. Raises CheckpointError if it is gone."""
    try:
        name = run_folder.latest_checkpoint_file.read_text().strip()
    except FileNotFoundError:
        return None
    folder = run_folder.checkpoints_dir / name
    if not (folder / "state.json").is_file():
        kept = ", ".join(f.name for f in _complete(run_folder)) or "none"
        raise CheckpointError(f"{run_folder.latest_checkpoint_file} names {name}, which is not a complete checkpoint; complete ones: {kept}")
    return folder


def load_checkpoint(folder: Path, engine: PolicyEngine) -> TrainState:
    """Fill the engine (weights, optimizer, schedule, RNG) from `folder` and return the run's state. Collective.

    Raises CheckpointError for a newer format, another model, a layout it cannot be read into, or damaged files.
    """
    record = read_json(folder / "state.json")
    if record is None or record.get("format_version") != FORMAT_VERSION:
        found = None if record is None else record.get("format_version")
        raise CheckpointError(f"{folder}/state.json: format_version {found}; this version reads {FORMAT_VERSION}")
    if record["model"] != _model(engine):
        raise CheckpointError(f"{folder} holds the model {record['model']}, the run's is {_model(engine)}")
    saved, here = record["layout"], _layout(engine.groups)
    if (saved["expert"] > 1) != (here["expert"] > 1):
        raise CheckpointError(
            f"{folder} was saved with parallel.expert {saved['expert']}; its optimizer state cannot be read with "
            f"parallel.expert {here['expert']} (Megatron keeps expert parameters apart only above 1): keep both above 1 or both 1"
        )
    problems: list[str] = []
    try:
        for part in engine.optimizer.chained_optimizers:
            # A fresh torch AdamW has no state to read into.
            if engine.config.optimizer.distributed:
                part._init_optimizer_states_with_dummy_values()
        loaded = dist_checkpointing.load(_sharded_state(engine, loading=True), str(folder / "megatron"))
        names = ["model"] if len(engine.chunks) == 1 else [f"model{i}" for i in range(len(engine.chunks))]
        for name, chunk in zip(names, engine.chunks):
            chunk.load_state_dict(loaded[name], strict=True)
        engine.optimizer.load_state_dict(loaded["optimizer"])
        _separate_steps(engine)
        rng_file = folder / "rng" / f"rank_{engine.groups.world.rank:05d}.safetensors"
        if saved == here:
            _restore_rng(load_file(rng_file))
    except (CheckpointException, EOFError, KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        problems.append(f"rank {engine.groups.world.rank}: {_first_cause(error)}")
    raise_together(problems, engine.groups.host, CheckpointError, f"{folder} cannot be read")
    state = TrainState(**record["state"])
    engine.scheduler.step(increment=state.num_optimizer_steps)
    return state


def _first_cause(error: BaseException) -> str:
    """The error in a line. A CheckpointException (not even an Exception) carries those of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _separate_steps(engine: PolicyEngine) -> None:
    """Give every parameter its own Adam step count again.

    Megatron's loader hands one tensor to all of them; torch's AdamW adds to it in place, once a parameter, and
    the bias correction would be wrong from the first step after a resume.
    """
    for part in engine.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def _model(engine: PolicyEngine) -> dict[str, Any]:
    spec = asdict(engine.spec)
    spec.pop("raw")
    return {**spec, "eos_token_ids": list(spec["eos_token_ids"]), "precision": engine.config.precision}


def _complete(run_folder: RunFolder) -> list[Path]:
    folders = run_folder.checkpoints_dir.glob("step_*")
    return sorted(f for f in folders if f.suffix != _PART_SUFFIX and (f / "state.json").is_file())


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for path in [parent, *(os.path.join(parent, f) for f in files)]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _on_rank_0(groups: ParallelGroups, action, target: Path) -> None:
    """Run `action` on rank 0; an OSError becomes a CheckpointError on every rank. Collective."""
    problems: list[str] = []
    if groups.world.rank == 0:
        try:
            action()
        except OSError as error:
            problems.append(str(error))
    raise_together(problems, groups.host, CheckpointError, f"{target} cannot be written")
