"""The critic in every layout is that of one rank: values, advantages, gradients, weights after three steps."""

from __future__ import annotations

import numpy as np
import pytest
from layout_jobs import recorded_sequences
from layout_models import make_folder
from test_layouts import flat, relative

# With tensor, sequence and expert parallelism below, every kind; tests/soak/role_layouts.py has more.
DENSE = {
    "DP2-distributed": dict(world=2, distributed=True),
    "PP2": dict(world=2, pipeline=2),
    "CP2": dict(world=2, context=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Tied, as small models are: the critic has no LM head to tie its embedding to, on the last stage either.
    return make_folder(tmp_path_factory.mktemp("critic") / "dense", moe=False, layers=2, tied=True)


@pytest.fixture(scope="module")
def reference(rank_pools, folder):
    return run(rank_pools, folder, dict(world=1))


def run(rank_pools, folder, layout) -> dict:
    parallel = dict(layout)
    world, distributed = parallel.pop("world"), parallel.pop("distributed", False)
    return rank_pools(world).run(
        "critic_jobs:run", folder=str(folder), parallel=parallel, optimizer=dict(lr=1e-3, distributed=distributed)
    )[0]


def test_one_rank(reference):
    """What the comparison of layouts rests on: a zero start, values that differ, and some tokens that are clipped."""
    assert not reference["tokens"]["zero"].any()
    assert reference["tokens"]["before"].std() > 0.1 and reference["tokens"]["behind"].std() > 0.1
    white = reference["tokens"]["white"]
    assert abs(white.mean()) < 1e-6 and abs(white.std() - 1) < 1e-6
    count, clipped = reference["sums"][0], reference["sums"][6]
    assert count == len(white) and 0 < clipped < count
    assert not any("lm_head" in name for name in reference["weights"])
    for name, gradient in reference["gradient"].items():
        assert np.abs(gradient).max() > 0, f"{name} has no gradient: the comparison would prove nothing"


def test_advantages_and_returns_are_those_of_a_plain_loop(reference):
    """From the values alone: a penalty towards the reference, a reward at the end, and every second one cut off."""
    tokens, place = reference["tokens"], 0
    advantages, returns = [], []
    for row, sequence in enumerate(recorded_sequences()):
        log_probs = sequence["rollout"][sequence["mask"] > 0].astype(np.float64)
        values = tokens["before"][place : place + len(log_probs)]
        place += len(log_probs)
        rewards = -0.1 * (log_probs - np.sin(log_probs))
        rewards[-1:] += sequence["advantage"]
        following, running = (tokens["behind"][row] if row % 2 else 0.0), 0.0
        backwards = []
        for reward, value in zip(rewards[::-1], values[::-1], strict=True):
            running = reward + 0.99 * following - value + 0.99 * 0.95 * running
            following = value
            backwards.append(running)
        advantages += backwards[::-1]
        returns += [a + v for a, v in zip(backwards[::-1], values, strict=True)]
    assert np.abs(tokens["returns"] - returns).max() < 1e-5
    assert np.abs(tokens["white"] - (advantages - np.mean(advantages)) / np.std(advantages)).max() < 1e-5


@pytest.mark.parametrize("layout", DENSE)
def test_a_layout_equals_one_rank(rank_pools, folder, reference, layout):
    check(run(rank_pools, folder, DENSE[layout]), reference)


def test_experts_equal_those_of_one_rank(rank_pools, tmp_path):
    folder = make_folder(tmp_path / "moe", moe=True, layers=2)
    check(run(rank_pools, folder, dict(world=2, tensor=2, expert=2)), run(rank_pools, folder, dict(world=1)))


def check(got, want):
    for name, values in want["tokens"].items():
        assert np.abs(got["tokens"][name] - values).max() < 1e-5, name
    assert got["sums"] == pytest.approx(want["sums"], rel=1e-5, abs=1e-5)
    assert got["gradient"].keys() == want["gradient"].keys()
    for name, gradient in want["gradient"].items():
        assert relative(got["gradient"][name] - gradient, gradient) < 1e-5, name
    assert np.allclose(got["grad_norms"], want["grad_norms"], rtol=1e-5)
    assert all(np.array_equal(got["start"][name], start) for name, start in want["start"].items())
    updates = {name: value - want["start"][name] for name, value in want["weights"].items()}
    error = {name: got["weights"][name] - value for name, value in want["weights"].items()}
    assert relative(flat(error), flat(updates)) < 1e-4
