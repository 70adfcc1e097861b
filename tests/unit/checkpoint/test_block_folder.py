"""Folders of FP8 blocks, as DeepSeek-V3 and Qwen3-FP8 are published: what they read as, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gspo_mega.algorithm.fp8 import quantize_blocks
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.hf_folder import check_names_and_shapes, open_folder
from gspo_mega.models.block_fp8 import is_quantizable, quantization_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import BlockFp8
from gspo_mega.models.tensors import hf_tensors, is_ignored_tensor

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 136,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "dtype": "bfloat16",
}
QUERY = "model.layers.0.self_attn.q_proj.weight"  # [160, 136]: ragged blocks on both sides
EXPERT = "model.layers.0.mlp.experts.1.down_proj.weight"


def block_folder(folder: Path, stored: BlockFp8 = BlockFp8(), scale_dtype: torch.dtype = torch.float32, **changes):
    """A published folder, and the values that it stands for, computed element by element."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization_config(stored)}))
    spec = read_model_spec(folder)
    generator = torch.Generator().manual_seed(3)
    tensors, values = {}, {}
    for entry in hf_tensors(spec):
        plain = torch.randn(entry.shape, generator=generator).to(torch.bfloat16)
        if not is_quantizable(entry) or any(name in entry.name for name in stored.kept):
            tensors[entry.name] = values[entry.name] = plain
            continue
        data, scales = quantize_blocks(plain, stored.block, power_of_two=stored.power_of_two)
        scales = scales.to(scale_dtype)
        tensors |= {entry.name: data, f"{entry.name}_scale_inv": scales}
        rows, columns = (torch.arange(size) // side for size, side in zip(entry.shape, stored.block))
        values[entry.name] = data.float() * scales.float()[rows][:, columns]
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return spec, values


def problems(folder: Path) -> list[str]:
    spec = read_model_spec(folder)
    shapes = {entry.name: entry.shape for entry in hf_tensors(spec)}
    return check_names_and_shapes(open_folder(folder, spec), shapes, lambda name: is_ignored_tensor(spec, name))


@pytest.mark.parametrize(
    "stored, scale_dtype",
    [
        (BlockFp8(), torch.float32),  # DeepSeek-V3
        (BlockFp8(), torch.bfloat16),  # Qwen3-FP8
        (BlockFp8(power_of_two=True), torch.float32),  # DeepSeek-V3.1
        (BlockFp8(power_of_two=True), torch.float8_e8m0fnu),
        (BlockFp8((64, 32)), torch.float32),
        (BlockFp8(kept=("model.layers.0.self_attn.q_proj", "lm_head")), torch.float32),
    ],
)
def test_every_published_layout_reads_as_its_values(tmp_path, stored, scale_dtype):
    spec, values = block_folder(tmp_path / "m", stored, scale_dtype)
    assert problems(tmp_path / "m") == []
    with open_folder(tmp_path / "m", spec) as folder:
        assert set(folder.files) == set(values), "scales are no tensors of the model"
        for name, want in values.items():
            assert torch.equal(folder.read(name).float(), want.float()), name


@given(dim=st.integers(0, 1), ends=st.tuples(st.integers(0, 135), st.integers(1, 136)))
@settings(max_examples=60, deadline=None)
def test_a_slice_is_that_of_the_whole(slices, dim, ends):
    folder, whole = slices
    start, stop = min(ends), max(ends)
    if start == stop:
        return
    part = folder.read(QUERY, dim, start, stop - start)
    assert torch.equal(part, whole.narrow(dim, start, stop - start))


@pytest.fixture(scope="module")
def slices(tmp_path_factory):
    path = tmp_path_factory.mktemp("slices") / "m"
    spec, values = block_folder(path)
    return open_folder(path, spec), values[QUERY]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({f"{EXPERT}_scale_inv": None}, f"missing: {EXPERT}_scale_inv [2, 1], the scales of {EXPERT}"),
        ({f"{QUERY}_scale_inv": torch.ones(2, 1)}, f"wrong shape: {QUERY}_scale_inv is [2, 1], blocks of 128 x 128"),
        ({f"{QUERY}_scale_inv": torch.ones(2, 2, dtype=torch.float16)}, f"wrong type: {QUERY}_scale_inv is F16"),
        ({"model.norm.weight_scale_inv": torch.ones(1)}, "unexpected: model.norm.weight_scale_inv, scales of a tensor"),
        ({"lm_head.weight_scale_inv": torch.ones(1, 2)}, "unexpected: lm_head.weight_scale_inv"),
        ({QUERY: torch.ones(160, 136, dtype=torch.bfloat16)}, f"not quantised: {QUERY} is BF16"),
        (
            {"model.norm.weight": torch.ones(136).to(torch.float8_e4m3fn)},
            "quantised: model.norm.weight is F8_E4M3, and its kind is never quantised",
        ),
        ({EXPERT: None}, f"missing: {EXPERT} [136, 24]"),
    ],
)
def test_scales_and_weights_that_do_not_fit_are_named(tmp_path, changes, words):
    block_folder(tmp_path / "m", **changes)
    (problem,) = [problem for problem in problems(tmp_path / "m") if words in problem]
    assert problem.startswith(words)


def test_scales_of_layers_that_are_not_loaded_are_passed_over(tmp_path):
    """DeepSeek-V3's layer for multi-token prediction lies behind the last one, quantised as well."""
    folder = tmp_path / "m"
    block_folder(folder)
    spec = replace(read_model_spec(folder), num_ignored_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "model.layers.1.eh_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "model.layers.1.eh_proj.weight_scale_inv": torch.ones(1, 1),
    }
    save_file(tensors, folder / "model.safetensors")
    shapes = {entry.name: entry.shape for entry in hf_tensors(spec)}
    assert check_names_and_shapes(open_folder(folder, spec), shapes, lambda name: is_ignored_tensor(spec, name)) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_is_none_is_named_when_it_is_read(tmp_path, bad):
    scales = torch.full((2, 2), 0.5)
    scales[1, 0] = bad
    spec, _ = block_folder(tmp_path / "m", **{f"{QUERY}_scale_inv": scales})
    with pytest.raises(ModelError, match=f"{QUERY}_scale_inv: has a scale that is negative or not finite"):
        open_folder(tmp_path / "m", spec).read(QUERY)


def test_a_promise_of_powers_of_two_is_held(tmp_path):
    stored = BlockFp8(power_of_two=True)
    spec, _ = block_folder(tmp_path / "m", stored, **{f"{QUERY}_scale_inv": torch.full((2, 2), 0.75)})
    with pytest.raises(ModelError, match=f"{QUERY}_scale_inv: has a scale that is not a power of two.*ue8m0"):
        open_folder(tmp_path / "m", spec).read(QUERY)


def test_a_plain_folder_is_read_as_before(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {
        entry.name: torch.ones(entry.shape, dtype=torch.bfloat16) for entry in hf_tensors(read_model_spec(folder))
    }
    save_file(tensors, folder / "model.safetensors")
    assert problems(folder) == []
    assert open_folder(folder, read_model_spec(folder)).read(QUERY).dtype == torch.bfloat16
