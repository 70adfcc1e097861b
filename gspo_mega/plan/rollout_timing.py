"""Estimated seconds in which the servers decode a step's responses.

Owns the cost of a decode step; `verify/simulate/server_costs.py` uses the same parts. Assumptions are
`gpus.ASSUMPTIONS`.
"""

from __future__ import annotations

from gspo_mega.config.episode_lengths import episode_lengths, mean_tokens
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import server_dtype
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.gpus import LINK_SHARE, MATRIX_SHARE, MEMORY_SHARE, NETWORK_SUM_SECONDS, Gpu
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.server_needs import DTYPE_BYTES


def between_nodes(config: Config, spec: ModelSpec, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a decode step between the nodes of one server: fixed, and per sequence. Two sums over all its ranks
    per layer; the GPUs of a node share what their node exchanges.
    """
    server = config.server
    if server.num_nodes == 1:
        return 0.0, 0.0
    sums, per_node = 2 * spec.num_layers, server.tensor // server.num_nodes
    sent = 2 * (1 - 1 / server.num_nodes) * spec.hidden_size * DTYPE_BYTES[server_dtype(config)] / per_node
    return sums * NETWORK_SUM_SECONDS, sums * sent / (LINK_SHARE * gpu.network_bytes_per_second)


def rollout_seconds(config: Config, spec: ModelSpec, gpu: Gpu, total_parameters: int) -> float:
    """Seconds to decode all responses: waves of as many requests as fit a server's cache, then the longest responses.

    A decode step reads every weight once (with experts: as many as the batch goes to) and the cache of its sequences.
    """
    server, rollout = config.server, config.rollout
    prompt, response = mean_tokens(config)
    memory = server_memory(config, spec, total_parameters, int(gpu.memory_gib * 2**30))
    sequences = config.batch.prompts_per_step * config.batch.group_size / server.num_servers
    length = prompt + response
    batch = max(1.0, min(sequences, rollout.max_concurrent_requests, memory.cache_tokens / length))
    token_bytes = memory.cache / max(1, memory.cache_tokens)

    def decode_step(num_sequences: float) -> float:
        read = memory.weights * _share_read(spec, num_sequences) + num_sequences * length * token_bytes
        flops = 2 * _active(spec, total_parameters) * num_sequences / server.tensor
        own = max(read / (MEMORY_SHARE * gpu.memory_bytes_per_second), flops / (MATRIX_SHARE["bf16"] * gpu.bf16_flops))
        fixed, by_sequence = between_nodes(config, spec, gpu)
        return own + fixed + by_sequence * num_sequences

    full = sequences / batch * response * decode_step(batch)
    tail = (episode_lengths(config).sampled - response) * decode_step(max(1.0, batch / 10))
    return full + tail


def _active(spec: ModelSpec, total_parameters: int) -> float:
    if spec.moe is None:
        return total_parameters
    experts = 3 * spec.num_moe_layers * spec.moe.num_experts * spec.hidden_size * spec.moe.expert_intermediate_size
    return total_parameters - experts * (1 - spec.moe.experts_per_token / spec.moe.num_experts)


def _share_read(spec: ModelSpec, num_sequences: float) -> float:
    """Share of the weights that a decode step of `num_sequences` tokens reads."""
    if spec.moe is None:
        return 1.0
    return 1 - (1 - spec.moe.experts_per_token / spec.moe.num_experts) ** num_sequences
