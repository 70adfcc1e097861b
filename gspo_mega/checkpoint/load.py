"""A run's state on disk: everything that it needs to continue as if it had not stopped.

A checkpoint is a folder with `megatron/` (weights and optimizer in Megatron's `torch_dist` format), `rng/` (one file
per rank), `fp8/` (scales of the FP8 recipe `delayed`, one file per rank) and `state.json` (counters, prompt order,
everything that the run's progress depends on, and the checksum of every file). PPO's critic is a second model in the
same format, in `critic/` and `critic_fp8/`.

This file describes that content, chooses a checkpoint (`find_checkpoint`) and reads it (`load_checkpoint`). `save.py`
writes it, and `folders.py` handles the folders. `load_weights`, at the end, takes only a policy's first weights from a
Megatron checkpoint: a converted folder, or the checkpoint of another run. Optimizer, counters and random states then
stay those of a fresh run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint import folders
from gspo_mega.checkpoint.collectives import all_gather_json, broadcast_json, raise_together
from gspo_mega.checkpoint.fp8_scales import read_scales
from gspo_mega.checkpoint.optimizer_shards import load_optimizer, optimizer_state, read_optimizer_state
from gspo_mega.checkpoint.quantized import is_fp8_parameter, keep_exact, plain_values
from gspo_mega.checkpoint.safe_pickle import first_cause, refuse_code, write_tags_by_value
from gspo_mega.checkpoint.tensor_sources import MEGATRON_FOLDER
from gspo_mega.config.schema import Model
from gspo_mega.cpu.backend import is_cpu_backend
from gspo_mega.engine.adapters import load_trained, sharded_adapters
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.precision import without_extra_state
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.models.huggingface import content_stamp

# The critic's folder, next to the policy's `MEGATRON_FOLDER` and in the same format.
CRITIC_FOLDER = "critic"
# A model with its own optimizer and schedule.
TrainedModel = PolicyEngine | CriticEngine
# Fields that checkpoints of the first format always have. Later fields are left out if they have their defaults, so
# that old checkpoints still match.
_FIRST_FIELDS = (
    *("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "qk_norm"),
    *("attention_bias", "torch_dtype", "eos_token_ids", "moe", "rope_scaling", "rotary_share", "linear_bias", "sinks"),
    *("swiglu_limit", "window", "stored", "stored_fp4"),
)
_FIRST_EXPERT_FIELDS = ("num_experts", "experts_per_token", "expert_intermediate_size", "norm_topk_prob")
_EXTRA_STATE = "_extra_state"


@dataclass
class TrainState:
    """The counters and host-side state of a run.

    - `step`: rollout batches trained on
    - `num_optimizer_steps`: applied optimizer steps, which drive the schedule
    - `skipped_in_a_row`: optimizer steps skipped since the last applied one
    - `num_critic_steps`, `critic_skipped_in_a_row`: the same for a critic
    - `prompts`, `demonstrations`: the state of the data orders
    - `summary`: the part of earlier attempts in the final table
    - `history`: the fingerprint of the weights, of the run's start and of all data that it trained on
    """

    step: int = 0
    num_optimizer_steps: int = 0
    weight_version: int = 0
    skipped_in_a_row: int = 0
    prompts: dict[str, Any] = field(default_factory=dict)
    demonstrations: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: str = ""
    num_critic_steps: int = 0
    critic_skipped_in_a_row: int = 0


def _metadata(groups: ParallelGroups) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.data_context.group,
    }


def sharded_state(engine: TrainedModel, *, loading: bool, with_optimizer: bool = True) -> dict[str, Any]:
    """Return Megatron's sharded state of weights and optimizer, with this rank's shards.

    Weights share memory with the model. The tensors of the distributed optimizer are copies (`optimizer_shards.py`).
    """
    write_tags_by_value()
    metadata = _metadata(engine.groups)
    names = ["model"] if len(engine.chunks) == 1 else [f"model{i}" for i in range(len(engine.chunks))]
    state: dict[str, Any] = _sharded_weights(engine, names)
    if with_optimizer:
        state["optimizer"] = optimizer_state(engine.optimizer, state, metadata, loading=loading)
    return state


def _sharded_weights(engine: TrainedModel, names: list[str]) -> dict[str, Any]:
    if engine.config.lora is not None:  # the other weights are in the folder that the run started from
        return {name: dict(sharded_adapters(chunk, engine.groups)) for name, chunk in zip(names, engine.chunks)}
    metadata = _metadata(engine.groups)
    with without_extra_state(engine.chunks):
        return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, engine.chunks)}


def random_state() -> dict[str, torch.Tensor]:
    """Return this rank's random states by name: [number of bytes] uint8 each, on the host."""
    state = {"torch": torch.get_rng_state()}
    state |= {f"tracker/{name}": value.cpu() for name, value in _rng_tracker().get_states().items()}
    if not is_cpu_backend():
        state["cuda"] = torch.cuda.get_rng_state().cpu()
    # The trackers may share one buffer, and safetensors refuses to write a buffer twice.
    return {name: value.clone() for name, value in state.items()}


def _rng_tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "Megatron's RNG tracker is made with the process groups"
    return tracker


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Continue this rank's random streams from `random_state`."""
    _rng_tracker().set_states({n.partition("/")[2]: v for n, v in state.items() if n.startswith("tracker/")})
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])


def layout_of(groups: ParallelGroups) -> dict[str, int]:
    """Return the sizes of the parallel groups, as `state.json` records them."""
    names = ("world", "tensor", "pipeline", "context", "data", "expert", "expert_tensor")
    return {name: getattr(groups, name).size for name in names}


def find_checkpoint(run_folder: RunFolder, groups: ParallelGroups) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, or None for a run without checkpoints, and a warning for every damaged one.
    Collective.

    The search starts with the one that `latest` names. All ranks together compare every file's checksum. A damaged
    checkpoint is renamed to `step_N.damaged`, and the one before it is tried. Raises CheckpointError on every rank for
    a newer format, and if all checkpoints are damaged, because the run must not silently start over.
    """
    warnings: list[str] = []
    problems: list[str] = []
    names: list[str] = []
    if groups.is_lead:
        try:
            folders.restore_moved_aside(run_folder)
            names = [str(folder) for folder in folders.candidates(run_folder)]
        except (OSError, CheckpointError) as error:
            problems.append(str(error))
    raise_together(problems, groups.host, CheckpointError, "no checkpoint can be chosen")
    for name in broadcast_json(names, groups.host):
        folder = Path(name)
        damage = sorted({problem for part in all_gather_json(_damage(folder, groups), groups.host) for problem in part})
        if groups.is_lead and (damage or warnings):
            try:
                if damage:
                    folders.set_aside_damaged(folder)
                else:
                    folders.make_latest(run_folder, folder)
            except OSError as error:
                problems.append(f"{folder}: {error.strerror}")
        raise_together(problems, groups.host, CheckpointError, "a damaged checkpoint cannot be moved aside")
        if not damage:
            return folder, warnings
        warnings.append(f"warning  checkpoint {folder.name} is damaged and passed over: {'; '.join(damage[:3])}")
    if warnings:
        raise CheckpointError("\n  ".join([f"{run_folder.checkpoints_dir}: no checkpoint is whole:", *warnings]))
    return None, []


def _damage(folder: Path, groups: ParallelGroups) -> list[str]:
    try:
        files = folders.read_record(folder).get("files", {})
    except (OSError, ValueError) as error:
        return [str(error)]
    return folders.checksum_problems(folder, files, groups.world.rank, groups.world.size)


def is_untrained(state: TrainState, name: str, has_critic: bool) -> bool:
    """Whether the model of the folder `name` has had no optimizer step: a policy whose critic warms up, or a critic
    whose steps were all skipped. Such an optimizer has no state, and the model continues from where the run began.
    """
    return has_critic and (state.num_critic_steps if name == CRITIC_FOLDER else state.num_optimizer_steps) == 0


def load_checkpoint(
    folder: Path,
    engine: PolicyEngine,
    critic: CriticEngine | None = None,
    begin: Callable[[TrainedModel], None] | None = None,
) -> TrainState:
    """Fill the engine (weights, optimizer, schedule, RNG) and the critic, if there is one, from `folder`. Returns the
    run's state. Collective.

    The layout may differ from the saved one. The ranks' random states are then those of a fresh start. `begin`, which
    is needed with a critic, fills a model that `is_untrained` as a fresh start of the run does.

    Raises CheckpointError for a newer format, another model, an incompatible layout, damaged files, or files that could
    run a program when Megatron loads them.
    """
    record = folders.read_record(folder)
    if record["model"] != model_of(engine):
        raise CheckpointError(f"{folder} holds the model {record['model']}, the run's is {model_of(engine)}")
    if record.get("base") != (base := base_stamp(engine)):
        raise CheckpointError(
            f"{folder} holds adapters for other weights than those of {base_folder(engine.config.model)} now (base"
            f" {record.get('base')}, there {base}): the folder was written again. Bring its weights back, or start"
            " another run"
        )
    if critic is not None and record.get(CRITIC_FOLDER) != model_of(critic):
        raise CheckpointError(
            f"{folder} holds the critic {record.get(CRITIC_FOLDER)}, the run's is {model_of(critic)}; start another run"
        )
    saved, here = record["layout"], layout_of(engine.groups)
    world, host = engine.groups.world, engine.groups.host
    state = TrainState(**record["state"])
    models: dict[str, TrainedModel] = {MEGATRON_FOLDER: engine} | ({} if critic is None else {CRITIC_FOLDER: critic})
    for name, model in models.items():
        if is_untrained(state, name, critic is not None):
            assert begin is not None
            begin(model)
            model.scales.load(_scales(folder, name, model, saved))
        else:
            _load_model(folder, name, model, saved)
            model.scheduler.step(increment=state.num_critic_steps if model is critic else state.num_optimizer_steps)
    problems: list[str] = []
    try:
        if saved == here:
            restore_random_state(load_file(folder / folders.rank_file("rng", world.rank)))
    except (OSError, SafetensorError, KeyError, RuntimeError, ValueError) as error:
        problems.append(f"rank {world.rank}: {first_cause(error)}")
    raise_together(problems, host, CheckpointError, f"{folder} cannot be read")
    return state


def _load_model(folder: Path, name: str, engine: TrainedModel, saved: dict[str, int]) -> None:
    """Fill one model and its optimizer from its folder `name`, which ranks in the layout `saved` wrote. Collective."""
    world, host = engine.groups.world, engine.groups.host
    raise_together(
        refuse_code(folder / name, world.rank, world.size), host, CheckpointError, f"{folder} cannot be read"
    )
    problems: list[str] = []
    try:
        for part in engine.optimizer.chained_optimizers:
            # A new torch AdamW has no state to read into.
            if isinstance(part, DistributedOptimizer):
                part._init_optimizer_states_with_dummy_values()
        loaded = _load_plain(sharded_state(engine, loading=True), folder / name)
        names = ["model"] if len(engine.chunks) == 1 else [f"model{i}" for i in range(len(engine.chunks))]
        scales = _scales(folder, name, engine, saved)
        engine.scales.load(scales)  # FP8 parameters are rounded with them when they are filled; this counts as a use
        with without_extra_state(engine.chunks):
            for key, chunk in zip(names, engine.chunks):
                load_trained(chunk, loaded[key])
        is_regrouped = (saved["expert"] > 1) != (engine.groups.expert.size > 1)
        load_optimizer(engine.optimizer, loaded["optimizer"], is_regrouped=is_regrouped)
        weights = _sharded_weights(engine, names)
        read_optimizer_state(engine.optimizer, weights, folder / name, host)
        if engine.scales.is_active and not scales:
            for key, chunk in zip(names, engine.chunks):
                for parameter_name, parameter in chunk.named_parameters():
                    keep_exact(parameter, loaded[key][parameter_name])
            engine.after_optimizer_loaded()
        _separate_steps(engine)
        engine.scales.load(scales)
    except (CheckpointException, EOFError, KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        problems.append(f"rank {world.rank}: {first_cause(error)}")
    raise_together(problems, host, CheckpointError, f"{folder} cannot be read")


def _load_plain(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the state that `wanted` describes, without FP8 parameters: their parts are loaded as plain tensors.
    Collective.

    Megatron-Core 0.19 would fill such parameters themselves, so that the loaded numbers are lost, and round them before
    their scales are loaded; 0.16 takes plain tensors.
    """
    for part in nested_values(wanted):
        if isinstance(getattr(part, "data", None), torch.Tensor) and is_fp8_parameter(part.data):
            part.data = plain_values(part.data)
    # Megatron's annotation includes a tuple, which it returns only for a strictness that is not used here.
    return cast(dict[str, Any], dist_checkpointing.load(wanted, str(folder)))


def fp8_folder(name: str) -> str:
    """Return the name of the folder in a checkpoint with the FP8 scales of the model in the folder `name`."""
    return "fp8" if name == MEGATRON_FOLDER else f"{name}_fp8"


def _scales(folder: Path, name: str, engine: TrainedModel, saved: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return a model's FP8 state on this rank; empty if the recipe has none, or if an earlier version saved none."""
    if not engine.scales.is_active:
        return {}
    groups, moe = engine.groups, engine.spec.moe
    return read_scales(
        folder / fp8_folder(name),
        engine.scales.module_names(),
        saved,
        layout_of(groups),
        rank=groups.world.rank,
        expert_rank=groups.expert.rank,
        num_experts=0 if moe is None else moe.num_experts,
    )


def _separate_steps(engine: TrainedModel) -> None:
    """Give every parameter its own Adam step count again.

    Megatron's loader gives one tensor to all of them. torch's AdamW would add to it in place once per parameter, and
    the bias correction would be wrong from the first step after a resume.
    """
    for part in engine.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def model_of(engine: TrainedModel) -> dict[str, Any]:
    """Return the model's spec and precision, as `state.json` records them."""
    spec = asdict(engine.spec)
    defaults = {field.name: field.default for field in fields(engine.spec)}
    later = [name for name in spec if name not in _FIRST_FIELDS and spec[name] == defaults[name]]
    for name in {"raw", "num_ignored_layers", *later}:
        spec.pop(name)
    if engine.spec.moe is not None:
        defaults = {field.name: field.default for field in fields(engine.spec.moe)}
        spec["moe"] = {
            name: value
            for name, value in spec["moe"].items()
            if name in _FIRST_EXPERT_FIELDS or value != defaults[name]
        }
    lora = engine.config.lora
    adapters = {} if lora is None else {"lora": lora.model_dump(include={"rank", "alpha", "targets"}, mode="json")}
    # As the file gives it back: with lists in place of tuples.
    return json.loads(json.dumps({**spec, "precision": engine.config.precision, **adapters}))


def base_folder(model: Model) -> Path:
    """Return the folder of the weights that a policy with adapters leaves as they are."""
    return Path(model.weights or model.path)


def base_stamp(engine: TrainedModel) -> str | None:
    """Return what distinguishes the weights that adapters belong to from others, or None without `lora`."""
    return None if engine.config.lora is None else content_stamp(base_folder(engine.config.model))


def load_weights(folder: Path, engine: PolicyEngine) -> None:
    """Fill the engine's parameters, cast to their dtype, from `folder`/megatron. Collective.

    Megatron's loader reads them into this layout, on each rank its shards. The caller must call `after_weights_loaded`
    next. Every file is checked before Megatron's loader gets it. Raises CheckpointError, the same on every rank, if a
    parameter is missing, of another shape, or damaged, or if loading could run a program.
    """
    host = engine.groups.host
    raise_together(
        refuse_code(folder / MEGATRON_FOLDER, engine.groups.world.rank, engine.groups.world.size),
        host,
        CheckpointError,
        f"{folder} cannot be loaded",
    )
    problems: list[str] = []
    try:
        for chunk in engine.chunks:
            wanted = chunk.sharded_state_dict(metadata={"dp_cp_group": engine.groups.data_context.group})
            # Transformer Engine's scaling states are not weights, and a converted checkpoint has none.
            wanted = {name: value for name, value in wanted.items() if not isinstance(value, ShardedObject)}
            loaded = _load_plain(wanted, folder / MEGATRON_FOLDER)
            result = chunk.load_state_dict({name: loaded[name] for name in wanted}, strict=False)
            problems += [f"{name} is not filled" for name in result.missing_keys if not name.endswith(_EXTRA_STATE)]
            for name, parameter in chunk.named_parameters():
                if name in loaded:  # all but those named in `problems`
                    keep_exact(parameter, loaded[name])
    except (
        CheckpointException,
        dist_checkpointing.core.CheckpointingException,
        EOFError,
        KeyError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        problems.append(first_cause(error))
    raise_together(problems, host, CheckpointError, f"{folder} cannot be loaded")
