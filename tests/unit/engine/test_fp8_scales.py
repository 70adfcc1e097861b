"""When the scales of recipe `delayed` may be used. Without Transformer Engine; what they do is tested on ranks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gspo_mega.engine import precision
from gspo_mega.engine.precision import MEASURING_PASSES, Fp8Scales


@pytest.fixture
def updates(monkeypatch):
    calls = []
    manager = SimpleNamespace(reduce_and_update_fp8_tensors=lambda forward: calls.append(forward))
    monkeypatch.setattr(precision, "_manager", lambda: manager)
    return calls


def scales(recipe):
    return Fp8Scales(cast(Any, SimpleNamespace(fp8="hybrid", fp8_recipe=recipe)), [])


def test_a_pass_before_the_scales_are_measured_is_an_error(updates):
    delayed, passes = scales("delayed"), []
    with pytest.raises(RuntimeError, match="before its scales were measured"):
        delayed.require_known()
    delayed.begin_step(lambda: passes.append(delayed.require_known()))
    assert passes == [None] * MEASURING_PASSES and updates == [True] * MEASURING_PASSES
    delayed.require_known()
    scales("tensorwise").require_known()


def test_a_failed_measurement_leaves_them_unknown(updates):
    delayed = scales("delayed")
    with pytest.raises(ZeroDivisionError):
        delayed.begin_step(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="before its scales were measured"):
        delayed.require_known()
