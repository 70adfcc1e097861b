"""The `gspo-mega` command line: which command, and how its errors reach a person.

Each command is a module of this package with `add_arguments(parser)` and `run(args) -> int`, imported only
when it is asked for, so that `gspo-mega plan` does not wait for libraries it does not use.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from gspo_mega import __version__
from gspo_mega.errors import GspoMegaError

COMMANDS = {
    "plan": "show the resolved layout of a configuration, or why it cannot run",
    "train": "run a configuration: servers, ranks, training",
    "sft": "supervised cold start of a configuration's model",
    "eval": "sampled accuracy of a run or a Hugging Face folder",
    "serve": "one SGLang server",
    "inspect": "the recorded rollouts of a run's step",
    "certify": "show that layouts compute the same numbers",
    "status": "how a run is doing, from its folder alone",
    "doctor": "what is wrong with this machine for a run",
}
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A GspoMegaError becomes its text on stderr and its `exit_code`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        print(f"gspo-mega {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(COMMANDS)}"
        print(f"gspo-mega: {name!r} is not a command; {hint}", file=sys.stderr)
        return EXIT_USAGE
    command = importlib.import_module(f"gspo_mega.commands.{name}")
    parser = argparse.ArgumentParser(
        prog=f"gspo-mega {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    try:
        # Intermixed: an override may stand before or after an option.
        code = command.run(parser.parse_intermixed_args(words[1:]))
        sys.stdout.flush()
        return code
    except GspoMegaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        [
            "gspo-mega: GSPO on Megatron-Core policies with SGLang rollouts.",
            "",
            "usage: gspo-mega COMMAND [...]        (gspo-mega COMMAND --help says more)",
            "",
            *lines,
            "",
            "Configurations take overrides: gspo-mega train configs/quickstart.yaml train.num_steps=10",
        ]
    )
