"""The environment variables that a rank needs on a GPU, whether one machine, Slurm, torchrun or tests/gpu/run.sh
starts it.

Owns their names, values and where they are valid. A variable that is set already stays as it is, except that of block
scales, which `fp8.block_scales` decides (`config/derived.py`). Servers get none of them.

    eval "$(python -m gspo_mega.train.gpu_variables)"     in a shell, for programs other than ranks
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from gspo_mega.config import Config
from gspo_mega.config.derived import block_scale_variable

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def before_torch(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that torch and CUDA read at their start: allocator segments that grow, so that packs of different sizes
    do not fragment memory; and one queue to the device, so that communication starts in the order of its calls, on
    which Megatron's overlap relies.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if not any(environment.get(name) for name in _ALLOCATOR):
        wanted[_ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def set_variables(
    environment: MutableMapping[str, str], local_rank: int, config: Config | None = None, devices: Path = Path("/dev")
) -> None:
    """Set all of them, on a machine without GPUs only the one of Transformer Engine's block scales. Call it before
    torch, Megatron or Transformer Engine is imported.
    """
    capability = None
    if any(devices.glob("nvidia[0-9]*")):
        environment.update(before_torch(environment))
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
            capability = torch.cuda.get_device_capability()
    environment.update(block_scale_variable(config, environment, capability))


def main() -> None:
    before = dict(os.environ)
    set_variables(os.environ, 0)
    for name in sorted(os.environ.keys() - before.keys()):
        sys.stdout.write(f"export {name}={shlex.quote(os.environ[name])}\n")


if __name__ == "__main__":
    main()
