"""Tensors of experts that files and servers have stacked: one tensor for all experts of a layer, as in gpt-oss.

Owns the view of files: which stacked tensors there are, of what shape, and from which of this package's tensors. The
tables (`tables.py`) name the stack of each; everything that has to do with ranks and parameters keeps one tensor per
expert. Moves no data and imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gspo_mega.models.families import TensorEntry, hf_tensors
from gspo_mega.models.spec import ModelSpec

Stacking = tuple[TensorEntry, tuple[TensorEntry, ...]]
"""A tensor as files have it, and those that it is made of: itself alone where nothing is stacked."""


def stackings(entries: Iterable[TensorEntry]) -> Iterator[Stacking]:
    """Every tensor as files have it, in the order of `entries`, in which those of a stack follow each other."""
    for name, group in itertools.groupby(
        entries, key=lambda entry: entry.name if entry.stack is None else entry.stack.name
    ):
        parts = tuple(group)
        yield (parts[0] if parts[0].stack is None else _whole(name, parts)), parts


def as_stored(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The tensors as files have them: names and shapes of a checkpoint, and of what servers are sent."""
    return [whole for whole, _ in stackings(entries)]


def checkpoint_tensors(spec: ModelSpec) -> list[TensorEntry]:
    """`hf_tensors` as files have them."""
    return as_stored(hf_tensors(spec))


def is_stacked(spec: ModelSpec) -> bool:
    """Does a checkpoint of the model stack the tensors of its experts?"""
    return any(entry.stack is not None for entry in hf_tensors(spec))


def _whole(name: str, parts: tuple[TensorEntry, ...]) -> TensorEntry:
    first, stack = parts[0], parts[0].stack
    assert stack is not None
    experts = 1 + max(part.expert or 0 for part in parts)
    rows, *columns = first.shape
    return replace(
        first,
        name=name,
        shape=(experts, *columns, rows * stack.step),
        role="whole",
        sharding="replicated",
        expert=None,
        stack=None,
    )
