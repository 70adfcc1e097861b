"""A critic's differences are judged by the policy's tolerances, and have columns where there are any."""

from __future__ import annotations

from gspo_mega.config.schema import CertifyCase
from gspo_mega.verify.certify.cases import Case
from gspo_mega.verify.certify.compare import TOLERANCES, outside
from gspo_mega.verify.certify.program import CertificateRow, render_table

POLICY = ("log_prob", "loss", "gradient", "weights")


def result(**critic: float) -> dict:
    found = {kind: {"value": 0.0, "place": "p"} for kind in POLICY}
    return (
        found
        | {"num_clip_flips": 0, "num_route_flips": 0}
        | {kind: {"value": value, "place": "score.weight"} for kind, value in critic.items()}
    )


def test_a_critic_is_outside_where_its_policy_would_be():
    within = result(values=1e-5, value_gradient=1e-5, value_weights=1e-4)
    assert outside(within, TOLERANCES["fp32"]) == [] == outside(result(), TOLERANCES["fp32"])
    beyond = result(values=2e-5, value_gradient=float("nan"), value_weights=2e-4)
    assert outside(beyond, TOLERANCES["fp32"]) == ["values", "value_gradient", "value_weights"]


def test_columns_of_a_critic_are_there_where_a_case_has_one():
    case = Case(CertifyCase(name="CP2", ranks=2), "m", "fp32", None)
    found = result(values=2e-5, value_gradient=0.0, value_weights=0.0)
    shown = render_table([CertificateRow(case, found, ("values",))])
    assert "v. grad  v. weight" in shown and "CP2: values differs by 2e-05, at most in score.weight" in shown
    assert "2.0e-05   0.0e+00   0.0e+00" in shown
    assert "v. grad" not in render_table([CertificateRow(case, result())])
