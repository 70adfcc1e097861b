"""`certify.sharp_fp8`: where it is an error, and where it means nothing."""

from __future__ import annotations

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.precision import is_sharp_fp8

SHARP = ("precision=fp8", "certify.sharp_fp8=true")


def test_only_a_certificate_of_fp8_computes_so(write):
    sharp = load_config(write(), SHARP, "certify").config
    assert is_sharp_fp8(sharp.precision, sharp.certify)
    plain = load_config(write(), SHARP[:1], "certify").config
    assert not is_sharp_fp8(plain.precision, plain.certify)
    bf16 = load_config(write(), ["precision=bf16", SHARP[1]], "certify")
    assert not is_sharp_fp8(bf16.config.precision, bf16.config.certify)
    assert "`certify.sharp_fp8` has no effect with `precision: bf16`" in bf16.notices


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["fp8.parameters=true"], "contradicts `fp8.parameters: true`"),
        (["optimizer.moments_dtype=bf16"], "needs `optimizer.moments_dtype: fp32`"),
    ],
)
def test_what_it_contradicts(write, overrides, said):
    assert said in refused(write(), *SHARP, *overrides)


def test_a_run_that_trains_refuses_it(write):
    said = refused(write(), *SHARP, "train={num_steps: 1}", command="train")
    assert "certify.sharp_fp8: only `gspo-mega certify` computes this way, not `train`" in said
