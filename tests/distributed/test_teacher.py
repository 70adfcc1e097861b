"""A teacher: its part of the gradient is what its advantages make, the same in every layout, for a teacher of another
size and family.
"""

from __future__ import annotations

import numpy as np
import pytest
from layout_models import make_folder

LAYOUTS = {
    "TP2+SP-EP2": dict(tensor=2, expert=2),
    "PP2": dict(pipeline=2),
    "CP2": dict(context=2),
}
JOB = "teacher_jobs:taught"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The policy, a teacher of its shape, and a dense one of half its depth."""
    root = tmp_path_factory.mktemp("teachers")
    make = {"policy": dict(seed=0), "same": dict(seed=1), "dense": dict(seed=2, moe=False, layers=2)}
    return {name: str(make_folder(root / name, **dict(moe=True) | values)) for name, values in make.items()}


@pytest.fixture(scope="session")
def alone(rank_pools, folders):
    def run(**arguments):
        return rank_pools(1).run(JOB, folder=folders["policy"], parallel={}, **arguments)[0]

    return run


@pytest.mark.parametrize("algorithm", ["gspo", "gspo_token", "grpo"])
def test_the_gradient_is_that_of_the_advantages(rank_pools, folders, alone, algorithm):
    """Of advantages of tokens in the packs, and for GSPO of two passes: its own, and GSPO-token's."""
    got = alone(teacher=folders["dense"], algorithm=algorithm)
    assert got["sums"]["tokens"] > 100 and got["sums"]["teacher_size"] > 0
    want = rank_pools(1).run(
        "teacher_jobs:without_teacher", folder=folders["policy"], teacher=folders["dense"], algorithm=algorithm
    )[0]
    assert got["gradient"].keys() == want.keys()
    for name, reference in want.items():
        assert np.linalg.norm(got["gradient"][name] - reference) < 1e-5 * np.linalg.norm(reference), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_part(rank_pools, folders, alone, layout):
    """Alternately for a teacher of the policy's shape and a dense one, which has no expert groups."""
    teacher = folders["dense" if layout == "TP2+SP-EP2" else "same"]
    want = alone(teacher=teacher)
    got = rank_pools(2).run(JOB, folder=folders["policy"], teacher=teacher, parallel=LAYOUTS[layout])[0]
    assert got["sums"] == pytest.approx(want["sums"], rel=1e-5)
    assert got["gradient"].keys() == want["gradient"].keys()
    for name, reference in want["gradient"].items():
        assert np.linalg.norm(got["gradient"][name] - reference) < 1e-5 * np.linalg.norm(reference), name


@pytest.mark.parametrize(
    ("layout", "compared"),
    [
        ("TP2+SP-EP2", dict(divergence="full")),
        ("TP2+SP-EP2", dict(divergence="top_k", top_k=40, top_k_of="policy")),
        ("PP2", dict(divergence="top_k", top_k=7, top_k_rest="renormalise")),
        ("CP2", dict(divergence="top_k", top_k=7)),
    ],
)
def test_every_layout_has_the_same_divergence(rank_pools, folders, alone, layout, compared):
    """Whole distributions over a vocabulary that tensor ranks share; the dense teacher is narrower in depth only."""
    compared |= dict(reward_weight=0.0)
    want = alone(teacher=folders["dense"], **compared)
    got = rank_pools(2).run(
        JOB, folder=folders["policy"], teacher=folders["dense"], parallel=LAYOUTS[layout], **compared
    )[0]
    assert want["sums"]["divergence"] > 0.01 * want["sums"]["tokens"] and want["sums"]["teacher_size"] == 0
    assert got["sums"] == pytest.approx(want["sums"], rel=1e-5)
    for name, reference in want["gradient"].items():
        assert np.linalg.norm(reference) > 0, "no reward teaches here, so all of it is the divergence's"
        assert np.linalg.norm(got["gradient"][name] - reference) < 1e-5 * np.linalg.norm(reference), name


SEVERAL = "teacher_jobs:taught_by_several"


@pytest.mark.parametrize("compared", [dict(), dict(divergence="top_k", top_k=5, reward_weight=0.0)])
def test_one_teacher_for_each_source_is_one_teacher_for_all(rank_pools, folders, alone, compared):
    """The same folder for three sources: each row has its scores from its own entry."""
    want = alone(teacher=folders["dense"], algorithm="grpo", **compared)
    entries = [dict(source=name, path=folders["dense"]) for name in ("a", "b", "c")]
    got = rank_pools(1).run(SEVERAL, folder=folders["policy"], parallel={}, by_source=entries, **compared)[0]
    assert got["sums"] == pytest.approx(want["sums"], rel=1e-6)
    for name, reference in want["gradient"].items():
        assert np.linalg.norm(got["gradient"][name] - reference) < 1e-5 * np.linalg.norm(reference), name


@pytest.mark.parametrize(
    ("layout", "compared"),
    [("TP2+SP-EP2", dict(divergence="top_k", top_k=4)), ("CP2", dict()), ("PP2", dict(divergence="top_k", top_k=4))],
)
def test_every_layout_has_the_same_part_of_several(rank_pools, folders, layout, compared):
    """A model for a third of the rows, a server for another, and none for the last."""
    entries = [dict(source="a", path=folders["same"]), dict(source="b", url="http://127.0.0.1:9")]
    given = dict(folder=folders["policy"], by_source=entries, **compared)
    want = rank_pools(1).run(SEVERAL, parallel={}, **given)[0]
    got = rank_pools(2).run(SEVERAL, parallel=LAYOUTS[layout], **given)[0]
    assert 0.2 < want["sums"]["tokens"] / want["sums"]["all_tokens"] < 0.9
    assert got["sums"] == pytest.approx(want["sums"], rel=1e-5)
    for name, reference in want["gradient"].items():
        assert np.linalg.norm(got["gradient"][name] - reference) < 1e-5 * np.linalg.norm(reference), name


def test_a_teacher_alone_is_approached(rank_pools, folders, alone):
    """With rewards of no weight, tokens that the teacher likes more than the policy become likelier, and others less
    so; the teacher stays as it is.
    """
    out = alone(teacher=folders["same"], algorithm="grpo", steps=6, reward_weight=0.0, coefficient=1.0)
    assert out["sums"]["reward_size"] == 0 and out["stands_still"]
    assert 0 < out["towards"][0] < out["towards"][2] < out["towards"][-1]


def test_a_teacher_whose_scores_are_missing(rank_pools, folders):
    text = rank_pools(1).run("teacher_jobs:refused", folder=folders["policy"], teacher=folders["same"])[0]
    assert "section teacher is there, but scores" in text
