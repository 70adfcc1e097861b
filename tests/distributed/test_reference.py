"""The frozen reference policy: 0 where it is the policy, the same in every layout, never trained."""

from __future__ import annotations

import numpy as np
import pytest
from layout_models import make_folder

LAYOUTS = {
    "TP2+SP-EP2": dict(tensor=2, expert=2),
    "PP2": dict(pipeline=2),
    "EP2": dict(expert=2),
    "CP2": dict(context=2),
}
JOB = "reference_jobs:kl_run"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The policy, another checkpoint of its shape, one of another shape."""
    root = tmp_path_factory.mktemp("references")
    make = {"policy": dict(seed=0), "other": dict(seed=1), "deeper": dict(layers=2)}
    return {name: str(make_folder(root / name, moe=True, **arguments)) for name, arguments in make.items()}


@pytest.fixture(scope="session")
def alone(rank_pools, folders):
    return rank_pools(1).run(JOB, folder=folders["policy"], reference=folders["other"], parallel={})[0]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_policy_as_its_own_reference(rank_pools, folders, estimator):
    """By default the reference is where the policy starts: KL 0 and gradient 0 there, above 0 once it has moved."""
    with_term, without = (
        rank_pools(1).run(
            JOB,
            folder=folders["policy"],
            reference=None,
            parallel={},
            estimator=estimator,
            coefficient=coefficient,
            steps=steps,
        )[0]
        for coefficient, steps in ((0.1, 3), (0.0, 0))
    )
    assert with_term["sums"][0] == 0 and with_term["sums"][1] > 100
    for name, gradient in without["gradient"].items():
        assert np.array_equal(with_term["gradient"][name], gradient), name
    first, second, third = with_term["per_token"]
    assert first == 0 < second < third
    assert with_term["reference_stands_still"] and with_term["shared_parameters"] == 0
    assert with_term["reference_bytes"] == with_term["policy_bytes"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_term(rank_pools, folders, alone, layout):
    got = rank_pools(2).run(JOB, folder=folders["policy"], reference=folders["other"], parallel=LAYOUTS[layout])[0]
    assert got["sums"][1] == alone["sums"][1]
    assert abs(got["sums"][0] - alone["sums"][0]) < 1e-5 * alone["sums"][0]
    assert got["gradient"].keys() == alone["gradient"].keys()
    for name, reference in alone["gradient"].items():
        assert np.linalg.norm(got["gradient"][name] - reference) < 1e-5 * np.linalg.norm(reference), name


def test_the_term_pulls_towards_the_reference(rank_pools, folders, alone):
    """The objective alone leaves the KL to another checkpoint about where it was; a heavy term lowers it."""
    heavy = rank_pools(1).run(
        JOB, folder=folders["policy"], reference=folders["other"], parallel={}, coefficient=50.0, steps=6
    )[0]["per_token"]
    assert 0 < heavy[-1] < 0.9 * heavy[0], heavy
    assert heavy[0] == alone["sums"][0] / alone["sums"][1]


def test_what_cannot_be_a_reference_is_refused(rank_pools, folders):
    text = rank_pools(1).run("reference_jobs:refused", folder=folders["policy"], reference=folders["deeper"])[0]
    assert "ModelError: kl.reference_path" in text and "num_layers 2 instead of 4" in text
    assert "ValueError: kl.coefficient is 0.1, but reference log-probs were not given" in text
