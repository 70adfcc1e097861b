"""Memory of a GPU that a rank and a server use in turns, by phase; and what both keep on the host meanwhile.

Owns who holds what in which phase, as `train/shared_gpus.py` moves it. What a process holds whatever the phase is (a
CUDA context, libraries) is a rule of thumb, for the server as for the rank.
"""

from __future__ import annotations

from dataclasses import replace

from gspo_mega.config.schema import Config
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.memory import Memory, server_memory, trainer_memory
from gspo_mega.plan.server_needs import weight_bytes
from gspo_mega.plan.shares import ModelShares
from gspo_mega.plan.state_bytes import StateBytes

# Context, NCCL's buffers and workspaces of one rank of a server, which the memory saver does not free.
SERVER_RESERVE_BYTES = 3 * 2**30
# What a rank moves to the host while servers sample; while it publishes, all of it but the weights.
_MOVED = ("weights", "padding", "gradients", "main weights", "moments", "reference")
_PUBLISHED = ("weights", "padding")


def run_memory(config: Config, layout: Layout, shares: ModelShares, total_parameters: int, limit: int) -> Memory:
    """The memory of the rank that needs most, on GPUs of `limit` bytes, with the server's part of it where they share.

    In a phase `rollout` the server has the memory that `server.memory_fraction` gives it.
    """
    memory = trainer_memory(config, layout, shares)
    if not config.cluster.colocated:
        return memory
    server = server_memory(config, shares.spec, total_parameters, limit)
    stays = {kind: size for kind, size in memory.always.items() if kind not in _MOVED}
    published = {kind: memory.always[kind] for kind in _PUBLISHED}
    parts = {phase: {**memory.always, **own, "server": SERVER_RESERVE_BYTES} for phase, own in memory.by_phase.items()}
    parts["publish"] = {
        **stays,
        **published,
        **memory.by_phase["publish"],
        "server": SERVER_RESERVE_BYTES + server.weights,
    }
    parts["rollout"] = {**stays, "server": SERVER_RESERVE_BYTES + round(limit * config.server.memory_fraction)}
    phases = {phase: sum(own.values()) for phase, own in parts.items()}
    return replace(memory, parts=parts[max(phases, key=lambda phase: phases[phase])], phases=phases)


def rank_host_bytes(config: Config, size: StateBytes) -> int:
    """What one rank keeps on the host while servers sample: its state but the gradients, which need no copy."""
    return size.weights + size.main + size.moments + size.reference if config.cluster.colocated else 0


def servers_host_bytes(config: Config, shares: ModelShares, total_parameters: int) -> int:
    """What the servers of one node keep on the host while ranks train: a copy of their weights."""
    if not config.cluster.colocated:
        return 0
    servers = -(-config.server.num_servers // config.cluster.num_nodes)
    return servers * weight_bytes(config, shares.spec, total_parameters)
