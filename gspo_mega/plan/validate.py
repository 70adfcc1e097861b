"""What makes a layout impossible for a model, each with the nearest valid value.

Three kinds: sizes that do not divide, layouts known to train wrong, lengths and batches that do not fit. All
of them are found before anything starts. Experts have `validate.py`; settings that are wrong for every model are
`config/validate.py`'s.

What makes a layout of experts impossible, or known to train wrong, each with the nearest valid value.

What a model with sinks, sliding windows and biases in every layer (gpt-oss) cannot be used with, by name.

Some of it Megatron cannot do, some has not been tried; each text says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.derived import episode_lengths, has_transformer_engine_layers
from gspo_mega.config.schema import Config
from gspo_mega.config.validate_servers import CONTEXT_SLACK
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.plan.gpus import GPUS, is_on_gpu
from gspo_mega.plan.layout import (
    RECIPE_SIDES,
    Sizes,
    can_divide_model,
    check_stages,
    dividing,
    divisors,
    nearest,
    undivided_sizes,
)
from gspo_mega.plan.servers import (
    check_served_model,
    check_server_parallel,
    check_server_precision,
    check_speculative,
    divides_attention,
)
from gspo_mega.plan.state import check_adapters
from gspo_mega.plan.validate_precision import (
    VALID_WITHOUT_GPU,
    check_chip,
    check_fusions,
    check_invariance,
    check_optimizer,
    unaligned_sizes,
)

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


def check_biased_layers(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """Nothing for other models. `device`: what the ranks will run on, None where that is not known."""
    if spec.sinks:
        yield from _attention(config, spec, device)
    if spec.linear_bias:
        yield from _biases(config, spec)


def _attention(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    has_gpu = is_on_gpu(config, device)
    if config.precision == "fp8":
        yield Violation(
            "precision", f"fp8: {spec.family} has been tried with Megatron's plain layers only", "bf16, fp32"
        )
    elif has_transformer_engine_layers(config, has_gpu=has_gpu is not False):
        chosen = "true" if config.engine.transformer_engine else "left out, which on a GPU means true"
        yield Violation(
            "engine.transformer_engine",
            f"{chosen}: Transformer Engine's attention with sinks and windows has not been compared with transformers'",
            "false",
        )
    if has_gpu is False and config.server.attention_backend is not None:
        yield Violation(
            "server.attention_backend",
            f"{config.server.attention_backend} without GPUs: of those that SGLang has there none has both sinks and"
            " windows",
            "null, which is this package's",
        )


def _biases(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    if config.parallel.expert_tensor > 1:
        yield Violation(
            "parallel.expert_tensor",
            f"{config.parallel.expert_tensor}: Megatron adds the biases of experts once for each rank that has a part"
            " of them, and refuses it",
            "1",
        )
    if config.engine.fuse_activation:
        yield Violation(
            "engine.fuse_activation",
            "true: Megatron's fused activation of these experts has no biases for single experts",
            "false, or leave it out",
        )
    if config.lora is not None:
        yield Violation(
            "lora", f"set with {spec.family}: adapters beside its biased layers have not been tried", "null"
        )
    if config.server.quantization != "none":
        yield Violation(
            "server.quantization",
            f"{config.server.quantization} with {spec.family}: experts with biases have no quantised form here",
            "none",
        )


def check_layout(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> list[Violation]:
    """Every violation, in the order of the file's sections. Empty for a layout that can run."""
    sizes = Sizes.of(config)
    return [
        *_ranks(config, spec, sizes, device),
        *_model_division(config, spec, sizes),
        *check_stages(config, spec, sizes),
        *check_experts(config, spec, sizes, device),
        *check_biased_layers(config, spec, device),
        *_precision(config, spec, device),
        *check_fusions(config, spec, device),
        *check_invariance(config, spec, device),
        *check_adapters(config, spec),
        *_optimizer(config, device),
        *_batches(config, sizes),
        *_lengths(config, spec, sizes),
        *_servers(config, spec, sizes, device),
        *check_server_parallel(config, spec, device),
        *check_speculative(config, spec, device),
        *check_server_precision(config, spec, device),
        *check_served_model(config, spec, device),
    ]


def _ranks(config: Config, spec: ModelSpec, sizes: Sizes, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    parallel = config.parallel
    if sizes.world % sizes.model and can_divide_model(config, spec):
        multiples = [sizes.model * k for k in (sizes.world // sizes.model, sizes.world // sizes.model + 1) if k > 0]
        yield Violation(
            "cluster.ranks_per_node",
            f"num_nodes {config.cluster.num_nodes} x ranks_per_node {config.cluster.ranks_per_node} = {sizes.world}"
            f" ranks, which tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} ="
            f" {sizes.model} does not divide",
            " or ".join(f"{multiple} ranks in all" for multiple in multiples),
        )
    cluster = config.cluster
    if cluster.colocated and is_on_gpu(config, device) is False:
        yield Violation(
            "cluster.colocated",
            "true without GPUs: there is no GPU memory to take turns with, and SGLang's memory saver needs CUDA",
            "false",
        )
    servers_per_node = -(-config.server.num_servers // cluster.num_nodes)
    if cluster.colocated and servers_per_node * config.server.tensor > cluster.ranks_per_node:
        yield Violation(
            "cluster.colocated",
            f"true, and the {servers_per_node} servers of a node with server.tensor {config.server.tensor} need"
            f" {servers_per_node * config.server.tensor} GPUs, while its ranks have {cluster.ranks_per_node}",
            f"at most {cluster.ranks_per_node // config.server.tensor * cluster.num_nodes} as server.num_servers",
        )
    if cluster.gpus_per_node is not None and cluster.ranks_per_node > cluster.gpus_per_node:
        yield Violation(
            "cluster.ranks_per_node",
            f"{cluster.ranks_per_node} ranks, one GPU each, on nodes of {cluster.gpus_per_node} GPUs",
            str(cluster.gpus_per_node),
        )
    server = config.server
    if cluster.gpus_per_node is not None and server.tensor > cluster.gpus_per_node * server.num_nodes:
        nodes = -(-server.tensor // cluster.gpus_per_node)
        yield Violation(
            "server.tensor",
            f"a server on {server.tensor} GPUs does not fit on"
            f" {'a node' if server.num_nodes == 1 else f'{server.num_nodes} nodes'} of {cluster.gpus_per_node}",
            f"{cluster.gpus_per_node * server.num_nodes}, or `server.num_nodes: {nodes}`",
        )


def _model_division(config: Config, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    tensor = config.parallel.tensor
    if bad := undivided_sizes(spec, tensor):
        valid = dividing(
            sizes.world,
            sizes.model // tensor,
            [size for size in divisors(spec.num_heads) if not undivided_sizes(spec, size)],
        )
        yield Violation(
            "parallel.tensor", f"{tensor} does not divide the model's {', '.join(bad)}", nearest(tensor, valid)
        )


def _precision(config: Config, spec: ModelSpec, device: str | None) -> Iterator[Violation]:
    gpu = config.cluster.gpu if device != "cpu" else None
    if gpu is not None and (problem := check_chip(config, GPUS[gpu].capability)) is not None:
        yield Violation("fp8.recipe" if config.precision == "fp8" else "precision", f"cluster.gpu {gpu}: {problem}")
    sides = list(unaligned_sizes(config, spec))
    if sides:
        yield Violation(
            "fp8.recipe",
            f"{config.fp8.recipe} needs every side of a linear layer on a rank to be a multiple of"
            f" {RECIPE_SIDES[config.fp8.recipe]}, which these are not: {', '.join(sides)}",
            " or ".join(
                r
                for r in RECIPE_SIDES
                if RECIPE_SIDES[r] < RECIPE_SIDES[config.fp8.recipe] and not any(unaligned_sizes(config, spec, r))
            ),
        )


def _optimizer(config: Config, device: str | None) -> Iterator[Violation]:
    if device == "cpu":
        fused = has_transformer_engine_layers(config, has_gpu=False)
        for key, problem in check_optimizer(config.optimizer, has_gpu=False, has_fused_adam=fused):
            yield Violation(key, problem, VALID_WITHOUT_GPU[key])


def _batches(config: Config, sizes: Sizes) -> Iterator[Violation]:
    batch = config.batch
    num_sequences = batch.prompts_per_step * batch.group_size
    if num_sequences // batch.num_mini_batches < sizes.data:
        largest = num_sequences // sizes.data
        yield Violation(
            "batch.num_mini_batches",
            f"{num_sequences} trajectories (prompts_per_step x group_size) in {batch.num_mini_batches} mini-batches are"
            f" {num_sequences // batch.num_mini_batches} per mini-batch, fewer than the {sizes.data} data-parallel"
            " ranks",
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
    lengths = episode_lengths(config)
    if longest > spec.max_position_embeddings and config.episodes.max_tokens is not None:
        yield Violation(
            "episodes.max_tokens",
            f"{longest} is more than the model's {spec.max_position_embeddings} positions",
            str(spec.max_position_embeddings),
        )
    elif longest > spec.max_position_embeddings:
        room = spec.max_position_embeddings - config.data.max_prompt_tokens
        yield Violation(
            "rollout.max_new_tokens",
            f"{lengths.spelled} is more than the model's {spec.max_position_embeddings} positions",
            str(room) if room > 0 else f"none: max_prompt_tokens must be below {spec.max_position_embeddings} first",
        )
    padded = math.ceil(longest / sizes.pack_multiple) * sizes.pack_multiple
    if padded > config.batch.micro_batch_tokens:
        rounding = f", {padded} when padded to a multiple of {sizes.pack_multiple}," if padded != longest else ""
        yield Violation(
            "batch.micro_batch_tokens",
            f"{config.batch.micro_batch_tokens} cannot hold the longest sequence: {lengths.spelled}{rounding} and"
            " sequences are never split",
            str(padded),
        )


def _servers(
    config: Config, spec: ModelSpec, sizes: Sizes, device: Literal["cpu", "gpu"] | None
) -> Iterator[Violation]:
    server = config.server
    tensor, heads, kv_heads = server.tensor, spec.num_heads, spec.num_kv_heads
    intermediate = spec.intermediate_size if spec.moe is None else spec.moe.expert_intermediate_size * server.expert
    if spec.moe is not None and (spec.moe.num_dense_layers or spec.moe.shared_intermediate_size):
        intermediate = math.gcd(
            intermediate, spec.moe.shared_intermediate_size, spec.intermediate_size if spec.moe.num_dense_layers else 0
        )

    def divides(size: int) -> bool:
        return divides_attention(config, spec, size) and intermediate % size == 0

    if tensor % server.attention_data == 0 and not divides(tensor):
        yield Violation(
            "server.tensor",
            f"{tensor} does not fit the model's {heads} heads, {kv_heads} key-value heads and intermediate size"
            f" {intermediate}",
            nearest(tensor, filter(divides, divisors(heads * server.attention_data))),
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
    needed = (server.context_tokens or longest) + CONTEXT_SLACK
    if server.max_total_tokens is not None and server.max_total_tokens < needed:
        yield Violation(
            "server.max_total_tokens",
            f"{server.max_total_tokens} cannot hold one sequence of {needed - CONTEXT_SLACK} tokens, and the"
            f" {CONTEXT_SLACK} that SGLang keeps free",
            str(needed),
        )
    if config.publish.verify == "tensors" and is_on_gpu(config, device):
        yield Violation(
            "publish.verify",
            "tensors: servers on GPUs report other checksums than the trainer can compute",
            "auto, or replicas",
        )
