"""Adapters of experts in PEFT's form: its places by hand, its product by PEFT's own formula, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.adapters import (
    from_peft,
    peft_settings,
    peft_shapes,
    read_adapters,
    served_config,
    stacks,
    to_peft,
)
from gspo_mega.config.schema import Lora
from gspo_mega.models.low_rank import adapter_tensors
from gspo_mega.models.spec import LatentAttention, ModelSpec, MoeSpec

SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=1,
    hidden_size=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=4,
    vocab_size=8,
    max_position_embeddings=16,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    torch_dtype="float32",
    eos_token_ids=(1,),
    moe=MoeSpec(num_experts=2, experts_per_token=1, expert_intermediate_size=1),
)
STEM = "base_model.model.model.layers.0.mlp.experts"
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def lora(*targets: str, rank: int = 1) -> Lora:
    return Lora(rank=rank, alpha=3.0, targets=targets)


def numbered(settings: Lora, spec: ModelSpec = SPEC) -> dict[str, torch.Tensor]:
    """1, 2, 3 ... in the order of the tensors."""
    found, last = {}, 0
    for entry in adapter_tensors(spec, settings.rank, settings.targets):
        found[entry.name] = torch.arange(last + 1.0, last + 1 + entry.num_elements).view(entry.shape)
        last += entry.num_elements
    return found


def test_each_number_by_hand():
    settings = lora(*EXPERTS)
    found = to_peft(settings, SPEC, numbered(settings))
    # Expert 0: gate A (1, 2) B 3, up A (4, 5) B 6, down A 7 B (8, 9); expert 1 goes on from 10.
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        f"{STEM}.base_layer.lora_A.weight": [[1, 2], [4, 5], [10, 11], [13, 14]],
        f"{STEM}.base_layer.lora_B.weight": [[3, 12, 0, 0], [0, 0, 6, 15]],
        f"{STEM}.lora_A.weight": [[7], [16]],
        f"{STEM}.lora_B.weight": [[8, 17], [9, 18]],
    }
    assert peft_settings(settings, SPEC) == {
        "target_modules": [],
        "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
        "lora_dropout": 0.0,
        "rank_pattern": {r".*\.experts\.gate_up_proj": 2},
        "alpha_pattern": {r".*\.experts\.gate_up_proj": 6.0},
    }


@pytest.mark.parametrize(("target", "b"), [("gate_proj", [[3, 6], [0, 0]]), ("up_proj", [[0, 0], [3, 6]])])
def test_one_of_gate_and_up_has_its_own_rank_and_zeros_for_the_other(target, b):
    settings = lora(target)
    found = to_peft(settings, SPEC, numbered(settings))
    assert found[f"{STEM}.lora_B.weight"].tolist() == b, "and PEFT wraps the experts once"
    assert "rank_pattern" not in peft_settings(settings, SPEC)


@pytest.mark.parametrize("targets", [EXPERTS, ("gate_proj", "down_proj"), ("q_proj", "up_proj"), ("q_proj",)])
def test_there_and_back_is_the_same_and_peft_multiplies_to_the_same(targets):
    spec = replace(SPEC, moe=MoeSpec(num_experts=3, experts_per_token=1, expert_intermediate_size=5), hidden_size=4)
    settings = lora(*targets, rank=2)
    tensors = numbered(settings, spec)
    found = to_peft(settings, spec, tensors)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == peft_shapes(settings, spec, False)
    back = from_peft(settings, spec, found, False)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    for stack in stacks(spec, settings.targets):
        # `ParamWrapper.get_delta_weight` of PEFT 0.21.2.
        a = found[stack.name("A")].reshape(3, -1, found[stack.name("A")].shape[1])
        b = found[stack.name("B")].reshape(found[stack.name("B")].shape[0], -1, 3)
        product = torch.einsum("o r e, e r i -> e o i", b, a)
        for expert, matrices in enumerate(stack.matrices):
            cut = product[expert].split(5) if stack.parameter == "gate_up_proj" else [product[expert]]
            halves: dict[str, torch.Tensor] = dict(zip(("gate", "up") if len(cut) == 2 else ("whole",), cut))
            for entry in matrices:
                name = entry.name.removesuffix(".weight")
                own = [tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "BA"]
                assert torch.equal(halves.pop(entry.role), own[0] @ own[1]), entry.name
            assert not any(rest.any() for rest in halves.values())


def test_shared_experts_and_dense_layers_are_parameters_beside_experts():
    spec = replace(
        SPEC,
        family="deepseek_v3",
        num_layers=2,
        qk_norm=False,
        moe=MoeSpec(2, 1, 1, shared_intermediate_size=2, num_dense_layers=1),
        latent=LatentAttention(query_rank=None, key_value_rank=2, content_dim=2, rotary_dim=2, value_dim=2),
    )
    settings = lora("o_proj", "down_proj")
    assert peft_settings(settings, spec) == {
        "target_modules": ["o_proj"],
        "target_parameters": ["experts.down_proj", "mlp.down_proj.weight", "shared_experts.down_proj.weight"],
        "lora_dropout": 0.0,
    }


def write(folder, settings, tensors=None, spec=SPEC, **changed):
    folder.mkdir(exist_ok=True)
    config = served_config(settings, spec, "base") | peft_settings(settings, spec) | changed
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found = to_peft(settings, spec, numbered(settings)) if tensors is None else tensors
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "adapter_model.safetensors")
    return folder


def test_one_a_for_gate_and_up_is_taken_for_both(tmp_path):
    settings = lora(*EXPERTS)
    tensors = to_peft(settings, SPEC, numbered(settings))
    tensors[f"{STEM}.base_layer.lora_A.weight"] = torch.tensor([[1.0, 2], [3, 4]])
    tensors[f"{STEM}.base_layer.lora_B.weight"] = torch.tensor([[5.0, 7], [6, 8]])
    folder = write(tmp_path / "a", settings, tensors, rank_pattern={}, alpha_pattern={})
    found = read_adapters(folder, settings, SPEC)
    for expert, a, gate, up in ((0, [[1, 2]], [[5]], [[6]]), (1, [[3, 4]], [[7]], [[8]])):
        stem = f"{STEM}.{expert}"
        assert found[f"{stem}.gate_proj.lora_A.weight"].tolist() == a
        assert found[f"{stem}.up_proj.lora_A.weight"].tolist() == a
        assert found[f"{stem}.gate_proj.lora_B.weight"].tolist() == gate
        assert found[f"{stem}.up_proj.lora_B.weight"].tolist() == up


def test_what_a_folder_has_otherwise_is_refused(tmp_path):
    settings = lora(*EXPERTS)

    def said(wanted=settings, **changed) -> str:
        with pytest.raises(ModelError) as error:
            read_adapters(write(tmp_path / "a", settings, **changed), wanted, SPEC)
        return str(error.value)

    assert "valid here: down_proj\n" in said(lora("down_proj")) + "\n"
    assert "target_parameters is ['experts.down_proj']; valid here: down_proj, gate_up_proj" in said(
        target_parameters=["experts.down_proj"]
    )
    assert "rank_pattern is {'.*': 2}" in said(rank_pattern={".*": 2})
    assert "and alpha_pattern {}" in said(alpha_pattern={})
    assert "lora_A.weight is [4, 2], the model makes it [2, 2]" in said(rank_pattern={}, alpha_pattern={})
    assert "use_dora is True; valid here: False" in said(use_dora=True)
    tensors = to_peft(settings, SPEC, numbered(settings))
    tensors[f"{STEM}.base_layer.lora_B.weight"][1, 0] = 1
    assert "gate and up of an expert share numbers of A; here each must have its own 1 (lora.rank)" in said(
        tensors=tensors
    )
