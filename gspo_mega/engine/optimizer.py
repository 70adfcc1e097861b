"""Megatron's optimizer and schedule, and one step that never applies a non-finite gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gspo_mega.config.schema import Optimizer
from gspo_mega.engine.precision import DTYPES


@dataclass(frozen=True)
class StepResult:
    """`grad_norm` before clipping (may be non-finite when `skipped`); `lr` that the step used."""

    grad_norm: float
    lr: float
    skipped: bool


def build_optimizer(settings: Optimizer, precision: str, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """AdamW over fp32 main parameters, sharded over data ranks when `settings.distributed`. Collective."""
    megatron_config = chunks[0].config
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=DTYPES[precision] == torch.bfloat16,
            # Says how FP8 parameters are written from the fp32 ones; without such parameters it has nothing to say.
            fp8_recipe=megatron_config.fp8_recipe if megatron_config.fp8_param else None,
            params_dtype=DTYPES[precision],
            use_distributed_optimizer=settings.distributed,
        ),
        chunks,
    )


def build_scheduler(settings: Optimizer, optimizer: MegatronOptimizer, num_optimizer_steps: int) -> OptimizerParamScheduler:
    """Learning rate by optimizer step: linear warm-up, then constant, linear or cosine to `min_lr`."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(num_optimizer_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # The YAML file says what the schedule is; a checkpoint only says how far it has come.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


@torch.no_grad()
def apply_gradients(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, clip_grad: float) -> StepResult:
    """One optimizer step from the reduced gradients, or none where their norm is not finite.

    The norm is the global one, so every rank decides alike. A skipped step leaves parameters, moments and
    schedule untouched. Collective.
    """
    lr = optimizer.param_groups[0]["lr"]
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(grad_norm):
        return StepResult(grad_norm=grad_norm, lr=lr, skipped=True)
    if clip_grad > 0.0:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()
    scheduler.step(increment=1)
    return StepResult(grad_norm=grad_norm, lr=lr, skipped=False)
