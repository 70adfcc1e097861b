"""The GPUs, ports and environment variables of the ranks and servers of one machine.

Owns the variables that srun or torchrun would set for a rank, and the choice of a free port. Starts nothing.
"""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gspo_mega.base.errors import PlanError

# Below the kernel's range for outgoing connections, and apart from the range of the servers.
_PORTS = range(14_000, 20_000)


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that children may use, as values for CUDA_VISIBLE_DEVICES. Does not ask the driver."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    found = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in devices.iterdir())
    return [str(number) for number in sorted(int(match.group(1)) for match in found if match)]


def device_here() -> Literal["cpu", "gpu"]:
    """The kind of device that ranks on this machine use."""
    return "gpu" if visible_gpus(os.environ) else "cpu"


def task_of_step(environment: Mapping[str, str] | None = None) -> int | None:
    """The number of this process in its Slurm step; None outside of one."""
    number = (os.environ if environment is None else environment).get("SLURM_PROCID", "")
    return int(number) if number.isdigit() else None


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that is free now. Raises PlanError without one."""
    candidates = random.Random(os.urandom(8)).sample(_PORTS, len(_PORTS))
    for port in candidates:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise PlanError(f"no free port of {host} between {_PORTS.start} and {_PORTS.stop}")


def rank_environments(num_ranks: int, gpus: list[str], threads: int = 1) -> list[dict[str, str]]:
    """One environment per rank of a single machine, as torchrun or srun would set it.

    `gpus`: one per rank, or empty on a machine without GPUs. `threads`: OMP_NUM_THREADS on such a machine, where ranks
    that each use all cores slow each other down.
    """
    port = free_port()
    common = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    if gpus:
        common["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        common["OMP_NUM_THREADS"] = str(threads)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def reward_gpus(gpus: list[str], needs: list[int]) -> tuple[list[str], list[list[str]]]:
    """What is left for the others, and the last GPUs, for the servers of reward models, which need so many each.
    Without GPUs both are empty. Raises PlanError where there are not as many.
    """
    if not gpus:
        return [], [[] for _ in needs]
    rest = len(gpus) - sum(needs)
    if rest < 0:
        raise PlanError(
            f"the servers of reward.model need {sum(needs)} GPUs, and {len(gpus)} are visible. Lower num_servers or"
            " tensor there"
        )
    shares, first = [], rest
    for need in needs:
        shares.append(gpus[first : first + need])
        first += need
    return gpus[:rest], shares


def share_gpus(
    gpus: list[str], num_ranks: int, num_servers: int, tensor: int, colocated: bool = False
) -> tuple[list[str], list[list[str]]]:
    """GPUs for the ranks and for each server (`tensor` per server), in the order of `gpus`: distinct ones, or with
    `colocated` the ranks' for the servers as well. Without GPUs both are empty.

    Raises PlanError when there are GPUs but fewer than ranks and servers need.
    """
    servers = [[] for _ in range(num_servers)]
    if not gpus:
        return [], servers
    first = 0 if colocated else num_ranks
    needed = max(num_ranks, first + num_servers * tensor)
    if needed > len(gpus):
        raise PlanError(
            f"{num_ranks} ranks and {num_servers} servers of server.tensor {tensor} need {needed} GPUs,"
            f" and {len(gpus)} are visible. Lower cluster.ranks_per_node, server.num_servers or server.tensor"
        )
    shares = [gpus[first + k * tensor : first + (k + 1) * tensor] for k in range(num_servers)]
    return gpus[:num_ranks], shares
