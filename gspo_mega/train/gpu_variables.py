"""The environment variables that a rank needs on a GPU, regardless of what starts it: one machine, Slurm, torchrun or
tests/gpu/run.sh.

A variable that is set already keeps its value, except that of block scales, which `fp8.block_scales` decides
(`config/precision.py`). Servers get none of these variables. For programs other than ranks, in a shell:

    eval "$(python -m gspo_mega.train.gpu_variables)"
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from gspo_mega.config.precision import block_scale_variable
from gspo_mega.config.schema import Fp8
from gspo_mega.plan.state import PINNED_BLOCK_BYTES

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GROWING = "expandable_segments:True"
_WITHOUT_ROUNDING = (2, 13)
_PINNED_MIB = PINNED_BLOCK_BYTES // 2**20


def before_torch(environment: Mapping[str, str], torch: str) -> dict[str, str]:
    """The variables that torch and CUDA read when they start and that `environment` does not set yet.

    They are allocator segments that grow, so that packs of different sizes do not fragment memory; large
    page-locked copies on the host that take the memory they need, where torch would round each up to a power of two and
    keep it; and a single queue to the device, so that communication starts in the order of its calls, on which
    Megatron's overlap relies.

    Both limits of page-locked memory must be the same: torch 2.13 gives a block that it kept without rounding to a
    larger request (pytorch/pytorch#192722). They are above what a pack has, since page-locking waits for the GPU.

    torch: version of this Python's torch. Older ones do not know how to leave the rounding out, and refuse the key.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if not any(environment.get(name) for name in _ALLOCATOR):
        rounds = tuple(map(int, re.findall(r"\d+", torch)[:2])) < _WITHOUT_ROUNDING
        limits = f"pinned_max_round_threshold_mb:{_PINNED_MIB},pinned_max_cached_size_mb:{_PINNED_MIB}"
        wanted[_ALLOCATOR[0]] = _GROWING if rounds else f"{_GROWING},{limits}"
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def set_variables(
    environment: MutableMapping[str, str],
    local_rank: int,
    fp8: Fp8 | None = None,
    devices: Path = Path("/dev"),
    opens_device: bool = True,
) -> None:
    """Set all variables in `environment`; on a machine without GPUs only that of Transformer Engine's block scales.
    Call this before torch, Megatron or Transformer Engine is imported. `opens_device`: make the GPU of `local_rank` the
    current device, which creates a context on it.
    """
    capability = None
    if any(devices.glob("nvidia[0-9]*")):
        environment.update(before_torch(environment, importlib.metadata.version("torch")))
        import torch

        if torch.cuda.is_available():
            if opens_device:
                torch.cuda.set_device(local_rank)
                capability = torch.cuda.get_device_capability()
            else:
                capability = torch.cuda.get_device_capability(local_rank)
    environment.update(block_scale_variable(fp8, environment, capability))


def main() -> None:
    """Write an `export` line for every variable that had to be set."""
    before = dict(os.environ)
    set_variables(os.environ, 0)
    for name in sorted(os.environ.keys() - before.keys()):
        sys.stdout.write(f"export {name}={shlex.quote(os.environ[name])}\n")


if __name__ == "__main__":
    main()
