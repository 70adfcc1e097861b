"""Quantise a checkpoint to FP8 blocks, as DeepSeek-V3 and Qwen3-FP8 are published.

    gspo-mega quantize path/to/hf path/to/fp8
    gspo-mega quantize runs/x/train/checkpoints/step_00000100 path/to/fp8 --described-by path/to/hf

OUT_DIR is a Hugging Face folder: `X.weight` in FP8 (e4m3), one scale per block of 128 x 128 in `X.weight_scale_inv`,
and `quantization_config` in config.json. Router, norms, embeddings and LM head stay plain. A server of
`server.quantization: fp8_block` can start from it. CHECKPOINT is a Hugging Face folder, a converted folder, or a run's
checkpoint. One tensor at a time is in memory. The same command continues after an interruption. Exit code 0: complete;
2: the source cannot be used; 6: it cannot be read, or OUT_DIR cannot be written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_mega.cli.checkpoint_tools import (
    DTYPES,
    ProgressBar,
    add_described_by,
    add_file_bytes,
    say_written,
    torch_dtype,
)

SCALES = ("checkpoint", "float32", "power_of_two")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help="what to quantise")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to create; it must not exist")
    add_described_by(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of tensors that stay plain, and to which the others are rounded first (default: the source's)",
    )
    parser.add_argument(
        "--scales",
        choices=SCALES,
        default="float32",
        help="float32, power_of_two: as fp8.block_scales in a run; checkpoint: as DeepSeek-V3's files (amax / 448)"
        " (default: float32)",
    )
    add_file_bytes(parser)


def run(args: argparse.Namespace) -> int:
    from gspo_mega.checkpoint.served_folders import to_blocks
    from gspo_mega.checkpoint.tensor_sources import open_checkpoint

    to_blocks(
        open_checkpoint(args.source, args.described_by),
        args.out_dir.absolute(),
        rule=args.scales,
        dtype=torch_dtype(args.dtype),
        progress=ProgressBar(),
        file_bytes=args.file_bytes,
    )
    say_written(args.out_dir)
    return 0
