"""Transformer Engine's Triton kernels for tokens' rows, against the functions that stand in their place on a CPU
(`gspo_mega/cpu/te_rows.py`). A script for `interpreter.py`; nothing of the wheel is replaced in it but autotuners.
"""

import functools
import sys
import types

import torch
from interpreter import Untuned, case, mend_interpreter, report

from gspo_mega.config.precision import wheel_folder
from gspo_mega.cpu import te_rows as ours

TOKENS, EXPERTS, WIDTH = 7, 6, 80


def _import_kernels():
    """Import only two modules of the wheel; its packages would import the compiled extension."""
    for name in ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton"):
        package = types.ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(wheel_folder() / package.__name__.replace(".", "/"))]
        sys.modules[package.__name__] = package
    import transformer_engine.common.triton.permutation as kernels
    import transformer_engine.pytorch.triton.permutation as theirs

    for name in (
        "_permute_kernel",
        "_unpermute_kernel",
        "_unpermute_bwd_with_merging_probs_kernel",
        "_sort_chunks_by_map_kernel",
    ):
        setattr(theirs, name, Untuned(getattr(kernels, name), BLOCK_SIZE=64))
    empty, zeros = torch.empty, torch.zeros  # the wheel asks for memory on a GPU
    torch.empty = lambda *sizes, device=None, **options: empty(*sizes, **options)
    torch.zeros = lambda *sizes, device=None, **options: zeros(*sizes, **options)
    return theirs


mend_interpreter()
theirs = _import_kernels()
GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


CHOSEN = torch.rand(TOKENS, EXPERTS, generator=GENERATOR) < 0.55
CHOSEN[3] = False  # a token without an expert
CHOSEN[4] = True  # one with all
WEIGHTS = torch.rand(TOKENS, EXPERTS, generator=GENERATOR) * CHOSEN
WEIGHTS[5, int(CHOSEN[5].nonzero()[0])] = 0.0  # a row of weight 0
ROWS = int(CHOSEN.sum())
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache  # the interpreter takes a second for the kernel's sums
def row_map(module=ours):
    return module.make_row_id_map(CHOSEN, TOKENS, EXPERTS)


def used(found):
    """The row map without what a kernel leaves unwritten: the places beyond a token's copies."""
    there = torch.arange(EXPERTS) < found[:, -1:]
    return torch.cat([torch.where(torch.cat([there, there], 1), found[:, :-1], -1), found[:, -1:]], 1)


@case("row map")
def _():
    yield used(row_map(theirs)), used(row_map())
    for shape in ((1, 1), (5, 8)):
        chosen = torch.rand(*shape, generator=GENERATOR) < 0.5
        got, want = (module.make_row_id_map(chosen, *shape) for module in (theirs, ours))
        there = torch.arange(shape[1]) < want[:, -1:]
        yield got[:, -1], want[:, -1]
        for first in (0, shape[1]):
            yield got[:, first : first + shape[1]][there], want[:, first : first + shape[1]][there]


@case("permute")
def _():
    for dtype in DTYPES:
        x = numbers(TOKENS, WIDTH, dtype=dtype)
        for probs in (WEIGHTS, None):
            got, want = (
                module.permute_with_mask_map(x, row_map(module), probs, None, None, TOKENS, EXPERTS, ROWS, WIDTH, None)
                for module in (theirs, ours)
            )
            yield got[0], want[0]
            if probs is not None:
                yield got[2], want[2]


@case("unpermute")
def _():
    merging, rows = torch.rand(TOKENS, EXPERTS, generator=GENERATOR), numbers(ROWS)
    variants = (
        (torch.float32, None, None),
        (torch.float32, None, rows),
        (torch.bfloat16, merging, None),
        (torch.bfloat16, merging, rows),
    )
    for dtype, merged, permuted in variants:
        y = numbers(ROWS, WIDTH, dtype=dtype)
        got, want = (
            module.unpermute_with_mask_map(y, row_map(module), merged, permuted, None, TOKENS, EXPERTS, WIDTH)
            for module in (theirs, ours)
        )
        yield got[0], want[0]
        if permuted is not None:
            yield got[1], want[1]


def _gradients():
    merging = torch.rand(TOKENS, EXPERTS, generator=GENERATOR)
    for dtype in DTYPES:
        y, outer = numbers(ROWS, WIDTH, dtype=dtype), numbers(TOKENS, WIDTH, dtype=dtype)
        yield tuple(
            module.unpermute_with_mask_map_bwd_with_merging_probs(
                outer, row_map(module), y, merging, None, TOKENS, EXPERTS, ROWS, WIDTH
            )
            for module in (theirs, ours)
        )


@case("unpermute backward, rows")
def _():
    for got, want in _gradients():
        yield got[0], want[0]


@case("unpermute backward, weights")
def _():
    for got, want in _gradients():
        yield torch.where(CHOSEN, got[1], 0), want[1]


SIZES, ORDER = torch.tensor([3, 0, 4, 1, 3, 7]), torch.tensor([2, 0, 5, 4, 1, 3])


@case("chunk map")
def _():
    yield tuple(module.make_chunk_sort_map(SIZES, ORDER, int(SIZES.sum()), len(SIZES)) for module in (theirs, ours))


@case("chunks")
def _():
    total = int(SIZES.sum())
    places = ours.make_chunk_sort_map(SIZES, ORDER, total, len(SIZES))
    for dtype in DTYPES:
        for forward in (True, False):
            z, w = numbers(total, WIDTH, dtype=dtype), numbers(total)
            got, want = (module.sort_chunks_by_map(z, places, w, total, WIDTH, forward) for module in (theirs, ours))
            yield got[0], want[0]
            yield got[1], want[1]


report()
