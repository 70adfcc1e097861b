"""The whole road of a checkpoint: Hugging Face -> Megatron's files -> a training run that starts from them -> Hugging
Face.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from router_ties import differ_by_rounding
from run_support import REPOSITORY, Command, environment, small_overrides
from safetensors.torch import load_file, save_file

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.writer import read_metrics


def tool(name: str, *arguments: object) -> str:
    command = [sys.executable, str(REPOSITORY / "tools" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout


def moved_copy(source: Path, target: Path) -> Path:
    """The model with every weight moved, so that it cannot be taken for the one that it was."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(target / "model.safetensors")
    moved = {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()}
    save_file(moved, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("parallel", ["parallel={expert: 2, expert_tensor: 1}"])
def test_a_run_starts_from_converted_weights_and_its_servers_too(tmp_path, quickstart_files, parallel):
    source = moved_copy(quickstart_files / "model", tmp_path / "source")
    tool("hf_to_megatron", source, tmp_path / "megatron")
    command = Command(
        tmp_path,
        "train",
        str(REPOSITORY / "configs/quickstart.yaml"),
        *small_overrides(quickstart_files, tmp_path / "runs", "run"),
        "eval=null",
        f"model.weights={tmp_path / 'megatron'}",
        parallel,
        "cluster.ranks_per_node=2",
        "train.num_steps=1",
        "optimizer.lr=1e-12",
        f"reward.functions=[{{function: 'run_support:score', options: {{log: {tmp_path / 'scores'}}}}}]",
        forked=True,
    )
    try:
        assert command.finish() == 0, command.out + command.err
    finally:
        command.end()
    run = RunFolder(tmp_path / "runs" / "run")
    (line,) = read_metrics(run.metrics_file)
    assert differ_by_rounding(run, line), "the servers sampled with the very weights"
    # Without a section `eval` nothing can be measured again, and what is said to come next can be done.
    assert f"next     gspo-mega train {run.path} train.num_steps=N" in command.out
    assert "gspo-mega eval" not in command.out

    # The learning rate moves nothing that a float can show: what comes out is what went in, by both roads.
    want, given = load_file(source / "model.safetensors"), load_file(quickstart_files / "model" / "model.safetensors")
    saved = run.checkpoint_dir(1)
    tool("megatron_to_hf", saved, tmp_path / "back", "--described-by", source)
    for folder in (run.huggingface_dir, tmp_path / "back"):
        got = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.allclose(got[name], tensor, rtol=0, atol=1e-9), name
            assert not torch.allclose(got[name], given[name], rtol=0, atol=1e-4), name
    assert "the same weights" in tool("verify_checkpoint", run.huggingface_dir, saved, "--described-by", source)
    assert "run         step 1" in tool("inspect_checkpoint", saved)
