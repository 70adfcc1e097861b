"""Which tokens of a sequence each context-parallel rank holds.

Each sequence is cut into 2 x size equal chunks; rank r holds chunks r and 2 x size - 1 - r, so that causal
attention costs every rank the same. Transformer Engine uses the same layout.
"""

from __future__ import annotations

import itertools

import torch


def local_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions of one sequence that `rank` holds: [length / size] int64, on the host, local to the context rank.

    Raises ValueError unless 2 x size divides `length`, a number of tokens.
    """
    if size == 1:
        return torch.arange(length)
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} padded tokens does not divide into 2 x {size} chunks")
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def local_rows(cu_seqlens: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Rows of a pack that `rank` holds, in its own order: [T / size] int64, on the host, local to the context rank.

    cu_seqlens: [S+1] int32 or int64 offsets of the whole pack's sequences in tokens, the same on every rank.
    """
    if size == 1:
        return torch.arange(int(cu_seqlens[-1]))
    bounds = cu_seqlens.tolist()
    return torch.cat([start + local_positions(end - start, size, rank) for start, end in itertools.pairwise(bounds)])
