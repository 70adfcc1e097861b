"""Arguments and progress that the commands for checkpoints share, and the scripts in `tools/` with the same names."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_mega.base.untrusted import printable

if TYPE_CHECKING:
    import torch

    from gspo_mega.checkpoint.tensor_sources import TensorSource

DTYPES = ("float32", "bfloat16")
FILE_BYTES = 2 * 1024**3
_SECONDS_BETWEEN = {True: 0.2, False: 10.0}  # on a terminal; in a log


class ProgressBar:
    """Called after every tensor with bytes done, bytes in total and the tensor's name. Draws on standard error."""

    def __init__(self) -> None:
        # It draws with escapes: it gets the terminal itself, and makes the names printable.
        self._stream = getattr(sys.stderr, "foreign", sys.stderr)
        self._terminal = self._stream.isatty()
        self._shown = 0.0

    def __call__(self, done: int, total: int, name: str) -> None:
        now = time.monotonic()
        if done < total and now - self._shown < _SECONDS_BETWEEN[self._terminal]:
            return
        self._shown = now
        filled = 30 * done // max(total, 1)
        unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
        amount = f"{100 * done // max(total, 1):3d}%  {done / size:.2f} of {total / size:.2f} {unit}"
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {amount}  {printable(name)}"
        print(
            f"\r\033[K{line[:150]}" if self._terminal else line,
            end="\n" if done >= total or not self._terminal else "",
            file=self._stream,
            flush=True,
        )


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help="what to convert")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to create; it must not exist")
    add_described_by(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="convert to this dtype (default: keep the dtype, bit for bit)")
    add_file_bytes(parser)


def add_file_bytes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file-bytes",
        type=int,
        default=FILE_BYTES,
        metavar="N",
        help=f"approximate size of a file (default: {FILE_BYTES})",
    )


def add_described_by(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--described-by",
        type=Path,
        metavar="HF_DIR",
        help="folder with config.json and tokenizer, for a Megatron checkpoint that has none (for example a run's)",
    )


def write_converted(source: TensorSource, into: Callable[..., None], options: argparse.Namespace) -> None:
    """Convert with `into` (`to_megatron` or `to_huggingface`) and say what was written. Raises what it raises."""
    from gspo_mega.checkpoint.convert import to_megatron

    into(
        source,
        options.out_dir.absolute(),
        dtype=torch_dtype(options.dtype),
        progress=ProgressBar(),
        file_bytes=options.file_bytes,
    )
    say_written(options.out_dir)
    if source.spec.num_ignored_layers:
        print(f"{options.out_dir}: {_where_carried_layers_are(source, into is to_megatron)}")


def say_written(out_dir: Path) -> None:
    print(f"{out_dir}: written and complete; manifest.json names every tensor with its SHA-256")


def torch_dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)


def _where_carried_layers_are(source: Any, is_megatron: bool) -> str:
    if not source.carried():
        return f"has no layers for multi-token prediction; {source.description} has none of their tensors"
    if is_megatron:
        return (
            f"has no layers for multi-token prediction; those of {source.description} are taken from there by"
            f" gspo-mega convert --described-by {source.description}"
        )
    return f"has the layers for multi-token prediction of {source.description}, as they are there"
