"""The environment variables that a rank needs on a GPU, whether one machine, Slurm, torchrun or tests/gpu/run.sh
starts it.

Owns their names, values and where they are valid. A variable that is set already stays as it is. Servers get none of
them.

    eval "$(python -m gspo_mega.runtime.gpu_variables)"     in a shell, for programs other than ranks
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Compute capability 10.0: its hardware has power-of-two block scales, and Transformer Engine refuses others.
_BLACKWELL = 10


def before_torch(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that torch and CUDA read at their start: allocator segments that grow, so that packs of different sizes
    do not fragment memory; and one queue to the device, so that communication starts in the order of its calls, on
    which Megatron's overlap relies.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if not any(environment.get(name) for name in _ALLOCATOR):
        wanted[_ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def before_transformer_engine(environment: Mapping[str, str], capability: tuple[int, int]) -> dict[str, str]:
    """Variables that Transformer Engine reads at its import: block scales in fp32 where the GPU has them."""
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    return {} if environment.get(name) or capability[0] >= _BLACKWELL else {name: "1"}


def set_variables(environment: MutableMapping[str, str], local_rank: int, devices: Path = Path("/dev")) -> None:
    """Set all of them on a machine with GPUs. Call it before torch, Megatron or Transformer Engine is imported."""
    if not any(devices.glob("nvidia[0-9]*")):
        return
    environment.update(before_torch(environment))
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        environment.update(before_transformer_engine(environment, torch.cuda.get_device_capability()))


def main() -> None:
    before = dict(os.environ)
    set_variables(os.environ, 0)
    for name in sorted(os.environ.keys() - before.keys()):
        sys.stdout.write(f"export {name}={shlex.quote(os.environ[name])}\n")


if __name__ == "__main__":
    main()
