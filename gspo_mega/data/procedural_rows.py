"""Make the files of `data.reasoning_gym` once, with a Python that has the package; they stay the same afterwards.

Each task gets a train file, and all tasks share one held-out file. The held-out items of a task are made first, from
seeds of their own. A train item is left out if its question is among them or came before, because small tasks repeat
themselves. `made_by.json` in the same folder records the settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_mega.base.atomic_io import atomic_write_text
from gspo_mega.base.errors import DataError
from gspo_mega.base.processes import LineProcess
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.config.prompt_sources import HELD_OUT_FILE
from gspo_mega.config.schema.data import Data, ReasoningGymTask

_WORKER = Path(__file__).parents[1] / "rewards" / "reasoning_gym_worker.py"
_MADE_BY = "made_by.json"
_AT_ONCE = 100
# Seeds of held-out items begin here; `data.reasoning_gym.seed` is smaller.
_HELD_OUT_SEED = 2**30
# A task is too small if this many times the wanted number of items do not suffice.
_ATTEMPTS = 10


def make_rows(data: Data) -> list[str]:
    """Make the files of `data.reasoning_gym` unless they exist. Returns a line for the user if they were made.

    Raises DataError if the Python, the package, a task or an option does not exist, if a task has too few different
    items, or if the folder has files that were made with other settings.
    """
    made = data.reasoning_gym
    if made is None:
        return []
    folder = Path(made.folder)
    asked = {
        "tasks": {task.name: task.options for task in made.tasks},
        **{key: getattr(made, key) for key in ("num_rows", "num_held_out", "seed")},
    }
    if (folder / _MADE_BY).exists():
        present = read_json_file(folder / _MADE_BY)
        changed = [key for key in asked if present.get(key) != asked[key]]
        if changed:
            raise DataError(
                f"{folder}: its files were made with another data.reasoning_gym.{changed[0]}; set"
                " data.reasoning_gym.folder to a new folder, or delete this one"
            )
        return []
    python = data.procedural_python or sys.executable
    with _Maker(python) as maker:
        held_out: list[str] = []
        for task in made.tasks:
            apart: set[str] = set()
            held_out += _lines(maker, task, _HELD_OUT_SEED + made.seed, made.num_held_out, apart)
            _write(folder / f"{task.name}.train.jsonl", _lines(maker, task, made.seed, made.num_rows, apart))
        _write(folder / HELD_OUT_FILE, held_out)
        atomic_write_text(folder / _MADE_BY, json.dumps({**asked, "reasoning_gym": maker.version}, indent=1) + "\n")
    return [f"data.reasoning_gym: {len(made.tasks)} tasks written to {folder} (reasoning-gym {maker.version})"]


class _Maker:
    """The worker process, `reasoning_gym_worker.py` in the given Python."""

    def __init__(self, python: str) -> None:
        try:
            self._process = LineProcess([python, "-P", str(_WORKER)])
        except OSError as error:
            raise DataError(f"data.procedural_python: {python} cannot be started: {error}") from error
        if "ready" not in self._process.greeting:
            raise DataError(
                f"data.reasoning_gym: {python}: {self._process.greeting['error']}. Make a venv with it (python -m venv"
                " gym, gym/bin/pip install reasoning-gym) and name its Python: data.procedural_python: gym/bin/python"
            )
        self.version: str = self._process.greeting["ready"]

    def __enter__(self) -> _Maker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.end()

    def rows(self, task: ReasoningGymTask, seed: int, size: int, first: int) -> list[dict[str, Any]]:
        asked = {"task": task.name, "options": task.options, "seed": seed, "size": size}
        reply = self._process.ask({"make": {**asked, "first": first, "number": min(_AT_ONCE, size - first)}})
        if "rows" not in reply:
            raise DataError(f"data.reasoning_gym.tasks: {task.name}: {reply['error']}")
        return reply["rows"]


def _lines(maker: _Maker, task: ReasoningGymTask, seed: int, number: int, seen: set[str]) -> list[str]:
    """`number` items as JSON lines. Their questions are not in `seen`, and are added to it. Raises DataError."""
    lines: list[str] = []
    for row in _rows(maker, task, seed, number * _ATTEMPTS):
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            lines.append(json.dumps(row))
        if len(lines) == number:
            return lines
    raise DataError(
        f"data.reasoning_gym: {task.name} has too few different items: {len(lines)} of the {number} asked for among"
        f" {number * _ATTEMPTS}; ask for fewer, or set its options to a wider range"
    )


def _rows(maker: _Maker, task: ReasoningGymTask, seed: int, most: int) -> Iterator[dict[str, Any]]:
    for first in range(0, most, _AT_ONCE):
        yield from maker.rows(task, seed, most, first)


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, "".join(f"{line}\n" for line in lines))
