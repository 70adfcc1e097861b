"""What publishes that send only what changed cost and save (`publish.full_every`): bytes, host memory, seconds.

How much changes in a step is not known before a run; `ASSUMED_SHARE` stands for it here, and `publish/changed_share`
is what a run measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_mega.config.precision import publishes, server_dtype
from gspo_mega.config.schema import Cluster, Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.server_buffers import num_owners, num_senders
from gspo_mega.plan.servers import DTYPE_BYTES, version_bytes

# Assumed. Measured at a learning rate of 1e-6: tests/benchmarks/RESULTS.md.
ASSUMED_SHARE = 0.05
# Assumed, for one GPU's link to its host: a rank compares with its copy there, and a server loads from its copy.
HOST_LINK_BYTES_PER_SECOND = 20e9
# A record has one byte of distance next to each value, if a value in 255 or more changes.
_DISTANCE_BYTES = 1


@dataclass(frozen=True)
class DeltaCost:
    """`full_bytes` and `delta_bytes`: what a publish of each kind moves, with `ASSUMED_SHARE`; `mean_bytes` of all of
    them. `sender_bytes`: the copy in the host's memory of each of `num_senders` ranks; `server_bytes`: of each server.
    """

    full_bytes: int
    delta_bytes: float
    mean_bytes: float
    num_senders: int
    sender_bytes: float
    server_bytes: int


def delta_cost(config: Config, spec: ModelSpec, layout: Layout, total_parameters: int) -> DeltaCost | None:
    """Return the cost, or None if every publish sends all weights."""
    every, train = config.publish.full_every, config.train
    if every == 1 or not publishes(train, config.sft) or (train and (train.from_rollouts or train.rollouts_only)):
        return None
    full = version_bytes(config, spec, total_parameters)
    delta = delta_bytes(config, spec, total_parameters)
    senders = num_senders(config.publish, spec, layout) or num_owners(layout)
    return DeltaCost(full, delta, (full + (every - 1) * delta) / every, senders, full / senders, full)


def delta_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> float:
    """Return what a publish moves that sends what changed, if `ASSUMED_SHARE` of the values do."""
    dtype = DTYPE_BYTES[server_dtype(config.server, config.precision)]
    value = 1 if config.server.quantization == "fp8_block" else dtype
    larger = (value + _DISTANCE_BYTES) / value
    return version_bytes(config, spec, total_parameters) * min(1.0, ASSUMED_SHARE * larger)


def copies_host_bytes(cluster: Cluster, num_servers: int, cost: DeltaCost | None) -> int:
    """Return the bytes of the copies in the memory of one node: of its ranks, and of the servers next to them."""
    if cost is None:
        return 0
    servers = 0
    if cluster.num_rollout_nodes == 0:
        servers = -(-num_servers // cluster.num_nodes)
    return round(min(cost.num_senders, cluster.ranks_per_node) * cost.sender_bytes) + servers * cost.server_bytes


def copying_seconds(full_every: int, cost: DeltaCost | None, rank_weight_bytes: int) -> float:
    """Return the seconds that a publish takes in addition, the mean over `publish.full_every` publishes: comparing on
    each rank that sends, and loading `rank_weight_bytes` from the copy on each rank of a server.
    """
    if cost is None:
        return 0.0
    share = 1 - 1 / full_every
    return share * (cost.sender_bytes + rank_weight_bytes) / HOST_LINK_BYTES_PER_SECOND
