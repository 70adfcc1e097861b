"""Convert a checkpoint between Hugging Face folders and Megatron's torch_dist format, bit for bit.

    gspo-mega convert path/to/hf path/to/megatron               a Hugging Face folder to Megatron
    gspo-mega convert path/to/megatron path/to/hf               and back
    gspo-mega convert runs/x/train/checkpoints/step_00000100 path/to/hf --described-by path/to/hf
                                                                a run's checkpoint, of any layout

Without --to, a Hugging Face folder becomes a Megatron checkpoint and anything else a Hugging Face folder. No model is
built and no GPU is needed; the largest tensors fit in memory one at a time. Optimizer state is not converted. The same
command continues after an interruption. Exit code 0: complete; 2: the source cannot be used; 6: it cannot be read, or
OUT_DIR cannot be written.
"""

from __future__ import annotations

import argparse

from gspo_mega.cli.checkpoint_tools import add_conversion_arguments, write_converted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_conversion_arguments(parser)
    parser.add_argument(
        "--to", choices=("hf", "megatron"), help="format of OUT_DIR (default: the one that CHECKPOINT does not have)"
    )


def run(args: argparse.Namespace) -> int:
    from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
    from gspo_mega.checkpoint.tensor_sources import HuggingFaceSource, open_checkpoint

    source = open_checkpoint(args.source, args.described_by)
    wanted = args.to or ("megatron" if isinstance(source, HuggingFaceSource) else "hf")
    write_converted(source, to_megatron if wanted == "megatron" else to_huggingface, args)
    return 0
