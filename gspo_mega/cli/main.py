"""The `gspo-mega` command line: `main` chooses the command, runs it, and shows its errors to the user.

Each command is a module of this package with `add_arguments(parser)` and `run(args) -> int`; its docstring is its
--help. Only the module of the command in use is imported, so `gspo-mega plan` does not wait for libraries that only
other commands need.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from gspo_mega import __version__
from gspo_mega.base import network
from gspo_mega.base.errors import FolderError, GspoMegaError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.untrusted import NoRegularFileError, printable_output
from gspo_mega.cli.screen import drop_standard_output, fill_standard_descriptors, show_error

COMMANDS = {
    "plan": "show the resolved layout of a configuration, or why it cannot run",
    "train": "run a configuration: servers, ranks, training",
    "sft": "supervised cold start of a configuration's model",
    "reward-model": "a reward model, fitted on answers known to be right or wrong",
    "eval": "sampled accuracy of a run or a Hugging Face folder",
    "serve": "one SGLang server",
    "inspect": "the recorded rollouts of a run's step",
    "mismatch": "where the mismatch of trainer and servers comes from, and whether the clip range tolerates it",
    "certify": "show that layouts compute the same numbers",
    "compare": "what other objectives would do with a run's recorded rollouts",
    "simulate": "a week of a configuration on many machines, simulated: step times, failures, nodes",
    "drill": "faults in small real runs, at random, and whether each ends as an undisturbed one",
    "trace": "a GPU rank's step without a GPU: memory, exchange, FLOPs and waits, beside the plan",
    "report": "one HTML file of runs: summary, curves, trajectories",
    "watch": "the report of a running run, live in a browser",
    "diff": "where two runs differ, since which step, and why",
    "ls": "the runs in a folder: state, step, reward, accuracy",
    "status": "how a run is doing, from the files in its folder",
    "doctor": "what is wrong with this machine for a run",
    "convert": "a checkpoint from Hugging Face's format to Megatron's, or back",
    "verify-checkpoint": "whether two checkpoints of any format hold the same weights",
    "inspect-checkpoint": "what is in a checkpoint",
    "quantize": "a checkpoint in FP8 blocks, as published ones are",
    "configs": "the configurations that come with the package",
    "completion": "a script for completing this command line in a shell",
}
# Commands that run something: output that cannot be written does not change their exit code.
RUNS = ("train", "sft", "reward-model", "eval", "serve", "certify", "mismatch", "compare")
# Earlier names of commands, which still work in this release.
RENAMED = {"budget": "mismatch"}
EXIT_USAGE = 2
# A disk that is full, lost, or read-only: no defect of the command, whichever file it was at.
_OF_THE_DISK = (errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
# The reader of the output is gone: the code that a shell reports for a program ended by SIGPIPE.
EXIT_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments`: by default those of this process.

    For a GspoMegaError, its text with its notes goes to standard error and its `exit_code` is returned.
    """
    fill_standard_descriptors()
    # A log line that cannot be written is lost. Otherwise Python would show a traceback for each.
    logging.raiseExceptions = False
    network.set_no_proxy()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in RENAMED:
        new = RENAMED[words[0]]
        show_error(f"gspo-mega {words[0]} is now gspo-mega {new}; the next release no longer knows the old name")
        words[0] = new
    name = words[0] if words else ""
    try:
        with printable_output():
            code = _run(words)
        _flush(name)
        return code
    except GspoMegaError as error:
        show_error("\n\n".join([str(error), *getattr(error, "__notes__", ())]))
        return error.exit_code
    except NoRegularFileError as error:
        show_error(f"gspo-mega {name}: {error.filename}: {error.strerror}")
        return FolderError.exit_code
    except OSError as error:
        if error.filename is not None and (
            name not in RUNS or isinstance(error, PermissionError) or error.errno in _OF_THE_DISK
        ):
            show_error(f"gspo-mega {name}: {error.filename}: {error.strerror}")
            return FolderError.exit_code
        if name in RUNS:
            raise
        # The command only prints: its reader (`| head`) has seen enough, or the disk of `> file` is full.
        drop_standard_output()
        if isinstance(error, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        show_error(f"gspo-mega {name}: standard output cannot be written: {error.strerror}")
        return GspoMegaError.exit_code
    except KeyboardInterrupt:
        return 130


def _flush(name: str) -> None:
    """Flush standard output now: a failure at Python's exit would replace the exit code of a run."""
    try:
        sys.stdout.flush()
    except OSError:
        if name not in RUNS:
            raise
        drop_standard_output()


def _run(words: list[str]) -> int:
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
        show_error(f"gspo-mega: {name!r} is not a command; {hint}")
        return EXIT_USAGE
    with uncollected():
        command = importlib.import_module(module_of(name))
    parser = Parser(
        prog=f"gspo-mega {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    # Intermixed parsing accepts overrides before and after options.
    return command.run(parser.parse_intermixed_args(words[1:]))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the missing argument, the nearest option, and how to write an override."""

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:  # argparse names the overrides too, although they are optional
            wanted = [name for name in missing.split(", ") if "=" not in name]
            usage = f"{self.prog} {' '.join(wanted)} ..."
            message = f"{' and '.join(wanted)} {'is' if len(wanted) == 1 else 'are'} missing; for example: {usage}"
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            from gspo_mega.config.explain import known_elsewhere  # it imports pydantic

            said, is_value = [], False  # is_value: of an option of another library, which is answered already
            for word in unknown.split():
                if is_value and not word.startswith("-"):
                    continue
                name = word.partition("=")[0]
                near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
                elsewhere = known_elsewhere(name.lstrip("-").split(".")) if word.startswith("--") else ""
                is_value = bool(elsewhere) and "=" not in word
                if elsewhere:
                    said.append(f"{word} is no option{elsewhere}, in the configuration or as key=value")
                elif near:
                    said.append(f"{word} is no option; did you mean {near[0]}?")
                elif word.startswith("--") and "=" in word:
                    said.append(f"{word}: keys of the configuration have no dashes; write {word.lstrip('-')}")
                else:
                    said.append(f"{word} is no option")
            message = "\n".join(said)
        show_error("\n".join(f"{self.prog}: {line}" for line in message.splitlines()))
        show_error(f"{self.prog} --help lists its arguments")
        raise SystemExit(EXIT_USAGE)


def module_of(command: str) -> str:
    """The name of the module that holds a command."""
    return f"gspo_mega.cli.{command.replace('-', '_')}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        [
            "gspo-mega: GSPO on Megatron-Core policies with SGLang rollouts.",
            "",
            "usage: gspo-mega COMMAND [...]        (details: gspo-mega COMMAND --help)",
            "       gspo-mega --version",
            "",
            *lines,
            "",
            "Configurations take overrides: gspo-mega train configs/quickstart.yaml train.num_steps=10",
            "Completion in bash and zsh: source <(gspo-mega completion bash)",
        ]
    )
