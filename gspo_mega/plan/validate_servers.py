"""What contradicts the policy's servers, given the model's shape and the nodes: each violation with the nearest valid
value.

The rules about SGLang are those of SGLang 0.5.23. `validate_server` and the functions after it yield violations, which
`validate.py` collects: context and cache, division over ranks, precisions, speculative decoding, and models that SGLang
would serve as others. The last two functions deal servers to nodes (`servers.py`) and raise, because a run asks them at
different times. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from gspo_mega.base.errors import PlanError, Violation
from gspo_mega.config.derived import episode_lengths
from gspo_mega.config.precision import WEIGHT_BLOCK, capability_problem, publishes, server_dtype
from gspo_mega.config.schema import Cluster, Config, Server
from gspo_mega.config.validate_servers import CONTEXT_SLACK
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.gpus import GPUS, Device, is_on_gpu
from gspo_mega.plan.layout import Sizes, divisors, nearest
from gspo_mega.plan.servers import (
    attention_ranks,
    divides_attention,
    expert_ranks,
    place_servers,
    read_draft_shape,
    reward_gpus,
    reward_servers,
)

# Families whose attention SGLang divides over a group of its own; the others' takes the whole tensor group.
WITH_DATA_PARALLEL_ATTENTION = ("qwen3", "qwen3_moe", "deepseek_v3")
# Compute capability of Ada, the first chip with e4m3.
_FIRST_E4M3 = (8, 9)
# Without a GPU SGLang 0.5.23 pads the widths of MLPs to multiples of this, for each of a server's tensor ranks
# (`adjust_config_with_unaligned_cpu_tp`).
_CPU_WIDTH = 32


def validate_server(config: Config, spec: ModelSpec, sizes: Sizes, device: Device | None) -> Iterator[Violation]:
    """Yield what is wrong with a server's tensor parallelism, context, cache size and verification for this model."""
    server = config.server
    tensor, heads, kv_heads = server.tensor, spec.num_heads, spec.num_kv_heads
    intermediate = spec.intermediate_size if spec.moe is None else spec.moe.expert_intermediate_size * server.expert
    if spec.moe is not None and (spec.moe.num_dense_layers or spec.moe.shared_intermediate_size):
        intermediate = math.gcd(
            intermediate, spec.moe.shared_intermediate_size, spec.intermediate_size if spec.moe.num_dense_layers else 0
        )

    def divides(size: int) -> bool:
        return divides_attention(config.server, spec, size) and intermediate % size == 0

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
            f"{server.max_total_tokens} cannot hold one sequence of {needed - CONTEXT_SLACK} tokens and the"
            f" {CONTEXT_SLACK} that SGLang keeps free",
            str(needed),
        )
    if config.publish.verify == "tensors" and is_on_gpu(config.cluster, device):
        yield Violation(
            "publish.verify",
            "tensors: servers on GPUs report other checksums than the trainer can compute",
            "auto, or replicas",
        )


def validate_server_parallel(config: Config, spec: ModelSpec, device: Device | None) -> Iterator[Violation]:
    """Yield what SGLang would refuse at a server's start, or change silently."""
    server = config.server
    if server.tensor % server.attention_data:
        yield Violation(
            "server.attention_data",
            f"{server.attention_data} does not divide server.tensor {server.tensor}",
            nearest(server.attention_data, divisors(server.tensor)),
        )
    if server.attention_data > 1 and spec.family not in WITH_DATA_PARALLEL_ATTENTION:
        yield Violation(
            "server.attention_data",
            f"{server.attention_data}: SGLang divides the attention of {spec.family} over all of a server's ranks;"
            f" it can do otherwise with {', '.join(WITH_DATA_PARALLEL_ATTENTION)}",
            "1",
        )
    if spec.moe is None:
        if server.expert > 1 or server.expert_dispatcher != "none":
            yield Violation("server.expert", f"{server.expert}, but the model ({spec.family}) has no experts", "1")
        return
    both = [size for size in divisors(server.tensor) if spec.moe.num_experts % size == 0]
    if server.expert not in both:
        yield Violation(
            "server.expert",
            f"{server.expert} does not divide both server.tensor {server.tensor} and the model's"
            f" {spec.moe.num_experts} experts",
            nearest(server.expert, both),
        )
    if server.expert_dispatcher != "none":
        if server.expert != server.tensor or server.expert == 1:
            yield Violation(
                "server.expert_dispatcher",
                f"{server.expert_dispatcher} exchanges tokens between all ranks of a server: SGLang would set"
                f" server.expert from {server.expert} to server.tensor {server.tensor}",
                f"none, or `server.expert: {server.tensor}`" if server.tensor > 1 else "none",
            )
        if is_on_gpu(config.cluster, device) is False:
            yield Violation(
                "server.expert_dispatcher",
                f"{server.expert_dispatcher} without GPUs: it consists of GPU kernels",
                "none",
            )
    on_cpu = is_on_gpu(config.cluster, device) is False
    if (
        on_cpu
        and server.expert > 1
        and (server_dtype(config.server, config.precision) != "fp32" or server.quantization != "none")
    ):
        yield Violation(
            "server.expert",
            f"{server.expert} without GPUs: SGLang computes experts of other ranks there only in fp32, not quantized",
            "1, or `server.dtype: fp32` with `server.quantization: none`",
        )


def validate_server_precision(config: Config, spec: ModelSpec, device: Device | None) -> Iterator[Violation]:
    """Yield what SGLang would refuse at a server's start or at the first publish, of quantization and cache format."""
    server = config.server
    gpu = config.cluster.gpu if device != "cpu" else None
    lacks_e4m3 = gpu is not None and GPUS[gpu].capability < _FIRST_E4M3
    # If no backend is named, SGLang takes Triton for latent attention, otherwise FlashInfer, which reads e4m3.
    by_triton = server.attention_backend == "triton" or (server.attention_backend is None and spec.latent is not None)
    if server.kv_cache == "fp8" and lacks_e4m3 and by_triton:
        yield Violation(
            "server.kv_cache",
            f"fp8 on {gpu}: Triton, which computes this attention there, has no e4m3 before compute capability 8.9",
            "auto" if spec.latent is not None else "auto, or `server.attention_backend: flashinfer`",
        )
    if server.quantization == "none":
        return
    if server.quantization == "fp8_block" and (sides := list(_undivided(config.server, spec))):
        yield Violation(
            "server.quantization",
            f"fp8_block needs these sides of a linear layer on one of a server's {server.tensor} ranks to be multiples"
            f" of {WEIGHT_BLOCK[0]}: {', '.join(sides)}",
            "none, or a smaller server.tensor" if server.tensor > 1 else "none, fp8, int8",
        )
    if not is_on_gpu(config.cluster, device):
        return
    dtype = server_dtype(server, config.precision)
    if dtype != "bf16":
        yield Violation(
            "server.quantization",
            f"{server.quantization} with activations in {dtype}: on a GPU SGLang's products of quantized operands take"
            " bf16",
            "`server.dtype: bf16`",
        )
    if server.quantization == "int8":
        yield Violation(
            "server.quantization",
            "int8: on a GPU SGLang takes INT8 weights from a checkpoint only, and cannot load others into a running"
            " server",
            "fp8_block, or none",
        )
    elif server.quantization == "fp8" and publishes(config.train, config.sft):
        yield Violation(
            "server.quantization",
            "fp8: on a GPU SGLang cannot load new weights into layers that it quantized while loading, so every"
            " publish would fail; without `train` and `sft` (`gspo-mega eval`) it can be used",
            "fp8_block, or none",
        )
    gpu = config.cluster.gpu
    if gpu is not None and (
        problem := capability_problem(server.quantization, GPUS[gpu].capability, publishes(config.train, config.sft))
    ):
        yield Violation("server.quantization", f"cluster.gpu {gpu}: {problem}", "none")


def _undivided(server: Server, spec: ModelSpec) -> Iterator[str]:
    """Yield in words the sides of one rank's linear layers that blocks do not divide. SGLang needs whole blocks in
    every part of a layer that has parts (query, key, value; gate, up) or is cut over ranks, and in every input, because
    128 values of a token share a scale.
    """
    tensor, attention, heads = server.tensor, attention_ranks(server), spec.num_heads
    sides = {
        "hidden size": (spec.hidden_size, 1),
        "attention output (heads x head size)": (heads * spec.value_head_dim, attention),
    }
    if spec.latent is None:
        sides["query size (heads x head size)"] = (heads * spec.head_dim, attention)
        sides["key size and value size (heads x head size)"] = (
            spec.num_kv_heads * spec.head_dim,
            min(attention, spec.num_kv_heads),  # above that, ranks keep copies of a head
        )
    else:
        latent = spec.latent
        sides["kv_lora_rank"] = (latent.key_value_rank, 1)
        if latent.query_rank is not None:
            sides["q_lora_rank"] = (latent.query_rank, 1)
        if attention > 1:
            both = heads * (latent.content_dim + latent.value_dim)
            sides["query size (heads x head size)"] = (heads * spec.head_dim, attention)
            sides["keys' and values' size (heads x both)"] = (both, attention)
    if (delta := spec.delta) is not None:
        sides["gated delta nets' key size (heads x head size)"] = (delta.keys, attention)
        sides["gated delta nets' value size (heads x head size)"] = (delta.values, attention)
    if not spec.has_experts(0):
        sides["intermediate size"] = (spec.intermediate_size, tensor)
    if spec.moe is not None:
        sides["experts' intermediate size"] = (spec.moe.expert_intermediate_size, expert_ranks(server))
        if spec.moe.shared_intermediate_size:
            sides["shared experts' intermediate size"] = (spec.moe.shared_intermediate_size, tensor)
    for name, (size, ranks) in sides.items():
        if size % ranks == 0 and size // ranks % WEIGHT_BLOCK[0]:
            yield f"{name} {size}" + (f" / {ranks} ranks" if ranks > 1 else "")


def validate_speculative(
    server: Server, cluster: Cluster, spec: ModelSpec, device: Device | None
) -> Iterator[Violation]:
    """Yield settings with which SGLang cannot draft, or would sample from another distribution."""
    speculative = server.speculative
    if speculative is None:
        return
    if is_on_gpu(cluster, device) is False:
        yield Violation(
            "server.speculative",
            f"{speculative.algorithm} without GPUs: SGLang accepts drafts there by the most probable token, no"
            " matter what the temperature is",
            "null",
        )
    if speculative.algorithm == "nextn" and not spec.num_ignored_layers:
        if FAMILIES[spec.family].drafts:
            why = "nextn, and config.json names no layers for multi-token prediction (num_nextn_predict_layers)"
        elif "mtp." in FAMILIES[spec.family].carried:
            why = f"nextn, which was not tried with the layers for multi-token prediction of {spec.family} (mtp.)"
        else:
            why = f"nextn, and models of {spec.family} have no layers for multi-token prediction"
        yield Violation("server.speculative.algorithm", why, "eagle3, standalone or ngram")
    folder = speculative.draft_path
    if folder is not None and not (read_draft_shape(Path(folder)) and any(Path(folder).glob("*.safetensors"))):
        yield Violation(
            "server.speculative.draft_path", f"{folder} is no Hugging Face folder with config.json and safetensors"
        )


def validate_served_model(config: Config, spec: ModelSpec, device: Device | None = None) -> Iterator[Violation]:
    """Yield models that SGLang would serve as other models than the folder holds. It matters only to a run that
    samples.
    """
    samples = publishes(config.train, config.sft) or config.eval is not None
    replays = config.train is not None and config.train.from_rollouts is not None
    width = _CPU_WIDTH * config.server.tensor
    padded = [f"{name} {size}" for name, size in _widths(spec) if size % width]
    if publishes(config.train, config.sft) and not replays and padded and is_on_gpu(config.cluster, device) is False:
        yield Violation(
            "model.path",
            f"{' and '.join(padded)}: without a GPU SGLang 0.5.23 pads such widths to multiples of {_CPU_WIDTH} x"
            f" server.tensor {config.server.tensor} = {width}, and no update of the weights can be verified",
            f"a model whose widths {width} divides, or GPUs",
        )
    if samples and not replays and spec.tie_word_embeddings and FAMILIES[spec.family].own_head:
        yield Violation(
            "model.path",
            f"tie_word_embeddings is true in its config.json, and SGLang 0.5.23 does not tie them in {spec.family}: its"
            " servers would sample from an output layer of random values",
            "a folder with `tie_word_embeddings: false` and a copy of model.embed_tokens.weight as lm_head.weight",
        )
    tokens = config.server.context_tokens or episode_lengths(config).tokens
    unserved = spec.window is not None and not FAMILIES[spec.family].serves_windows
    if samples and not replays and unserved and spec.window and tokens > spec.window.tokens:
        yield Violation(
            "server.context_tokens",
            f"SGLang 0.5.23 attends to everything in {spec.family}, its window is of {spec.window.tokens} tokens, and"
            f" episodes may have {tokens}",
            f"{spec.window.tokens} or fewer, with shorter prompts and responses",
        )


def _widths(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield (name, width) of each kind of MLP that a model has."""
    moe = spec.moe
    if moe is None or moe.num_dense_layers:
        yield "intermediate_size", spec.intermediate_size
    if moe is not None:
        yield "the experts' width", moe.expert_intermediate_size
        if moe.shared_intermediate_size:
            yield "the shared experts' width", moe.shared_intermediate_size


def validate_rollout_nodes(config: Config, where: Callable[[str], str]) -> None:
    """Raises PlanError, with the key's place, if the nodes that hold only servers have fewer GPUs than the servers
    need. A run on recorded rollouts starts no servers.
    """
    cluster, server = config.cluster, config.server
    replays = config.train is not None and config.train.from_rollouts is not None
    if cluster.gpus_per_node is None or not cluster.num_rollout_nodes or replays:
        return
    needed = max(place_servers(config, server.num_servers, cluster.num_rollout_nodes).gpus)
    if needed <= cluster.gpus_per_node:
        return
    rewards = reward_gpus(config.reward)
    both = f" and {rewards} of reward.model" if rewards else ""
    raise PlanError(
        f"{where('cluster.num_rollout_nodes')}: cluster.num_rollout_nodes: {cluster.num_rollout_nodes}"
        f" node{'s' * (cluster.num_rollout_nodes > 1)} of {cluster.gpus_per_node} GPUs (cluster.gpus_per_node) for"
        f" {server.num_servers * server.tensor} GPUs of servers (server.num_servers {server.num_servers} x"
        f" server.tensor {server.tensor}){both}: one node would need {needed}; valid: at least"
        f" {_enough_nodes(config, cluster.num_rollout_nodes)} nodes, or fewer servers"
    )


def validate_shared_nodes(config: Config, where: Callable[[str], str]) -> None:
    """Raises PlanError as `validate_rollout_nodes` does, for ranks and servers on the same nodes
    (`cluster.num_rollout_nodes: 0`).
    """
    cluster, server = config.cluster, config.server
    replays = config.train is not None and config.train.from_rollouts is not None
    if cluster.gpus_per_node is None or cluster.num_rollout_nodes or replays:
        return
    needed = max(place_servers(config, server.num_servers, cluster.num_nodes, cluster.ranks_per_node).gpus)
    if needed <= cluster.gpus_per_node:
        return
    colocated = ", in turns (cluster.colocated)" if cluster.colocated else ""
    scorers = reward_gpus(config.reward) > 0
    raise PlanError(
        f"{where('cluster.gpus_per_node')}: cluster.gpus_per_node: a node of {cluster.gpus_per_node} GPUs for its"
        f" {cluster.ranks_per_node} ranks and its share of server.num_servers {server.num_servers} x server.tensor"
        f" {server.tensor}{' and of reward.model' if scorers else ''}{colocated} would need {needed};"
        f" valid: nodes of their own for the servers (cluster.num_rollout_nodes: {_enough_nodes(config, 1)}), fewer of"
        " them, or fewer cluster.ranks_per_node"
    )


def _enough_nodes(config: Config, at_least: int) -> int:
    """Return the smallest number of nodes, not below `at_least`, on which all servers find their GPUs, each server
    within `cluster.gpus_per_node` on each of its nodes.
    """
    server, node = config.server, config.cluster.gpus_per_node
    assert node is not None
    nodes = max(at_least, server.num_nodes)
    most = nodes + server.num_servers * server.num_nodes + len(reward_servers(config.reward))
    while nodes < most and max(place_servers(config, server.num_servers, nodes).gpus) > node:
        nodes += 1
    return nodes
