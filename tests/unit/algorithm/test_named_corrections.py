"""The corrections that papers name: numbers derived by hand, and a slow reference in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from algorithm_cases import Batch, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.correction import CorrectionRule, correct, correct_segments, exact_sums
from gspo_mega.algorithm.losses import reference_kl
from gspo_mega.algorithm.named_corrections import (
    binary_divergence,
    second_moment_bound,
    squares,
    token_weights,
)


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def weights_of(mode, trainer, server, **limits):
    return token_weights(CorrectionRule(mode, **limits), logs(*trainer), logs(*server)).tolist()


def near(values):
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def test_token_tis_cuts_the_weight_above():
    """w = .6/.2 = 3, .3/.2 = 1.5, .1/.4 = 1/4; limits 2 (the default) and 1.2."""
    trainer, server = (0.6, 0.3, 0.1), (0.2, 0.2, 0.4)
    assert weights_of("token_tis", trainer, server) == near([2, 1.5, 0.25])
    assert weights_of("token_tis", trainer, server, upper=1.2) == near([1.2, 1.2, 0.25])


def test_icepop_drops_on_both_sides():
    """w = 6 and .2 are outside of [.5, 5], 4.5 and 1/2 + are inside; [.1, 10] keeps all."""
    trainer, server = (0.6, 0.08, 0.9, 0.26), (0.1, 0.4, 0.2, 0.5)
    assert weights_of("icepop", trainer, server) == near([0, 0, 4.5, 0.52])
    assert weights_of("icepop", trainer, server, lower=0.1, upper=10.0) == near([6, 0.2, 4.5, 0.52])


def test_kpop_drops_by_the_divergence_of_two_coins_in_either_direction():
    """D(.9, .6) = .9 ln 1.5 + .1 ln .25 = .2263; D(.01, .02) = .0031 although w = 1/2; D(.5, .4) = .0204."""
    by_hand = 0.9 * math.log(1.5) + 0.1 * math.log(0.25)
    assert binary_divergence(logs(0.9), logs(0.6)).tolist() == near([by_hand])
    assert weights_of("kpop", (0.9, 0.01, 0.5), (0.6, 0.02, 0.4)) == near([0, 0.5, 1.25])
    assert weights_of("kpop", (0.9, 0.01, 0.5), (0.6, 0.02, 0.4), threshold=0.23) == near([0, 0.5, 1.25])
    assert by_hand < 0.23  # the other direction, .6 ln(2/3) + .4 ln 4 = .3112, is what drops it
    assert weights_of("kpop", (0.9, 0.01, 0.5), (0.6, 0.02, 0.4), threshold=0.32) == near([1.5, 0.5, 1.25])


def test_certain_tokens_have_divergences():
    zero = torch.zeros(1, dtype=torch.float64)
    assert binary_divergence(zero, zero).tolist() == [0.0]
    assert binary_divergence(zero, logs(0.5)).tolist() == near([math.log(2)])
    assert binary_divergence(logs(0.5), zero).tolist() == [math.inf]
    assert token_weights(CorrectionRule("kpop"), logs(0.5), zero).tolist() == [0.0]


def slow_divergence(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@given(st.lists(st.tuples(st.floats(1e-6, 0.999), st.floats(1e-6, 0.999)), min_size=1, max_size=20))
def test_the_weights_are_those_of_the_equations(pairs):
    trainer, server = zip(*pairs, strict=True)
    ratio = [p / q for p, q in pairs]
    far = [abs(w - edge) > 1e-9 * edge for w in ratio for edge in (2.0, 0.5, 5.0)]
    if not all(far):
        return
    assert weights_of("token_tis", trainer, server) == pytest.approx([min(w, 2.0) for w in ratio], rel=1e-12)
    assert weights_of("icepop", trainer, server) == pytest.approx([w * (0.5 <= w <= 5) for w in ratio], rel=1e-12)
    largest = [max(slow_divergence(p, q), slow_divergence(q, p)) for p, q in pairs]
    if all(abs(one - 0.1) > 1e-9 for one in largest):
        got = weights_of("kpop", trainer, server)
        assert got == pytest.approx([w * (one <= 0.1) for w, one in zip(ratio, largest, strict=True)], rel=1e-12)


def test_m2po_masks_the_largest_until_the_mean_square_is_small_enough():
    """d = .1, -.2, .3, -.6: squares .01, .04, .09, .36. Means of the smallest: .01, .025, .0467, .125."""
    own = squares(torch.tensor([0.1, -0.2, 0.3, -0.6]))
    for threshold, kept in ((0.13, 4), (0.04, 2), (0.047, 3), (0.02, 1), (0.001, 0)):
        bound = second_moment_bound(threshold, own)
        assert (own <= bound).tolist() == [k < kept for k in range(4)], threshold


def slow_mask(d, threshold):
    """Mask the largest d^2 one by one until the mean of the rest is at most the threshold."""
    kept = sorted(range(len(d)), key=lambda k: d[k] ** 2)
    while kept and sum(d[k] ** 2 for k in kept) / len(kept) > threshold:
        kept.pop()
    return [k in kept for k in range(len(d))]


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([1e-3, 0.04, 0.5]), st.integers(1, 4))
def test_m2po_is_the_mask_of_the_whole_batch_on_any_number_of_ranks(seed, threshold, num_ranks):
    rng = random.Random(seed)
    d = [rng.gauss(0, 0.2) * (10 if rng.random() < 0.1 else 1) for _ in range(rng.randrange(1, 60))]
    own = squares(torch.tensor(d, dtype=torch.float64))
    shards = [own[rank::num_ranks] for rank in range(num_ranks)]
    # Each rank's search asks the others the same questions: they are answered from all shards' numbers.
    whole = second_moment_bound(threshold, own)
    asked = []

    def sums(part):
        asked.append(part)
        return part

    assert second_moment_bound(threshold, torch.cat(shards), sums) == whole
    assert (own <= whole).tolist() == slow_mask(d, threshold)
    assert len(asked) <= 43  # as many collectives on every rank, whatever it holds
    empty = []
    second_moment_bound(threshold, own[:0], lambda part: empty.append(part) or part)
    assert abs(len(empty) - len(asked)) <= 1


def test_m2po_masks_what_is_not_a_number_of_any_use():
    own = squares(torch.tensor([0.0, 1e9, math.nan, -math.inf]))
    assert (own <= second_moment_bound(0.04, own)).tolist() == [True, False, False, False]


def test_sequence_mis_weighs_by_the_product_and_drops_above():
    """Sums of d: log 1.5, log 3, log .25 and none: weights 1.5, 0, .25, 1; several versions change nothing."""
    sums, lengths = logs(1.5, 3, 0.25, 1), torch.tensor([4, 2, 3, 0])
    rule = CorrectionRule("sequence_mis", token_veto_nats=None)
    result = correct(rule, sums, lengths, torch.zeros(4))
    assert result.weights.tolist() == near([1.5, 0, 0.25, 1]) and result.keep.tolist() == [True, False, True, True]
    vetoed = correct(CorrectionRule("sequence_mis"), sums, lengths, torch.tensor([1, 0, 0, 0]))
    assert vetoed.keep.tolist() == [False, False, True, True]
    assert correct(CorrectionRule("sequence_mis", upper=4.0), sums, lengths, torch.zeros(4)).keep.all()


@pytest.mark.parametrize("mode", ["token_tis", "icepop", "kpop", "m2po"])
def test_corrections_of_tokens_drop_only_vetoed_responses(mode):
    sums = exact_sums(torch.tensor([0.1, 3.0, -0.2]), torch.tensor([0, 1, 1]), 2)
    result = correct(CorrectionRule(mode), sums, torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert result.weights.tolist() == [1, 0] and result.keep.tolist() == [True, False]


def test_the_corrections_of_versions_are_of_the_mean_only():
    rule = CorrectionRule("mask")
    assert correct_segments(rule, torch.zeros(2, 2), torch.ones(2, 2), torch.zeros(2)).result.keep.all()
    with pytest.raises(ValueError, match="has no weight that a token has by itself"):
        token_weights(rule, logs(0.5), logs(0.5))
    with pytest.raises(ValueError, match="valid: none, truncate, mask, token_tis"):
        CorrectionRule("tis")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["token", "sequence_token", "cispo", "sapo"])
def test_a_weight_multiplies_the_term_of_its_token_and_its_gradient(name):
    """The gradient in each token is that without weights, times the weight; so is that of the KL term."""
    built = settings_of(name, "sequence_mean_token_sum")
    for seed in range(3):
        batch = Batch(seed)
        plain, gradient = batch.run(built)
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(len(batch.mask), generator=generator) * (
            torch.rand(len(batch.mask), generator=generator) < 0.7
        )
        weighed, scaled = batch.run(built, token_weights=torch.where(batch.mask, weights, math.nan))
        torch.testing.assert_close(
            scaled, gradient * torch.where(batch.mask, weights.double(), 0.0), rtol=1e-12, atol=0
        )
        assert torch.equal(weighed.clipped_high, plain.clipped_high)
        ones, _ = batch.run(built, token_weights=torch.ones(len(batch.mask)))
        assert torch.equal(ones.value, plain.value)

        def kl(log_probs, batch=batch, **more):
            return reference_kl(
                built, "k3", log_probs=log_probs, reference_log_probs=batch.old, mask=batch.mask,
                segment_ids=batch.segment_ids, num_sequences=batch.num_sequences, lengths=batch.lengths,
                denominator=3, keep=batch.keep, **more,
            ).value  # fmt: skip

        new = batch.new.clone().requires_grad_()
        without = torch.autograd.grad(kl(new), new)[0]
        with_weights = torch.autograd.grad(kl(new, token_weights=weights), new)[0]
        torch.testing.assert_close(with_weights, without * weights.double(), rtol=1e-12, atol=0)


def test_terms_of_whole_responses_take_no_weights_of_tokens():
    with pytest.raises(ValueError, match="weights of tokens need terms of tokens"):
        Batch(0).run(settings_of("sequence"), token_weights=torch.ones(100))
