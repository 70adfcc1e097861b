"""Layers for multi-token prediction: every Hugging Face folder that is made of a policy has them as they were."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import found, quiet, tensors_of
from family_models import make_family_folder, token_ids
from safetensors.torch import load_file, save_file

from gspo_mega.algorithm.fp8 import dequantize_blocks
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.mtp_layers import CarriedLayers
from gspo_mega.checkpoint.served_folders import to_blocks
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.models.block_fp8 import scale_name
from gspo_mega.models.tensors import hf_tensors

LAYER = "model.layers.4."
TOOLS = Path(__file__).resolve().parents[2] / "tools"


def edit(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def set_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def with_layer(folder: Path) -> Path:
    """`folder`, a model of four layers, with one for multi-token prediction behind them, as such folders are published:
    bf16, random.
    """

    def add(tensors):
        like = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.3.")}
        generator = torch.Generator().manual_seed(1)
        wide = tensors["model.norm.weight"].numel()
        shapes = {name.replace("model.layers.3.", LAYER): tensor.shape for name, tensor in like.items()}
        shapes |= {f"{LAYER}{name}.weight": (wide,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{LAYER}eh_proj.weight": (wide, 2 * wide)}
        shapes |= {f"{LAYER}{n}.weight": tensors["lm_head.weight"].shape for n in ("embed_tokens", "shared_head.head")}
        for name, shape in shapes.items():
            kept = torch.float32 if name.endswith("bias") else torch.bfloat16
            tensors[name] = torch.randn(shape, generator=generator).to(kept)

    set_config(edit(folder, add), num_nextn_predict_layers=1)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model of DeepSeek-V3's kind."""
    return with_layer(make_family_folder(tmp_path_factory.mktemp("carried") / "model", "deepseek_v3"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Path:
    """A model of GLM-4.5's kind, whose layers have biases and norms of query and key."""
    return with_layer(make_family_folder(tmp_path_factory.mktemp("carried") / "glm", "glm4_moe"))


def carried(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors_of(folder).items() if name.startswith(LAYER)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    equal = one.keys() == other.keys()
    return equal and all(torch.equal(t, other[n]) and t.dtype == other[n].dtype for n, t in one.items())


def hf_logits(folder: Path) -> np.ndarray:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(token_ids())[None]).logits[0].numpy()


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("source", dict(expert=2)),
        ("source", dict(pipeline=2)),
        ("glm", dict(pipeline=2, first_stage_layers=3)),
    ],
    ids=str,
)
def test_an_export_of_ranks_has_them_to_the_bit(rank_pools, request, tmp_path, kind, parallel):
    source = request.getfixturevalue(kind)
    why = rank_pools(2).run("carried_jobs:export", folder=str(source), parallel=parallel, out=str(tmp_path / "hf"))
    assert why == [None, None]
    assert same(tensors_of(source), tensors_of(tmp_path / "hf")) and len(carried(source)) > 30
    assert config_of(tmp_path / "hf")["num_nextn_predict_layers"] == 1
    manifest = json.loads((tmp_path / "hf" / "manifest.json").read_text())["tensors"]
    assert manifest.keys() == tensors_of(source).keys()
    assert np.array_equal(hf_logits(tmp_path / "hf"), hf_logits(source))
    assert np.abs(hf_logits(source) - np.load(source / "logits.npy")).max() <= 1e-5
    # What was exported starts a run again, and is a whole folder to the tools.
    assert found(source, tmp_path / "hf") == []


@pytest.mark.parametrize("variant", ["qwen3_5_vl", "qwen3_vl_moe"])
def test_a_vision_tower_and_layers_under_other_names_are_carried_to_the_bit(rank_pools, tmp_path, variant):
    source = make_family_folder(tmp_path / "model", variant)
    drafts = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    if variant == "qwen3_5_vl":
        edit(source, lambda tensors: tensors.update({"mtp.fc.weight": drafts}))
    why = rank_pools(2).run(
        "carried_jobs:export", folder=str(source), parallel=dict(pipeline=2), out=str(tmp_path / "hf")
    )
    assert why == [None, None]
    written = tensors_of(tmp_path / "hf")
    assert same(tensors_of(source), written)
    assert sum(name.startswith("model.visual.") for name in written) > 10
    assert "num_nextn_predict_layers" not in config_of(tmp_path / "hf")


def test_a_layer_that_lost_a_tensor_is_refused_by_name(rank_pools, source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "broken")
    edit(broken, lambda tensors: tensors.pop(f"{LAYER}mlp.experts.3.up_proj.weight"))
    why = rank_pools(2).run(
        "carried_jobs:export", folder=str(source), parallel=dict(expert=2), out=str(tmp_path / "hf"), source=str(broken)
    )
    assert why[0] == why[1] and f"missing: {LAYER}mlp.experts.3.up_proj.weight [24, 32]" in why[0]
    assert "set num_nextn_predict_layers to 0" in why[0] and not (tmp_path / "hf").exists()
    edit(broken, lambda tensors: tensors.update({f"{LAYER}eh_proj.weight": torch.ones(4, 4)}))
    with pytest.raises(ModelError, match=r"wrong shape: model.layers.4.eh_proj.weight is \[4, 4\], .* \[32, 64\]"):
        CarriedLayers(broken)


def test_a_run_says_before_it_trains_what_it_could_not_export(rank_pools, source, tmp_path):
    def started(folder: Path) -> list:
        return rank_pools(2).run("carried_jobs:start", folder=str(folder), spec_of=str(source))

    assert started(source) == [([], None), ([], None)]
    without = edit(
        shutil.copytree(source, tmp_path / "without"), lambda tensors: [tensors.pop(n) for n in carried(source)]
    )
    (said, why), other = started(without)
    assert why is None and other == ([], None)
    assert said == [
        f"{without}: config.json names 1 layers for multi-token prediction and the folder has none of their tensors;"
        " what the run exports names none"
    ]
    half = edit(shutil.copytree(source, tmp_path / "half"), lambda tensors: tensors.pop(f"{LAYER}hnorm.weight"))
    for said, why in started(half):
        assert said == [] and why is not None and f"missing: {LAYER}hnorm.weight [32]" in why


@pytest.mark.parametrize("kind", ["source", "glm"])
def test_a_conversion_there_and_back_takes_them_from_the_folder_that_describes_it(request, tmp_path, kind):
    source = request.getfixturevalue(kind)
    to_megatron(open_checkpoint(source), tmp_path / "megatron", progress=quiet)
    assert config_of(tmp_path / "megatron")["num_nextn_predict_layers"] == 0
    to_huggingface(open_checkpoint(tmp_path / "megatron" / "megatron", source), tmp_path / "back", progress=quiet)
    assert same(tensors_of(source), tensors_of(tmp_path / "back")) and found(source, tmp_path / "back") == []
    assert config_of(tmp_path / "back") == config_of(source)
    # One that changed on the way is found by its name.
    edit(tmp_path / "back", lambda tensors: tensors[f"{LAYER}hnorm.weight"].mul_(2))
    assert [line.split(":")[0] for line in found(source, tmp_path / "back")] == [f"{LAYER}hnorm.weight"]
    # Without a folder that has them they are left behind, and said to be.
    to_huggingface(open_checkpoint(tmp_path / "megatron"), tmp_path / "without", progress=quiet)
    assert not carried(tmp_path / "without") and config_of(tmp_path / "without")["num_nextn_predict_layers"] == 0
    set_config(tmp_path / "without", num_nextn_predict_layers=1)
    assert CarriedLayers(tmp_path / "without").entries == []
    half = edit(tmp_path / "back", lambda tensors: tensors.pop(f"{LAYER}shared_head.head.weight"))
    assert found(source, half) == ["the models differ: their layers for multi-token prediction have other tensors"]


def test_the_tools_say_where_they_are(source, tmp_path):
    def said(tool: str, *arguments: object) -> str:
        command = [sys.executable, str(TOOLS / f"{tool}.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()[-1]

    megatron, out, plain = tmp_path / "megatron", tmp_path / "out", tmp_path / "plain"
    assert said("hf_to_megatron", source, megatron).endswith(f"gspo-mega convert --described-by {source}")
    assert said("megatron_to_hf", megatron / "megatron", out, "--described-by", source) == (
        f"{out}: has the layers for multi-token prediction of {source}, as they are there"
    )
    bare = edit(shutil.copytree(source, tmp_path / "bare"), lambda tensors: [tensors.pop(n) for n in carried(source)])
    assert said("hf_to_megatron", bare, plain).endswith(f"{bare} has none of their tensors")


def test_another_dtype_is_theirs_too(source, tmp_path):
    to_huggingface(open_checkpoint(source), tmp_path / "out", progress=quiet, dtype=torch.float32)
    want = {name: tensor.float() for name, tensor in carried(source).items()}
    assert same(want, carried(tmp_path / "out"))


def test_fp8_blocks_leave_them_plain_and_are_read_as_their_values(source, tmp_path):
    to_blocks(open_checkpoint(source), tmp_path / "fp8", rule="checkpoint", dtype=torch.bfloat16, progress=quiet)
    assert same(carried(source), carried(tmp_path / "fp8"))
    kept = config_of(tmp_path / "fp8")["quantization_config"]["modules_to_not_convert"]
    assert kept == ["model.layers.4"]
    assert CarriedLayers(tmp_path / "fp8").entries and open_checkpoint(tmp_path / "fp8")

    # As DeepSeek-V3 is published: the layer's own linear weights are blocks as well.
    blocks = shutil.copytree(tmp_path / "fp8", tmp_path / "blocks")
    name, values = f"{LAYER}self_attn.o_proj.weight", {}

    def quantise(tensors):
        data = (tensors[name].float() * 8).to(torch.float8_e4m3fn)
        scales = torch.full((1, 1), 0.125)
        tensors[name], tensors[scale_name(name)] = data, scales
        values[name] = dequantize_blocks(data, scales, (128, 128)).to(torch.bfloat16)

    edit(blocks, quantise)
    layers = CarriedLayers(blocks)
    read = dict(layers.tensors())
    assert scale_name(name) not in read and torch.equal(read[name], values[name]) and read[name].dtype == torch.bfloat16
    edit(blocks, lambda tensors: tensors.pop(scale_name(name)))
    with pytest.raises(ModelError, match=f"missing: {scale_name(name)}, the scales of {name}"):
        CarriedLayers(blocks)


def test_a_model_that_names_none_carries_none(source, tmp_path):
    none = shutil.copytree(source, tmp_path / "none")
    set_config(none, num_nextn_predict_layers=0)
    assert CarriedLayers(none).entries == []
    assert not any(name.startswith(LAYER) for name in (entry.name for entry in hf_tensors(CarriedLayers(none).spec)))
