"""Some responses of each held-out evaluation, in the run folder: `evaluations/step_<8 digits>.jsonl`.

The file is named after the step whose weights were measured, and written whole once the evaluation has ended. So an
evaluation that is made again replaces its file, and a run that continues from an earlier step removes the files that it
will write again. `before_and_after` reads the first and the last response to each prompt, for the report and the end of
a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import DataError, FolderError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import MOST_TEXT_BYTES, parse_json, read_bytes
from gspo_mega.config.prompt_sources import MOST_KEPT_CHARACTERS, MOST_KEPT_PROMPTS

_NAME = re.compile(r"step_(\d{8})\.jsonl")
_TYPES = {"set": str, "row": int, "prompt": str, "response": str, "correct": (bool, type(None))}


def shown_places(num_prompts: int) -> list[int]:
    """The places of at most `MOST_KEPT_PROMPTS` prompts of a set of `num_prompts`, evenly spread over it, the first and
    the last included. The same in every evaluation, so that a prompt's responses can be compared.
    """
    if num_prompts <= MOST_KEPT_PROMPTS:
        return list(range(num_prompts))
    return [round(place * (num_prompts - 1) / (MOST_KEPT_PROMPTS - 1)) for place in range(MOST_KEPT_PROMPTS)]


def clipped(text: str, most: int = MOST_KEPT_CHARACTERS) -> str:
    """The text, or its beginning and its end with the number of characters between them that were left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def write_responses_of(folder: RunFolder, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write the kept responses of the evaluation of `step`'s weights, replacing those of an earlier try. `rows`: JSON
    types, with the keys of `gspo-mega eval --out`. Raises FolderError if the disk refuses them.
    """
    file = _file(folder, step)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        atomic_io.make_folder(file.parent)
        # A lone surrogate, which a broken tokenizer may leave in a text, cannot be encoded as UTF-8.
        atomic_io.write_whole(file, text.encode("utf-8", "replace"))
    except OSError as error:
        raise FolderError(
            f"{file}: held-out responses cannot be written: {error.strerror}; the same command continues the run"
        ) from error


def drop_responses(folder: RunFolder, after: int, due: Collection[int] = ()) -> None:
    """Remove the responses of steps after `after` (-1: all) and of the steps `due`, which a continued run measures
    again. Raises FolderError.
    """
    for step, file in _files(folder):
        if step > after or step in due:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise FolderError(f"{file}: cannot be removed: {error.strerror}") from error


@dataclass
class HeldOutPrompt:
    """A held-out prompt with its first and last response, rows as `gspo-mega eval --out` writes them. `before`: None if
    the set was measured once.
    """

    row: int
    prompt: str
    answer: Any
    before: dict[str, Any] | None
    after: dict[str, Any]


@dataclass
class HeldOutChange:
    """What the model answered to the kept prompts of one set. `first_step`: of the weights of `before`, None if the set
    was measured once; `last_step`: of `after`. `prompts`: those that were answered wrongly before and rightly
    afterwards come first, then those that were lost, then the rest, each in the order of the set.
    """

    name: str
    first_step: int | None
    last_step: int
    prompts: list[HeldOutPrompt] = field(default_factory=list)


def before_and_after(folder: RunFolder) -> tuple[list[HeldOutChange], list[str]]:
    """The kept responses of the first and the last evaluation of each set, and what could not be read, as lines for the
    user. Both are empty for a run that was recorded without them.
    """
    files, problems = _files(folder), list[str]()
    first = _first_of_each_set(files, problems)
    last = _first_of_each_set(files[::-1], problems)
    found = []
    for name, (last_step, rows) in last.items():
        first_step, earlier = first.get(name, (last_step, rows))
        by_prompt = {(row["row"], row["prompt"]): row for row in earlier} if first_step < last_step else {}
        change = HeldOutChange(name, first_step if by_prompt else None, last_step)
        for row in rows:
            before = by_prompt.get((row["row"], row["prompt"]))
            change.prompts.append(HeldOutPrompt(row["row"], row["prompt"], row.get("answer"), before, row))
        change.prompts.sort(key=_order)
        found.append(change)
    order = list(first)
    found.sort(key=lambda one: order.index(one.name) if one.name in order else len(order))
    return found, list(dict.fromkeys(problems))


def _order(prompt: HeldOutPrompt) -> int:
    before = None if prompt.before is None else prompt.before["correct"]
    after = prompt.after["correct"]
    return 0 if after and before is False else 1 if after is False and before else 2


def _first_of_each_set(
    files: Sequence[tuple[int, Path]], problems: list[str]
) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """For each set, the step and the rows of the first of `files` that has it. Reads no further than to the first file
    that has the sets of the last one, so that a long run is not read whole.
    """
    found: dict[str, tuple[int, list[dict[str, Any]]]] = {}
    wanted: set[str] | None = None
    for step, file in files:
        if wanted is not None and wanted <= found.keys():
            break
        for row in _rows(file, problems):
            if row["set"] not in found or found[row["set"]][0] == step:
                found.setdefault(row["set"], (step, []))[1].append(row)
        if wanted is None:
            wanted = {row["set"] for row in _rows(files[-1][1], problems)}
    return found


def _rows(file: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        return list(read_responses(file))
    except DataError as error:
        problems.append(f"{error}; these held-out responses are not shown")
        return []


def read_responses(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file. Raises DataError if it cannot be read or has a line that this module did not write."""
    try:
        lines = read_bytes(file, MOST_TEXT_BYTES).splitlines()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not all(isinstance(row.get(key, ...), kind) for key, kind in _TYPES.items()):
            raise DataError(f"{file}:{number}: is not a line with a held-out response")
        yield row


def _file(folder: RunFolder, step: int) -> Path:
    return folder.evaluations_dir / f"step_{step:08d}.jsonl"


def _files(folder: RunFolder) -> list[tuple[int, Path]]:
    """The steps that have a file, ascending, with it."""
    if not folder.evaluations_dir.is_dir():
        return []
    found = ((_NAME.fullmatch(entry.name), entry) for entry in folder.evaluations_dir.iterdir())
    return sorted((int(match[1]), entry) for match, entry in found if match)
