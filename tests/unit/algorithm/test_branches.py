"""Branches of an episode: what their weights leave unchanged, and that every pass takes them."""

from __future__ import annotations

import pytest
import torch
from algorithm_cases import AGGREGATIONS, RATIOS, Batch, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.diagnostics import POLICY_SUMS, policy_sums
from gspo_mega.algorithm.losses import reference_kl
from gspo_mega.algorithm.objective import mini_batch_denominator, policy_objective, sequence_coefficients

EVERY = [(ratio, aggregation) for ratio in RATIOS for aggregation in AGGREGATIONS]
F64 = torch.float64


class Turns:
    """Two episodes of one group: the first of two turns of 2 and 3 tokens, the second of one turn of 4. `in_rows` gives
    the first episode one row, or a row for each turn.
    """

    def __init__(self, seed: int, drift: float = 0.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.old = -torch.rand(9, generator=g, dtype=F64) * 3
        self.new = self.old + drift * torch.randn(9, generator=g, dtype=F64)
        self.reference = self.old + 0.1 * torch.randn(9, generator=g, dtype=F64)
        self.advantages = torch.randn(2, generator=g, dtype=F64)

    def in_rows(self, split: bool) -> dict:
        segments = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2] if split else [0] * 5 + [1] * 4)
        rows = [0, 0, 1] if split else [0, 1]
        lengths = torch.tensor([2, 3, 4] if split else [5, 4])
        return dict(
            mask=torch.ones(9),
            segment_ids=segments,
            num_sequences=len(rows),
            lengths=lengths,
            advantages=self.advantages[rows],
            group_sizes=torch.full((len(rows),), 2),
            branch_weights=lengths.double() / torch.tensor([5, 4])[rows],
        )

    def objective(self, rule, split: bool, **changes):
        new = self.new.clone().requires_grad_()
        denominator = mini_batch_denominator(rule.aggregation, [5, 4], [0, 0])
        arguments = {**self.in_rows(split), "denominator": denominator, **changes}
        output = policy_objective(rule, log_probs=new, old_log_probs=self.old, **arguments)
        output.objective_sum.backward()
        return output, new.grad


@pytest.mark.parametrize("ratio, aggregation", EVERY)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_branching_changes_nothing_where_the_policy_is_the_old_one(ratio, aggregation, seed):
    turns, rule = Turns(seed), settings_of(ratio, aggregation)
    together, gradient = turns.objective(rule, split=False)
    apart, split_gradient = turns.objective(rule, split=True)
    torch.testing.assert_close(apart.value, together.value, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_with_a_token_ratio_branching_changes_nothing_at_any_ratio(aggregation):
    turns, rule = Turns(3, drift=0.05), settings_of("token", aggregation)
    (together, gradient), (apart, split_gradient) = (turns.objective(rule, split) for split in (False, True))
    assert together.clipped_high.any() or together.clipped_low.any()
    torch.testing.assert_close(apart.value, together.value, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=0)


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "group_mean_token_mean"])
def test_without_its_weight_a_branch_counts_as_an_episode(aggregation):
    """The fault that the tests above are there for."""
    turns, rule = Turns(3), settings_of("sequence", aggregation)
    (together, gradient) = turns.objective(rule, split=False)
    apart, split_gradient = turns.objective(rule, split=True, branch_weights=None)
    assert float((apart.value - together.value).abs()) > 0.1 * abs(float(together.value))
    assert not torch.allclose(split_gradient, gradient, rtol=1e-3)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_term_is_averaged_as_the_objective(aggregation, estimator):
    turns, rule = Turns(4), settings_of("sequence", aggregation)

    def term(split):
        new = turns.new.clone().requires_grad_()
        rows = turns.in_rows(split)
        del rows["advantages"]
        out = reference_kl(rule, estimator, log_probs=new, reference_log_probs=turns.reference, denominator=2.0, **rows)
        out.value.backward()
        return out.value.detach(), new.grad

    for one, other in zip(term(split=True), term(split=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_branched_episode_counts_once_in_every_number_of_sequences(ratio):
    turns, rule = Turns(5, drift=0.05), settings_of(ratio)

    def counts(split, weighed=True) -> dict[str, float]:
        output, _ = turns.objective(rule, split)
        rows = turns.in_rows(split)
        names = ("mask", "segment_ids", "lengths", "advantages", *(["branch_weights"] if weighed else []))
        sums = policy_sums(output, **{name: rows[name] for name in names}).tolist()
        return {str(name): value for name, value in zip(POLICY_SUMS, sums, strict=True)}

    apart, together = counts(split=True), counts(split=False)
    for name in ("num_sequences", "num_kept_sequences", "positive_sequences", "negative_sequences", "num_tokens"):
        assert apart[name] == pytest.approx(together[name], rel=1e-12), name
    for sign in ("positive", "negative"):
        assert apart[f"{sign}_mass"] == pytest.approx(together[f"{sign}_mass"], rel=1e-12)
    assert counts(split=True, weighed=False)["num_sequences"] == pytest.approx(3), "rows, and so seen by this test"


@pytest.mark.parametrize("ratio, aggregation", EVERY)
def test_weights_of_one_change_no_bit(ratio, aggregation):
    batch = Batch(11)
    plain, gradient = batch.run(settings_of(ratio, aggregation))
    weighed, same = batch.run(settings_of(ratio, aggregation), branch_weights=torch.ones(batch.num_sequences))
    assert torch.equal(plain.value, weighed.value) and torch.equal(gradient, same)
    assert torch.equal(plain.sequence_terms, weighed.sequence_terms)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"branch_weights must be \(2,\); got \(3,\)"):
        sequence_coefficients(settings_of(), torch.tensor([1, 2]), 2.0, branch_weights=torch.ones(3))
