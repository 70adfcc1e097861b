"""Import: from a Hugging Face folder into the policy's chunks, in any layout.

Every rank reads only its own slices; `models/tensors.py` knows the place of each tensor. `check_folder`, at the end,
finds without ranks what is wrong with a folder's weights: names, shapes and types, and if asked the values. The import
on every rank uses the same functions and refuses the same folders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gspo_mega.base import progress
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.collectives import raise_together
from gspo_mega.checkpoint.hf_folder import HuggingFaceFolder, check_names_and_shapes, not_finite, open_folder
from gspo_mega.checkpoint.quantized import filled
from gspo_mega.models.parameter_names import by_parameter, canonical_parameters, tensor_group
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, as_stored, hf_tensors, is_ignored_tensor, parameter_blocks

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.process_groups import ParallelGroups

_HEAD = "lm_head.weight"
_MOST_SHOWN = 20


def import_huggingface(
    folder: str | Path, spec: ModelSpec, groups: ParallelGroups, chunks: Sequence[PolicyModel]
) -> None:
    """Fill every parameter of this rank's chunks from the folder, cast to the parameter's dtype.

    `chunks` are unwrapped GPT chunks. Padding rows of the vocabulary become zero. Call it before the optimizer copies
    the parameters. Collective over all ranks.

    Raises ModelError, the same on every rank, listing tensors that are missing, unexpected, of another shape or type,
    or not finite. It also raises one if embeddings are tied and the folder has a head that differs from them.
    """
    fill_from(
        folder,
        spec,
        groups,
        lambda _: (canonical_parameters(spec, groups, chunks), hf_tensors(spec)),
        is_ignored_tensor,
    )


def fill_from(
    folder: str | Path,
    spec: ModelSpec,
    groups: ParallelGroups,
    wanted: Callable[[HuggingFaceFolder], tuple[dict[str, torch.Tensor], list[TensorEntry]]],
    is_allowed: Callable[[ModelSpec, str], bool],
) -> None:
    """Fill parameters of this rank from the folder.

    `wanted` gives the parameters by canonical name, and all tensors of the model that the folder must have.
    `is_allowed` is true for names that it may have besides. Collective; errors are those of `import_huggingface`.
    """
    problems: list[str] = []
    source, parameters, entries = None, {}, []
    try:
        source = open_folder(folder, spec)
        parameters, entries = wanted(source)
        # Rank 0 reads all headers. The other ranks open only the files that they need.
        if groups.is_lead:
            shapes = {entry.name: entry.shape for entry in as_stored(entries)}
            problems = check_names_and_shapes(source, shapes, lambda name: is_allowed(spec, name))
    except ModelError as error:
        problems = [str(error)]
    raise_together(problems, groups.host, ModelError, f"{folder} cannot be loaded as {spec.family}")
    assert source is not None  # otherwise this rank would have had a problem
    with source:
        try:
            problems += _fill(source, spec, groups, parameters, entries)
        except ModelError as error:
            problems.append(str(error))
    raise_together(problems, groups.host, ModelError, f"{folder} cannot be loaded as {spec.family}")


def _fill(
    source: HuggingFaceFolder,
    spec: ModelSpec,
    groups: ParallelGroups,
    parameters: dict[str, torch.Tensor],
    entries: list[TensorEntry],
) -> list[str]:
    """Fill the parameters. Returns the problems of tensors with values that are not finite, one for each tensor."""
    owners, problems = {}, {}
    for parameter, fused in by_parameter(entries).items():
        owners |= dict.fromkeys((parameter, *fused[0].copies), fused)
    with torch.no_grad():
        for name, parameter in parameters.items():
            with filled(parameter) as values:
                for entry in owners[name]:
                    problem = _fill_from_tensor(source, spec, groups, entry, values)
                    if problem is not None:
                        problems.setdefault(entry.name, problem)
    return list(problems.values())


def _fill_from_tensor(
    source: HuggingFaceFolder, spec: ModelSpec, groups: ParallelGroups, entry: TensorEntry, parameter: torch.Tensor
) -> str | None:
    problem = None
    group = tensor_group(groups, entry)
    for block in parameter_blocks(spec, entry, group.size, group.rank):
        values = source.read(entry.name, block.dim, block.start, block.length)
        parameter.narrow(block.dim, block.local_start, block.length).copy_(values)
        problem = problem or not_finite(values, entry.name, source.file_of(entry.name))
        progress.beat()
        if (
            problem is None
            and entry.copies
            and _HEAD in source.files
            and not torch.equal(values, source.read(_HEAD, block.dim, block.start, block.length))
        ):
            raise ModelError(
                f"config.json ties the embeddings, but {_HEAD} differs from {entry.name}; set tie_word_embeddings to"
                " false there"
            )
    return problem


def check_folder(
    folder: str | Path,
    spec: ModelSpec,
    wanted: Callable[[HuggingFaceFolder], list[TensorEntry]],
    is_allowed: Callable[[ModelSpec, str], bool],
    *,
    values: bool,
) -> str:
    """Read the headers of the folder's files, and with `values` every value of every tensor, one tensor at a time.

    `wanted` gives the tensors of the model, and `is_allowed` is true for names that may be there besides, as in
    `fill_from`. Returns in words what was read. Raises ModelError that lists the tensors and files.
    """
    begun = time.monotonic()
    num_read = num_bytes = 0
    with open_folder(folder, spec) as source:
        entries = wanted(source)
        shapes = {entry.name: entry.shape for entry in as_stored(entries)}
        problems = check_names_and_shapes(source, shapes, lambda name: is_allowed(spec, name))
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
