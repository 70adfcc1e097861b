"""Advantages and terms of the user's own: the shipped examples against hand-derived numbers, the built-in ones and a
plain reference, and what is refused of what a function returns.
"""

from __future__ import annotations

import math
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from algorithm_cases import AGGREGATIONS, Batch, settings_of

from gspo_mega.algorithm.advantages import group_advantages
from gspo_mega.algorithm.hooks import AdvantageInputs, UserTerms, load_advantage, user_advantages
from gspo_mega.algorithm.terms import deferred_checks, objective_settings
from gspo_mega.base.errors import HookError, NumericsError
from gspo_mega.config.schema import Objective, UserFunction

ROOT = str(Path(__file__).parents[3])


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a module `mine_N` of the user; returns the name that a configuration gives its function."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, function: str = "f") -> str:
        name = f"mine_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text("import torch\n" + textwrap.dedent(text))
        sys.modules.pop(name, None)
        return f"{name}:{function}"

    return write


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def inputs_of(rewards, groups, **more):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return AdvantageInputs(rewards, torch.tensor(groups), {}, {}, torch.ones(len(rewards), dtype=torch.int64), **more)


def custom(name, ratio="sequence", aggregation="sequence_mean_token_mean", **options):
    norm = 16 if aggregation == "sequence_mean_token_sum_norm" else None
    function = UserFunction(function=name, options=options)
    return objective_settings(
        "custom", Objective(ratio=ratio, function=function, aggregation=aggregation, norm_constant_tokens=norm)
    )


# Advantages.


def test_maxrl_divides_by_the_share_of_successes():
    """One success of four: (1 - 1/4) / (1/4) = 3 and -1; two of three: 1/2 and -1; none and all: 0."""
    hook = load_advantage(UserFunction(function="examples.hooks:maxrl"))
    rewards, groups = [1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1], [7, 7, 7, 7, 2, 2, 2, 5, 5, 9, 9]
    got = user_advantages(hook, inputs_of(rewards, groups))
    want = [3, -1, -1, -1, 0.5, 0.5, -1, 0, 0, 0, 0]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    # GRPO's, rescaled by sd / mean = sqrt((1 - p) / p).
    grpo = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    scale = torch.tensor([math.sqrt(3)] * 4 + [math.sqrt(1 / 2)] * 3 + [0.0] * 4, dtype=torch.float64)
    torch.testing.assert_close(got, grpo * scale, rtol=1e-12, atol=1e-15)


def test_a_function_that_calls_the_built_in_advantages_gives_the_same_bits(mine):
    name = mine("""
        from gspo_mega.algorithm.advantages import group_advantages
        def f(inputs, scale):
            return scale * group_advantages(inputs.rewards, inputs.group_ids)
        """)
    hook = load_advantage(UserFunction(function=name, options={"scale": 1.0}))
    rewards, groups = [0.3, 0.1, 2.0, 4.0, 5.0], [0, 0, 1, 1, 1]
    want = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert torch.equal(user_advantages(hook, inputs_of(rewards, groups)), want)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def f(inputs): return inputs.rewards[:1]", "returned a tensor of shape [1]; [2] was expected"),
        ("def f(inputs): return inputs.rewards / 0", "returned inf for response 0, whose reward is 1; advantages must"),
        ("def f(inputs): return 'high'", "returned str, which is no tensor of numbers"),
        ("def f(inputs): return inputs.nothing", "failed: AttributeError"),
        ("def f(inputs): raise ValueError('only 0 and 1')", "failed: ValueError: only 0 and 1 (mine_"),
    ],
)
def test_what_a_function_must_not_return_is_named_with_its_key_and_place(mine, body, said):
    hook = load_advantage(UserFunction(function=mine(body)))
    with pytest.raises(HookError) as caught:
        user_advantages(hook, inputs_of([1, 0], [0, 0]))
    assert str(caught.value).startswith("advantage.function: mine_") and said in str(caught.value)


@pytest.mark.parametrize(
    ("body", "options", "said"),
    [
        ("def g(inputs): pass", {}, "has no function 'f'"),
        ("def f(): pass", {}, "cannot be called with (a value)"),
        ("def f(inputs, tau): pass", {}, "missing a required argument: 'tau'"),
        ("def f(inputs): pass", {"tau": 1}, "got an unexpected keyword argument 'tau'"),
        ("async def f(inputs): pass", {}, "it is an async function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_loaded(mine, body, options, said):
    with pytest.raises(HookError) as caught:
        load_advantage(UserFunction(function=mine(body), options=options))
    assert said in str(caught.value)


# Terms.

CLIPPED = {
    "sequence": """
        from gspo_mega.algorithm.hooks import UserTerms
        def f(inputs, low, high):
            s, a = inputs.sequence_log_ratio.exp(), inputs.sequence_advantages
            over, under = (a > 0) & (s > 1 + high), (a < 0) & (s < 1 - low)
            return UserTerms(torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a), over, under)
        """,
    "token": """
        from gspo_mega.algorithm.hooks import UserTerms
        def f(inputs, low, high):
            r, a = inputs.log_ratio.exp(), inputs.advantages
            over, under = (a > 0) & (r > 1 + high), (a < 0) & (r < 1 - low)
            return UserTerms(torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a), over, under)
        """,
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_the_clipped_term_as_a_function_is_the_built_in_one(mine, ratio, aggregation):
    """Value, gradient, terms and flags, with rejected and weighted sequences and every average."""
    built_in = settings_of(ratio, aggregation)
    own = custom(mine(CLIPPED[ratio]), ratio, aggregation, low=built_in.clip_low, high=built_in.clip_high)
    for seed in range(4):
        batch = Batch(seed, scale=4e-3 if ratio == "sequence" else 4e-2)
        (want, want_gradient), (got, gradient) = batch.run(built_in), batch.run(own)
        torch.testing.assert_close(got.value, want.value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(got.sequence_terms, want.sequence_terms, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-12, atol=1e-15)
        assert torch.equal(got.clipped_high, want.clipped_high) and torch.equal(got.clipped_low, want.clipped_low)
        assert got.flags_are_per_token == want.flags_are_per_token


def slow_sspo(batch, tau_positive, tau_negative):
    """J of one mini-batch, written per sequence from the equation: mean of exp(mean of arctan(tau d) / tau) A."""
    new = batch.new.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(batch.num_sequences):
        rows = (batch.segment_ids == i) & batch.mask
        if not bool(rows.any()) or not bool(batch.keep[i]):
            continue
        tau = tau_positive if batch.advantages[i] > 0 else tau_negative
        d = new[rows] - batch.old[rows]
        total = total + batch.weights[i] * batch.advantages[i] * (torch.atan(tau * d) / tau).mean().exp()
    total = total / batch.denominator("sequence_mean_token_mean")
    total.backward()
    return total.detach(), new.grad


@pytest.mark.parametrize("scale", [2e-3, 1.0])
def test_sspo_is_its_equation(scale):
    own = custom("examples.hooks:sspo", tau_positive=0.8, tau_negative=1.7)
    for seed in range(5):
        batch = Batch(seed, scale=scale)
        output, gradient = batch.run(own)
        value, slow_gradient = slow_sspo(batch, 0.8, 1.7)
        torch.testing.assert_close(output.value, value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, slow_gradient, rtol=1e-12, atol=1e-15)


def test_sspo_by_hand():
    """d = 1, -1, 0 and tau 1: log w = (pi/4 - pi/4 + 0) / 3 = 0; gradient of w A is A (1/2, 1/2, 1) / 3."""
    batch = Batch(0, num_sequences=1)
    batch.segment_ids, batch.mask = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    batch.old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    batch.new = batch.old + torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    batch.advantages, batch.keep = torch.tensor([2.0], dtype=torch.float64), torch.ones(1)
    batch.weights, batch.lengths = torch.ones(1, dtype=torch.float64), torch.tensor([3])
    output, gradient = batch.run(custom("examples.hooks:sspo"))
    assert float(output.value) == pytest.approx(2.0, rel=1e-12)
    assert gradient.tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3], rel=1e-12)


def test_sspo_with_a_temperature_towards_zero_is_gspo_without_a_clip():
    wide = settings_of("sequence", clip_low=1.0, clip_high=1e300)
    for seed in range(3):
        batch = Batch(seed, scale=0.1)
        want, want_gradient = batch.run(wide)
        got, gradient = batch.run(custom("examples.hooks:sspo", tau_positive=1e-9, tau_negative=1e-9))
        torch.testing.assert_close(got.value, want.value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-12, atol=1e-15)


def test_a_term_of_a_token_gets_means_without_a_gradient(mine):
    """The gradient would reach into tokens of other ranks: that of r_t times the mean is the mean times r_t's own."""
    name = mine("""
        def f(inputs):
            assert not inputs.sequence_log_ratio.requires_grad
            mean = inputs.sequence_mean(inputs.log_ratio.exp())
            assert not mean.requires_grad
            return inputs.advantages * inputs.log_ratio.exp() * mean[inputs.segment_ids]
        """)
    batch = Batch(3)
    output, gradient = batch.run(custom(name, "token", "sequence_mean_token_sum"))
    ratio = torch.where(batch.mask, (batch.new - batch.old).exp(), 0.0)
    means = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.segment_ids, ratio)
    means = means / batch.lengths.clamp(min=1)
    weight = batch.weights * batch.advantages * batch.keep * means / batch.denominator("sequence_mean_token_sum")
    torch.testing.assert_close(gradient, weight[batch.segment_ids] * ratio, rtol=1e-12, atol=1e-15)
    assert output.flags_are_per_token


@pytest.mark.parametrize(
    ("ratio", "body", "error", "said"),
    [
        ("sequence", "def f(inputs): return inputs.log_ratio", HookError, "`objective.ratio: sequence` one number per"),
        (
            "token",
            "def f(inputs): return inputs.sequence_log_ratio",
            HookError,
            "`objective.ratio: token` one number per",
        ),
        ("token", "def f(inputs): return inputs.log_ratio.log()", NumericsError, "term is"),
        ("token", "def f(inputs): return inputs.nothing", HookError, "objective.function: mine_"),
    ],
)
def test_terms_that_cannot_be_are_refused(mine, ratio, body, error, said):
    with pytest.raises(error) as caught, deferred_checks():
        Batch(1).run(custom(mine(body), ratio))
    assert said in str(caught.value)


def test_a_plain_tensor_and_terms_without_flags_count_nothing_as_clipped(mine):
    batch = Batch(2)
    for text in ("return inputs.log_ratio", "return UserTerms(inputs.log_ratio)"):
        name = mine(f"from {UserTerms.__module__} import UserTerms\ndef f(inputs): {text}")
        output, _ = batch.run(custom(name, "token"))
        assert not output.clipped_high.any() and not output.clipped_low.any() and not output.dual_clipped.any()
