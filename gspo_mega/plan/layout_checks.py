"""What makes a layout impossible for a model, each with the nearest valid value.

Three kinds: sizes that do not divide, layouts known to train wrong, lengths and batches that do not fit. All
of them are found before anything starts. Experts have `expert_checks.py`; settings that are wrong for every model are
`config/rules.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.episode_lengths import episode_lengths
from gspo_mega.config.layer_library import has_transformer_engine_layers
from gspo_mega.config.schema import Config
from gspo_mega.config.server_options import CONTEXT_SLACK
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.adapter_shares import check_adapters
from gspo_mega.plan.alignment import RECIPE_SIDES
from gspo_mega.plan.biased_checks import check_biased_layers
from gspo_mega.plan.draft_needs import check_speculative
from gspo_mega.plan.expert_checks import check_experts
from gspo_mega.plan.fusion_needs import check_fusions
from gspo_mega.plan.gpus import GPUS
from gspo_mega.plan.invariance_needs import check_invariance
from gspo_mega.plan.layout_sizes import Sizes
from gspo_mega.plan.model_division import can_divide_model, dividing, divisors, nearest, undivided_sizes
from gspo_mega.plan.optimizer_needs import VALID_WITHOUT_GPU, check_optimizer
from gspo_mega.plan.precision_needs import check_chip, unaligned_sizes
from gspo_mega.plan.server_needs import check_served_model, check_server_precision
from gspo_mega.plan.server_parallel import check_server_parallel, divides_attention
from gspo_mega.plan.stages import check_stages
from gspo_mega.plan.verification import is_on_gpu


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
