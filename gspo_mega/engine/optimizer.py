"""Megatron's data parallelism, optimizer and schedule around the policy, and a step that never applies a non-finite
gradient.

With `optimizer.overlap` gradients are reduced bucket by bucket during the backward pass. With `optimizer.distributed`
as well, parameters are gathered after the optimizer step while the next forward pass begins: a module waits for its own
bucket when it is called. Code that reads parameters in any other way (the LM head in chunks, export, publish,
checkpoints) calls `await_parameters` first.

The last part shows what a step reads of each parameter: its gradient after clipping, its settings and its moments. It
goes from the model's parameters to those of Megatron's optimizers, which are the same ones, fp32 copies, or this data
rank's shards of them. Certificates use it.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.base.errors import ModelError
from gspo_mega.config.schema import Optimizer
from gspo_mega.cpu.backend import is_cpu_backend
from gspo_mega.engine.precision import transformer_engine_error
from gspo_mega.engine.process_groups import ParallelGroups, device, dismantle_with_groups
from gspo_mega.plan.validate_precision import optimizer_problems

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    from gspo_mega.engine.model import PolicyModel

_NORM_ROW = 4096  # elements


# --- Data parallelism ----------------------------------------------------------------------------------------


def wrap_data_parallel(
    megatron_config: TransformerConfig, chunks: list[PolicyModel], settings: Optimizer
) -> list[DistributedDataParallel]:
    """Put Megatron's DDP around each chunk, with gradient buffers of `settings.gradients_dtype`, which are summed (not
    averaged) over data ranks.

    With `settings.overlap` it also sets in `megatron_config` how Megatron's schedules delay reductions until the last
    micro-batch, and gives every chunk its `await_parameters`.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.gradients_dtype == "fp32",
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=settings.overlap,
        overlap_param_gather=settings.overlap and settings.distributed,
        # `start_parameter_gathers` starts all gathers at once. If modules started them on demand, ranks whose experts
        # got no token would start theirs in another order, and the ranks would wait for each other.
        align_param_gather=settings.overlap and settings.distributed,
        average_in_collective=False,
        fp8_param_gather=bool(megatron_config.fp8 and megatron_config.fp8_param),
    )
    wrapped = [
        DistributedDataParallel(megatron_config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        dismantle_with_groups(chunk)
    if settings.overlap:
        no_sync, start = [w.no_sync for w in wrapped], [w.start_grad_sync for w in wrapped]
        schedule: Any = megatron_config  # Megatron declares one function; its interleaved schedule takes one per chunk
        schedule.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        # Pipeline stages start their reductions together, after the same backward pass, so that none slows a neighbour.
        schedule.grad_sync_func = start if len(wrapped) > 1 else start[0]
        for chunk, around in zip(chunks, wrapped, strict=True):
            chunk.await_parameters = partial(_await_parameters, around)
    return wrapped


def start_parameter_gathers(wrapped: Iterable[DistributedDataParallel]) -> None:
    """If gathers overlap, start to gather the parts of the parameters that each data rank updated in an optimizer step.
    Does not wait.

    Collective over the data-parallel groups, also after a skipped step: the buckets' state must stay the same.
    """
    for chunk in wrapped:
        if chunk.ddp_config.overlap_param_gather:
            _await_parameters(chunk)
            chunk.start_param_sync()


def _await_parameters(wrapped: DistributedDataParallel) -> None:
    """Wait until no parameter of the chunk is being gathered; starts nothing."""
    for bucket_group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        if bucket_group.param_gather_handle is not None:
            bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)


# --- The optimizer -------------------------------------------------------------------------------------------

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}  # FP8 numbers and scales are bytes


def require_optimizer(settings: Optimizer) -> None:
    """Raise ModelError with a line for every setting that this machine does not support."""
    problems = optimizer_problems(settings, has_gpu=not is_cpu_backend(), has_fused_adam=_has_fused_adam())
    if problems:
        raise ModelError("\n".join(f"{key}: {text}" for key, text in problems))


def _has_fused_adam() -> bool:
    if transformer_engine_error() is not None:
        return False
    adam = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
    return {"exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"} <= set(inspect.signature(adam).parameters)


# The parameters without weight decay; query and key norms are among them.
NORMS_AND_BIASES = ParamKey(
    name="*.bias", predicate=ParamPredicate(name="one_dimensional", fn=lambda parameter: parameter.dim() == 1)
)


def build_optimizer(settings: Optimizer, chunks: list[DistributedDataParallel]) -> ChainedOptimizer:
    """AdamW over fp32 main parameters, sharded over data ranks when `settings.distributed`. Collective.

    Weight decay applies to matrices only, or to all parameters with `settings.decay_norms_and_biases`.
    """
    megatron_config = chunks[0].config
    offload = settings.cpu_offload_fraction > 0
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=megatron_config.params_dtype == torch.bfloat16,
        # How FP8 parameters are written from the fp32 ones; meaningless without FP8 parameters.
        fp8_recipe=megatron_config.fp8_recipe if megatron_config.fp8_param else None,
        params_dtype=megatron_config.params_dtype,
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=settings.overlap and settings.distributed,
        # Megatron uses the same path for offloading: the fp32 parameters then belong to the inner optimizer, which
        # is the only part that knows if they are on the host or on the device.
        use_precision_aware_optimizer=settings.moments_dtype != "fp32" or offload,
        # Whole fp32 parameters, as the plan counts them. A bf16 parameter and its 16 missing bits apart from it can be
        # saved but not loaded.
        store_param_remainders=False,
        exp_avg_dtype=MOMENT_DTYPES[settings.moments_dtype],
        exp_avg_sq_dtype=MOMENT_DTYPES[settings.moments_dtype],
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=settings.cpu_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=offload,
    )
    # Megatron declares all keys of an override as required, and merges the ones that are there.
    no_decay = {NORMS_AND_BIASES: cast("ParamGroupOverride", {"wd_mult": 0.0})}
    overrides = {} if settings.decay_norms_and_biases else no_decay
    # Megatron declares the base class and returns a chain, also for a single optimizer.
    optimizer = cast("ChainedOptimizer", get_megatron_optimizer(config, [*chunks], config_overrides=overrides))
    if config.optimizer_cpu_offload:
        free_replaced_copies(optimizer)
    return optimizer


def free_replaced_copies(optimizer: ChainedOptimizer) -> None:
    """Free the fp32 parameters on the host that Megatron has replaced by new ones. Call it after an optimizer was built
    and after its state was loaded.

    Its offloaded Adam makes new copies of all parameters whenever a state is loaded into it, which happens while it is
    built, too. Only the garbage collector finds the old ones, whose hooks refer to each other, and it may not look for
    them in a whole run.
    """
    if any(part.config.optimizer_cpu_offload for part in optimizer.chained_optimizers):
        gc.collect()


@torch.no_grad()
def reload_parameters(optimizer: ChainedOptimizer) -> None:
    """Copy newly loaded parameters into the optimizer's fp32 ones.

    For an FP8 parameter Megatron would copy the rounded numbers. The fp32 ones would then lie on FP8's grid, and no
    step below half its spacing (3 % of a weight) would change the policy, until hundreds had added up. So the fp32 ones
    are made from the loaded numbers, which the loader left on the parameter as `exact_values` of its shape; they are
    dropped afterwards. With recipe `delayed` and moments below fp32, Transformer Engine's Adam owns the fp32 ones, and
    would make them from the rounded numbers in its first step.

    Raises RuntimeError for an FP8 parameter without loaded numbers.
    """
    optimizer.reload_model_params()
    for part in optimizer.chained_optimizers:
        shards: Any = part  # only the distributed optimizer, which FP8 parameters need, has these attributes
        if not hasattr(shards, "shard_fp32_from_float16_groups"):
            continue
        groups = (shards.model_float16_groups, shards.shard_fp32_from_float16_groups, shards.shard_float16_groups)
        for group in zip(*groups, strict=True):
            for model, main, stored in zip(*group, strict=True):
                exact = getattr(model, "exact_values", None)
                if exact is None:
                    if is_float8tensor(model):
                        raise RuntimeError(f"an FP8 parameter of {tuple(model.shape)} is without its loaded numbers")
                    continue
                where = shards._get_model_param_range_map(model)["param"]
                values = exact.view(-1)[where.start : where.end]
                if main is not None:
                    main.copy_(values)
                else:
                    shards.optimizer.initialize_state(stored, store_param_remainders=False)
                    shards.optimizer.set_scaled_state(stored, "master_param", values.float())
    _drop_exact_values(optimizer)


@torch.no_grad()
def write_parameters(optimizer: ChainedOptimizer) -> None:
    """Write the parameters from their loaded fp32 copies, as an optimizer step does at its end. Collective.

    The copies of FP8 parameters must be separate ones (`shard_fp32_from_float16_groups`).
    """
    for part in optimizer.chained_optimizers:
        shards: Any = part  # as above
        shards._copy_main_params_to_model_params()
    for chunk in optimizer.model_chunks:
        chunk.start_param_sync(force_sync=True)
    _drop_exact_values(optimizer)


def _drop_exact_values(optimizer: ChainedOptimizer) -> None:
    for chunk in optimizer.model_chunks:
        for parameter in chunk.parameters():  # also those whose fp32 numbers other data ranks hold
            vars(parameter).pop("exact_values", None)


def build_scheduler(
    settings: Optimizer, optimizer: MegatronOptimizer, num_optimizer_steps: int
) -> OptimizerParamScheduler:
    """The schedule of the learning rate by optimizer step: linear warm-up, then constant, linear or cosine to `min_lr`.

    Step k of n warm-up steps has the rate lr k / n. Megatron's own warm-up begins at a rate of 0, which would waste the
    first mini-batch; here it begins at lr / n and is one step shorter. A checkpoint stores
    the number of optimizer steps taken, so a resumed run has the rates of an uninterrupted one.
    """
    warmup_steps = max(settings.warmup_steps, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / warmup_steps,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup_steps - 1,
        lr_decay_steps=max(num_optimizer_steps, warmup_steps),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # The YAML file defines the schedule; a checkpoint only defines the position in it.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


# --- The step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. `grad_norm`: before clipping, infinite if `skipped`. `lr`: the learning rate of
    the step, whether it was applied or skipped.
    """

    grad_norm: float
    lr: float
    skipped: bool


@torch.no_grad()
def apply_gradients(
    optimizer: ChainedOptimizer,
    scheduler: OptimizerParamScheduler,
    clip_grad: float,
    groups: ParallelGroups,
    before_step: Callable[[], None] | None = None,
) -> StepResult:
    """Take one optimizer step from the reduced gradients, or none if one of them is not finite.

    All ranks decide the same. A skipped step leaves parameters, moments and schedule bitwise unchanged. `before_step`
    is called on every rank once gradients are clipped, before anything reads them. Collective.
    """
    lr = optimizer.param_groups[0]["lr"]
    optimizer.prepare_grads()  # copies them for the inner optimizer; without a loss scale it checks nothing
    grad_norm, finite = gradient_norm(optimizer, groups)
    if finite:
        if clip_grad > 0.0:
            for part in optimizer.chained_optimizers:
                parameters: list[torch.Tensor] = [*part.get_parameters()]
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm, has_decoupled_gradients(part))
        if before_step is not None:
            before_step()
        optimizer.step_with_ready_grads()
        _renew_inverse_scales(optimizer)
        scheduler.step(increment=1)
    optimizer.zero_grad()  # fp32 copies of bf16 gradients would stay until the next step; those in buffers do not go
    start_parameter_gathers(optimizer.model_chunks)
    return StepResult(grad_norm=grad_norm, lr=lr, skipped=not finite)


def gradient_norm(optimizer: ChainedOptimizer, groups: ParallelGroups) -> tuple[float, bool]:
    """(global L2 norm, whether every gradient on every rank is finite). The norm is infinite if one is not.

    Waits for the device once. Collective over all ranks.

    Each parameter counts once in the norm (`counts_in_norm`). The finiteness check covers the copies that do not count,
    too: Megatron's own norm would miss a copy that is the only one that is not finite.
    """
    device = torch.cuda.current_device()
    squares: dict[int, torch.Tensor] = {}
    summed_over: dict[int, dist.ProcessGroup] = {}
    bad = torch.zeros((), dtype=torch.float64, device=device)
    for part in optimizer.chained_optimizers:
        group = part.get_grad_stats_parallel_group()
        summed_over[id(group)] = group
        total = squares.setdefault(id(group), torch.zeros((), dtype=torch.float64, device=device))
        pairs = [(p, g) for p in part.get_parameters() if (g := read_gradient(part, p)) is not None]
        if not pairs:
            continue
        norms = norms_of([g for _, g in pairs])
        if chosen := [norm for norm, (p, _) in zip(norms, pairs, strict=True) if counts_in_norm(part, p, groups)]:
            total += torch.stack(chosen).double().square().sum()
        bad += torch.stack(norms).isfinite().logical_not().sum()
    for key, total in squares.items():
        dist.all_reduce(total, group=summed_over[key])
    dist.all_reduce(bad)
    *parts, num_bad = torch.stack([*squares.values(), bad]).tolist()
    norm = math.sqrt(sum(parts)) if num_bad == 0 else math.inf
    return norm, math.isfinite(norm)


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The L2 norm of each gradient, without a wait for the device.

    On a CPU torch adds all squares of a tensor one after the other in fp32: the norm of 28 million elements (an
    embedding) is then wrong by 0.2%. Rows of _NORM_ROW elements are short enough, and their norms are added in fp64.
    """
    if gradients[0].is_cuda:
        # One kernel for all of them, which adds in blocks; torch has no public name for it.
        return list(torch._foreach_norm(list(gradients)))  # pyright: ignore[reportPrivateImportUsage]
    return [_norm_by_rows(gradient.reshape(-1)) for gradient in gradients]


def _norm_by_rows(values: torch.Tensor) -> torch.Tensor:
    rest = values.numel() % _NORM_ROW
    rows = torch.linalg.vector_norm(values[: values.numel() - rest].view(-1, _NORM_ROW), dim=-1)
    parts = torch.cat([rows, torch.linalg.vector_norm(values[values.numel() - rest :]).reshape(1)])
    return torch.linalg.vector_norm(parts, dtype=torch.float64)


def counts_in_norm(part: MegatronOptimizer, parameter: torch.Tensor, groups: ParallelGroups) -> bool:
    """Whether the gradient of `parameter`, one of the optimizer `part`, counts in the norm on this rank.

    It does, unless another rank has the same gradient and counts it: the rank with the other copy of tied embeddings,
    or the first rank of the group that the parameter is not cut over. For an expert this is the expert-tensor group;
    Megatron uses the tensor group, whose ranks have different experts
    (https://github.com/NVIDIA/Megatron-LM/pull/5916, and https://github.com/NVIDIA/Megatron-LM/pull/6099 of biases).
    """
    if getattr(parameter, "shared", False):
        return False
    of_experts = any(group["is_expert_parallel"] for group in part.param_groups)
    group = groups.expert_tensor if of_experts else groups.tensor
    return bool(getattr(parameter, "tensor_model_parallel", False)) or group.rank == 0


def read_gradient(part: MegatronOptimizer, parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that the step of `part` reads for one of its parameters: float32 of its shape, or None."""
    return getattr(parameter, "decoupled_grad", None) if has_decoupled_gradients(part) else parameter.grad


def _renew_inverse_scales(optimizer: ChainedOptimizer) -> None:
    """Give FP8 parameters that Transformer Engine's Adam has stepped the inverse of the scale that it rounded with.

    Adam writes the inverse only on a data rank that steps a part of the parameter. The other ranks would gather the new
    numbers and read them with the inverse of an older scale. The scale itself is the same on all of them.
    """
    if not any(has_decoupled_gradients(part) for part in optimizer.chained_optimizers):
        return
    for chunk in optimizer.model_chunks:
        for parameter in chunk.parameters():
            quantizer: Any = getattr(parameter, "_quantizer", None)
            if quantizer is not None:
                cast(Any, parameter)._scale_inv.copy_(quantizer.scale.reciprocal())


def has_decoupled_gradients(part: MegatronOptimizer) -> bool:
    """Whether the gradients are in `decoupled_grad`, which holds gradients of another dtype than the parameters'."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


# --- What a step reads of each parameter ---------------------------------------------------------------------

# The settings that decide a parameter's update, in addition to its gradient and its moments.
SETTINGS = ("lr", "weight_decay", "betas", "eps")


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as an optimizer of this rank holds it. `model`: the model's parameter. `main`: the optimizer's own,
    for the elements [start, end) of the flattened `model`. `part`: the optimizer. `settings`: those of its parameter
    group.
    """

    model: torch.nn.Parameter
    main: torch.Tensor
    start: int
    end: int
    part: MegatronOptimizer
    settings: dict[str, Any]


def held_parameters(optimizer: ChainedOptimizer) -> Iterator[HeldParameter]:
    """Yields every parameter of which this rank steps some elements."""
    for part in optimizer.chained_optimizers:
        settings = {id(main): group for group in part.param_groups for main in group["params"]}
        for model, main in _pairs(part):
            if main is None or id(main) not in settings:
                continue
            start, end = 0, model.numel()
            if hasattr(part, "model_float16_groups"):
                shards: Any = part  # only the distributed optimizer has this method
                where = shards._get_model_param_range_map(model)["param"]
                start, end = where.start, where.end
            yield HeldParameter(model, main, start, end, part, settings[id(main)])


def _pairs(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yields (model's parameter, optimizer's parameter). Each kind of optimizer in Megatron has lists of its own."""
    if hasattr(part, "model_float16_groups"):  # the distributed optimizer
        own = part.shard_float16_groups if has_decoupled_gradients(part) else part.shard_fp32_from_float16_groups
        lists = [(part.model_float16_groups, own), (part.model_fp32_groups, part.shard_fp32_groups)]
    elif hasattr(part, "float16_groups"):
        lists = [
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
    else:
        own = [group["params"] for group in part.param_groups]
        lists = [(own, own)]
    for models, mains in lists:
        for of_group in zip(models, mains, strict=True):
            yield from zip(*of_group, strict=True)


@torch.no_grad()
def overwrite_gradient_buffers(
    optimizer: ChainedOptimizer, values: Callable[[HeldParameter], torch.Tensor | None]
) -> None:
    """Overwrite this rank's elements of every parameter's `main_grad` with `values(held)`, of the shape of `held.main`;
    None leaves them. This does not change gradients that the optimizer has already read.
    """
    for held in held_parameters(optimizer):
        found = values(held)
        if found is not None:
            gradient: Any = held.model
            gradient.main_grad.view(-1)[held.start : held.end].copy_(found.reshape(-1))


def step_gradient(held: HeldParameter) -> torch.Tensor | None:
    """The gradient that the next step reads: float32 of the shape of `held.main`, or None."""
    return read_gradient(held.part, held.main)


def moment(held: HeldParameter, name: str) -> torch.Tensor | None:
    """Adam's `exp_avg` or `exp_avg_sq` (`name`), of the shape of `held.main`; None before the first step, and if it is
    kept in eight bits.
    """
    optimizer = held.part.optimizer
    found = optimizer.state.get(held.main, {}).get(name)
    return None if found is None or found.dtype == torch.uint8 else found


def gradient_squares_by_kind(
    optimizer: ChainedOptimizer, groups: ParallelGroups, kinds: tuple[str, ...], kind_of: Callable[[torch.Tensor], str]
) -> dict[str, float]:
    """The sum of squares of the current gradients that count in the norm, for each of `kinds`. `kind_of`: the kind of a
    parameter of the model. Collective over all ranks, which get the same numbers.
    """
    sums: dict[int, torch.Tensor] = {}
    summed_over: dict[int, dist.ProcessGroup] = {}
    for part in optimizer.chained_optimizers:
        group = part.get_grad_stats_parallel_group()
        summed_over[id(group)] = group
        sums.setdefault(id(group), torch.zeros(len(kinds), dtype=torch.float64, device=device()))
    for held in held_parameters(optimizer):
        gradient = step_gradient(held)
        if gradient is not None and counts_in_norm(held.part, held.main, groups):
            place = kinds.index(kind_of(held.model))
            sums[id(held.part.get_grad_stats_parallel_group())][place] += gradient.double().square().sum()
    for key, values in sums.items():
        dist.all_reduce(values, group=summed_over[key])
    return dict(zip(kinds, torch.stack([*sums.values()]).sum(dim=0).tolist(), strict=True))
