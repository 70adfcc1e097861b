"""The KL term to a reference: hand-derived values and gradients, averaged as the objective averages."""

import math

import pytest
import torch
from algorithm_cases import AGGREGATIONS, Batch

from gspo_mega.algorithm.losses import reference_kl, token_kl
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.errors import NumericsError

# Two responses: log policy and log reference a token. d = log reference - log policy.
POLICY = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.tensor([-1.0 + math.log(2), -2.0 - math.log(2), -0.5 + math.log(3)], dtype=torch.float64)
SEGMENTS, LENGTHS = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
LOG2, LOG3 = math.log(2), math.log(3)
# By hand, d = (log 2, -log 2, log 3): k1 = -d; k2 = d^2 / 2; k3 = (2 - 1 - log 2, 1/2 - 1 + log 2, 3 - 1 - log 3).
TOKENS = {
    "k1": ([-LOG2, LOG2, -LOG3], [1.0, 1.0, 1.0]),
    "k2": ([LOG2**2 / 2, LOG2**2 / 2, LOG3**2 / 2], [-LOG2, LOG2, -LOG3]),
    "k3": ([1 - LOG2, LOG2 - 0.5, 2 - LOG3], [1 - 2.0, 1 - 0.5, 1 - 3.0]),
}


def run(estimator, policy, settings=ObjectiveSettings(), denominator=2.0, reference=REFERENCE, **changes):
    arguments = dict(
        log_probs=policy,
        reference_log_probs=reference,
        mask=torch.ones(3),
        segment_ids=SEGMENTS,
        num_sequences=2,
        lengths=LENGTHS,
        denominator=denominator,
    )
    return reference_kl(settings, estimator, **{**arguments, **changes})


@pytest.mark.parametrize("estimator", TOKENS)
def test_values_and_gradients_by_hand(estimator):
    values, slopes = TOKENS[estimator]
    policy = POLICY.clone().requires_grad_()
    out = run(estimator, policy)
    # sequence_mean_token_mean: ((k_1 + k_2) / 2 + k_3) / 2
    assert float(out.value) == pytest.approx(((values[0] + values[1]) / 2 + values[2]) / 2, rel=1e-12)
    assert out.sums.tolist() == pytest.approx([sum(values), 3.0], rel=1e-12)
    out.value.backward()
    assert policy.grad.tolist() == pytest.approx([slopes[0] / 4, slopes[1] / 4, slopes[2] / 2], rel=1e-12)


@pytest.mark.parametrize("estimator", TOKENS)
def test_token_mean_by_hand(estimator):
    values, _ = TOKENS[estimator]
    out = run(estimator, POLICY, ObjectiveSettings(aggregation="token_mean"), denominator=3.0)
    assert float(out.value) == pytest.approx(sum(values) / 3, rel=1e-12)


def test_correction_weights_and_rejected_sequences_as_in_the_objective():
    values, _ = TOKENS["k3"]
    weighted = run("k3", POLICY, sequence_weights=torch.tensor([0.5, 2.0]))
    assert float(weighted.value) == pytest.approx((0.5 * (values[0] + values[1]) / 2 + 2.0 * values[2]) / 2, rel=1e-12)
    policy = POLICY.clone().requires_grad_()
    rejected = run("k3", policy, keep=torch.tensor([True, False]))
    assert float(rejected.value) == pytest.approx((values[0] + values[1]) / 2 / 2, rel=1e-12), (
        "it stays in the denominator"
    )
    rejected.value.backward()
    assert policy.grad[2] == 0
    assert torch.equal(rejected.sums, weighted.sums), "what is measured is every active token"


@pytest.mark.parametrize("estimator", TOKENS)
def test_a_policy_that_is_its_reference(estimator):
    policy = POLICY.clone().requires_grad_()
    out = run(estimator, policy, reference=POLICY)
    out.value.backward()
    assert float(out.value) == 0 and out.sums[0] == 0
    assert policy.grad.tolist() == ([0.25, 0.25, 0.5] if estimator == "k1" else [0.0, 0.0, 0.0])


@pytest.mark.parametrize("estimator", TOKENS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradcheck(estimator, aggregation):
    batch = Batch(seed=3, scale=0.3)
    settings = ObjectiveSettings(
        aggregation=aggregation, norm_constant_tokens=7 if aggregation.endswith("norm") else None
    )
    other = dict(
        reference_log_probs=batch.old,
        mask=batch.mask,
        segment_ids=batch.segment_ids,
        num_sequences=batch.num_sequences,
        lengths=batch.lengths,
        denominator=batch.denominator(aggregation),
        keep=batch.keep,
        sequence_weights=batch.weights,
        group_sizes=batch.group_sizes(),
    )
    assert torch.autograd.gradcheck(
        lambda policy: reference_kl(settings, estimator, log_probs=policy, **other).value,
        batch.new.clone().requires_grad_(),
    )


def test_parts_of_context_parallel_ranks_add_up():
    whole = run("k3", POLICY)
    parts = [
        run("k3", POLICY[held], reference=REFERENCE[held], mask=torch.ones(len(held)), segment_ids=SEGMENTS[held])
        for held in (torch.tensor([1, 2]), torch.tensor([0]))
    ]
    assert float(sum(p.value for p in parts)) == pytest.approx(float(whole.value), rel=1e-12)
    assert sum(p.sums for p in parts).tolist() == pytest.approx(whole.sums.tolist(), rel=1e-12)


def test_masked_tokens_may_hold_anything_and_active_ones_not():
    spoilt = torch.cat([REFERENCE[:2], torch.tensor([math.nan])])
    masked = run(
        "k3", POLICY, reference=spoilt, mask=torch.tensor([1, 1, 0]), lengths=torch.tensor([2, 0]), denominator=1.0
    )
    assert float(masked.value) == pytest.approx((TOKENS["k3"][0][0] + TOKENS["k3"][0][1]) / 2, rel=1e-12)
    with pytest.raises(NumericsError, match="reference_log_probs is nan"):
        run("k3", POLICY, reference=spoilt)


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-9, -1e-6], dtype=torch.float64)
    assert token_kl("k3", d).tolist() == pytest.approx([5e-19, 5e-13 * (1 - 1e-6 / 3)], rel=1e-12)


def test_an_unknown_estimator():
    with pytest.raises(ValueError, match="valid: k1, k2, k3"):
        token_kl("k4", POLICY)
