"""`quantization_config` of published FP8 checkpoints: what is read, what is refused by name, which tensors it means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.hf_export import copy_description
from gspo_mega.config import load_config
from gspo_mega.models.block_fp8 import (
    is_linear,
    is_quantizable,
    is_quantized,
    is_rounded,
    quantization_config,
    read_block_fp8,
    scale_name,
    scale_shape,
    served_layout,
    stored_bytes,
)
from gspo_mega.models.delta_net import unrounded_modules
from gspo_mega.models.hf_fields import ConfigReader
from gspo_mega.models.huggingface import read_model_spec, read_stored, spec_from_config
from gspo_mega.models.spec import BlockFp8, ModelSpec, shape_differences
from gspo_mega.models.tensors import hf_tensors

ROOT = Path(__file__).parents[3]
DEEPSEEK_V3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK_V31 = DEEPSEEK_V3 | {"scale_fmt": "ue8m0"}
QWEN3_MOE = DEEPSEEK_V3 | {
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]
}


def read(raw: object) -> tuple[BlockFp8 | None, list[str]]:
    reader = ConfigReader({"quantization_config": raw})
    return read_block_fp8(reader), reader.problems


@pytest.mark.parametrize(
    "raw, stored",
    [
        (None, None),
        ({}, None),
        (DEEPSEEK_V3, BlockFp8()),
        (DEEPSEEK_V31, BlockFp8(power_of_two=True)),
        (QWEN3_MOE, BlockFp8(kept=tuple(QWEN3_MOE["modules_to_not_convert"]))),
        ({key: value for key, value in DEEPSEEK_V3.items() if key != "fmt"}, BlockFp8()),
        (DEEPSEEK_V3 | {"weight_block_size": [64, 256]}, BlockFp8((64, 256))),
        (DEEPSEEK_V3 | {"weight_per_tensor": False, "act_per_tensor": False}, BlockFp8()),  # Qwen3.8-2.4T-A95B-FP8
    ],
)
def test_published_layouts_are_read(raw, stored):
    assert read(raw) == (stored, [])


@pytest.mark.parametrize("stored", [BlockFp8(), BlockFp8((32, 64), ("lm_head",), True)])
def test_a_layout_is_written_as_it_is_read(stored):
    assert read(quantization_config(stored)) == (stored, [])


@pytest.mark.parametrize(
    "raw, words",
    [
        ("fp8", "is 'fp8'; must be an object"),
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq', supported: 'fp8'"),
        (DEEPSEEK_V3 | {"fmt": "e5m2"}, "fmt is 'e5m2', supported: 'e4m3'"),
        (DEEPSEEK_V3 | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        (DEEPSEEK_V3 | {"weight_block_size": None}, "weight_block_size is None, supported: rows and columns"),
        (DEEPSEEK_V3 | {"weight_block_size": [128]}, "weight_block_size is [128]"),
        (DEEPSEEK_V3 | {"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        (DEEPSEEK_V3 | {"scale_fmt": "ue4m3"}, "scale_fmt is 'ue4m3'"),
        (DEEPSEEK_V3 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        (DEEPSEEK_V3 | {"expert_dtype": "fp4"}, "expert_dtype is not known"),
        (DEEPSEEK_V3 | {"act_per_tensor": True}, "act_per_tensor is True, supported: False"),
    ],
)
def test_other_quantisations_are_refused_by_name(raw, words):
    stored, (problem,) = read(raw)
    assert stored is None and problem.startswith("quantization_config: ") and words in problem


def test_weights_that_another_file_says_are_quantised_are_refused(tmp_path):
    """As NVIDIA publishes FP8 and NVFP4: config.json may be that of the plain model."""
    (tmp_path / "config.json").write_text((ROOT / "configs/models/qwen3_06b.json").read_text())
    assert read_model_spec(tmp_path).stored is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelError, match="hf_quant_config.json: the weights are quantised, which config.json does not"):
        read_model_spec(tmp_path)


def qwen3_moe() -> ModelSpec:
    raw = json.loads((ROOT / "configs/models/qwen3_30b_a3b.json").read_text())
    return spec_from_config(raw | {"quantization_config": QWEN3_MOE})


def test_linear_layers_are_quantised_and_nothing_else():
    spec = qwen3_moe()
    entries = hf_tensors(spec)
    kinds = {entry.name.split(".", 3)[-1] for entry in entries if is_quantizable(entry) and entry.layer == 0}
    experts = {f"mlp.experts.{e}.{n}_proj.weight" for e in range(128) for n in ("gate", "up", "down")}
    assert kinds == {f"self_attn.{n}_proj.weight" for n in "qkvo"} | experts
    assert all(is_quantized(spec.stored, entry) == is_quantizable(entry) for entry in entries)


def test_listed_modules_are_plain_by_whole_names():
    spec = qwen3_moe()
    stored = BlockFp8(kept=("model.layers.0.mlp.experts.1", "model.layers.0.self_attn.q"))
    plain = [e.name for e in hf_tensors(spec) if is_quantizable(e) and not is_quantized(stored, e)]
    assert plain == [f"model.layers.0.mlp.experts.1.{n}_proj.weight" for n in ("gate", "up", "down")]


def test_sizes_on_disk_are_one_byte_and_the_scales():
    spec = qwen3_moe()
    entries = hf_tensors(spec)
    linear = [entry for entry in entries if is_quantizable(entry)]
    want = sum(entry.num_elements * (1 if is_quantizable(entry) else 2) for entry in entries)
    want += sum(4 * (e.shape[0] // 128) * (e.shape[1] // 128) for e in linear)
    assert stored_bytes(BlockFp8(), entries, 2) == want
    assert stored_bytes(None, entries, 2) == 2 * sum(entry.num_elements for entry in entries)
    assert scale_shape((576, 7168), (128, 128)) == (5, 56) and scale_name("a.weight") == "a.weight_scale_inv"


def test_a_quantised_model_has_the_shape_of_the_plain_one():
    raw = json.loads((ROOT / "configs/models/qwen3_30b_a3b.json").read_text())
    assert shape_differences(qwen3_moe(), spec_from_config(raw)) == []


def test_a_folder_says_itself_how_it_stores(tmp_path):
    assert read_stored(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": DEEPSEEK_V31}))
    assert read_stored(tmp_path) == BlockFp8(power_of_two=True)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="config.json: quantization_config: .*'gptq'"):
        read_stored(tmp_path)


def test_servers_get_what_the_configuration_says():
    plain = load_config(ROOT / "configs/quickstart.yaml").config
    blocks = plain.model_copy(update={"server": plain.server.model_copy(update={"quantization": "fp8_block"})})
    assert served_layout(plain) is None
    assert served_layout(blocks) == BlockFp8()
    blackwell = blocks.model_copy(update={"cluster": blocks.cluster.model_copy(update={"gpu": "B200"})})
    assert served_layout(blackwell) == BlockFp8(power_of_two=True)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_betas_and_alphas_have_no_blocks(tmp_path, family):
    """As in the published folders of both families, whose config.json names these modules of each delta net."""
    raw = json.loads((ROOT / f"configs/models/certify_{family}.json").read_text())
    entries = hf_tensors(spec_from_config(raw))
    plain = {entry.name.split(".", 3)[-1] for entry in entries if is_linear(entry) and not is_quantizable(entry)}
    assert plain == (
        {"linear_attn.in_proj_ba.weight"}
        if family == "qwen3_next"
        else {"linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"}
    )
    rounded = {e.name.split(".", 3)[-1] for e in entries if is_quantizable(e) and "linear_attn" in e.name}
    assert "linear_attn.out_proj.weight" in rounded and not any("conv1d" in name for name in rounded)
    # What a server quantises while it loads are all of them.
    assert all(is_rounded("fp8_block", e) == is_quantizable(e) for e in entries)
    assert all(is_rounded("fp8", e) == is_linear(e) and not is_rounded("none", e) for e in entries)
    names = unrounded_modules(raw)
    assert len(names) == 3 * 2 and names[0] == "model.layers.0.linear_attn.in_proj_b", "two of the four layers"
    assert unrounded_modules({"text_config": raw})[0] == "model.language_model.layers.0.linear_attn.in_proj_b"
    (source := tmp_path / "source").mkdir(), (target := tmp_path / "target").mkdir()
    (source / "config.json").write_text(json.dumps(raw))
    copy_description(source, target, "float32", BlockFp8())
    assert read_stored(target) == BlockFp8(kept=names)


def test_other_models_name_no_plain_modules():
    assert unrounded_modules({"num_hidden_layers": 2}) == ()
