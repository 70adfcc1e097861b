"""Folders whose experts are stacked, plain and in MXFP4, and what is sent of them."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.hf_folder import open_folder, stacked
from gspo_mega.checkpoint.quantized import plain_form
from gspo_mega.checkpoint.served_folders import to_blocks, to_form
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.models.huggingface import read_model_spec, spec_from_config
from gspo_mega.models.spec import shape_differences
from gspo_mega.models.tensors import checkpoint_tensors, hf_tensors
from gspo_mega.sync.verify import ExpectedChecksums

CONFIG = dict(
    architectures=["GptOssForCausalLM"],
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_local_experts=2,
    num_experts_per_tok=1,
    vocab_size=40,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=dict(rope_type="default"),
    sliding_window=4,
    eos_token_id=1,
)
SPEC = spec_from_config(CONFIG)
FP4 = {"quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.0.mlp.experts"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def random_tensors():
    generator = torch.Generator().manual_seed(7)
    return {e.name: torch.randn(e.shape, generator=generator) for e in checkpoint_tensors(SPEC)}


def write(folder, tensors, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def packed_tensors():
    """Random 4-bit codes and scales, and the values that they stand for, element by element."""
    tensors, generator = random_tensors(), torch.Generator().manual_seed(8)
    plain = dict(tensors)
    for name in ("gate_up_proj", "down_proj"):
        experts, columns, rows = tensors.pop(f"{EXPERTS}.{name}").shape
        codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), generator=generator)
        scales = torch.randint(120, 132, (experts, rows, columns // 32), generator=generator)
        tensors[f"{EXPERTS}.{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{EXPERTS}.{name}_scales"] = scales.to(torch.uint8)
        values = E2M1[codes] * 2.0 ** (scales[..., None] - 127)
        plain[f"{EXPERTS}.{name}"] = values.view(experts, rows, columns).transpose(1, 2).contiguous()
    return tensors, plain


def test_one_experts_tensors_are_read_from_the_stack(tmp_path):
    tensors = random_tensors()
    with open_folder(write(tmp_path / "a", tensors), SPEC) as folder:
        both = tensors[f"{EXPERTS}.gate_up_proj"]
        assert torch.equal(folder.read(f"{EXPERTS}.1.gate_proj.weight"), both[1, :, 0::2].T)
        assert torch.equal(folder.read(f"{EXPERTS}.1.up_proj.weight", 0, 3, 5), both[1, :, 1::2].T[3:8])
        assert torch.equal(folder.read(f"{EXPERTS}.0.up_proj.bias"), tensors[f"{EXPERTS}.gate_up_proj_bias"][0, 1::2])
        down = tensors[f"{EXPERTS}.down_proj"]
        assert torch.equal(folder.read(f"{EXPERTS}.1.down_proj.weight", 1, 8, 4), down[1].T[:, 8:12])


def test_parts_are_put_together_as_they_were(tmp_path):
    tensors = random_tensors()
    with open_folder(write(tmp_path / "a", tensors), SPEC) as folder:
        parts = ((entry, folder.read(entry.name)) for entry in hf_tensors(SPEC))
        found = {entry.name: tensor for entry, tensor in stacked(SPEC, parts)}
    assert list(found) == [entry.name for entry in checkpoint_tensors(SPEC)]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_mxfp4_reads_as_the_values_it_stands_for_and_converts_to_a_plain_folder(tmp_path):
    packed, plain = packed_tensors()
    folder = write(tmp_path / "packed", packed, **FP4)
    source = open_checkpoint(folder)
    assert source.spec.stored_fp4
    to_megatron(source, tmp_path / "megatron", dtype=torch.float32, progress=lambda *told: None)
    to_huggingface(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", progress=lambda *told: None)
    to_huggingface(source, tmp_path / "direct", dtype=torch.float32, progress=lambda *told: None)
    to_form(source, tmp_path / "served", plain_form(torch.float32), progress=lambda *told: None)  # as servers start
    for made in ("back", "direct", "served"):
        found = load_file(tmp_path / made / "model.safetensors")
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
        config = json.loads((tmp_path / made / "config.json").read_text())
        assert "quantization_config" not in config and config["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), "missing: model.layers.0.mlp.experts.down_proj_scales"),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_blocks"), "missing: model.layers.0.mlp.experts.down_proj [2, 64, 32]"),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": torch.zeros(2, 32, 3, dtype=torch.uint8)}),
            "wrong shape: model.layers.0.mlp.experts.down_proj_scales is [2, 32, 3], the blocks make it [2, 32, 2]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": torch.zeros(2, 32, 2)}),
            "wrong type: model.layers.0.mlp.experts.down_proj_scales is F32; MXFP4 is U8",
        ),
    ],
)
def test_what_is_wrong_with_mxfp4_is_named(tmp_path, change, text):
    packed, _ = packed_tensors()
    change(packed)
    with pytest.raises(ModelError) as refused:
        open_checkpoint(write(tmp_path / "a", packed, **FP4))
    assert text in str(refused.value)


def test_a_scale_that_is_no_number_is_named(tmp_path):
    packed, _ = packed_tensors()
    packed[f"{EXPERTS}.down_proj_scales"][1, 0, 0] = 0xFF
    spec = replace(SPEC, stored_fp4=True)
    with (
        open_folder(write(tmp_path / "a", packed, **FP4), spec) as folder,
        pytest.raises(ModelError, match="down_proj_scales: expert 1: has a scale that is no number"),
    ):
        folder.read(f"{EXPERTS}.1.down_proj.weight")


def test_a_server_holds_stacks_the_other_way_round():
    """SGLang transposes the matrices of experts while it loads them, and keeps gate and up in turn."""
    tensors, expected = random_tensors(), ExpectedChecksums(SPEC)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    found = expected.checksums()
    for theirs, ours in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
        weight = tensors[f"{EXPERTS}.{ours}"].transpose(1, 2).contiguous()
        assert found[f"{EXPERTS}.{theirs}"] == hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16]
        bias = tensors[f"{EXPERTS}.{ours}_bias"]
        assert found[f"{EXPERTS}.{theirs}_bias"] == hashlib.sha256(bias.numpy().tobytes()).hexdigest()[:16]


# As Qwen3.5-35B-A3B is published: stacks under the names of a vision-language class, its layer for multi-token prediction
# expert by expert.
QWEN = dict(
    architectures=["Qwen3_5MoeForConditionalGeneration"],
    text_config=dict(
        hidden_size=8,
        moe_intermediate_size=6,
        shared_expert_intermediate_size=4,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=1,
        vocab_size=40,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_conv_kernel_dim=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
    eos_token_id=1,
)
LAYER, SERVED = "model.language_model.layers.0.mlp.experts", "model.layers.0.mlp.experts"
DRAFT = "mtp.layers.0.mlp.experts.0.gate_proj.weight"


def qwen_folder(folder, change=lambda tensors: None):
    spec = replace(spec_from_config(QWEN), stacks_experts=True)
    generator = torch.Generator().manual_seed(9)
    tensors = {e.name: torch.randn(e.shape, generator=generator) for e in checkpoint_tensors(spec)}
    tensors[DRAFT] = torch.randn(6, 8, generator=generator)
    change(tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def test_qwens_stacks_have_gate_and_up_one_after_the_other(tmp_path):
    made, tensors = qwen_folder(tmp_path / "a")
    spec = read_model_spec(made)
    assert spec.stacks_experts and not shape_differences(spec, spec_from_config(QWEN))
    both, down = tensors[f"{LAYER}.gate_up_proj"], tensors[f"{LAYER}.down_proj"]
    assert both.shape == (3, 12, 8) and down.shape == (3, 8, 6)
    with open_folder(made, spec) as folder:
        assert torch.equal(folder.read(f"{LAYER}.1.gate_proj.weight"), both[1, :6])
        assert torch.equal(folder.read(f"{LAYER}.2.up_proj.weight", 0, 2, 3), both[2, 8:11])
        assert torch.equal(folder.read(f"{LAYER}.1.down_proj.weight", 1, 3, 2), down[1][:, 3:5])
        parts = ((entry, folder.read(entry.name)) for entry in hf_tensors(spec))
        found = {entry.name: tensor for entry, tensor in stacked(spec, parts)}
    assert found.keys() | {DRAFT} == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
    expected = ExpectedChecksums(spec)
    for name, tensor in found.items():
        expected.add(name, tensor)
    for theirs, ours in (("w13_weight", both), ("w2_weight", down)):  # a server has what was sent
        assert expected.checksums()[f"{SERVED}.{theirs}"] == hashlib.sha256(ours.numpy().tobytes()).hexdigest()[:16]


def test_stacks_of_qwen3_vl_have_gate_and_up_one_after_the_other_in_transposed_matrices(tmp_path):
    text = QWEN["text_config"] | dict(intermediate_size=12, shared_expert_intermediate_size=None, layer_types=None)
    raw = QWEN | dict(architectures=["Qwen3VLMoeForConditionalGeneration"], text_config=text)
    spec = replace(spec_from_config(raw), stacks_experts=True)
    generator = torch.Generator().manual_seed(9)
    tensors = {e.name: torch.randn(e.shape, generator=generator) for e in checkpoint_tensors(spec)}
    both, down = tensors[f"{LAYER}.gate_up_proj"], tensors[f"{LAYER}.down_proj"]
    assert both.shape == (3, 8, 12) and down.shape == (3, 6, 8)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model_spec(tmp_path).stacks_experts
    with open_folder(tmp_path, spec) as folder:
        assert torch.equal(folder.read(f"{LAYER}.1.gate_proj.weight"), both[1, :, :6].T)
        assert torch.equal(folder.read(f"{LAYER}.2.up_proj.weight", 0, 2, 3), both[2, :, 8:11].T)
        assert torch.equal(folder.read(f"{LAYER}.1.down_proj.weight", 1, 3, 2), down[1, 3:5].T)
        parts = ((entry, folder.read(entry.name)) for entry in hf_tensors(spec))
        found = {entry.name: tensor for entry, tensor in stacked(spec, parts)}
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
    expected = ExpectedChecksums(spec)
    for name, tensor in found.items():
        expected.add(name, tensor)
    for theirs, ours in (("w13_weight", both), ("w2_weight", down)):  # SGLang transposes them while it loads them
        weight = ours.transpose(1, 2).contiguous()
        assert expected.checksums()[f"{SERVED}.{theirs}"] == hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16]


def test_whether_experts_are_stacked_is_read_from_an_index_too(tmp_path):
    made, tensors = qwen_folder(tmp_path / "a")
    (made / "model.safetensors").rename(made / "one.safetensors")
    index = made / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "one.safetensors")}))
    assert read_model_spec(made).stacks_experts
    # A layer for multi-token prediction says nothing of the others, nor does a folder without weights.
    index.write_text(json.dumps({"weight_map": {"mtp.layers.0.mlp.experts.gate_up_proj": "one.safetensors"}}))
    assert not read_model_spec(made).stacks_experts
    index.unlink()
    assert not read_model_spec(made).stacks_experts


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(f"{LAYER}.down_proj"), f"missing: {LAYER}.down_proj [3, 8, 6]"),
        (
            lambda t: t.update({f"{LAYER}.gate_up_proj": t[f"{LAYER}.gate_up_proj"].mT.contiguous()}),
            f"wrong shape: {LAYER}.gate_up_proj is [3, 8, 12], config.json makes it [3, 12, 8]",
        ),
        (
            lambda t: t.update({f"{LAYER}.0.up_proj.weight": torch.zeros(6, 8)}),
            f"unexpected: {LAYER}.0.up_proj.weight",
        ),
        (lambda t: t.pop(f"{LAYER}.gate_up_proj"), f"missing: {LAYER}.0.gate_proj.weight [6, 8]"),
    ],
)
def test_stacks_that_do_not_fit_are_named(tmp_path, change, text):
    made, _ = qwen_folder(tmp_path / "a", change)
    with pytest.raises(ModelError) as refused:
        open_checkpoint(made)
    assert text in str(refused.value)


def test_a_stack_is_not_quantised_in_blocks(tmp_path):
    source = open_checkpoint(write(tmp_path / "a", random_tensors()))
    with pytest.raises(
        ModelError, match="the experts of gpt_oss are stacked in files, and FP8 blocks do not support stacks"
    ):
        to_blocks(source, tmp_path / "b", rule="checkpoint", progress=lambda *told: None)
