"""What a server's GPU holds outside `server.memory_fraction`: CUDA graphs, the CUDA context with libraries, and NCCL's
buffers of the groups through which weights are published.

SGLang's memory saver frees neither, so with `cluster.colocated` both stay while the ranks have their turn. The sizes of
graphs are SGLang 0.5.23's own (`reserve_for_graph_mb` and `handle_gpu_memory_settings` in `arg_groups/memory_hook.py`),
and those of what they compute in are a formula. Those of NCCL's buffers are NCCL's own; how many it makes is an
assumption. Nothing here was measured on a GPU by this package. No torch.
"""

from __future__ import annotations

from typing import Any

from gspo_mega.config.precision import server_dtype
from gspo_mega.config.schema import Config, Publish, Server
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import is_stacked
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.servers import DTYPE_BYTES, attention_ranks, expert_ranks, reward_gpus

MIB = 2**20
# CUDA context, NCCL's buffers of the server's own groups, and workspaces.
CONTEXT_BYTES = 3 * 2**30
# SGLang's defaults by GPU memory: (below this many MiB, tokens of one prefill, most sequences of a decode graph with
# fewer than 4 ranks, and with more). Above the last: the second line.
_BY_MEMORY = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 4096, 48, 160),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
)
_LARGEST = (16384, 512, 512)
# MiB of one sequence of the largest decode graph; of one more for each group of the attention, and again above 300.
_DECODE_MIB, _GROUP_MIB, _MANY_GROUP_MIB, _MANY = 2, 3, 1.5, 300
# MiB of one prefill graph; with latent attention of all together; with DeepEP in addition.
_PREFILL_MIB, _LATENT_MIB, _DEEPEP_MIB = 8, 1536, 1024
_MOST_LATENT_TOKENS = 8192
# Token counts for which SGLang captures a prefill: (from, to, step).
_PREFILLS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, 2**31, 512))
# NCCL's buffers of one connection, of its three protocols: LL, LL128 and Simple (`init.cc` of NCCL 2.30).
_CONNECTION_BYTES = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * MIB
# Assumed, from NCCL's choice of channels on GPUs of compute capability 9: a rank's connections in a ring that crosses
# nodes, where a channel may have one from the network and one to it, and in a ring inside a node, where only the
# receiver has a buffer.
_CONNECTIONS_ACROSS, _CONNECTIONS_INSIDE = 8 * 2, 24


def num_senders(publish: Publish, spec: ModelSpec, layout: Layout) -> int:
    """Return how many ranks send weights with `publish.method: distributed`; 0 with another method. All owners send if
    files have experts in stacks.
    """
    if publish.method != "distributed":
        return 0
    owners = num_owners(layout)
    return owners if is_stacked(spec) else min(publish.max_senders, owners)


def num_owners(layout: Layout) -> int:
    """Return the number of ranks that own tensors: one in each pipeline stage and expert rank gets them whole."""
    return layout.pipeline * layout.expert


def publish_group_bytes(config: Config, spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Return the bytes of NCCL's buffers for publishes, which stay from one publish to the next, on the GPU of a server
    and on that of a sending rank. A server is in one group of each sender.
    """
    senders = num_senders(config.publish, spec, layout)
    if not senders:
        return 0, 0
    a_group = (_CONNECTIONS_INSIDE if on_one_node(config) else _CONNECTIONS_ACROSS) * _CONNECTION_BYTES
    servers = config.server.num_servers
    return senders * a_group, -(-servers // (config.publish.servers_per_group or servers)) * a_group


def on_one_node(config: Config) -> bool:
    """Return whether ranks and servers share one node."""
    cluster = config.cluster
    used = cluster.ranks_per_node + config.server.num_servers * config.server.tensor + reward_gpus(config.reward)
    return cluster.num_nodes == 1 and cluster.num_rollout_nodes == 0 and used <= (cluster.gpus_per_node or 0)


def graph_bytes(config: Config, spec: ModelSpec, gpu_bytes: int) -> int:
    """Return the bytes that the CUDA graphs of one of a server's ranks take on a GPU of `gpu_bytes`: the graphs
    themselves, by SGLang's rule, and what the largest captured prefill computes in, which stays allocated for them.
    """
    server = config.server
    sequences, sizes = (
        decode_sequences(config.server, config.rollout.max_concurrent_requests, gpu_bytes),
        prefill_sizes(server, spec, gpu_bytes),
    )
    size = _DECODE_MIB * sequences
    if server.attention_data > 1:
        size += sequences * server.attention_data * (_GROUP_MIB + (_MANY_GROUP_MIB if sequences > _MANY else 0))
    if sizes:
        size += _LATENT_MIB if spec.latent is not None else _PREFILL_MIB * len(sizes)
        size += _DEEPEP_MIB if server.expert_dispatcher == "deepep" else 0
    elements = max([sequences, *sizes]) * widest_elements(server, spec)
    return round(size * MIB) + elements * DTYPE_BYTES[server_dtype(server, config.precision)]


def decode_sequences(server: Server, most_requests: int, gpu_bytes: int) -> int:
    """Return the sequences of the largest graph of a decode step; 0 if none is captured. `most_requests`:
    `rollout.max_concurrent_requests`.
    """
    options = server.options
    if not _captures(options, "decode"):
        return 0
    if (sizes := options.get("cuda_graph_bs_decode")) is not None:
        return max(sizes)
    if (most := options.get("cuda_graph_max_bs_decode")) is not None:
        return most
    _, few, many = _defaults(gpu_bytes)
    return min(few if server.tensor < 4 else many, most_requests)


def prefill_sizes(server: Server, spec: ModelSpec, gpu_bytes: int) -> list[int]:
    """Return the tokens of each graph of a prefill; empty if none is captured."""
    options = server.options
    if not _captures(options, "prefill"):
        return []
    if (sizes := options.get("cuda_graph_bs_prefill")) is not None:
        return list(sizes)
    # The groups of the attention share the tokens of one prefill.
    chunk = (options.get("chunked_prefill_size") or _defaults(gpu_bytes)[0]) // server.attention_data
    most = options.get("cuda_graph_max_bs_prefill")
    if most is None:
        most = chunk if spec.latent is None else min(_MOST_LATENT_TOKENS, chunk)
        most = min(most, server.max_total_tokens or most)
    return [size for first, last, step in _PREFILLS for size in range(first, min(last, most) + 1, step)]


def _captures(options: dict[str, Any], phase: str) -> bool:
    if (backend := options.get(f"cuda_graph_backend_{phase}")) is not None:
        return backend != "disabled"
    return not (options.get("disable_cuda_graph") or options.get(f"disable_{phase}_cuda_graph"))


def _defaults(gpu_bytes: int) -> tuple[int, int, int]:
    """Return (tokens of one prefill, most sequences of a decode graph with fewer than 4 ranks, with more)."""
    for below, tokens, few, many in _BY_MEMORY:
        if gpu_bytes < below * MIB:
            return tokens, few, many
    return _LARGEST


def widest_elements(server: Server, spec: ModelSpec) -> int:
    """Return the elements per token that the widest part of a layer holds on one rank: its input, the residual and its
    output, and in between queries, keys and values with the attention's output, or an MLP's two projections and their
    product. An expert's part of these is kept for every expert that a token goes to.
    """
    ranks, dense = attention_ranks(server), spec.num_layers
    keys = max(1, spec.num_kv_heads // ranks) * 2 * spec.head_dim
    widest = [spec.num_heads // ranks * (spec.head_dim + spec.value_head_dim) + keys]
    if spec.moe is not None:
        dense = spec.moe.num_dense_layers
        inside = 3 * spec.moe.expert_intermediate_size // expert_ranks(server)
        widest.append(spec.moe.experts_per_token * (inside + spec.hidden_size))
    if dense:
        widest.append(3 * spec.intermediate_size // server.tensor)
    return 3 * spec.hidden_size + max(widest)
