"""The terms that other objectives put in place of the clipped one: numbers derived by hand, and a slow reference."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import slow_objectives as slow
import torch
from algorithm_cases import Batch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.objective import policy_objective
from gspo_mega.algorithm.surrogates import TokenInputs, surrogate_terms
from gspo_mega.algorithm.terms import ObjectiveSettings, objective_settings
from gspo_mega.config.algorithms import RECIPES, SURROGATES, SurrogateFacts
from gspo_mega.config.schema import Objective

SLOW = {"dapo": "grpo", "dr_grpo": "grpo", "luspo": "gspo"}
NAMES = [name for name in RECIPES if name != "custom"]


def recipe_settings(name, **changes):
    defaults = dict(RECIPES[name].objective_defaults)
    if defaults["aggregation"] == "sequence_mean_token_sum_norm":
        defaults["norm_constant_tokens"] = 16
    return objective_settings(name, Objective(**(defaults | changes)))


def of_tokens(name, probabilities, advantage, **changes):
    """J, its gradient and its flags of one response whose tokens' terms are summed: [(new, old, server), ...]."""
    columns = [torch.tensor(column, dtype=torch.float64).log() for column in zip(*probabilities, strict=True)]
    new, old = columns[0].requires_grad_(), columns[1]
    recipe = RECIPES[name]
    output = policy_objective(
        ObjectiveSettings(
            ratio=recipe.ratio,
            surrogate=recipe.surrogate,
            clip_low=recipe.clip_low,
            clip_high=recipe.clip_high,
            aggregation="sequence_mean_token_sum",
            **changes,
        ),
        log_probs=new,
        old_log_probs=old,
        rollout_log_probs=columns[2] if len(columns) > 2 else None,
        mask=torch.ones(len(new)),
        segment_ids=torch.zeros(len(new), dtype=torch.int64),
        num_sequences=1,
        advantages=torch.tensor([advantage]),
        lengths=torch.tensor([len(new)]),
        denominator=1,
    )
    output.objective_sum.backward()
    assert float(output.value) == pytest.approx(float(output.objective_sum.detach()), rel=1e-12)
    return SimpleNamespace(
        value=float(output.value),
        gradient=new.grad.tolist(),
        high=output.clipped_high.tolist(),
        low=output.clipped_low.tolist(),
    )


def near(values):
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    """r = 2, .5, 1; with the weight at most 1.5: A (1.5 log .4 + .5 log .2 + log .5), gradient A r^."""
    tokens = [(0.4, 0.2), (0.2, 0.4), (0.5, 0.5)]
    logs = 1.5 * math.log(0.4) + 0.5 * math.log(0.2) + math.log(0.5)
    for advantage in (2.0, -1.0):
        got = of_tokens("cispo", tokens, advantage)  # the recipe's upper bound of 5 is not reached
        assert got.high == [False] * 3 and got.gradient == near([2 * advantage, 0.5 * advantage, advantage])
    widths = {"clip_low": 1.0, "clip_high": 0.5}
    for advantage in (2.0, -1.0):
        got = clipped(tokens, advantage, **widths)
        assert got.value == near(advantage * logs)
        assert got.gradient == near([1.5 * advantage, 0.5 * advantage, advantage])
        assert (got.high, got.low) == ([True, False, False], [False] * 3)


def clipped(tokens, advantage, clip_low, clip_high):
    new = torch.tensor([p for p, _ in tokens], dtype=torch.float64).log().requires_grad_()
    output = policy_objective(
        ObjectiveSettings("token", clip_low, clip_high, aggregation="sequence_mean_token_sum", surrogate="cispo"),
        log_probs=new,
        old_log_probs=torch.tensor([p for _, p in tokens], dtype=torch.float64).log(),
        mask=torch.ones(len(tokens)),
        segment_ids=torch.zeros(len(tokens), dtype=torch.int64),
        num_sequences=1,
        advantages=torch.tensor([advantage]),
        lengths=torch.tensor([len(tokens)]),
        denominator=1,
    )
    output.objective_sum.backward()
    return SimpleNamespace(
        value=float(output.value),
        gradient=new.grad.tolist(),
        high=output.clipped_high.tolist(),
        low=output.clipped_low.tolist(),
    )


def test_sapo_gates_by_a_sigmoid_whose_temperature_has_the_sign_of_the_advantage():
    """f(r) = (4 / tau) sigmoid(tau (r - 1)); f'(1) = 1, so the gradient at r = 1 is A, and A r 4 p (1 - p) elsewhere."""
    p = 1 / (1 + math.exp(-1.0))
    got = of_tokens("sapo", [(0.4, 0.2), (0.5, 0.5)], 3.0)
    assert got.value == near(3 * (4 * p + 2)) and got.gradient == near([3 * 2 * 4 * p * (1 - p), 3.0])
    p = 1 / (1 + math.exp(-1.05))
    got = of_tokens("sapo", [(0.4, 0.2), (0.5, 0.5)], -1.0)
    assert got.value == near(-4 / 1.05 * p - 2 / 1.05) and got.gradient == near([-2 * 4 * p * (1 - p), -1.0])
    assert got.high == got.low == [False, False]


def test_dppo_drops_by_the_change_of_a_probability_and_not_of_a_ratio():
    """.2 -> .4 and .9 -> .7 are .2 apart, above .15; .01 -> .03 has the ratio 3 and is .02 apart."""
    tokens = [(0.4, 0.2), (0.03, 0.01), (0.7, 0.9)]
    got = of_tokens("dppo", tokens, 1.0)
    assert got.value == near(3 + 7 / 9) and got.gradient == near([0.0, 3.0, 7 / 9])
    assert (got.high, got.low) == ([True, False, False], [False, False, False])
    got = of_tokens("dppo", tokens, -1.0)
    assert got.value == near(-2 - 3) and got.gradient == near([-2.0, -3.0, 0.0])
    assert (got.high, got.low) == ([False, False, False], [False, False, True])


def test_dppo_kl_drops_by_the_divergence_of_the_tokens_coin_in_the_direction_that_moves_away():
    """D(.2, .4) = .2 ln(1/2) + .8 ln(4/3) = .0915 and D(.9, .7) = .0962 are above .05; D(.01, .03) = .0090 is not."""
    tokens = [(0.4, 0.2), (0.03, 0.01), (0.7, 0.9)]
    got = of_tokens("dppo_kl", tokens, 1.0)
    assert got.value == near(3 + 7 / 9) and got.gradient == near([0.0, 3.0, 7 / 9])
    assert (got.high, got.low) == ([True, False, False], [False, False, False])
    got = of_tokens("dppo_kl", tokens, -1.0)
    assert got.value == near(-2 - 3) and got.gradient == near([-2.0, -3.0, 0.0])
    assert (got.high, got.low) == ([False, False, False], [False, False, True])


def test_minirl_weighs_by_the_server_and_clips_by_the_trainer():
    """(pi, pi_old, mu): pi / mu is 2.2; 1.5 with pi / pi_old = 1.5; 10, cut at 5; and .5 with pi / pi_old = .5."""
    tokens = [(0.22, 0.2, 0.1), (0.3, 0.2, 0.2), (0.1, 0.1, 0.01), (0.2, 0.4, 0.4)]
    got = of_tokens("minirl", tokens, 0.5)
    assert got.gradient == near([1.1, 0.0, 2.5, 0.25]) and got.high == [False, True, False, False]
    assert got.value == near(1.1 * math.log(0.22) + 2.5 * math.log(0.1) + 0.25 * math.log(0.2))
    got = of_tokens("minirl", tokens, -1.0)
    assert got.gradient == near([-2.2, -1.5, -5.0, 0.0]) and got.low == [False, False, False, True]
    got = of_tokens("minirl", tokens, 0.5, weight_limit=None)
    assert got.gradient[2] == near(5.0)


def test_vespo_weighs_every_token_by_a_kernel_of_the_whole_responses_ratio():
    """W = 2 x 1.5 = 3: W^2 exp(3 (1 - W)) = 9 exp(-6) for A > 0 and W^3 exp(2 (1 - W)) = 27 exp(-4) for A < 0."""
    tokens, logs = [(0.4, 0.2), (0.3, 0.2)], math.log(0.4) + math.log(0.3)
    for advantage, weight in ((2.0, 9 * math.exp(-6)), (-1.0, 27 * math.exp(-4))):
        got = of_tokens("vespo", tokens, advantage)
        assert got.value == near(advantage * weight * logs) and got.gradient == near([advantage * weight] * 2)
        assert got.high == got.low == [False, False]
    assert of_tokens("vespo", [(0.5, 0.5)], 1.0).gradient == near([1.0])


def test_vespo_of_an_overflowing_product_is_zero():
    tokens = [(0.9, 1e-300)] * 4
    assert of_tokens("vespo", tokens, -1.0).gradient == [0.0] * 4


def test_gmpo_clips_log_ratios_of_tokens_inside_their_geometric_mean():
    """d = 1, -.2 with A > 0 becomes .4, -.2: exp(.1); d = 1, -.6 with A < 0 becomes 1, -.4: exp(.3). L = 2 times it."""
    e = math.exp
    got = of_tokens("gmpo", [(0.3 * e(1.0), 0.3), (0.3 * e(-0.2), 0.3)], 2.0)
    assert got.value == near(2 * 2 * e(0.1)) and got.gradient == near([0.0, 2 * e(0.1)])
    assert (got.high, got.low) == ([True, False], [False, False])
    got = of_tokens("gmpo", [(0.3 * e(1.0), 0.3), (0.3 * e(-0.6), 0.3)], -2.0)
    assert got.value == near(-2 * 2 * e(0.3)) and got.gradient == near([-2 * e(0.3), 0.0])
    assert (got.high, got.low) == ([False, False], [False, True])


def two_responses(name, advantages=(1.0, -1.0)):
    """Responses of 1 and 3 tokens, all with pi = pi_old: the gradient shows the weight of a token alone."""
    new = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    settings_of_recipe = recipe_settings(name)
    output = policy_objective(
        settings_of_recipe,
        log_probs=new,
        old_log_probs=new.detach().clone(),
        rollout_log_probs=new.detach().clone(),
        mask=torch.ones(4),
        segment_ids=torch.tensor([0, 1, 1, 1]),
        num_sequences=2,
        advantages=torch.tensor(advantages),
        lengths=torch.tensor([1, 3]),
        denominator=4 if settings_of_recipe.aggregation == "token_mean" else 2,
    )
    output.objective_sum.backward()
    return new.grad.tolist()


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("dapo", [1 / 4, 1 / 4]),  # by the tokens of all responses
        ("cispo", [1 / 4, 1 / 4]),
        ("vespo", [1 / 4, 1 / 4]),
        ("dr_grpo", [1 / 2 / 16, 1 / 2 / 16]),  # a constant, here 16
        ("dppo", [1 / 2 / 16, 1 / 2 / 16]),
        ("dppo_kl", [1 / 2 / 16, 1 / 2 / 16]),
        ("luspo", [1 / 2, 1 / 2]),  # GSPO's (1/N) s A, times its length
        ("minirl", [1 / 2, 1 / 2]),  # sums of tokens
        ("grpo", [1 / 2, 1 / 6]),
        ("gspo", [1 / 2, 1 / 6]),
        ("sapo", [1 / 2, 1 / 6]),
        ("gmpo", [1 / 2, 1 / 6]),
    ],
)
def test_what_a_token_weighs_in_a_recipe(name, weights):
    short, long = weights
    assert two_responses(name) == near([short, -long, -long, -long])


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([3e-3, 0.05, 0.4]))
@settings(max_examples=5, deadline=None)
def test_every_recipe_is_the_slow_reference(name, seed, scale):
    batch = Batch(seed, scale=scale)
    batch.mask[:] = True
    batch.lengths = torch.zeros(batch.num_sequences, dtype=torch.int64).index_add(
        0, batch.segment_ids, batch.mask.long()
    )
    settings_of_recipe = recipe_settings(name)
    output, gradient = batch.run(settings_of_recipe, rollout_log_probs=batch.old - 0.1)
    new = batch.new.clone().requires_grad_()
    rows = []
    for i in range(batch.num_sequences):
        own = batch.segment_ids == i
        rows.append(
            slow.Row(
                new[own],
                batch.old[own],
                batch.old[own] - 0.1,
                float(batch.advantages[i]),
                bool(batch.keep[i]),
                float(batch.weights[i]),
            )
        )
    expected = slow.objective(
        SLOW.get(name, name),
        rows,
        settings_of_recipe.clip_low,
        settings_of_recipe.clip_high,
        settings_of_recipe.aggregation,
        16,
    )
    scale_of = float(output.sequence_terms.abs().sum())
    assert float(output.value) == pytest.approx(float(expected.detach()), rel=1e-11, abs=1e-13 * scale_of)
    if expected.requires_grad:
        (expected_gradient,) = torch.autograd.grad(expected, new)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surrogate": "ppo2", "ratio": "token"}, "valid: clip, cispo"),
        ({"surrogate": "sapo"}, "has a ratio of tokens; got ratio 'sequence'"),
        ({"surrogate": "sapo", "ratio": "token", "dual_clip": 2.0}, "has no dual clip"),
    ],
)
def test_settings_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**changes)


def test_minirl_needs_the_servers_log_probs():
    with pytest.raises(ValueError, match="to the server's log-probs, which were not given"):
        of_tokens("minirl", [(0.4, 0.2)], 1.0)


def test_a_term_without_a_formula_is_an_error_of_its_own(monkeypatch):
    """And does not become the term of the last branch."""
    monkeypatch.setitem(SURROGATES, "new", SurrogateFacts())
    chosen = ObjectiveSettings(surrogate="cispo", ratio="token")
    object.__setattr__(chosen, "surrogate", "new")
    ones = torch.ones(1, dtype=torch.float64)
    inputs = TokenInputs(ones, ones, ones, ones, ones, ones, ones, ones.bool())
    with pytest.raises(ValueError, match=r"surrogate new has no formula in surrogates\.py"):
        surrogate_terms(chosen, inputs)
