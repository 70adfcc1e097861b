"""Positions that rows share count once for each row, on every tensor rank, as they do where each row is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gspo_mega.data.packing import build_micro_batch
from gspo_mega.engine.routing import ExpertBias, Routers


def trajectory(prompt: list[int], response: list[int], mask: list[int]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "response_token_ids": response,
        "response_mask": mask,
        "rollout_log_probs": [0.0] * len(response),
    }


# The first of the rows that share a prompt trains nothing; the prompt counts for the two others only.
ROWS = [
    trajectory([1, 2, 3], [10, 11], [0, 0]),
    trajectory([1, 2, 3], [12, 13, 14], [1, 1, 0]),
    trajectory([1, 2, 3], [15], [1]),
    trajectory([4, 5], [16, 17], [1, 1]),
]


def routers(rank: int = 0, tensor: int = 1) -> Routers:
    of_tensor, one = SimpleNamespace(size=tensor, rank=rank), SimpleNamespace(size=1, rank=0)
    groups: Any = SimpleNamespace(tensor=of_tensor, context=one)
    return Routers([], None, groups, sequence_parallel=tensor > 1, recompute=False)


def pack(mode: Any, multiple: int = 1):
    return build_micro_batch(ROWS, [0, 1, 2, 3], 1, pack_multiple=multiple, share_prefixes=mode)


def counts_by_prefix(mode: Any, tensor: int) -> dict[tuple[int, ...], int]:
    """How often each prefix of a row counts, summed over the tensor ranks."""
    own = pack(mode, tensor)
    prefixes = [
        tuple(own.token_ids[start : position + 1].tolist())
        for start, end in zip(own.cu_seqlens, own.cu_seqlens[1:])
        for position in range(start, end)
    ]
    found: dict[tuple[int, ...], int] = {}
    for rank in range(tensor):
        one = routers(rank, tensor)
        rows, counts = one.rows(own).tolist(), one.num_rows(own).tolist()
        assert len(rows) == own.num_computed // tensor
        for row, count in zip(rows, counts, strict=True):
            found[prefixes[row]] = found.get(prefixes[row], 0) + count
    return {prefix: count for prefix, count in found.items() if count}


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_prefix_counts_for_every_row_that_trains_on_it(tensor):
    wanted = counts_by_prefix("off", tensor)
    assert wanted == {(1,): 2, (1, 2): 2, (1, 2, 3): 2, (1, 2, 3, 12): 1, (4,): 1, (4, 5): 1, (4, 5, 16): 1}
    assert counts_by_prefix("prompts", tensor) == wanted


@pytest.mark.parametrize("tensor", [1, 2])
def test_all_rows_of_a_shared_position_are_known(tensor):
    own = pack("prompts", tensor)
    seen = []
    for rank in range(tensor):
        positions, places = routers(rank, tensor).all_rows(own)
        first = routers(rank, tensor).rows(own).numpy()
        assert own.computed_at is not None
        assert np.array_equal(own.computed_at[first[places]], own.computed_at[positions])
        seen += positions.tolist()
    assert sorted(seen) == list(range(own.num_tokens))


def test_the_expert_biass_counts_are_those_of_rows():
    import torch

    counted = {}
    for mode in ("off", "prompts"):
        own = pack(mode)
        one: Any = routers()
        one.moe = SimpleNamespace(num_experts=32)
        bias = ExpertBias(0.1, one, SimpleNamespace(), 1)  # pyright: ignore[reportArgumentType]
        tokens = torch.from_numpy(own.token_ids)[one.rows(own)]
        bias.count([own], [{0: torch.stack([tokens, tokens + 12], 1).to(torch.int16)}])
        counted[mode] = bias._counts
    assert torch.equal(counted["off"], counted["prompts"]) and counted["off"].sum() == 2 * 10
