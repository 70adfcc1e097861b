"""What the servers' work costs: seconds of a decode step and of reading tokens in, and how many requests run at once.

Owns the plan's figures in the form that the simulation integrates, for any number of requests and of cached tokens. The
figures themselves (bytes, FLOPs, shares of peak) are the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_mega.config.schema import Config
from gspo_mega.models.sizes import ParameterCounts
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.gpus import MATRIX_SHARE, MEMORY_SHARE, Gpu
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.rollout_timing import between_nodes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DecodeCost:
    """A decode step of one server: it reads the weights that its requests need and the cache of its sequences, or
    computes, whichever is longer; `fixed` seconds go to each step beside that.

    `weights`: seconds to read them all. `unread`: share of the experts that one token does not go to, 0 without
    experts.
    `cached`: seconds per cached token. `computed`: seconds of computation per request. `sent`: seconds per request
    between the nodes of a server.
    """

    weights: float
    cached: float
    computed: float
    unread: float = 0.0
    fixed: float = 0.0
    sent: float = 0.0

    def seconds(self, num_requests: Array, num_tokens: Array) -> Array:
        """Of one decode step with `num_requests` sequences that hold `num_tokens` tokens together."""
        read = self.weights * (1.0 - self.unread**num_requests) + self.cached * num_tokens
        return self.fixed + self.sent * num_requests + np.maximum(read, self.computed * num_requests)

    def scaled(self, factor: float) -> DecodeCost:
        return DecodeCost(
            self.weights * factor,
            self.cached * factor,
            self.computed * factor,
            self.unread,
            self.fixed * factor,
            self.sent * factor,
        )


@dataclass(frozen=True)
class ServerCost:
    """`prefill`: seconds per token that is read in. `cache_tokens`: that one server holds. `most_requests`: that may be
    open on one server.
    """

    decode: DecodeCost
    prefill: float
    cache_tokens: float
    most_requests: int

    def slots(self, held_tokens: float) -> int:
        """Requests that run at once on one server where each holds `held_tokens` on average."""
        return max(1, min(self.most_requests, int(self.cache_tokens / max(1.0, held_tokens))))

    def scaled(self, factor: float) -> ServerCost:
        return ServerCost(self.decode.scaled(factor), self.prefill * factor, self.cache_tokens, self.most_requests)


def server_cost(config: Config, spec: ModelSpec, gpu: Gpu, counts: ParameterCounts) -> ServerCost:
    """One server of the configuration on GPUs of this kind."""
    tensor = config.server.tensor
    memory = server_memory(config, spec, counts.total, int(gpu.memory_gib * 2**30))
    bandwidth = MEMORY_SHARE * gpu.memory_bytes_per_second
    token = 2 * counts.active / tensor / (MATRIX_SHARE["bf16"] * gpu.bf16_flops)
    unread = 0.0 if spec.moe is None else 1 - spec.moe.experts_per_token / spec.moe.num_experts
    fixed, sent = between_nodes(config, spec, gpu)
    decode = DecodeCost(
        weights=memory.weights / bandwidth,
        cached=memory.cache / max(1, memory.cache_tokens) / bandwidth,
        computed=token,
        unread=unread,
        fixed=fixed,
        sent=sent,
    )
    return ServerCost(decode, token, float(memory.cache_tokens), config.rollout.max_concurrent_requests)
