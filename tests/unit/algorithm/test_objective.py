"""The policy objective: properties that hold for every batch, the parallel contract, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_cases import AGGREGATIONS, RATIOS, SURROGATES, Batch, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective
from gspo_mega.base.errors import NumericsError

SEEDS = st.integers(0, 10_000)
EVERY = [(ratio, aggregation) for ratio in RATIOS for aggregation in AGGREGATIONS]
EVERY += [(surrogate, "token_mean") for surrogate in SURROGATES]


def close(a, b, scale=1.0):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-11, atol=1e-14 * scale)


@given(seed=SEEDS, aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=40, deadline=None)
def test_gspo_token_equals_gspo_when_token_advantages_are_the_sequences(seed, aggregation):
    batch = Batch(seed)
    sequence, sequence_gradient = batch.run(settings_of("sequence", aggregation))
    token, token_gradient = batch.run(
        settings_of("sequence_token", aggregation), token_advantages=batch.advantages[batch.segment_ids]
    )
    close(sequence.value, token.value)
    close(sequence_gradient, token_gradient)
    close(sequence.sequence_terms, token.sequence_terms)


@pytest.mark.parametrize("ratio, aggregation", EVERY)
@given(seed=SEEDS, permutation_seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_the_order_of_tokens_and_sequences_does_not_matter(ratio, aggregation, seed, permutation_seed):
    batch, g = Batch(seed), torch.Generator().manual_seed(permutation_seed)
    whole, gradient = batch.run(settings_of(ratio, aggregation))
    tokens = torch.randperm(batch.segment_ids.numel(), generator=g)
    sequences = torch.randperm(batch.num_sequences, generator=g)
    shuffled, shuffled_gradient = batch.run(settings_of(ratio, aggregation), tokens=tokens, sequences=sequences)
    close(whole.value, shuffled.value)
    close(gradient, shuffled_gradient)
    close(whole.sequence_terms[sequences], shuffled.sequence_terms)


@pytest.mark.parametrize("ratio, aggregation", EVERY)
@given(seed=SEEDS, cut=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_micro_batches_sum_to_the_whole(ratio, aggregation, seed, cut):
    batch = Batch(seed)
    whole, gradient = batch.run(settings_of(ratio, aggregation))
    value, total = 0.0, torch.zeros_like(gradient)
    for sequences in (torch.arange(cut), torch.arange(cut, batch.num_sequences)):
        tokens = torch.isin(batch.segment_ids, sequences).nonzero()[:, 0]
        part, part_gradient = batch.run(settings_of(ratio, aggregation), tokens=tokens, sequences=sequences)
        value, total = value + part.value, total + part_gradient
    close(whole.value, value)
    close(gradient, total)


@pytest.mark.parametrize("ratio, aggregation", EVERY)
@given(seed=SEEDS, split_seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_context_parallel_parts_sum_to_the_whole(ratio, aggregation, seed, split_seed):
    """Each rank holds some tokens of every sequence; its reduce adds the others' partial sums, without gradient."""
    batch = Batch(seed)
    whole, gradient = batch.run(settings_of(ratio, aggregation))
    first = torch.rand(batch.segment_ids.numel(), generator=torch.Generator().manual_seed(split_seed)) < 0.5
    halves = [first.nonzero()[:, 0], (~first).nonzero()[:, 0]]
    partial: dict[int, torch.Tensor] = {}
    calls = []
    for rank, tokens in enumerate(halves):

        def remember(sums, rank=rank):
            partial[rank] = sums.detach()
            return sums

        batch.run(settings_of(ratio, aggregation), tokens=tokens, reduce_sequences=remember)
    value, terms, total = 0.0, 0.0, torch.zeros_like(gradient)
    for rank, tokens in enumerate(halves):

        def reduce(sums, rank=rank):
            calls.append(rank)
            shape = (batch.num_sequences, 2) if ratio == "gmpo" else (batch.num_sequences,)
            assert sums.shape == shape and sums.dtype == torch.float64
            return sums + partial[1 - rank]

        part, part_gradient = batch.run(settings_of(ratio, aggregation), tokens=tokens, reduce_sequences=reduce)
        close(part.sequence_log_ratio, whole.sequence_log_ratio)
        value, terms, total = value + part.value, terms + part.sequence_terms, total + part_gradient
    assert calls == [0, 1]
    close(whole.value, value)
    close(whole.sequence_terms, terms)
    close(gradient, total)


@pytest.mark.parametrize("ratio", RATIOS + SURROGATES)
@given(seed=SEEDS, garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@settings(max_examples=20, deadline=None)
def test_masked_tokens_never_touch_value_or_gradient(ratio, seed, garbage):
    batch = Batch(seed)
    clean, gradient = batch.run(settings_of(ratio))
    batch.new[~batch.mask] = garbage
    batch.old[~batch.mask] = -garbage
    advantages = batch.advantages[batch.segment_ids].masked_fill(~batch.mask, garbage)
    dirty, dirty_gradient = batch.run(settings_of(ratio), token_advantages=advantages)
    assert torch.equal(clean.value, dirty.value)
    assert torch.equal(gradient, dirty_gradient)
    assert torch.equal(dirty_gradient[~batch.mask], torch.zeros(int((~batch.mask).sum()), dtype=torch.float64))


@pytest.mark.parametrize("ratio", RATIOS + SURROGATES)
@given(seed=SEEDS, scale=st.floats(1e-3, 1e3))
@settings(max_examples=15, deadline=None)
def test_the_objective_is_linear_in_the_advantages(ratio, seed, scale):
    batch = Batch(seed)
    one, gradient = batch.run(settings_of(ratio))
    many, scaled = batch.run(settings_of(ratio), advantages=batch.advantages * scale)
    close(one.value * scale, many.value, scale)
    close(gradient * scale, scaled, scale)


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradient_is_the_derivative_of_the_value(ratio):
    """Central differences; GSPO-token's stop-gradient makes it the derivative of GSPO's value instead."""
    batch = Batch(3)
    _, gradient = batch.run(settings_of(ratio))
    value_ratio = "sequence" if ratio == "sequence_token" else ratio
    for token in batch.mask.nonzero()[:, 0].tolist():
        values = []
        for step in (1e-6, -1e-6):
            batch.new[token] += step
            values.append(float(batch.run(settings_of(value_ratio))[0].value))
            batch.new[token] -= step
        assert float(gradient[token]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-9)


def single(log_ratio, advantage, ratio="sequence", **changes):
    log_probs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    output = policy_objective(
        ObjectiveSettings(ratio=ratio, **({"clip_low": 3e-4, "clip_high": 4e-4} | changes)),
        log_probs=log_probs,
        old_log_probs=torch.zeros(1, dtype=torch.float64),
        mask=torch.ones(1),
        segment_ids=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        advantages=torch.tensor([advantage]),
        lengths=torch.ones(1),
        denominator=1,
    )
    output.objective_sum.backward()
    return float(output.value), float(log_probs.grad), output


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_clip_edge_itself_is_inside(ratio):
    for edge, advantage, outward in ((math.log1p(4e-4), 1.0, math.inf), (math.log1p(-3e-4), -1.0, -math.inf)):
        assert single(edge, advantage, ratio)[1] != 0
        assert single(math.nextafter(edge, outward), advantage, ratio)[1] == 0
        assert single(math.nextafter(edge, outward), -advantage, ratio)[1] != 0


@pytest.mark.parametrize("ratio", RATIOS)
def test_an_overflowing_ratio_is_bounded_where_clipped_and_shown_where_not(ratio):
    value, gradient, output = single(1000.0, 1.0, ratio)
    assert (value, gradient) == (1.0004, 0.0) and bool(output.clipped_high.all())
    value, gradient, output = single(1000.0, -1.0, ratio, dual_clip=3.0)
    assert (value, gradient) == (-3.0, 0.0) and bool(output.dual_clipped.all())
    value, gradient, _ = single(1000.0, -1.0, ratio)
    assert value == -math.inf and gradient == -math.inf
    assert single(1000.0, 0.0, ratio)[:2] == (0.0, 0.0)
    assert single(100.0, -1.0, ratio)[0] == pytest.approx(-math.exp(100), rel=1e-13)


def test_a_rejected_sequence_adds_nothing_and_stays_in_the_denominator():
    batch = Batch(11)
    batch.keep[:] = True
    whole, gradient = batch.run(settings_of())
    keep = batch.keep.clone()
    keep[1] = False
    part, part_gradient = batch.run(settings_of(), keep=keep)
    own = batch.segment_ids == 1
    assert torch.equal(part_gradient[own], torch.zeros(int(own.sum()), dtype=torch.float64))
    assert torch.equal(part_gradient[~own], gradient[~own])
    close(part.value, whole.value - whole.sequence_terms[1])
    batch.new[own] = batch.old[own] + 1000.0  # what made it rejected may be enormous
    assert torch.equal(batch.run(settings_of(), keep=keep)[1], part_gradient)


def test_float32_log_probs_lose_nothing_but_their_own_rounding():
    batch = Batch(5)
    batch.new, batch.old = batch.new.float().double(), batch.old.float().double()
    exact, gradient = batch.run(settings_of())
    batch.new, batch.old = batch.new.float(), batch.old.float()
    single_precision, single_gradient = batch.run(settings_of())
    assert torch.equal(exact.value, single_precision.value)
    assert single_gradient.dtype == torch.float32
    torch.testing.assert_close(single_gradient.double(), gradient, rtol=1e-7, atol=0)


def test_filler_alone_is_zero():
    output = policy_objective(
        settings_of(),
        log_probs=torch.zeros(3, requires_grad=True),
        old_log_probs=torch.zeros(3),
        mask=torch.zeros(3),
        segment_ids=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        advantages=torch.zeros(1),
        lengths=torch.zeros(1),
        denominator=0,
    )
    output.objective_sum.backward()
    assert float(output.value) == 0.0 and float(output.importance_ratio[0]) == 1.0


@pytest.mark.parametrize("which, bad", [("new", math.nan), ("new", -math.inf), ("old", math.inf)])
def test_a_non_finite_active_token_is_an_error_that_names_it(which, bad):
    batch = Batch(2)
    token = int(batch.mask.nonzero()[-1])
    getattr(batch, which)[token] = bad
    name = "old_log_probs" if which == "old" else "log_probs"
    with pytest.raises(
        NumericsError, match=rf"^{name} is .* at active token {token}, sequence {int(batch.segment_ids[token])} "
    ):
        batch.run(settings_of())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ratio": "tokens"}, "valid: sequence, sequence_token, token"),
        ({"aggregation": "mean"}, "valid: sequence_mean_token_mean"),
        ({"clip_low": -0.1}, "must be >= 0"),
        ({"dual_clip": 1.0}, "must be > 1"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, "norm_constant_tokens"),
    ],
)
def test_settings_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**changes)


def test_a_denominator_without_meaning_is_refused():
    for denominator in (0, -1):
        with pytest.raises(ValueError, match="denominator"):
            Batch(1).run(settings_of(), denominator=denominator)
    with pytest.raises(ValueError, match="group_sizes"):
        Batch(1).run(settings_of(aggregation="group_mean_token_mean"), group_sizes=None)
