"""Shared parts of the conversion tools: arguments, a progress bar on stderr, errors as a text and an exit code.

Not a tool itself: see hf_to_megatron, megatron_to_hf, inspect_checkpoint and verify_checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.untrusted import printable, printable_output

with uncollected():
    import torch

    from gspo_mega.checkpoint.convert import FILE_BYTES, to_megatron
    from gspo_mega.checkpoint.tensor_sources import TensorSource, open_checkpoint

_SECONDS_BETWEEN = {True: 0.2, False: 10.0}  # on a terminal; in a log


class ProgressBar:
    """Called after every tensor with bytes done, bytes in total and the tensor's name."""

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


def convert(name: str, text: str, into: Callable[..., None], arguments: list[str] | None) -> int:
    """One direction of conversion as a program. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=name, description=text)
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help="what to convert")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to create; it must not exist")
    add_described_by(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="convert to this dtype (default: keep the dtype, bit for bit)"
    )
    add_file_bytes(parser)
    options = parser.parse_args(arguments)

    def run() -> int:
        source: TensorSource = open_checkpoint(options.source, options.described_by)
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        into(source, options.out_dir.absolute(), dtype=dtype, progress=ProgressBar(), file_bytes=options.file_bytes)
        print(f"{options.out_dir}: written and complete; manifest.json names every tensor with its SHA-256")
        if source.spec.num_ignored_layers:
            print(f"{options.out_dir}: {_where_carried_layers_are(source, into is to_megatron)}")
        return 0

    return guarded(run)


def _where_carried_layers_are(source: TensorSource, is_megatron: bool) -> str:
    if not source.carried():
        return f"has no layers for multi-token prediction; {source.description} has none of their tensors"
    if is_megatron:
        return (
            f"has no layers for multi-token prediction; those of {source.description} are taken from there by"
            f" tools/megatron_to_hf.py --described-by {source.description}"
        )
    return f"has the layers for multi-token prediction of {source.description}, as they are there"


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


@printable_output()
def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`, or of its error after printing the error's text."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except GspoMegaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error, file=sys.stderr)
        return 6
