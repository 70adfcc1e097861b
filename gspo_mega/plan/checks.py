"""What makes a layout impossible for a model, each with the nearest value that would do.

Three kinds: sizes that do not divide, layouts known to train wrong, lengths and batches that do not fit. All
of them are found before anything starts. Settings that are wrong whatever the model are `config/rules.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gspo_mega.config.schema import Config
from gspo_mega.model.spec import ModelSpec
from gspo_mega.plan.alignment import RECIPE_ROWS, alignment_tokens
from gspo_mega.plan.optimizer_needs import VALID_WITHOUT_GPU, check_optimizer
from gspo_mega.plan.precision_needs import check_precision, unaligned_sizes
from gspo_mega.plan.verification import is_on_gpu


class Violation(NamedTuple):
    """`key`: dotted; `nearest`: the nearest valid values, in words, empty when there are none."""

    key: str
    text: str
    nearest: str = ""


@dataclass(frozen=True)
class Sizes:
    """Sizes that follow from a configuration alone. `data` is rounded down where ranks do not divide."""

    world: int
    model: int
    data: int
    sequence_parallel: bool
    sequence_multiple: int
    pack_multiple: int
    longest_sequence: int

    @classmethod
    def of(cls, config: Config) -> Sizes:
        parallel = config.parallel
        world = config.cluster.num_nodes * config.cluster.ranks_per_node
        model = parallel.tensor * parallel.pipeline * parallel.context
        sequence_parallel = parallel.sequence and parallel.tensor > 1
        # Context parallelism gives each rank two equal slices of a sequence, one from either end, to balance causal
        # attention; sequence parallelism cuts a pack's tokens evenly over tensor ranks.
        multiple = (2 * parallel.context if parallel.context > 1 else 1) * (parallel.tensor if sequence_parallel else 1)
        return cls(
            world=world,
            model=model,
            data=max(1, world // model),
            sequence_parallel=sequence_parallel,
            sequence_multiple=multiple,
            pack_multiple=math.lcm(multiple, alignment_tokens(config)),
            longest_sequence=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        )


def check_layout(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> list[Violation]:
    """Every violation, in the order of the file's sections. Empty for a layout that can run."""
    sizes = Sizes.of(config)
    return [
        *_ranks(config, spec, sizes),
        *_model_division(config, spec, sizes),
        *_pipeline(config, spec, sizes),
        *_experts(config, spec, sizes, device),
        *_precision(config, spec, device),
        *_optimizer(config, device),
        *_batches(config, sizes),
        *_lengths(config, spec, sizes),
        *_servers(config, spec, sizes, device),
    ]


def nearest(value: int, valid: Iterable[int]) -> str:
    """The closest valid values below and above, in words."""
    choices = sorted(set(valid))
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(map(str, below + above))


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _dividing(world: int, others: int, choices: list[int]) -> list[int]:
    """Those of `choices` that, with `others`, divide the ranks there are; all where none does, and ranks have to change
    too.
    """
    return [choice for choice in choices if world % (choice * others) == 0] or choices


def _ranks(config: Config, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    parallel = config.parallel
    if sizes.world % sizes.model and _fits_model(config, spec):
        multiples = [sizes.model * k for k in (sizes.world // sizes.model, sizes.world // sizes.model + 1) if k > 0]
        yield Violation(
            "cluster.ranks_per_node",
            f"num_nodes {config.cluster.num_nodes} x ranks_per_node {config.cluster.ranks_per_node} = {sizes.world}"
            f" ranks, which tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} ="
            f" {sizes.model} does not divide",
            " or ".join(f"{multiple} ranks in all" for multiple in multiples),
        )
    cluster = config.cluster
    if cluster.gpus_per_node is not None and cluster.ranks_per_node > cluster.gpus_per_node:
        yield Violation(
            "cluster.ranks_per_node",
            f"{cluster.ranks_per_node} ranks, one GPU each, on nodes of {cluster.gpus_per_node} GPUs",
            str(cluster.gpus_per_node),
        )
    if cluster.gpus_per_node is not None and config.server.tensor > cluster.gpus_per_node:
        yield Violation(
            "server.tensor",
            f"a server on {config.server.tensor} GPUs does not fit on a node of {cluster.gpus_per_node}; sharing one"
            " over nodes is not supported",
            str(cluster.gpus_per_node),
        )


def _fits_model(config: Config, spec: ModelSpec) -> bool:
    """Can the model be cut into so many tensor and pipeline ranks? Where not, what else follows from these sizes is
    left unsaid: they have to change first.
    """
    return not _uncut(spec, config.parallel.tensor) and spec.num_layers % config.parallel.pipeline == 0


def _model_division(config: Config, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    tensor = config.parallel.tensor
    if bad := _uncut(spec, tensor):
        valid = _dividing(
            sizes.world, sizes.model // tensor, [size for size in divisors(spec.num_heads) if not _uncut(spec, size)]
        )
        yield Violation(
            "parallel.tensor", f"{tensor} does not divide the model's {', '.join(bad)}", nearest(tensor, valid)
        )


def _uncut(spec: ModelSpec, tensor: int) -> list[str]:
    """What of the model so many tensor ranks cannot divide, in words."""
    # Where there are more ranks than key-value heads, several ranks share a head: Megatron gathers the projection's
    # rows.
    shared = tensor % spec.num_kv_heads == 0 and 2 * spec.num_kv_heads * spec.head_dim % tensor == 0
    sizes = [
        ("attention heads", spec.num_heads),
        ("key-value heads", 0 if shared or spec.latent is not None else spec.num_kv_heads),
    ]
    if not spec.has_experts(0):
        sizes.append(("intermediate size", spec.intermediate_size))
    if spec.moe is not None:
        sizes.append(("shared experts' intermediate size", spec.moe.shared_intermediate_size))
    return [f"{name} {size}" for name, size in sizes if size % tensor]


def _pipeline(config: Config, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    pipeline, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if spec.num_layers % pipeline:
        valid = _dividing(sizes.world, sizes.model // pipeline, divisors(spec.num_layers))
        yield Violation(
            "parallel.pipeline",
            f"{pipeline} does not divide the model's {spec.num_layers} layers",
            nearest(pipeline, valid),
        )
        return
    if virtual is not None and pipeline == 1:
        yield Violation(
            "parallel.virtual_pipeline",
            f"{virtual} chunks a rank need pipeline stages, and pipeline is 1",
            "leave it out (null)",
        )
        return
    layers = spec.num_layers // pipeline
    if virtual is not None and layers % virtual:
        choices = [d for d in divisors(layers) if d > 1]
        yield Violation(
            "parallel.virtual_pipeline",
            f"{virtual} does not divide the {layers} layers of a pipeline stage",
            nearest(virtual, choices) or "leave it out (null)",
        )
        return
    layers //= virtual or 1
    if config.recompute.granularity == "full" and config.recompute.num_layers > layers:
        yield Violation(
            "recompute.num_layers",
            f"{config.recompute.num_layers} is more than the {layers} layers of a model chunk",
            str(layers),
        )


def _experts(config: Config, spec: ModelSpec, sizes: Sizes, device: str | None) -> Iterator[Violation]:
    parallel = config.parallel
    if spec.moe is None:
        for key, value in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
            if value > 1:
                yield Violation(f"parallel.{key}", f"{value}, but the model ({spec.family}) has no experts", "1")
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
        return
    if config.moe.expert_bias_update_rate > 0 and not spec.moe.expert_bias:
        yield Violation(
            "moe.expert_bias_update_rate",
            f"{config.moe.expert_bias_update_rate:g}, but the routers of {spec.family} have no expert bias (that takes"
            " sigmoid scores and a bias in the checkpoint)",
            "0, with moe.load_balancing or without",
        )
    moe, expert, expert_tensor = spec.moe, parallel.expert, parallel.expert_tensor
    if moe.experts_per_token == 1 and moe.norm_topk_prob:
        yield Violation(
            "model.path",
            "num_experts_per_tok 1 with norm_topk_prob: the one expert's weight is 1 whatever its router says, so that"
            " router cannot learn, and Megatron refuses it",
            "a model with norm_topk_prob false, or with more experts a token",
        )
    stands = _fits_model(config, spec) and sizes.world % sizes.model == 0
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
    if parallel.tensor > 1 and not parallel.sequence:
        yield Violation(
            "parallel.sequence",
            "experts with tensor > 1 need sequence parallelism (Megatron's dispatchers count on it)",
            "true",
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
    if parallel.pipeline > 1 and parallel.expert_dispatcher == "allgather":
        yield Violation(
            "parallel.expert_dispatcher",
            f"allgather needs micro-batches of one length, and pipeline {parallel.pipeline} runs packs of different"
            " lengths",
            "alltoall",
        )
    if gathers_unevenly(config, spec) and device == "cpu":
        yield Violation(
            "parallel.expert_dispatcher",
            f"alltoall with expert {expert} and expert_tensor {expert_tensor} gathers uneven token counts, which gloo,"
            " the only backend without GPUs, cannot",
            "allgather",
        )


def gathers_unevenly(config: Config, spec: ModelSpec) -> bool:
    """Do the ranks of an expert-tensor group gather as many tokens from each as its experts happened to be given?

    Not where these ranks have equal parts of packs, and keep all of them: a single expert rank, or every expert chosen.
    """
    parallel, moe = config.parallel, spec.moe
    if moe is None or parallel.expert_tensor == 1 or parallel.expert_dispatcher != "alltoall":
        return False
    of_one_pack = parallel.tensor * parallel.context % parallel.expert_tensor == 0
    return not of_one_pack or (parallel.expert > 1 and moe.experts_per_token < moe.num_experts)


def _precision(config: Config, spec: ModelSpec, device: str | None) -> Iterator[Violation]:
    if device == "cpu" and (problem := check_precision(config, None, None, None)) is not None:
        yield Violation("precision", problem)
    sides = list(unaligned_sizes(config, spec))
    if sides:
        yield Violation(
            "fp8.recipe",
            f"{config.fp8.recipe} needs every side of a linear layer on a rank to be a multiple of"
            f" {RECIPE_ROWS[config.fp8.recipe]}, which these are not: {', '.join(sides)}",
            " or ".join(
                r
                for r in RECIPE_ROWS
                if RECIPE_ROWS[r] < RECIPE_ROWS[config.fp8.recipe] and not any(unaligned_sizes(config, spec, r))
            ),
        )


def _optimizer(config: Config, device: str | None) -> Iterator[Violation]:
    if device == "cpu":
        for key, problem in check_optimizer(config.optimizer, has_gpu=False, has_fused_adam=False):
            yield Violation(key, problem, VALID_WITHOUT_GPU[key])


def _batches(config: Config, sizes: Sizes) -> Iterator[Violation]:
    batch = config.batch
    num_sequences = batch.prompts_per_step * batch.group_size
    if num_sequences // batch.num_mini_batches < sizes.data:
        largest = num_sequences // sizes.data
        yield Violation(
            "batch.num_mini_batches",
            f"{num_sequences} trajectories (prompts_per_step x group_size) in {batch.num_mini_batches} mini-batches are"
            f" {num_sequences // batch.num_mini_batches} a mini-batch, fewer than the {sizes.data} data-parallel ranks",
            (
                str(largest)
                if largest
                else f"1, with at least {math.ceil(sizes.data / batch.group_size)} prompts_per_step"
            ),
        )
    if config.sft is not None and config.sft.sequences_per_step < sizes.data:
        yield Violation(
            "sft.sequences_per_step",
            f"{config.sft.sequences_per_step} demonstrations are fewer than the {sizes.data} data-parallel ranks",
            str(sizes.data),
        )


def _lengths(config: Config, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    longest = sizes.longest_sequence
    spelled = (
        f"max_prompt_tokens {config.data.max_prompt_tokens} + max_new_tokens {config.rollout.max_new_tokens} ="
        f" {longest}"
    )
    if longest > spec.max_position_embeddings:
        room = spec.max_position_embeddings - config.data.max_prompt_tokens
        yield Violation(
            "rollout.max_new_tokens",
            f"{spelled} is more than the model's {spec.max_position_embeddings} positions",
            str(room) if room > 0 else f"none: max_prompt_tokens must be below {spec.max_position_embeddings} first",
        )
    padded = math.ceil(longest / sizes.pack_multiple) * sizes.pack_multiple
    if padded > config.batch.micro_batch_tokens:
        rounding = f", {padded} when padded to a multiple of {sizes.pack_multiple}," if padded != longest else ""
        yield Violation(
            "batch.micro_batch_tokens",
            f"{config.batch.micro_batch_tokens} cannot hold the longest sequence: {spelled}{rounding} and sequences are"
            " never split",
            str(padded),
        )


def _servers(
    config: Config, spec: ModelSpec, sizes: Sizes, device: Literal["cpu", "gpu"] | None
) -> Iterator[Violation]:
    server = config.server
    tensor, heads, kv_heads = server.tensor, spec.num_heads, spec.num_kv_heads
    intermediate = spec.intermediate_size if spec.moe is None else spec.moe.expert_intermediate_size
    if spec.moe is not None and (spec.moe.num_dense_layers or spec.moe.shared_intermediate_size):
        intermediate = math.gcd(
            intermediate, spec.moe.shared_intermediate_size, spec.intermediate_size if spec.moe.num_dense_layers else 0
        )

    def divides(size: int) -> bool:
        # SGLang copies a key-value head where there are more ranks than heads.
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0) and intermediate % size == 0

    if not divides(tensor):
        yield Violation(
            "server.tensor",
            f"{tensor} does not fit the model's {heads} heads, {kv_heads} key-value heads and intermediate size"
            f" {intermediate}",
            nearest(tensor, filter(divides, divisors(heads))),
        )
    longest = sizes.longest_sequence
    if server.context_tokens is not None and not longest <= server.context_tokens <= spec.max_position_embeddings:
        valid = nearest(server.context_tokens, (longest, spec.max_position_embeddings))
        yield Violation(
            "server.context_tokens",
            f"{server.context_tokens} is not between the longest sequence ({longest}) and the model's positions"
            f" ({spec.max_position_embeddings})",
            valid if longest <= spec.max_position_embeddings else "",
        )
    if server.max_total_tokens is not None and server.max_total_tokens < longest:
        yield Violation(
            "server.max_total_tokens",
            f"{server.max_total_tokens} cannot hold one sequence of {longest} tokens",
            str(longest),
        )
    if config.publish.verify == "tensors" and is_on_gpu(config, device):
        yield Violation(
            "publish.verify",
            "tensors: servers on GPUs report other checksums than the trainer can compute",
            "auto, or replicas",
        )
