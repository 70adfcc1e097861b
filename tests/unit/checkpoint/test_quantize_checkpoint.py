"""tools/quantize_checkpoint.py: the folder that it writes, what it refuses, and that it goes on after a stop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
import megatron_to_hf
import quantize_checkpoint
from test_block_folder import CONFIG, EXPERT, QUERY

from gspo_mega.algorithm.fp8 import quantize_blocks, quantize_published_blocks
from gspo_mega.checkpoint.compare import describe
from gspo_mega.checkpoint.hf_export import tensor_digest
from gspo_mega.checkpoint.hf_folder import open_folder
from gspo_mega.checkpoint.served_folders import to_blocks
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.models.block_fp8 import is_quantizable
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors

FILE_BYTES = 20_000  # about a tensor a file


@pytest.fixture
def plain(tmp_path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(1)
    entries = hf_tensors(read_model_spec(folder))
    save_file(
        {e.name: torch.randn(e.shape, generator=generator).to(torch.bfloat16) for e in entries},
        folder / "model.safetensors",
    )
    return folder


def everything(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("scales", ["power_of_two", "float32", "checkpoint"])
def test_it_writes_what_is_published_by_the_rule_asked_for(plain, tmp_path, scales, capsys):
    out = tmp_path / "out"
    code = quantize_checkpoint.main([str(plain), str(out), "--scales", scales, "--file-bytes", str(FILE_BYTES)])
    assert code == 0 and "written and complete" in capsys.readouterr().out
    source, found = everything(plain), everything(out)
    want = {}
    for entry in hf_tensors(read_model_spec(plain)):
        if not is_quantizable(entry):
            want[entry.name] = source[entry.name]
            continue
        if scales == "checkpoint":
            data, inverse = quantize_published_blocks(source[entry.name])
        else:
            data, inverse = quantize_blocks(source[entry.name], (128, 128), power_of_two=scales == "power_of_two")
        want |= {entry.name: data, f"{entry.name}_scale_inv": inverse}
    assert found.keys() == want.keys()
    assert all(tensor_digest(found[name]) == tensor_digest(want[name]) for name in want)
    assert found[QUERY].dtype == torch.float8_e4m3fn and found[f"{EXPERT}_scale_inv"].dtype == torch.float32
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"].get("scale_fmt") == ("ue8m0" if scales == "power_of_two" else None)
    assert config["quantization_config"]["weight_block_size"] == [128, 128] and config["dtype"] == "bfloat16"
    manifest = json.loads((out / "manifest.json").read_text())["tensors"]
    assert {name: noted["sha256"] for name, noted in manifest.items()} == {n: tensor_digest(t) for n, t in want.items()}
    assert manifest[f"{QUERY}_scale_inv"] | {"sha256": 0} == {
        "shape": [2, 2],
        "dtype": "float32",
        "sha256": 0,
        "source": QUERY,
        "file": manifest[f"{QUERY}_scale_inv"]["file"],
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: noted["file"] for name, noted in manifest.items()} and len(set(index.values())) > 3


def test_what_it_writes_is_read_again_and_becomes_plain_again(plain, tmp_path):
    """Values with a power of two as scale are values of bfloat16, so nothing is rounded a second time."""
    out, back = tmp_path / "out", tmp_path / "back"
    assert quantize_checkpoint.main([str(plain), str(out), "--scales", "power_of_two"]) == 0
    assert megatron_to_hf.main([str(out), str(back)]) == 0
    spec, tensors = read_model_spec(out), everything(back)
    with open_folder(out, spec) as folder:
        for entry in hf_tensors(spec):
            assert tensors[entry.name].dtype == torch.bfloat16
            assert torch.equal(folder.read(entry.name).float(), tensors[entry.name].float())
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    again = tmp_path / "again"
    assert quantize_checkpoint.main([str(back), str(again), "--scales", "power_of_two"]) == 0
    with open_folder(again, spec) as folder:
        assert all(torch.equal(folder.read(e.name).float(), tensors[e.name].float()) for e in hf_tensors(spec))


def test_a_stopped_quantisation_leaves_no_half_folder_and_goes_on(plain, tmp_path):
    out, seen = tmp_path / "out", []

    def stop(done: int, total: int, name: str) -> None:
        seen.append(name)
        if name == f"{EXPERT}_scale_inv":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_blocks(open_checkpoint(plain), out, rule="float32", progress=stop, file_bytes=FILE_BYTES)
    assert not out.exists()
    rest: list[str] = []
    to_blocks(
        open_checkpoint(plain),
        out,
        rule="float32",
        progress=lambda d, t, name: rest.append(name),
        file_bytes=FILE_BYTES,
    )
    assert QUERY in seen and QUERY not in rest, "what was finished is kept"
    straight = tmp_path / "straight"
    to_blocks(open_checkpoint(plain), straight, rule="float32", progress=lambda *_: None, file_bytes=FILE_BYTES)
    assert (out / "manifest.json").read_text() == (straight / "manifest.json").read_text()


def test_the_rest_of_another_rule_is_not_gone_on_with(plain, tmp_path, capsys):
    def stop(done: int, total: int, name: str) -> None:
        if name == EXPERT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_blocks(open_checkpoint(plain), tmp_path / "out", rule="float32", progress=stop, file_bytes=FILE_BYTES)
    arguments = [str(plain), str(tmp_path / "out"), "--file-bytes", str(FILE_BYTES), "--scales", "power_of_two"]
    assert quantize_checkpoint.main(arguments) == 6 and "belongs to another conversion" in capsys.readouterr().err


def test_it_refuses_before_it_begins(plain, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantize_checkpoint.main([str(plain), str(out)]) == 0
    assert quantize_checkpoint.main([str(plain), str(out)]) == 6
    assert "already exists" in capsys.readouterr().err
    assert quantize_checkpoint.main([str(out), str(tmp_path / "twice")]) == 2
    assert "already FP8" in capsys.readouterr().err and not list(tmp_path.glob("twice*"))
    tensors = load_file(plain / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != QUERY}, plain / "model.safetensors")
    assert quantize_checkpoint.main([str(plain), str(tmp_path / "less")]) == 2
    assert f"missing: {QUERY}" in capsys.readouterr().err and not list(tmp_path.glob("less*"))


def test_a_weight_that_is_not_finite_is_named(plain, tmp_path, capsys):
    tensors = load_file(plain / "model.safetensors")
    tensors[EXPERT][3, 5] = float("nan")
    save_file(tensors, plain / "model.safetensors")
    assert quantize_checkpoint.main([str(plain), str(tmp_path / "out")]) == 6
    assert f"{EXPERT}: has a value that is not finite" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_quantised_folder_is_described_as_it_lies_on_the_disk(plain, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantize_checkpoint.main([str(plain), str(out)]) == 0
    lines = describe(out)
    stored = everything(out)
    size = sum(tensor.nbytes for tensor in stored.values())
    (said,) = [line for line in lines if line.startswith("stored ")]
    assert f"FP8 in blocks of 128x128: {len(stored)} tensors with their scales, {size} bytes (" in said
    assert "float8_e4m3fn" in said and size < sum(tensor.nbytes for tensor in everything(plain).values())
    assert sum(line.startswith("  ") for line in lines) == len(stored)
    assert any(line.startswith("read as     ") and "bfloat16" in line for line in lines)
    assert any(line.startswith("tensors     ") for line in describe(plain))
