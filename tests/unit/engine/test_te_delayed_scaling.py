"""Delayed scaling on a CPU: histories and scales of several passes worked out by hand, and against loops in numpy.

Transformer Engine's bulk kernel (`amax_and_scale_update_after_reduction`) in words: the newest amax is the reduced one
or, if that is 0, row 0 of the history; unless it is 0 too, all rows move up by one, the newest goes last, row 0 becomes
0; `max` takes the largest of the rows as they were before row 0 was cleared; the scale is largest / 2^margin / amax.
"""

import numpy as np
import pytest
import torch
from te_process import in_te_process


def update(reduced, histories, scales, algorithm="max", dtype="kFloat8E4M3", margin=0):
    import transformer_engine_torch as extension
    from transformer_engine.pytorch.constants import DType

    extension.fused_amax_and_scale_update_after_reduction(reduced, histories, scales, algorithm, DType[dtype], margin)


@in_te_process
def test_three_passes_by_hand():
    """One tensor, three rows. Row 0 collects the present pass; before each update it holds that pass's amax.

    pass 1: amax 7:   rows (7, 0, 0) → newest 7, rolled (0, 0, 7): max 7 → 448 / 7 = 64
    pass 2: amax 3.5: rows (3.5, 0, 7) → rolled (0, 7, 3.5), row 0 cleared: (0, 7, 3.5); max 7 → 64; most recent: 128
    pass 3: amax 1.75: rows (1.75, 7, 3.5) → rolled (7, 3.5, 1.75): max is still 7, though that row is now cleared:
            (0, 3.5, 1.75)
    pass 4: amax 1.75: rows (1.75, 3.5, 1.75) → rolled (3.5, 1.75, 1.75): max 3.5 → 128
    """
    history, scale = torch.zeros(3, 1), torch.ones(1)
    recent_history, recent = torch.zeros(3, 1), torch.ones(1)
    seen, seen_recent = [], []
    for amax in (7.0, 3.5, 1.75, 1.75):
        for rows in (history, recent_history):
            rows[0] = amax
        update(torch.tensor([amax]), [history], [scale])
        update(torch.tensor([amax]), [recent_history], [recent], "most_recent")
        seen.append((history.flatten().tolist(), scale.item()))
        seen_recent.append(recent.item())
    assert seen == [
        ([0, 0, 7], 64),
        ([0, 7, 3.5], 64),
        ([0, 3.5, 1.75], 64),
        ([0, 1.75, 1.75], 128),
    ]
    assert seen_recent == [64, 128, 256, 256]


@in_te_process
def test_nothing_seen_and_nothing_finite_leave_the_scale():
    history = torch.tensor([[0.0, torch.inf, torch.nan, 2.0], [1.0, 1.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    before, scale = history.clone(), torch.tensor([3.0, 3.0, 3.0, 3.0])
    update(torch.tensor([0.0, torch.inf, torch.nan, 0.0]), [history], [scale])
    # Tensor 0 saw nothing: neither its rows nor its scale move. Tensor 1: infinity is the largest, the scale stays.
    # Tensor 2: NaN counts for nothing, 5 is the largest. Tensor 3: the reduced amax is 0, row 0 (2) takes its place.
    assert torch.equal(history[:, 0], before[:, 0])
    assert history[:, 1].tolist() == [0, 5, torch.inf] and history[:2, 2].tolist() == [0, 5]
    assert torch.isnan(history[2, 2]) and history[:, 3].tolist() == [0, 5, 2]
    assert scale.tolist() == [3.0, 3.0, float(np.float32(448) / np.float32(5)), float(np.float32(448) / np.float32(5))]


@in_te_process
def test_margin_the_other_format_and_an_amax_whose_quotient_overflows():
    scales = [torch.ones(1), torch.ones(1), torch.ones(1)]
    update(torch.tensor([7.0]), [torch.zeros(2, 1)], scales[:1], margin=3)
    update(torch.tensor([7.0]), [torch.zeros(2, 1)], scales[1:2], dtype="kFloat8E5M2")
    update(torch.tensor([1e-40]), [torch.zeros(2, 1)], scales[2:])
    assert [scale.item() for scale in scales] == [8.0, 8192.0, torch.finfo(torch.float32).max]
    with pytest.raises(ValueError, match="max and most_recent"):
        update(torch.tensor([1.0]), [torch.zeros(2, 1)], scales[:1], "median")


def by_loops(reduced, histories, scales, algorithm, largest, margin):
    at = 0
    for history, scale in zip(histories, scales, strict=True):
        for tensor in range(history.shape[1]):
            newest = reduced[at] if reduced[at] != 0 else history[0, tensor]
            at += 1
            amax = np.float32(0)
            if newest != 0:
                old = history[:, tensor].copy()
                for row in range(len(old)):
                    moved = old[row + 1] if row < len(old) - 1 else newest
                    amax = np.fmax(amax, moved)
                    history[row, tensor] = moved if row > 0 else 0
            if algorithm == "most_recent":
                amax = newest
            if np.isfinite(amax) and amax > 0:
                scale[tensor] = np.float32(np.float32(largest) * np.float32(2.0**-margin)) / amax


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 16])
@in_te_process
def test_many_passes_by_loops(algorithm, length):
    random = np.random.default_rng(length)
    widths = (3, 1, 2)
    histories, scales = [np.zeros((length, n), np.float32) for n in widths], [np.ones(n, np.float32) for n in widths]
    ours = [torch.from_numpy(h.copy()) for h in histories], [torch.from_numpy(s.copy()) for s in scales]
    for number in range(40):
        seen = (np.exp(random.standard_normal(6)) * (random.random(6) > 0.3)).astype(np.float32)
        reduced = seen * (random.random(6) > 0.2).astype(np.float32)
        start = 0
        for history, mine in zip(histories, ours[0], strict=True):
            history[0] = seen[start : start + history.shape[1]]
            mine[0] = torch.from_numpy(history[0])
            start += history.shape[1]
        by_loops(reduced, histories, scales, algorithm, 57344.0, number % 3)
        update(torch.from_numpy(reduced), *ours, algorithm, "kFloat8E5M2", number % 3)
        for expected, got in zip((*histories, *scales), (*ours[0], *ours[1]), strict=True):
            np.testing.assert_array_equal(got.numpy(), expected)


@in_te_process
def test_quantising_uses_the_given_scale_notes_the_amax_and_saturates():
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    amax = torch.tensor([5.0])
    quantizer = Float8Quantizer(torch.tensor([64.0]), amax, DType.kFloat8E4M3)
    ours = quantizer(torch.tensor([[7.0, -14.0, 0.03125, torch.nan]]))
    # 7 * 64 = 448; -14 * 64 = -896 saturates; 2.0; NaN. The amax is that of the values, and the larger one stays.
    assert ours._data.tolist() == [[0x7E, 0xFE, 0x40, 0x7F]]
    assert (ours._scale_inv.tolist(), amax.tolist()) == ([1 / 64], [14.0])
    quantizer(torch.tensor([[1.0]]))
    assert amax.tolist() == [14.0]
    # Gradients: 1e4 * 64 is beyond E5M2's 57344, and no infinity is written.
    gradients = Float8Quantizer(torch.tensor([64.0]), torch.zeros(1), DType.kFloat8E5M2)
    assert gradients(torch.tensor([[1e4, -1e4, 1.0]]))._data.tolist() == [[0x7B, 0xFB, 0x54]]
    # Flat shards of FP8 parameters are cast with a quantiser that has no amax to note.
    silent = Float8Quantizer(torch.tensor([64.0]), torch.Tensor(), DType.kFloat8E4M3)
    assert silent(torch.tensor([[7.0]]))._data.tolist() == [[0x7E]]


@in_te_process
def test_on_a_grid_a_rounding_of_the_amax_changes_no_scale_and_an_amax_that_is_not_shared_does():
    """The steps are 4.4 % apart. No scale is above the exact one, so that nothing overflows."""
    from gspo_mega.cpu.te_fp8 import put_delayed_scales_on_grid

    def scale_of(amax):
        history, scale = torch.zeros(1, 1), torch.ones(1)
        update(torch.tensor([amax]), [history], [scale])
        return scale.item()

    exact = {amax: scale_of(amax) for amax in (3.0, 3.003, 3.15)}
    assert len(set(exact.values())) == 3
    put_delayed_scales_on_grid(True)
    try:
        on_grid = {amax: scale_of(amax) for amax in exact}
    finally:
        put_delayed_scales_on_grid(False)
    assert on_grid[3.0] == on_grid[3.003] != on_grid[3.15]
    assert all(0.957 < on_grid[amax] / exact[amax] <= 1 for amax in exact)
    assert scale_of(3.0) == exact[3.0]
