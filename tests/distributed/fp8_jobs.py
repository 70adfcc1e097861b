"""What ranks run in the tests of FP8 scales."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layout_jobs import layout_config, recorded_sequences, shard

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.checkpoint.quantized import is_fp8_parameter, plain_values
from gspo_mega.config import load_config
from gspo_mega.engine import precision
from gspo_mega.engine.losses import PassOutput
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.routing import RoutingPass
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan.layout import alignment_tokens
from gspo_mega.train.context import WorkerContext
from gspo_mega.verify.certify.cases import case_config
from gspo_mega.verify.certify.compare import Reference
from gspo_mega.verify.certify.ranks import run_case


def steps(folder: str, parallel: dict, num_steps: int, *, held: bool, **sections) -> dict:
    """|log s| of this rank's sequences per step, on the first mini-batch after the old pass: the policy is unchanged.

    Two mini-batches per step. `held` False: scales move as Transformer Engine moves them. `scales`: what forward and
    gradient scales were at the end of each step.
    """
    parallel = {"expert_tensor": 1, **parallel}
    config = layout_config(folder, parallel, **sections)
    spec = read_model_spec(folder)
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(**sizes)
    moving = mock.patch("gspo_mega.engine.forward_backward.held_scales", lambda config: contextlib.nullcontext())
    try:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=20)
        import_huggingface(folder, spec, groups, engine.chunks)
        engine.after_weights_loaded()
        log_s, scales = [], []
        with contextlib.nullcontext() if held else moving:
            if not held:
                engine.scales.is_active = False
            align = math.lcm(
                2 * groups.context.size * groups.tensor.size,
                alignment_tokens(config.parallel, config.precision, config.fp8),
            )
            for step in range(num_steps):
                sequences = recorded_sequences(seed=step)
                halves = [shard(part, groups.data.rank, groups.data.size, align) for part in (sequences, sequences[6:])]
                old = [engine.old_pass(half) for half in halves]
                for index, (half, before) in enumerate(zip(halves, old, strict=True)):
                    result, report = engine.train_mini_batch(half, ObjectiveSettings(), 11.0, before)
                    assert not result.skipped and (index == 1 or result.grad_norm > 0)
                    if index == 0:
                        log_s.append(np.abs(report.columns["log_s"]))
                state = engine.scales.state()
                scales.append(
                    {
                        direction: torch.cat([v for k, v in sorted(state.items()) if k.endswith(f"{direction}/scale")])
                        for direction in ("scaling_fwd", "scaling_bwd")
                    }
                    if held
                    else {}
                )
        return {"log_s": log_s, "scales": scales}
    finally:
        destroy_groups()


def certified(
    file: str,
    names: list[str],
    reference: str,
    run_dir: str,
    model: str,
    overrides: list[str],
    shares_amax: bool = True,
    other_order: bool = False,
    is_recorded: bool = False,
) -> list | None:
    """`gspo-mega certify` of the cases `names` of `file`, in this process, against its case `reference`, all with the
    weights of `model`. Not `shares_amax`: recipe `delayed` leaves every rank its own largest values of the
    first quarter of the tensors. `other_order`: the products of `names` add in another order than the reference's.
    `is_recorded`: an earlier call with the same `overrides` left the reference in `run_dir`.

    Returns on rank 0 (name, result) of each case.
    """
    own = [*overrides, f"model.path={model}"]
    given = {case.name: case for case in load_config(file, own, "certify").config.certify.cases}
    folder, found = Reference(Path(run_dir) / "reference"), []
    for name in [*([] if is_recorded else [reference]), *names]:
        case = given[name]
        case = case.model_copy(update={"set": {key: value for key, value in case.set.items() if key != "model.path"}})
        config = case_config(file, case, own).config
        context = cast(WorkerContext, SimpleNamespace(is_lead=dist.get_rank() == 0))
        sums = _other_order_of_sums() if other_order and name != reference else contextlib.nullcontext()
        with sums, contextlib.nullcontext() if shares_amax else _some_amax_unshared():
            result = run_case(context, config, case, folder, name == reference)
        if name != reference:
            found.append((name, result))
    return found if dist.get_rank() == 0 else None


@contextlib.contextmanager
def _other_order_of_sums() -> Iterator[None]:
    """Products add as another processor might: the last two thirds of a sum first, then the first third."""
    te_layers = importlib.import_module("gspo_mega.cpu.te_layers")

    def product(a: object, transposed_a: bool, b: object, transposed_b: bool) -> torch.Tensor:
        left, right = (
            te_layers.operand(matrix, columnwise=columnwise).to(te_layers._sum_dtype)
            for matrix, columnwise in ((b, transposed_b), (a, not transposed_a))
        )
        left, right = left.t() if transposed_b else left, right.t() if transposed_a else right
        third = left.size(1) // 3
        return (left[:, third:] @ right[third:] + left[:, :third] @ right[:third]).float()

    with mock.patch.object(te_layers, "_product", product):
        yield


@contextlib.contextmanager
def _some_amax_unshared() -> Iterator[None]:
    shares = precision._manager().reduce_tensor_across_group_op_max

    def shares_most(tensor: torch.Tensor, group: Any) -> None:
        own = tensor[: len(tensor) // 4].clone()
        shares(tensor, group)
        tensor[: len(own)] = own

    with mock.patch.object(precision._manager(), "reduce_tensor_across_group_op_max", shares_most):
        yield


def gradients(folder: str, denominator: float, passes: int | None = None, **sections) -> dict[str, torch.Tensor]:
    """This rank's gradient of a fresh engine by parameter, float32. `passes`: how often scales are measured before."""
    config, spec = layout_config(folder, {"expert_tensor": 1}, **sections), read_model_spec(folder)
    groups = create_groups(tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    try:
        with mock.patch.object(precision, "MEASURING_PASSES", passes or precision.MEASURING_PASSES):
            engine = PolicyEngine(config, spec, groups, num_optimizer_steps=20)
            import_huggingface(folder, spec, groups, engine.chunks)
            engine.after_weights_loaded()
            batch = shard(
                recorded_sequences(),
                groups.data.rank,
                groups.data.size,
                alignment_tokens(config.parallel, config.precision, config.fp8),
            )
            engine.policy_gradients(batch, ObjectiveSettings(), denominator, None)
        return {name: cast(Any, p).main_grad.float().clone() for name, p in engine.chunks[0].named_parameters()}
    finally:
        destroy_groups()


def scored(folder: str, **sections) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """(what a pass of a fresh engine through its bare pipeline says, its log-probs by `score`, those of an old pass of
    another fresh engine), of this rank's active tokens per micro-batch.
    """
    config, spec = layout_config(folder, {"expert_tensor": 1}, **sections), read_model_spec(folder)
    groups = create_groups(tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    try:
        batch = shard(
            recorded_sequences(),
            groups.data.rank,
            groups.data.size,
            alignment_tokens(config.parallel, config.precision, config.fp8),
        )
        engines = [PolicyEngine(config, spec, groups, num_optimizer_steps=20) for _ in range(2)]
        for engine in engines:
            import_huggingface(folder, spec, groups, engine.chunks)
            engine.after_weights_loaded()
        kept: list[torch.Tensor] = []

        def keep(batch: object, log_probs: torch.Tensor, entropies: object) -> PassOutput:
            kept.append(log_probs.detach())
            return PassOutput()

        try:
            routing = RoutingPass(engines[0].routers, len(batch))
            engines[0].pipeline.run(batch, keep, forward_only=True, routing=routing)
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        engines[0].score(batch, keep, replays_rollout=False)
        return said, kept, [one.log_probs for one in engines[1].old_pass(batch).micro_batches]
    finally:
        destroy_groups()


def block_scales(folder: str, **sections) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the scales of this rank's FP8 parameters after a step, the log-probs of an old pass after it)."""
    config, spec = layout_config(folder, {"expert_tensor": 1}, **sections), read_model_spec(folder)
    groups = create_groups(tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    try:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=20)
        import_huggingface(folder, spec, groups, engine.chunks)
        engine.after_weights_loaded()
        batch = shard(
            recorded_sequences(),
            groups.data.rank,
            groups.data.size,
            alignment_tokens(config.parallel, config.precision, config.fp8),
        )
        result, _ = engine.train_mini_batch(batch, ObjectiveSettings(), 11.0, None)
        assert not result.skipped and result.grad_norm > 0
        parameters = [cast(Any, p) for p in engine.chunks[0].parameters()]
        scales = [p._rowwise_scale_inv.flatten() for p in parameters if hasattr(p, "_rowwise_scale_inv")]
        return torch.cat(scales), [one.log_probs for one in engine.old_pass(batch).micro_batches]
    finally:
        destroy_groups()


def imported(folder: str, parallel: dict, fitted: bool, **sections) -> list[float]:
    """The relative error of each FP8 parameter of this rank after import, against the numbers that were loaded. Not
    `fitted`: with the scale that it was filled with.
    """
    parallel = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "expert_tensor": 1, **parallel}
    groups = create_groups(**parallel)
    try:
        engine = PolicyEngine(layout_config(folder, parallel, **sections), read_model_spec(folder), groups, 20)
        import_huggingface(folder, engine.spec, groups, engine.chunks)
        parameters = [p for p in engine.chunks[0].parameters() if is_fp8_parameter(p)]
        loaded = [cast(Any, p).exact_values.float() for p in parameters]
        with contextlib.nullcontext() if fitted else mock.patch.object(engine.scales, "fit_parameters"):
            engine.after_weights_loaded()
        with pytest.raises(RuntimeError, match="is without its loaded numbers"):
            engine.after_weights_loaded()
        return [
            float((plain_values(p).float() - exact).norm() / exact.norm())
            for p, exact in zip(parameters, loaded, strict=True)
        ]
    finally:
        destroy_groups()
