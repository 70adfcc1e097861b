"""Families through the whole command, from a folder as published ones are. `tests/soak/families_trained.py` tries all."""

from __future__ import annotations

import importlib.util

import pytest
from family_runs import train

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


@pytest.mark.parametrize("variant", ["llama2", "deepseek_v3", "gpt_oss"])
def test_two_steps_of_a_family(tmp_path, variant):
    train(tmp_path, variant, forked=True)
