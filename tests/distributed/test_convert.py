"""Conversion: there and back bit for bit, loadable in any layout, resumable, and every difference found."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import FILE_BYTES, found, quiet, tensors_of, there_and_back
from family_models import VARIANTS, make_family_folder, token_ids
from safetensors.torch import load_file, save_file
from test_family_logits import layouts_of

from gspo_mega.base.errors import CheckpointError, ModelError
from gspo_mega.checkpoint.compare import describe
from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.hf_folder import part_of
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.checkpoint.torch_dist import TorchDistFolder
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def apart(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a folder with those of experts apart, which Megatron's files have by themselves."""
    return {
        entry.name: tensors[entry.name] if entry.stack is None else part_of(tensors[entry.stack.name], entry)
        for entry in hf_tensors(read_model_spec(folder))
    }


CONVERTED = [v for v, (name, _) in VARIANTS.items() if not (FAMILIES[name].delta_net or FAMILIES[name].text_part)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", CONVERTED)
def test_every_tensor_comes_back_bit_for_bit(tmp_path, variant, dtype):
    source = make_family_folder(tmp_path / "source", variant, dtype)
    converted, back = there_and_back(source, tmp_path)
    want, got = tensors_of(source), tensors_of(back)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    for name in ("tokenizer.json", "generation_config.json"):
        assert (back / name).read_bytes() == (converted / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert len(list(back.glob("*.safetensors"))) > 1 and len(list((converted / "megatron").glob("*.distcp"))) > 1
    assert found(source, converted) == found(converted, back) == found(back, source) == []
    for folder, written in ((converted, apart(source, want)), (back, want)):
        manifest = json.loads((folder / "manifest.json").read_text())["tensors"]
        assert manifest.keys() == written.keys()
        for name, tensor in written.items():
            said = manifest[name]
            assert (said["shape"], said["dtype"], said["source"]) == (
                list(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                name,
            )
            assert said["sha256"] == hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            assert (folder / said["file"]).is_file()


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_vl_moe"])
def test_delta_nets_and_vision_language_classes_are_refused_before_anything_is_written(tmp_path, variant):
    source = make_family_folder(tmp_path / "source", variant)
    with pytest.raises(CheckpointError, match=f"{variant}: Megatron's files keep .* has not been written"):
        to_megatron(open_checkpoint(source), tmp_path / "out", progress=quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "variant",
    [
        *("qwen2", "llama3-tied", "qwen3_moe", "qwen2_moe", "mixtral"),
        *("deepseek_v3", "deepseek_v3-yarn-scaled", "glm4_moe", "gpt_oss"),
    ],
)
def test_megatron_loads_it_in_every_layout(rank_pools, tmp_path, variant):
    source = make_family_folder(tmp_path / "source", variant)
    to_megatron(open_checkpoint(source), tmp_path / "out", progress=quiet, file_bytes=FILE_BYTES)
    layouts = layouts_of(variant) | {"PP2, 3 and 1 layers": dict(pipeline=2, first_stage_layers=3)}
    seen = rank_pools(2).run(
        "convert_jobs:loaded", source=str(source), converted=str(tmp_path / "out"), layouts=layouts
    )[0]
    assert seen == dict.fromkeys(layouts, [])


def test_megatron_loads_bf16_and_refuses_another_shape(rank_pools, tmp_path):
    source = make_family_folder(tmp_path / "source", "qwen2", torch.bfloat16)
    to_megatron(open_checkpoint(source), tmp_path / "out", progress=quiet)
    layouts = {"PP2": dict(pipeline=2)}
    seen = rank_pools(2).run(
        "convert_jobs:loaded", source=str(source), converted=str(tmp_path / "out"), layouts=layouts, precision="bf16"
    )[0]
    assert seen == {"PP2": []}
    shape = make_family_folder(tmp_path / "shape", "qwen3")
    texts = rank_pools(2).run("convert_jobs:refused", converted=str(tmp_path / "out"), shape=str(shape))
    assert all("cannot be loaded" in text for text in texts) and len(set(texts)) == 1


@pytest.mark.parametrize(
    "variant, parallel",
    [
        ("llama3", dict(tensor=2)),
        ("qwen2-tied", dict(pipeline=2)),
        ("mixtral", dict(expert=2)),
        ("deepseek_v3", dict(expert=2)),
        ("glm4_moe", dict(pipeline=2, first_stage_layers=3)),
        ("gpt_oss", dict(tensor=2, expert=2)),
    ],
)
def test_a_runs_checkpoint_becomes_what_the_engine_held(rank_pools, tmp_path, variant, parallel):
    source = make_family_folder(tmp_path / "source", variant)
    (tmp_path / "run").mkdir()
    optimizer = dict(lr=1e-3, distributed=variant != "llama3")
    held = rank_pools(2).run(
        "checkpoint_jobs:run",
        folder=str(source),
        run_dir=str(tmp_path / "run"),
        parallel=parallel,
        plan=["start", "train", "save"],
        optimizer=optimizer,
    )[0]["weights"]
    saved = tmp_path / "run" / "checkpoints" / "step_00000001"
    with pytest.raises(CheckpointError, match="no config.json"):
        open_checkpoint(saved)
    to_huggingface(open_checkpoint(saved, source), tmp_path / "out", progress=quiet)
    got = tensors_of(tmp_path / "out")
    assert got.keys() == held.keys()
    for name, tensor in got.items():
        assert np.array_equal(tensor.numpy(), held[name]), name
    lines = describe(saved)
    assert lines[0].startswith("run         step 1, 1 optimizer steps") and any(
        "self_attention.linear_proj.weight" in line for line in lines
    )


@pytest.mark.parametrize("variant", ["llama3", "mixtral", "deepseek_v3", "deepseek_v3-yarn"])
def test_transformers_loads_what_comes_back(tmp_path, variant):
    import transformers

    source = make_family_folder(tmp_path / "source", variant)
    _, back = there_and_back(source, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids())[None]).logits[0]
    assert torch.equal(logits, torch.from_numpy(np.load(source / "logits.npy")))


def test_the_norm_before_experts_has_the_names_of_both_layer_specs(mixtral):
    """With Transformer Engine Megatron looks for the first, without it for the second."""
    stored = TorchDistFolder(mixtral[1] / "megatron").tensors
    assert {
        "decoder.layers.pre_mlp_layernorm.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    } <= stored.keys()


def test_another_dtype_on_request(tmp_path):
    source = make_family_folder(tmp_path / "source", "qwen2")
    to_megatron(open_checkpoint(source), tmp_path / "out", progress=quiet, dtype=torch.bfloat16)
    to_huggingface(open_checkpoint(tmp_path / "out"), tmp_path / "back", progress=quiet)
    want = tensors_of(source)
    assert all(torch.equal(tensor, want[name].bfloat16()) for name, tensor in tensors_of(tmp_path / "back").items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    lines = found(tmp_path / "back", source)
    assert len(lines) == len(want) and all(
        line.endswith("bfloat16 instead of float32, the same values after rounding") for line in lines
    )
    other = changed(source, tmp_path / "other", lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert [line for line in found(tmp_path / "back", other) if "other values" in line] == [
        "model.norm.weight: bfloat16 instead of float32, and other values"
    ]


def changed(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_verification_names_what_differs(tmp_path, mixtral):
    source, converted, _ = mixtral
    expert = "model.layers.2.block_sparse_moe.experts.1."

    def one_number(tensors):
        tensors["model.norm.weight"][3] += 1e-6

    def swapped(tensors):
        tensors[expert + "w1.weight"], tensors[expert + "w3.weight"] = (
            tensors[expert + "w3.weight"],
            tensors[expert + "w1.weight"],
        )

    def permuted(tensors):
        for name in ("w1", "w2", "w3"):
            a, b = f"{expert}{name}.weight", f"{expert.replace('experts.1', 'experts.3')}{name}.weight"
            tensors[a], tensors[b] = tensors[b], tensors[a]

    assert [line.partition(":")[0] for line in found(changed(source, tmp_path / "a", one_number), converted)] == [
        "model.norm.weight"
    ]
    assert "1 of 32 numbers differ" in found(tmp_path / "a", converted)[0]
    assert len(found(changed(source, tmp_path / "b", swapped), converted)) == 2
    assert len(found(changed(source, tmp_path / "c", permuted), converted)) == 6
    other = make_family_folder(tmp_path / "other", "llama2")
    assert found(other, converted)[0].startswith("the models differ: family 'llama'")


def test_damage_is_named(tmp_path, mixtral):
    damaged = tmp_path / "damaged"
    shutil.copytree(mixtral[1], damaged)
    victim = sorted((damaged / "megatron").glob("*.distcp"))[1]
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=victim.name):
        found(damaged, mixtral[0])
    (damaged / "megatron" / ".metadata").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=".metadata cannot be read"):
        open_checkpoint(damaged)
    cut = tmp_path / "cut"
    shutil.copytree(mixtral[0], cut)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises((CheckpointError, ModelError), match="model.safetensors"):
        open_checkpoint(cut)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_checkpoint(TOOLS)


def test_the_tools(tmp_path):
    source = make_family_folder(tmp_path / "source", "qwen2")

    def run(tool: str, *arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, TOOLS / f"{tool}.py", *map(str, arguments)], capture_output=True, text=True, timeout=120
        )

    done = run("hf_to_megatron", source, tmp_path / "megatron")
    assert done.returncode == 0 and "100%" in done.stderr, done.stderr
    assert run("megatron_to_hf", tmp_path / "megatron", tmp_path / "back").returncode == 0
    same = run("verify_checkpoint", source, tmp_path / "back")
    assert (same.returncode, same.stdout.splitlines()[-1].endswith("the same weights")) == (0, True)
    shown = run("inspect_checkpoint", tmp_path / "megatron")
    assert (
        shown.returncode == 0
        and "format      Megatron torch_dist" in shown.stdout
        and "model.layers.3.self_attn.k_proj.bias  [16]  float32" in shown.stdout
    )
    piped = f"{sys.executable} {TOOLS}/inspect_checkpoint.py {tmp_path / 'megatron'} | head -1"
    read = subprocess.run(["bash", "-c", f"set -o pipefail; {piped}"], capture_output=True, text=True, timeout=120)
    assert (read.returncode, read.stderr) == (0, "") and read.stdout.startswith("format"), read.stderr
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    differs = run("verify_checkpoint", source, tmp_path / "megatron")
    assert differs.returncode == 1 and differs.stdout.startswith("model.layers.1.mlp.up_proj.weight: 1 of ")
    again = run("hf_to_megatron", source, tmp_path / "megatron")
    assert again.returncode == 6 and "is not overwritten" in again.stderr and "Traceback" not in again.stderr
    assert run("inspect_checkpoint", tmp_path / "none").returncode == 6


def test_another_dtype_leaves_the_expert_bias_in_fp32_and_mtp_layers_behind(tmp_path):
    source = make_family_folder(tmp_path / "source", "deepseek_v3")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(4, 4)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="unexpected: model.layers.4.eh_proj.weight"):
        open_checkpoint(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    to_megatron(open_checkpoint(source), tmp_path / "out", progress=quiet, dtype=torch.bfloat16)
    to_huggingface(open_checkpoint(tmp_path / "out"), tmp_path / "back", progress=quiet)
    back = tensors_of(tmp_path / "back")
    assert back.keys() == tensors.keys() - {"model.layers.4.eh_proj.weight"}
    assert {n for n, t in back.items() if t.dtype != torch.bfloat16} == {
        n for n in back if n.endswith("e_score_correction_bias")
    }
    assert all(torch.equal(t, tensors[n].to(t.dtype)) for n, t in back.items())
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["num_nextn_predict_layers"], written["dtype"]) == (0, "bfloat16")
