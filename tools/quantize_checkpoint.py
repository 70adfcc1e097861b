"""Quantise a checkpoint to FP8 blocks: `python tools/quantize_checkpoint.py CHECKPOINT OUT_DIR`.

OUT_DIR is a Hugging Face folder in the layout in which DeepSeek-V3 and Qwen3-FP8 are published: `X.weight` in FP8
(e4m3), one scale per block of 128 x 128 in `X.weight_scale_inv`, and `quantization_config` in config.json. Router,
norms, embeddings and LM head stay plain. A server of `server.quantization: fp8_block` can start from it. CHECKPOINT is
a Hugging Face folder, a converted folder, or a run's checkpoint. One tensor at a time is in memory. The same command
continues after an interruption. Exit code 0: complete; 2: the source cannot be used; 6: OUT_DIR cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch
from conversion_tool import ProgressBar, add_described_by, add_file_bytes, guarded

from gspo_mega.base.untrusted import printable_output
from gspo_mega.checkpoint.quantized import Rule
from gspo_mega.checkpoint.served_folders import to_blocks
from gspo_mega.checkpoint.tensor_sources import open_checkpoint


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="quantize_checkpoint", description="Quantise a checkpoint to FP8 blocks.")
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help="what to quantise")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to create; it must not exist")
    add_described_by(parser)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="dtype of tensors that stay plain, and to which the others are rounded first (default: the source's)",
    )
    parser.add_argument(
        "--scales",
        choices=get_args(Rule),
        default="float32",
        help="float32, power_of_two: as fp8.block_scales in a run; checkpoint: as DeepSeek-V3's files (amax / 448)"
        " (default: float32)",
    )
    add_file_bytes(parser)
    options = parser.parse_args(arguments)

    def run() -> int:
        source = open_checkpoint(options.source, options.described_by)
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        to_blocks(
            source,
            options.out_dir.absolute(),
            rule=options.scales,
            dtype=dtype,
            progress=ProgressBar(),
            file_bytes=options.file_bytes,
        )
        print(f"{options.out_dir}: written and complete; manifest.json names every tensor with its SHA-256")
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
