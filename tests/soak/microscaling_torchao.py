"""Whether `quantize_mx` rounds as torchao does, to the bit: `python tests/soak/microscaling_torchao.py`.

torchao is no dependency of this project. Install it beside, in a folder of its own, and show it to this one program:

    pip install --no-deps --target /tmp/torchao torchao==0.18.0
    PYTHONPATH=/tmp/torchao .venv/bin/python tests/soak/microscaling_torchao.py

Its mode RCEIL is NVIDIA's rule: a run's scale is rounded up to the next power of two. Needs no GPU, some seconds. Prints
how many scale bytes and FP8 values were compared and how many differ; exit code 0: none does. The rule itself is held by
`tests/unit/algorithm/test_microscaling.py`, without torchao.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gspo_mega.algorithm.fp8 import quantize_mx

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SOURCES = (torch.float32, torch.bfloat16)
SEEDS = 16


def spread(seed: int) -> torch.Tensor:
    """[64, 256] float32 over many powers of two, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((64, 256), generator=generator) * torch.exp(torch.randn((64, 256), generator=generator) * 8)
    x[3] = 0
    return x


def main() -> int:
    formats = "torchao.prototype.mx_formats"
    mode = importlib.import_module(f"{formats}.config").ScaleCalculationMode.RCEIL
    to_mx = importlib.import_module(f"{formats}.mx_tensor").to_mx
    scales, values, wrong_scales, wrong_values = 0, 0, 0, 0
    for dtype in FORMATS:
        for source in SOURCES:
            for seed in range(SEEDS):
                x = spread(seed).to(source)
                their_scales, theirs = to_mx(x, dtype, 32, mode)
                data, codes = quantize_mx(x, (1, 32), dtype)
                scales, values = scales + codes.numel(), values + data.numel()
                wrong_scales += int((codes != their_scales.view(torch.uint8)).sum())
                wrong_values += int((data.view(torch.uint8) != theirs.view(torch.uint8)).sum())
    version = importlib.metadata.version("torchao")
    print(f"torchao {version}: {wrong_scales} of {scales} scale bytes and {wrong_values} of {values} values differ")
    return 1 if wrong_scales or wrong_values else 0


if __name__ == "__main__":
    raise SystemExit(main())
