"""Rows that share prefixes on several context ranks: together the ranks hold every label and every token once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_mega.data.packing import build_micro_batch
from gspo_mega.engine.device_batch import held_rows, to_device
from gspo_mega.engine.routing import Routers


def trajectory(prompt: list[int], response: list[int], mask: list[int]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "response_token_ids": response,
        "response_mask": mask,
        "rollout_log_probs": [-float(token) for token in response],
    }


# Tokens tell where they are from; the last rows' responses begin alike, and one trains nothing.
ROWS = [
    trajectory([1, 2, 3, 4, 5], [10, 11, 12], [1, 0, 1]),
    trajectory([1, 2, 3, 4, 5], [13], [1]),
    trajectory([1, 2, 3, 4, 5], [14, 15, 16, 17, 18, 19], [1, 1, 1, 1, 0, 1]),
    trajectory([6, 7], [20, 21, 22], [1, 1, 1]),
    trajectory([6, 7], [20, 23], [0, 0]),
]


@pytest.mark.parametrize("mode", ["prompts", "full"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_label_is_on_the_rank_that_computes_the_token_before_it(mode, ranks):
    pack = build_micro_batch(ROWS, range(5), 2 * ranks, pack_multiple=2 * ranks, share_prefixes=mode)
    assert pack.computed_at is not None and pack.num_computed % (2 * ranks) == 0
    tokens, depths, labels, ends, weights = [], [], [], [], []
    for rank in range(ranks):
        context, one = SimpleNamespace(size=ranks, rank=rank), SimpleNamespace(size=1, rank=0)
        groups: Any = SimpleNamespace(context=context, tensor=one, is_last_stage=True)
        batch = to_device(pack, groups)
        assert batch.token_ids.shape == batch.position_ids.shape == (1, pack.num_computed // ranks)
        held, active = held_rows(pack, groups)
        at = held[active].numpy()
        # The head reads the state after this token, at this depth, for this label.
        assert np.array_equal(batch.token_ids[0, batch.rows].numpy(), pack.token_ids[at])
        assert np.array_equal(batch.position_ids[0, batch.rows].numpy(), pack.position_ids[at])
        assert np.array_equal(batch.labels.numpy(), pack.token_ids[at + 1])
        assert np.array_equal(batch.rollout_log_probs.numpy(), -pack.token_ids[at + 1])
        assert batch.sequence_ids.tolist() == sorted(batch.sequence_ids.tolist())
        labels += at.tolist()
        ends += zip(batch.end_sequences.tolist(), batch.token_ids[0, batch.end_rows].tolist())
        tokens += batch.token_ids[0].tolist()
        depths += batch.position_ids[0].tolist()
        forest: Any = batch.packed
        forest = forest.forest
        assert forest.num_row_tokens == sum(8 if k == 0 else n for k, n in enumerate((8, 6, 11, 5, 4)))
        weights += forest.num_rows.tolist()
        routers = Routers([], None, groups, sequence_parallel=False, recompute=False)
        assert np.array_equal(pack.token_ids[routers.rows(pack).numpy()], batch.token_ids[0].numpy())
    assert sorted(labels) == np.flatnonzero(pack.loss_mask).tolist()
    last = {row: ROWS[i]["response_token_ids"] for row, i in enumerate(pack.trajectory_index.tolist())}
    assert dict(ends) == {row: response[-1] for row, response in last.items() if response[-1] != 23}
    first = pack.first_rows()
    assert sorted(tokens) == sorted(pack.token_ids[first].tolist())
    assert sorted(depths) == sorted(pack.position_ids[first].tolist())
    assert sorted(weights) == sorted(pack.row_counts().tolist())


def test_nodes_are_cut_where_ranks_are():
    pack = build_micro_batch(ROWS, range(5), 4, pack_multiple=4, share_prefixes="prompts")
    context, one = SimpleNamespace(size=2, rank=1), SimpleNamespace(size=1, rank=0)
    groups: Any = SimpleNamespace(context=context, tensor=one, is_last_stage=True)
    packed: Any = to_device(pack, groups).packed
    length = pack.num_computed // 4
    assert packed.forest.held == (slice(length, 2 * length), slice(2 * length, 3 * length))
    assert set(range(0, 4 * length + 1, length)) <= set(packed.forest.starts)
    assert torch.equal(packed.cu_seqlens_q, torch.tensor([0, 4 * length], dtype=torch.int32))
