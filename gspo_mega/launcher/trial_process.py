"""Have a separate process read a run's inputs before the run starts: ask it, await it, and tell its answer.

`input_trial.py` is what that process does; it starts here, so that its imports collect no garbage. This side has the
deadline, and needs no torch; in a Python without transformers it returns a notice instead.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_mega.base import errors
from gspo_mega.base.errors import GspoMegaError, RankError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import LoadedConfig, render_config

# It imports transformers, which takes seconds, or a minute from a slow folder, and then reads for some seconds more.
DEADLINE_SECONDS = 180.0
_COMMAND = (sys.executable, "-m", "gspo_mega.launcher.trial_process")
_NEEDED = ("torch", "transformers", "safetensors")


def try_inputs(
    loaded: LoadedConfig, command: str, tools: Sequence[dict[str, Any]] = (), read: list[str] | None = None
) -> list[str]:
    """Have a process read what the ranks of `command` read, to find what they would refuse. `tools`: schemas of the
    run's tools. `read`: a list to which this appends lines that say what was read. Returns notices. If there are
    problems, raises the first one's class of error, with the text of all problems and the places of their keys.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return [
            f"{', '.join(missing)} cannot be imported here: tokenizer, template, rows and stored tensors were not"
            f" checked; `{command}` checks them when it starts"
        ]
    folder = RunFolder(Path(loaded.config.run.dir) / loaded.config.run.name)
    answer = _run_trial(
        loaded,
        {"command": command, "tools": list(tools), "keeps_weights": folder.latest_checkpoint_file.exists()},
        DEADLINE_SECONDS,
    )
    if answer is None:
        return [
            f"the inputs were not read within {DEADLINE_SECONDS:g} s; the run reads them when it starts, and then says"
            " what is wrong with them"
        ]
    notices = _notices_or_error(loaded, answer)
    if read is not None:
        read += answer["read"]
    return notices


def read_weights(loaded: LoadedConfig, command: str | None) -> list[str]:
    """Have a process read every value of the folders' weights. Returns lines that say what was read. Raises ModelError
    with the tensors that are missing, misshaped, mistyped or not finite.
    """
    answer = _run_trial(loaded, {"command": command, "tools": [], "keeps_weights": False, "read_weights": True}, None)
    assert answer is not None
    return _notices_or_error(loaded, answer)


def _run_trial(loaded: LoadedConfig, question: dict[str, Any], deadline: float | None) -> dict[str, Any] | None:
    """The process's answer; None after the deadline. Raises RankError if the process ended without an answer."""
    with tempfile.TemporaryDirectory(prefix="gspo-mega-trial-") as scratch:
        file = Path(scratch) / "config.yaml"
        file.write_text(render_config(loaded.config), encoding="utf-8")
        asked = json.dumps({"read_weights": False, **question, "config": str(file)}) + "\n"
        try:
            ended = subprocess.run(
                _COMMAND, input=asked, capture_output=True, encoding="utf-8", errors="replace", timeout=deadline
            )
        except subprocess.TimeoutExpired:
            return None
    try:
        return json.loads(ended.stdout)
    except ValueError:
        last = "\n".join(ended.stderr.strip().splitlines()[-20:])
        raise RankError(
            f"the process that reads the inputs ended with exit code {ended.returncode} and no answer:\n{last}"
        ) from None


def _notices_or_error(loaded: LoadedConfig, answer: dict[str, Any]) -> list[str]:
    """The notices of an answer without problems. Otherwise raises the first problem's class of error."""
    problems = answer["problems"]
    if not problems:
        return answer["notices"]
    lines = dict.fromkeys(
        line
        for problem in problems
        for line in _placed(f"{loaded.where(problem['key'])}: {problem['key']}: ", problem["text"])
    )
    kind: type[GspoMegaError] = getattr(errors, problems[0]["kind"])
    raise kind("\n".join(lines))


def _placed(place: str, text: str) -> list[str]:
    """The lines of a text, each with its place; an indented line belongs to the line before it and gets none."""
    return [line if line.startswith(" ") else place + line for line in text.splitlines()]


def _answer() -> None:
    """What the process does."""
    with uncollected():
        from gspo_mega.launcher.input_trial import main
    main()


if __name__ == "__main__":
    _answer()
