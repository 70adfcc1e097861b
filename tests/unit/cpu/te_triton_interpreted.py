"""Transformer Engine's Triton kernels for tokens' rows, run by Triton's interpreter on a CPU (TRITON_INTERPRET=1), against
the plain functions that stand in their place. A process of its own: nothing of the wheel is replaced in it.
"""

import sys
import types
from pathlib import Path

import torch

from gspo_mega.cpu import te_rows as ours

TOKENS, EXPERTS, WIDTH = 11, 5, 96
GENERATOR = torch.Generator().manual_seed(0)


def import_kernels():
    """The two modules of the wheel alone: its packages would import the compiled extension."""
    wheel = Path(sys.prefix) / "opt" / "transformer_engine"
    for name in ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton"):
        package = types.ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(wheel / package.__name__.replace(".", "/"))]
        sys.modules[package.__name__] = package
    import transformer_engine.common.triton.permutation as kernels
    import transformer_engine.pytorch.triton.permutation as theirs

    for name in (
        "_permute_kernel",
        "_unpermute_kernel",
        "_unpermute_bwd_with_merging_probs_kernel",
        "_sort_chunks_by_map_kernel",
    ):
        setattr(theirs, name, Untuned(getattr(kernels, name)))
    empty, zeros = torch.empty, torch.zeros  # the wheel asks for memory on a GPU
    torch.empty = lambda *sizes, device=None, **options: empty(*sizes, **options)
    torch.zeros = lambda *sizes, device=None, **options: zeros(*sizes, **options)
    return theirs


class Untuned:
    """A kernel with one block size; trying several needs a GPU's clock."""

    def __init__(self, tuned):
        self.plain = getattr(tuned, "fn", tuned)

    def __getitem__(self, grid):
        block = dict(BLOCK_SIZE=64)
        size = grid(block) if callable(grid) else grid
        return lambda *arguments, **options: self.plain[size](*arguments, **options, **block)


def same(what, got, want):
    """To the rounding of a sum of WIDTH fp32 terms in another order."""
    assert got.shape == want.shape and got.dtype == want.dtype, (what, got.dtype, want.dtype)
    bound = WIDTH * 2**-24 * float(want.double().abs().max())
    assert float((got.double() - want.double()).abs().max()) <= bound, (what, got, want)


def numbers(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def main():
    theirs = import_kernels()
    both = (theirs, ours)
    mask = torch.rand(TOKENS, EXPERTS, generator=GENERATOR) < 0.45
    mask[3] = False  # a token without an expert
    weights = torch.rand(TOKENS, EXPERTS, generator=GENERATOR) * mask
    weights[5, int(mask[5].nonzero()[0])] = 0.0  # a row of weight 0
    x, num_rows = numbers(TOKENS, WIDTH), int(mask.sum())
    maps = [module.make_row_id_map(mask, TOKENS, EXPERTS) for module in both]
    for probs in (weights, None):
        moved = [
            module.permute_with_mask_map(x, row_map, probs, None, None, TOKENS, EXPERTS, num_rows, WIDTH, None)
            for module, row_map in zip(both, maps, strict=True)
        ]
        same("rows", moved[0][0], moved[1][0])
        if probs is not None:
            same("weights of rows", moved[0][2], moved[1][2])

    y, merging = numbers(num_rows, WIDTH), torch.rand(TOKENS, EXPERTS, generator=GENERATOR)
    for merged in (None, merging):
        for permuted in (None, numbers(num_rows)):
            back = [
                module.unpermute_with_mask_map(y, row_map, merged, permuted, None, TOKENS, EXPERTS, WIDTH)
                for module, row_map in zip(both, maps, strict=True)
            ]
            same("sums", back[0][0], back[1][0])
            if permuted is not None:
                same("weights of tokens", back[0][1], back[1][1])
    outer = numbers(TOKENS, WIDTH)
    gradients = [
        module.unpermute_with_mask_map_bwd_with_merging_probs(
            outer, row_map, y, merging, None, TOKENS, EXPERTS, num_rows, WIDTH
        )
        for module, row_map in zip(both, maps, strict=True)
    ]
    same("gradient by rows", gradients[0][0], gradients[1][0])
    same("gradient by weights", gradients[0][1], gradients[1][1])

    sizes, order = torch.tensor([3, 0, 4, 1, 3]), torch.tensor([2, 0, 4, 1, 3])
    chunks = [module.make_chunk_sort_map(sizes, order, 11, 5) for module in both]
    same("where chunks go", *chunks)
    z, w = numbers(11, WIDTH), numbers(11)
    for forward in (True, False):
        done = [module.sort_chunks_by_map(z, chunks[0], w, 11, WIDTH, forward) for module in both]
        same("chunks", done[0][0], done[1][0])
        same("weights of chunks", done[0][1], done[1][1])
    print("the kernels agree")


main()
