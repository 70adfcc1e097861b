"""What is wrong with a Hugging Face folder's weights, without ranks: names, shapes and types, and the values if asked.

The import of every rank refuses the same by the same functions (`hf_import.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.block_folder import open_folder
from gspo_mega.checkpoint.hf_folder import HuggingFaceFolder, check_names_and_shapes, not_finite
from gspo_mega.models.families import TensorEntry
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.stacked import as_stored

_MOST_SHOWN = 20


def check_folder(
    folder: str | Path,
    spec: ModelSpec,
    wanted: Callable[[HuggingFaceFolder], list[TensorEntry]],
    is_beside: Callable[[ModelSpec, str], bool],
    *,
    values: bool,
) -> str:
    """Read the headers of the folder's files, and with `values` every value of every tensor, one tensor at a time.
    `wanted`, `is_beside`: the tensors of the model, and the names that may be there besides, as `fill_from` has them.
    Returns what was read, in words. Raises ModelError that lists the tensors and files.
    """
    begun = time.monotonic()
    num_read = num_bytes = 0
    with open_folder(folder, spec) as source:
        entries = wanted(source)
        shapes = {entry.name: entry.shape for entry in as_stored(entries)}
        problems = check_names_and_shapes(source, shapes, lambda name: is_beside(spec, name))
        bad = shapes.keys() & {word for problem in problems for word in problem.split()} if values else set()
        for entry in entries if values else ():
            stored = entry.stack.name if entry.stack is not None else entry.name
            if stored in bad or stored not in source.files:
                continue
            try:
                tensor = source.read(entry.name)
            except ModelError as error:
                problems.append(str(error))
                continue
            num_read, num_bytes = num_read + 1, num_bytes + tensor.nbytes
            if (problem := not_finite(tensor, entry.name, source.file_of(entry.name))) is not None:
                problems.append(problem)
    if problems:
        more = [f"... and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
        title = f"{folder} cannot be loaded as {spec.family}:"
        raise ModelError("\n  ".join([title, *problems[:_MOST_SHOWN], *more]))
    seconds = time.monotonic() - begun
    return f"{folder}: {num_read} tensors, {num_bytes / 2**30:.2f} GiB, read in {seconds:.0f} s: every value is finite"
