"""Where the batch-invariant parts go in a layer of either Megatron version."""

from __future__ import annotations

import functools
import types

import pytest

from gspo_mega.engine.invariant_layers import (
    InvariantAttention,
    InvariantColumnLinear,
    InvariantRowLinear,
    use_invariant_parts,
)


def parts() -> types.SimpleNamespace:
    return types.SimpleNamespace(linear_fc1=None, linear_fc2=None)


@pytest.mark.parametrize(
    "mlp", [types.SimpleNamespace(submodules=parts()), functools.partial(print, submodules=parts())]
)
def test_every_product_and_the_attention_are_replaced(mlp):
    attention, layer = types.SimpleNamespace(), types.SimpleNamespace(mlp=mlp)
    use_invariant_parts(attention, layer)
    assert vars(attention) == {
        "core_attention": InvariantAttention,
        "linear_qkv": InvariantColumnLinear,
        "linear_proj": InvariantRowLinear,
    }
    own = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    assert (own.linear_fc1, own.linear_fc2) == (InvariantColumnLinear, InvariantRowLinear)
