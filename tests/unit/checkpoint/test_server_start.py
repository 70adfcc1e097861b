"""The folder that a server starts from: model.path where that is in the run's form, and else a copy made once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from test_block_folder import CONFIG as MODEL
from test_block_folder import QUERY, block_folder
from waiting import until

from gspo_mega.algorithm.fp8 import quantize_blocks
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.served_folders import CopyMaker, StartWeights, needed_copy, start_folder
from gspo_mega.config import load_config
from gspo_mega.models.block_fp8 import served_layout
from gspo_mega.models.huggingface import read_model_spec, read_stored
from gspo_mega.models.spec import BlockFp8
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.rollout.server.start_weights import current_weights

ROOT = Path(__file__).parents[3]


def test_a_server_command_starts_without_torch():
    """Only the process that makes the copy imports it: the command itself stays small and starts fast."""
    program = "import sys; import gspo_mega.cli.serve; sys.exit(*({'torch', 'numpy'} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def run(tmp_path: Path, model: Path, *changes: str):
    words = [f"run.dir={tmp_path}", "run.name=run", f"model.path={model}", *changes]
    return load_config(ROOT / "configs/quickstart.yaml", words).config, RunFolder(tmp_path / "run")


def plain_folder(folder: Path, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    generator = torch.Generator().manual_seed(seed)
    entries = hf_tensors(read_model_spec(folder))
    save_file({e.name: torch.randn(e.shape, generator=generator) for e in entries}, folder / "model.safetensors")
    return folder


def made(config, folder: RunFolder) -> Path:
    """The folder that a server starts from, made where it has to be."""
    copy = needed_copy(StartWeights.of(config), folder)
    if copy is None:
        return Path(config.model.path)
    if not copy.is_dir():
        maker = CopyMaker(StartWeights.of(config), copy)
        try:
            until(lambda: maker.look() and copy.is_dir())
        finally:
            maker.end()
    return copy


@pytest.fixture
def plain(tmp_path) -> Path:
    return plain_folder(tmp_path / "plain", 1)


def test_plain_servers_start_from_a_plain_model_itself(tmp_path, plain):
    config, folder = run(tmp_path, plain)
    assert made(config, folder) == plain and not folder.weights_dir.exists()


def test_the_copy_holds_what_a_publish_would_send(tmp_path, plain):
    """The trainer's precision first (bf16), then blocks; tensors that stay plain are in the server's dtype."""
    config, folder = run(tmp_path, plain, "precision=bf16", "server.quantization=fp8_block")
    start = made(config, folder)
    assert (
        re.fullmatch("start-blocks-float32-bf16-bf16-[0-9a-f]{12}", start.name) and start.parent == folder.weights_dir
    )
    assert read_stored(start) == BlockFp8()
    source, found = load_file(plain / "model.safetensors"), load_file(start / "model.safetensors")
    data, scales = quantize_blocks(source[QUERY].to(torch.bfloat16), (128, 128))
    assert torch.equal(found[QUERY].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(found[f"{QUERY}_scale_inv"], scales)
    assert torch.equal(found["lm_head.weight"], source["lm_head.weight"].to(torch.bfloat16))


def test_a_model_in_the_same_blocks_is_started_from_itself_and_other_blocks_are_not(tmp_path):
    # As Qwen3-FP8 does: modules that are never quantised are listed.
    block_folder(tmp_path / "same", BlockFp8(kept=("lm_head", "model.layers.0.mlp.gate")))
    config, folder = run(tmp_path, tmp_path / "same", "precision=bf16", "server.quantization=fp8_block")
    assert made(config, folder) == tmp_path / "same"
    block_folder(tmp_path / "other", BlockFp8((64, 64)))
    config, folder = run(tmp_path, tmp_path / "other", "precision=bf16", "server.quantization=fp8_block")
    assert read_stored(made(config, folder)) == served_layout(config) == BlockFp8()


def test_plain_servers_of_a_model_in_blocks_get_its_values(tmp_path):
    _, values = block_folder(tmp_path / "blocks")
    config, folder = run(tmp_path, tmp_path / "blocks", "precision=fp32")
    start = made(config, folder)
    assert start.name.startswith("start-plain-fp32-fp32-") and read_stored(start) is None
    assert torch.equal(load_file(start / "model.safetensors")[QUERY], values[QUERY])


def test_a_restart_takes_the_committed_version_only_in_the_form_that_servers_hold(tmp_path, plain):
    config, folder = run(tmp_path, plain, "precision=bf16", "server.quantization=fp8_block")
    block_folder(tmp_path / "v1")
    folder.weights_dir.mkdir(parents=True)
    attempt = folder.new_attempt()
    attempt.api_key_file.write_text("key")
    start = str(tmp_path / "start")
    for committed, want in ((plain, (None, start)), (tmp_path / "v1", (1, str(tmp_path / "v1")))):
        folder.current_weights_file.write_text(json.dumps({"weight_version": 1, "path": str(committed)}))
        assert current_weights(attempt, start, served_layout(config)) == want


def test_a_version_of_a_run_that_was_moved_is_found_in_its_folder_and_a_lost_one_is_not_waited_for(tmp_path, plain):
    """The file has the absolute path of the folder as it was."""
    config, folder = run(tmp_path, plain, "precision=fp32")
    folder.weights_dir.mkdir(parents=True)
    attempt = folder.new_attempt()
    folder.current_weights_file.write_text(json.dumps({"weight_version": 1, "path": "/nowhere/weights/v00000001"}))
    assert current_weights(attempt, str(plain), served_layout(config)) == (None, str(plain))
    shutil.copytree(plain, folder.weights_version_dir(1))
    assert current_weights(attempt, str(plain), served_layout(config)) == (1, str(folder.weights_version_dir(1)))


def test_a_copy_is_of_this_model_and_of_these_bytes_and_no_other_copy_stays(tmp_path, plain):
    """An evaluation's run folder sees many models: another path, or the same path written again."""

    def holds(model: Path, start: Path) -> bool:
        data, _ = quantize_blocks(load_file(model / "model.safetensors")[QUERY].to(torch.bfloat16), (128, 128))
        return torch.equal(load_file(start / "model.safetensors")[QUERY].view(torch.uint8), data.view(torch.uint8))

    blocks = ("precision=bf16", "server.quantization=fp8_block")
    other = plain_folder(tmp_path / "other", 2)
    config, folder = run(tmp_path, plain, *blocks)
    first = made(config, folder)
    second = made(run(tmp_path, other, *blocks)[0], folder)
    assert first != second and holds(plain, first.parent / second.name) is False and holds(other, second)
    plain_folder(plain, 3)
    third = made(config, folder)
    assert third not in (first, second) and holds(plain, third)
    assert [path for path in folder.weights_dir.iterdir() if path.is_dir()] == [third]
    (plain / "config.json").write_text(json.dumps(MODEL | {"rope_theta": 5.0}))
    assert start_folder(StartWeights.of(config), folder) != third
