"""What makes a layout of experts impossible, or known to train wrong, each with the nearest valid value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.plan.layout_sizes import Sizes
from gspo_mega.plan.model_division import can_divide_model, divisors, nearest
from gspo_mega.plan.verification import is_on_gpu

# Dispatchers of DeepEP's kernels, Megatron's `flex`.
_BY_KERNELS = ("deepep", "hybridep")


def check_experts(
    config: Config, spec: ModelSpec, sizes: Sizes, device: Literal["cpu", "gpu"] | None
) -> Iterator[Violation]:
    """Every violation that concerns experts. `device`: what the ranks will run on, None where that is not known."""
    if spec.moe is None:
        yield from _without_experts(config, spec)
        return
    yield from _router(config, spec, spec.moe)
    yield from _division(config, spec, spec.moe, sizes)
    yield from _dispatch(config, spec, device)


def _without_experts(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    for key, value in (("expert", config.parallel.expert), ("expert_tensor", config.parallel.expert_tensor)):
        if value > 1:
            yield Violation(f"parallel.{key}", f"{value}, but the model ({spec.family}) has no experts", "1")
    if config.parallel.expert_dispatcher in _BY_KERNELS:
        yield Violation(
            "parallel.expert_dispatcher",
            f"{config.parallel.expert_dispatcher}, but the model ({spec.family}) has no experts",
            "alltoall",
        )
    if config.rollout.return_routed_experts:
        yield Violation("rollout.return_routed_experts", f"the model ({spec.family}) has no experts", "false")
    for key, off in (
        ("load_balancing", "none"),
        ("z_loss_coefficient", 0.0),
        ("expert_bias_update_rate", 0.0),
        ("routing_replay", "none"),
    ):
        if (value := getattr(config.moe, key)) != off:
            yield Violation(
                f"moe.{key}",
                f"{value}, but the model ({spec.family}) has no experts",
                f"{off:g}" if off == 0 else "none",
            )


def _router(config: Config, spec: ModelSpec, moe: MoeSpec) -> Iterator[Violation]:
    if config.moe.expert_bias_update_rate > 0 and not moe.expert_bias:
        yield Violation(
            "moe.expert_bias_update_rate",
            f"{config.moe.expert_bias_update_rate:g}, but the routers of {spec.family} have no expert bias (that takes"
            " sigmoid scores and a bias in the checkpoint)",
            "0, with moe.load_balancing or without",
        )
    if moe.experts_per_token == 1 and moe.norm_topk_prob:
        yield Violation(
            "model.path",
            "num_experts_per_tok 1 with norm_topk_prob: the one expert's weight is 1 whatever its router says, so that"
            " router cannot learn, and Megatron refuses it",
            "a model with norm_topk_prob false, or with more experts per token",
        )


def _division(config: Config, spec: ModelSpec, moe: MoeSpec, sizes: Sizes) -> Iterator[Violation]:
    parallel = config.parallel
    expert, expert_tensor = parallel.expert, parallel.expert_tensor
    stands = can_divide_model(config, spec) and sizes.world % sizes.model == 0
    per_stage = sizes.world // parallel.pipeline
    fitting = [
        d for d in divisors(moe.num_experts) if sizes.world % (d * expert_tensor * parallel.pipeline) == 0 or not stands
    ]
    if moe.num_experts % expert:
        yield Violation(
            "parallel.expert",
            f"{expert} does not divide the model's {moe.num_experts} experts",
            nearest(expert, fitting),
        )
    elif stands and sizes.world % (expert * expert_tensor * parallel.pipeline):
        yield Violation(
            "parallel.expert",
            f"expert {expert} x expert_tensor {expert_tensor} x pipeline {parallel.pipeline} does not divide"
            f" {sizes.world} ranks",
            nearest(expert, fitting),
        )
    if moe.expert_intermediate_size % expert_tensor:
        yield Violation(
            "parallel.expert_tensor",
            f"{expert_tensor} does not divide the experts' intermediate size {moe.expert_intermediate_size}",
            nearest(expert_tensor, divisors(moe.expert_intermediate_size)),
        )
    if stands and expert == 1 and expert_tensor != parallel.tensor:
        # Megatron keeps the gradients of experts apart only above 1; at 1 they go with everything else.
        choices = [d for d in divisors(moe.num_experts) if d > 1 and per_stage % (d * expert_tensor) == 0]
        yield Violation(
            "parallel.expert",
            f"tensor {parallel.tensor} with expert 1 and expert_tensor {expert_tensor} trains wrong: experts would not"
            " be reduced over their data-parallel group",
            " or ".join([f"expert {d}" for d in choices[:1]] + [f"expert_tensor {parallel.tensor}"]),
        )


def _dispatch(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    parallel = config.parallel
    if parallel.tensor > 1 and not parallel.sequence:
        yield Violation(
            "parallel.sequence",
            "experts with tensor > 1 need sequence parallelism (Megatron's dispatchers count on it)",
            "true",
        )
    if parallel.pipeline > 1 and parallel.expert_dispatcher == "allgather":
        yield Violation(
            "parallel.expert_dispatcher",
            f"allgather needs micro-batches of one length, and pipeline {parallel.pipeline} runs packs of different"
            " lengths",
            "alltoall",
        )
    if (chosen := parallel.expert_dispatcher) in _BY_KERNELS:
        if is_on_gpu(config, device) is False:
            yield Violation(
                "parallel.expert_dispatcher", f"{chosen} without GPUs: DeepEP is made of their kernels", "alltoall"
            )
        if config.precision == "fp32":
            yield Violation(
                "parallel.expert_dispatcher",
                f"{chosen} with precision fp32: DeepEP moves bf16 numbers",
                "alltoall, or precision bf16 or fp8",
            )
        if parallel.expert * parallel.expert_tensor == 1:
            yield Violation(
                "parallel.expert_dispatcher",
                f"{chosen} with expert 1 and expert_tensor 1: there are no other ranks' experts",
                "alltoall",
            )
    if gathers_unevenly(config, spec) and device == "cpu":
        yield Violation(
            "parallel.expert_dispatcher",
            f"alltoall with expert {parallel.expert} and expert_tensor {parallel.expert_tensor} gathers uneven token"
            " counts, which gloo, the only backend without GPUs, cannot",
            "allgather",
        )


def gathers_unevenly(config: Config, spec: ModelSpec) -> bool:
    """Does an expert-tensor group gather a different number of tokens from each of its ranks?

    It does not where these ranks hold equal parts of packs and keep all of them: with a single expert rank, or where
    every token goes to every expert.
    """
    parallel, moe = config.parallel, spec.moe
    if moe is None or parallel.expert_tensor == 1 or parallel.expert_dispatcher != "alltoall":
        return False
    of_one_pack = parallel.tensor * parallel.context % parallel.expert_tensor == 0
    return not of_one_pack or (parallel.expert > 1 and moe.experts_per_token < moe.num_experts)
