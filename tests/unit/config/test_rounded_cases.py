"""`certify.cases.N.rounded`: what it cannot be together with."""

from __future__ import annotations

import pytest
from config_refusals import refused

from gspo_mega.config import load_config


def test_it_is_a_case_of_one_rank(write):
    given = ["certify.cases=[{name: other, ranks: 2}, {name: rounding, rounded: true}]"]
    assert load_config(write(), given, "certify").config.certify.rounding_factor == 4.0


def test_a_factor_without_such_a_case_is_a_notice(write):
    found = load_config(write(), ("certify.rounding_factor=2",), "certify").notices
    assert "certify.rounding_factor has no effect without a case that is `rounded`" in found


@pytest.mark.parametrize(
    ("more", "key", "said"),
    [
        ("ranks: 2", "certify.cases.1.ranks", "2 for a case that is rounded; valid: 1"),
        ("set: {precision: fp8}", "certify.cases.1.rounded", "valid: in fp32 or bf16"),
        ("refused: true", "certify.cases.1.rounded", "its numbers are measured, not judged"),
        ("exact: [loss]", "certify.cases.1.rounded", "its numbers are measured, not judged"),
    ],
)
def test_what_it_contradicts(write, more, key, said):
    given = f"certify.cases=[{{name: other}}, {{name: rounding, rounded: true, {more}}}]"
    found = refused(write(), given, command="certify")
    assert key in found and said in found
