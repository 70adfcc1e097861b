"""Differences are found, named, and judged; what cannot be compared is not called equal."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from run_configs import make_config

from gspo_mega.config.schema import CertifyCase
from gspo_mega.verify.certify.cases import Case
from gspo_mega.verify.certify.compare import (
    TOLERANCES,
    CaseComparison,
    CaseDifference,
    Reference,
    Tolerance,
    num_clip_flips,
    outside,
    tolerance_of,
    widened,
)
from gspo_mega.verify.certify.measure import Edges, Numbers, num_route_flips
from gspo_mega.verify.certify.program import CertificateRow, render_table

SUMS = {"objective": 2.0, "positive_mass": 3.0, "negative_mass": 1.0}
EDGES = (-0.1, 0.1)


def numbers(log_probs=(-1.0, -2.0, -3.0), log_s=(0.0, 0.2), objective=2.0, routes=None):
    return Numbers(np.array(log_probs), np.array(log_s), SUMS | {"objective": objective}, [1.0], routes)


@pytest.fixture
def reference(tmp_path):
    reference = Reference(tmp_path)
    reference.save("numbers", numbers(routes=np.zeros((3, 2, 2), np.int64)))
    reference.save("edges", Edges(np.array([0.1, -0.1]), None))
    reference.save_tensors("gradient", iter([("a", torch.tensor([3.0, 4.0])), ("zero", torch.zeros(2))]))
    reference.save_tensors("weights", iter([("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([5.0]))]))
    return reference


class Start:
    """Stands for the checkpoint's folder."""

    def read(self, name):
        return {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([1.0])}[name]


def test_what_was_saved_is_what_is_loaded(reference):
    loaded = reference.load("numbers", Numbers)
    want = numbers(routes=np.zeros((3, 2, 2), np.int64))
    assert np.array_equal(loaded.log_probs, want.log_probs) and np.array_equal(loaded.routes, want.routes)
    assert loaded.sums == want.sums and reference.load("edges", Edges).routes is None


def test_the_largest_difference_and_its_place(reference):
    comparison = CaseComparison(reference, EDGES)
    comparison.take_gradient(iter([("a", torch.tensor([3.0, 4.5])), ("zero", torch.tensor([0.0, 0.01]))]))
    comparison.take_weights(iter([("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([5.3]))]), Start())
    result = comparison.result(
        numbers(
            log_probs=(-1.0, -2.0, -3.25), objective=2.4, routes=np.eye(3, dtype=np.int64)[:, :2, None].repeat(2, 2)
        ),
        ["x", "y"],
        [1, 2],
    )
    assert result["log_prob"] == {"value": 0.25, "place": "y"}
    assert result["loss"]["value"] == pytest.approx(0.4 / 4.0), "of the mass of |s A|"
    assert result["gradient"]["value"] == pytest.approx(0.5 / 5.0) and result["gradient"]["place"] == "a"
    # Updates (1, 0) and (4): the error is 0.3 of a norm of sqrt(17).
    assert result["weights"]["value"] == pytest.approx(0.3 / 17**0.5, rel=1e-5) and result["weights"]["place"] == "b"
    assert (result["num_clip_flips"], result["num_route_flips"]) == (0, 2)
    assert outside(result, TOLERANCES["fp32"]) == ["log_prob", "loss", "gradient", "weights"]


def test_equal_numbers_are_inside_and_a_gradient_where_there_was_none_is_not(reference):
    comparison = CaseComparison(reference, EDGES)
    comparison.take_gradient(iter([("a", torch.tensor([3.0, 4.0])), ("zero", torch.zeros(2))]))
    comparison.take_weights(iter([("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([5.0]))]), Start())
    result = comparison.result(numbers(), ["x", "y"], [1, 2])
    assert outside(result, TOLERANCES["fp32"]) == []
    comparison.take_gradient(iter([("zero", torch.tensor([1e-4, 0.0]))]))
    result = comparison.result(numbers(), ["x", "y"], [1, 2])
    assert outside(result, TOLERANCES["fp32"]) == ["gradient"] and result["gradient"]["place"] == "zero"


class Moved:
    """The start of a case whose weights were moved first."""

    def read(self, name):
        return Start().read(name) + {"a": torch.tensor([0.5, -0.5]), "b": torch.tensor([0.25])}[name]


def test_weights_that_were_moved_first_are_compared_by_their_updates(reference):
    comparison = CaseComparison(reference, EDGES)
    moved = [("a", torch.tensor([1.5, 1.5])), ("b", torch.tensor([5.75]))]
    comparison.take_weights(iter(moved), Start(), Moved())
    # The update of b is 4.5 in place of 4, that of a is the reference's.
    assert comparison.result(numbers(), ["x", "y"], [1, 2])["weights"]["value"] == pytest.approx(0.5 / 17**0.5)


def test_rounding_widens_what_it_changes_and_counts_stay_counts():
    measured = {kind: {"value": value, "place": ""} for kind, value in (("log_prob", 6e-6), ("gradient", 1e-7))}
    measured |= {"state": {"value": 5.0, "place": ""}, "weights": None}
    wider = widened(TOLERANCES["fp32"], measured, 8.0)
    assert wider == replace(TOLERANCES["fp32"], log_prob=4.8e-5)
    assert widened(TOLERANCES["fp32"], None, 8.0) == TOLERANCES["fp32"]
    assert wider.state == 0.0 and widened(wider, measured, 1.0) == wider


def test_nan_is_outside_whatever_comes_after():
    difference = CaseDifference()
    for value, place in ((1.0, "a"), (float("nan"), "b"), (2.0, "c"), (1e-9, "d")):
        difference.note(value, place)
    assert difference.place == "b" and not difference.value <= 1.5
    nan = {kind: {"value": float("nan"), "place": ""} for kind in ("log_prob", "loss", "gradient", "weights")}
    assert outside(nan, TOLERANCES["bf16"]) == ["log_prob", "loss", "gradient", "weights"]


def test_flips_are_counted():
    assert num_clip_flips(np.array([0.09, 0.11, -0.2, 0.0]), np.array([0.11, 0.12, -0.05, 0.0]), EDGES) == 2
    routes = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    changed = routes.copy()
    changed[1, 0] = (0, 2)
    assert num_route_flips(changed, routes) == 1 and num_route_flips(None, routes) == 0


def row(result=None, refusal=None, refused=False, failed=(), error=""):
    return CertificateRow(Case(CertifyCase(name="case", refused=refused), "m", "fp32", refusal), result, failed, error)


def test_a_row_passes_only_for_what_was_asked_of_it(reference):
    comparison = CaseComparison(reference, EDGES)
    comparison.take_gradient(iter([("a", torch.tensor([3.0, 4.0]))]))
    result = comparison.result(numbers(), ["x", "y"], [1, 2])
    assert row(result).passed and "pass" in render_table([row(result)])
    assert not row(result, failed=("gradient",)).passed and "FAIL" in render_table([row(result, failed=("gradient",))])
    assert not row(error="it broke").passed and "it broke" in render_table([row(error="it broke")])
    assert row(refusal="no", refused=True).passed and "refused: no" in render_table([row(refusal="no", refused=True)])
    assert not row(refusal="no").passed and "REFUSED" in render_table([row(refusal="no")])
    assert not row(result, refused=True).passed and "NOT REFUSED" in render_table([row(result, refused=True)])


def test_exact_numbers_tolerate_no_difference():
    last_bit = dict(log_prob=CaseDifference(1e-12), loss=CaseDifference(), gradient=CaseDifference(1e-12), weights=None)
    result = {kind: asdict(difference) if difference else None for kind, difference in last_bit.items()}
    assert outside(result, TOLERANCES["fp8"]) == []
    assert outside(result, TOLERANCES["fp8"], ["log_prob", "loss", "weights"]) == ["log_prob"]


def fp8(recipe: str, **certify):
    return make_config(precision="fp8", fp8=dict(recipe=recipe), certify=certify)


def test_one_scale_for_a_tensor_tolerates_more_than_one_for_a_block():
    case = CertifyCase(name="case")
    blocks, tensors = (tolerance_of(fp8(recipe), case) for recipe in ("mxfp8", "delayed"))
    assert blocks == TOLERANCES["fp8"] and tensors.log_prob == 2 * blocks.log_prob
    assert tolerance_of(make_config(precision="bf16", fp8=dict(recipe="delayed")), case) == TOLERANCES["bf16"]


def test_a_sharp_certificate_tolerates_less_where_the_layout_has_the_references_scales():
    case = CertifyCase(name="case", other_scales=("delayed",))
    for recipe in ("blockwise", "mxfp8", "tensorwise"):
        sharp, coarse = (tolerance_of(fp8(recipe, sharp_fp8=value), case) for value in (True, False))
        assert sharp.reached is not None and coarse.reached is None
        assert all(getattr(sharp, kind) < getattr(coarse, kind) for kind in ("loss", "gradient", "weights"))
    other, coarse = (tolerance_of(fp8("delayed", sharp_fp8=value), case) for value in (True, False))
    assert other == coarse != tolerance_of(fp8("delayed", sharp_fp8=True), CertifyCase(name="case"))


@pytest.mark.parametrize(
    ("here", "share"),
    [((-1.0, -2.0, -3.0, -4.0), 0.0), ((-1.0, -2.0, -3.1, -4.0 + 5e-6), 0.25), ((float("nan"),) * 4, 1.0)],
)
def test_tokens_that_differ_are_counted_and_masked_ones_are_not(reference, here, share):
    reference.save("numbers", numbers(log_probs=(-1.0, -2.0, -3.0, -4.0, 0.0)))
    result = CaseComparison(reference, EDGES, counts_reached=True).result(numbers(log_probs=(*here, 0.0)), ["x"], [5])
    assert result["reached"]["value"] == share
    limit = Tolerance(log_prob=1.0, loss=1.0, gradient=1.0, weights=1.0, reached=0.2)
    assert ("reached" in outside(result, limit)) == (share > 0.2)
    assert "reached" in render_table([row(result)])
