"""What quick restarts cost: copies of ranks' state in memory (`checkpoint.peer_copies`), and where they cannot be kept;
processes that have imported everything (`train.standby_processes`). No torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Cluster, Config
from gspo_mega.plan.gpus import SHA256_BYTES_PER_SECOND
from gspo_mega.plan.state import State, StateBytes

# A rank's own copy and its neighbour's, each of the last step and of the one before it.
HELD = 4
# Rules of thumb: a GPU's memory to host memory that is not page-locked, and gloo over TCP, one connection in each
# direction.
_TO_HOST_BYTES_PER_SECOND, _GLOO_BYTES_PER_SECOND = 5e9, 1.5e9
_ROOT = Path("/dev/shm")
# Rules of thumb for torch, Megatron and transformers in memory. Without a GPU a process had 0.46 GiB, of which 0.13 GiB
# were pages of libraries that all processes share; libraries for CUDA are larger, and were not measured.
_STANDBY_BYTES, _STANDBY_BYTES_ON_GPU = 2**29, 2**30


@dataclass(frozen=True)
class PeerCopyCost:
    """`rank_bytes`: of one copy of the fullest rank. `node_bytes`: that the ranks of a node keep in its memory.
    `pause_seconds`: that training waits after a step. `seconds`: until the neighbour has compared the checksum.
    """

    rank_bytes: int
    node_bytes: int
    pause_seconds: float
    seconds: float


def peer_copy_cost(config: Config, ranks: Sequence[Sequence[tuple[State, StateBytes]]]) -> PeerCopyCost | None:
    """Return the cost; None without `checkpoint.peer_copies`. `ranks`: for each pipeline stage the state of the models
    that its fullest rank trains.
    """
    if not config.checkpoint.peer_copies:
        return None
    own = max(sum(_copied_bytes(state, size) for state, size in models) for models in ranks)
    pause = own / _TO_HOST_BYTES_PER_SECOND
    sending = own / _GLOO_BYTES_PER_SECOND + 2 * own / SHA256_BYTES_PER_SECOND
    return PeerCopyCost(own, HELD * own * config.cluster.ranks_per_node, pause, pause + sending)


def _copied_bytes(state: State, size: StateBytes) -> int:
    """Return the bytes of a model in a copy: with adapters only what is trained of the weights."""
    weights = size.weights * (state.parameters - state.frozen) // max(state.parameters, 1)
    return weights + size.main + size.moments


def validate_peer_copies(config: Config) -> Iterator[Violation]:
    """Yield what keeps a run from having copies in memory."""
    key, cluster = "checkpoint.peer_copies", config.cluster
    if not config.checkpoint.peer_copies:
        return
    if config.train is None:
        yield Violation(key, "1 without a section `train`: only `gspo-mega train` copies and restarts", "0")
    if cluster.num_nodes * cluster.ranks_per_node == 1:
        yield Violation(key, "1 with one rank, which has no neighbour", "0, or more ranks")
    for other, value, is_there, valid in (
        ("cluster.colocated", "true", cluster.colocated, "false"),
        ("optimizer.cpu_offload_fraction", "above 0", config.optimizer.cpu_offload_fraction > 0, "0"),
        ("optimizer.moments_dtype", "fp8", config.optimizer.moments_dtype == "fp8", "bf16"),
        ("fp8.parameters", "true", config.precision == "fp8" and config.fp8.parameters, "false"),
    ):
        if is_there:
            yield Violation(key, f"1 with {other}: {value}, whose state is not copied yet", f"0, or {other}: {valid}")


def peer_copy_lines(cost: PeerCopyCost | None, cluster: Cluster) -> list[str]:
    """Return the report's lines about copies in memory."""
    if cost is None:
        return []
    whose = "on another node" if cluster.num_nodes > 1 else "on this machine, which its loss takes too"
    return [
        f"copies in memory (checkpoint.peer_copies): after each step {_gib(cost.rank_bytes)} per rank to its neighbour"
        f" {whose}; training waits about {cost.pause_seconds:.1f} s, the copy takes {cost.seconds:.1f} s at"
        f" {_GLOO_BYTES_PER_SECOND / 1e9:g} GB/s; {_gib(cost.node_bytes)} of a node's /dev/shm"
    ]


def peer_copy_notices(cost: PeerCopyCost | None, cluster: Cluster) -> list[str]:
    """Return a notice if this machine, the only one of the run, has too little room for the copies."""
    if cost is None or cluster.num_nodes > 1:
        return []
    try:
        free = shutil.disk_usage(_ROOT).free
    except OSError:
        return [f"checkpoint.peer_copies: this machine has no {_ROOT}, where copies in memory are kept"]
    if cost.node_bytes <= free:
        return []
    return [
        f"checkpoint.peer_copies: the copies take {_gib(cost.node_bytes)} of {_ROOT}, and {_gib(free)} are free there;"
        " a step without room has no copy"
    ]


def standby_bytes(config: Config, on_gpu: bool) -> int:
    """Return the host memory of a node's standby processes; 0 without `train.standby_processes`."""
    if config.train is None or not config.train.standby_processes:
        return 0
    return config.cluster.ranks_per_node * (_STANDBY_BYTES_ON_GPU if on_gpu else _STANDBY_BYTES)


def standby_lines(size: int, cluster: Cluster) -> list[str]:
    """Return the report's line about standby processes. `size`: bytes of a node's."""
    if not size:
        return []
    return [
        f"standby processes (train.standby_processes): {cluster.ranks_per_node} per node, about {_gib(size)} of its"
        " memory; after a start's first step they import in the background"
    ]


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
