"""Which tensors a publish verifies: all of them in time, about equal shares, and never one that is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_publish_parts import SPEC

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import BlockFp8
from gspo_mega.sync.hashes import Rotation, skipped
from gspo_mega.sync.verify import server_tensors

SHAPES = Path(__file__).parents[3] / "configs/models"


def table(num_layers: int, kinds: list[str]) -> list[str]:
    layers = [f"model.layers.{layer}.{kind}" for layer in range(num_layers) for kind in kinds]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]


KINDS = ["self_attn.qkv_proj.weight", "mlp.experts.w13_weight", "mlp.experts.w13_weight_scale", "norm.weight"]


@given(num_layers=st.integers(0, 13), num_parts=st.integers(1, 40), first=st.integers(0, 100), data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_tensor_is_verified_in_as_many_publishes_as_the_key_says(num_layers, num_parts, first, data):
    names = table(num_layers, KINDS)
    sizes = {name: data.draw(st.integers(0, 1000)) for name in names}
    rotation = Rotation(sizes, num_parts)
    parts = [rotation.part(turn) for turn in range(first, first + num_parts)]
    assert set().union(*parts) == set(names) and all(parts), "all, and each publish has some"
    for part in parts:
        pieces = skipped(names, part)
        assert {name for name in names if not any(piece in name for piece in pieces)} == part, "as SGLang reads it"
        assert all(piece in names or piece.endswith(".") for piece in pieces)


def test_shares_are_about_equal_and_a_whole_layer_is_skipped_by_one_word():
    names = table(32, KINDS)
    rotation = Rotation(dict.fromkeys(names, 10), 4)
    sizes = [len(rotation.part(turn)) for turn in range(4)]
    assert sum(sizes) == len(names) and max(sizes) - min(sizes) <= 4
    assert len(skipped(names, rotation.part(1))) < 32, "not a word per tensor"


def test_one_part_has_all_and_skips_nothing():
    names = table(2, KINDS)
    assert Rotation(dict.fromkeys(names, 1), 1).part(5) == set(names) and skipped(names, set(names)) == []


@pytest.mark.parametrize("stored, on_load", [(None, None), (BlockFp8(), None), (None, "fp8"), (None, "int8")])
@pytest.mark.parametrize("shape", [None, *sorted(path.stem for path in SHAPES.glob("certify_*.json"))])
def test_the_tensors_of_every_family_can_be_skipped_by_name(shape, stored, on_load):
    spec = SPEC if shape is None else read_model_spec(SHAPES / f"{shape}.json")
    names = sorted(server_tensors(spec, stored, on_load).expected)
    rotation = Rotation(dict.fromkeys(names, 1), 7)
    for turn in range(7):
        pieces = skipped(names, rotation.part(turn))
        assert {name for name in names if not any(piece in name for piece in pieces)} == rotation.part(turn)
