"""Layers for multi-token prediction, of every family that has them: all are read, to the bit, and nothing else is; the plan
names them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.mtp_layers import CarriedLayers, is_carried
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import carried_bytes, spec_from_config
from gspo_mega.models.tensors import checkpoint_tensors

SHAPES = Path(__file__).parents[3] / "configs" / "models"
FLASH = dict(architectures=["Glm4MoeLiteForCausalLM"], rope_scaling=None, n_group=1, topk_group=1)
# By family: a shape, and what it differs in.
AFTER_THE_LAST = {
    "deepseek_v3": ("certify_mla", {}),
    "glm4_moe": ("certify_glm4_moe", {}),
    "glm4_moe_lite": ("certify_mla", FLASH),
}
UNDER_THEIR_NAME = {
    "qwen3_next": ("certify_qwen3_next", {}),
    "qwen3_5": ("certify_qwen3_5", {}),
    "qwen3_5_moe": ("certify_qwen3_5_moe", {}),
}


def make(folder: Path, shape: str, changes: dict, own) -> dict[str, torch.Tensor]:
    """A folder of the model, with the tensors that `own` makes of its spec besides; these."""
    raw = json.loads((SHAPES / f"{shape}.json").read_text()) | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    spec = spec_from_config(raw)
    generator = torch.Generator().manual_seed(3)
    carried = {name: torch.randn(size, generator=generator).to(torch.bfloat16) for name, size in own(spec).items()}
    tensors = {entry.name: torch.zeros(entry.shape) for entry in checkpoint_tensors(spec)}
    save_file(tensors | carried, folder / "model.safetensors")
    return carried


def layer_after_the_last(spec) -> dict[str, tuple[int, ...]]:
    last, here = f"model.layers.{spec.num_layers - 1}.", f"model.layers.{spec.num_layers}."
    like = {e.name.replace(last, here): e.shape for e in checkpoint_tensors(spec) if e.name.startswith(last)}
    wide = spec.hidden_size
    others = {f"{here}{name}.weight": (wide,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return like | others | {f"{here}eh_proj.weight": (wide, 2 * wide)}


def named_mtp(spec) -> dict[str, tuple[int, ...]]:
    wide = spec.hidden_size
    return {
        "mtp.fc.weight": (wide, 2 * wide),
        "mtp.norm.weight": (wide,),
        "mtp.layers.0.mlp.experts.gate_up_proj": (2, 4, wide),  # as a stack, which says nothing of the others
        "mtp.layers.0.mlp.experts.1.down_proj.weight": (wide, 2),
    }


@pytest.mark.parametrize("family", [*AFTER_THE_LAST, *UNDER_THEIR_NAME])
def test_every_tensor_is_carried_to_the_bit_and_no_other(tmp_path, family):
    shape, changes = (AFTER_THE_LAST | UNDER_THEIR_NAME)[family]
    after = family in AFTER_THE_LAST
    changes = changes | ({"num_nextn_predict_layers": 1} if after else {})
    folder = tmp_path / "model"
    wanted = make(folder, shape, changes, layer_after_the_last if after else named_mtp)
    layers = CarriedLayers(folder)
    found = dict(layers.tensors())
    assert layers.spec.family == family and not layers.spec.stacks_experts
    assert found.keys() == wanted.keys() and len(found) > 3
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == torch.bfloat16 for name in wanted)
    assert all(is_carried(entry) for entry in layers.entries)
    if not after:  # the plan says how many and how large
        assert carried_bytes(folder, "mtp.") == (len(wanted), 2 * sum(tensor.numel() for tensor in wanted.values()))
    open_checkpoint(folder)  # which refuses what it does not expect
    raw = layers.config_json({"num_nextn_predict_layers": 0} if after else {})
    assert raw == ({"num_nextn_predict_layers": 1} if after else {})


def test_these_are_all_families_that_have_them():
    has = {name for name, family in FAMILIES.items() if family.drafts or "mtp." in family.carried}
    text_parts = {"qwen3_5_vl", "qwen3_5_moe_vl"}  # tests/distributed/test_carried_layers.py
    assert has == {*AFTER_THE_LAST, *UNDER_THEIR_NAME} | text_parts


def test_those_of_minimax_are_not_known(tmp_path):
    make(tmp_path / "model", "certify_minimax_m2", {}, lambda spec: {"model.mtp.0.fc.weight": (4, 4)})
    with pytest.raises(ModelError, match="unexpected: model.mtp.0.fc.weight"):
        open_checkpoint(tmp_path / "model")
