"""Shared parts of the checkpoint tools, which are commands of `gspo-mega` too: errors as a text and an exit code.

Not a tool itself: see hf_to_megatron, megatron_to_hf, inspect_checkpoint, verify_checkpoint and quantize_checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.untrusted import printable_output
from gspo_mega.cli.checkpoint_tools import add_conversion_arguments, write_converted

with uncollected():
    from gspo_mega.checkpoint.tensor_sources import open_checkpoint


def convert(name: str, text: str, into: Callable[..., None], arguments: list[str] | None) -> int:
    """One direction of conversion as a program. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=name, description=text)
    add_conversion_arguments(parser)
    options = parser.parse_args(arguments)
    return guarded(lambda: write_converted(open_checkpoint(options.source, options.described_by), into, options))


def run_command(name: str, text: str, command: ModuleType, arguments: list[str] | None) -> int:
    """A command of `gspo-mega` as a program of its own. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=name, description=text)
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    return guarded(lambda: command.run(options))


@printable_output()
def guarded(run: Callable[[], int | None]) -> int:
    """The exit code of `run`, 0 for None, or of its error after printing the error's text."""
    try:
        code = run()
        sys.stdout.flush()
        return code or 0
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
