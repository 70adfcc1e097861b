"""The variables of a rank on a GPU: which, where they are valid, that they are there before torch, and that
tests/gpu/run.sh has the same.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_configs import make_config

from gspo_mega.config.precision import FLOAT32_SCALES_VARIABLE, block_scale_variable, has_powers_of_two
from gspo_mega.launcher.local import WORKER_COMMAND
from gspo_mega.models.block_fp8 import publishes_powers_of_two
from gspo_mega.plan.gpus import GPUS
from gspo_mega.plan.state import PINNED_BLOCK_BYTES
from gspo_mega.train import gpu_variables, worker
from gspo_mega.train.gpu_variables import before_torch

REPOSITORY = Path(__file__).parents[3]
PINNED = "pinned_max_round_threshold_mb:32,pinned_max_cached_size_mb:32"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{PINNED}"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
FP32_SCALES = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
TWO = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, EXPANDABLE | ONE_QUEUE),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ONE_QUEUE),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ONE_QUEUE),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, EXPANDABLE),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": ""}, EXPANDABLE | ONE_QUEUE),
    ],
)
def test_what_torch_reads_is_added_and_a_choice_stands(given, added):
    assert before_torch(given, "2.14.1+cu130") == added


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.9"])
def test_an_older_torch_gets_no_key_that_it_would_refuse(version):
    assert before_torch({}, version) == ONE_QUEUE | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_this_torch_reads_the_key():
    torch._C._accelerator_setAllocatorSettings(before_torch({}, torch.__version__)["PYTORCH_CUDA_ALLOC_CONF"])
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:many")
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings("pinned_max_cached_size_mb:many")


def test_no_page_locked_block_that_is_not_a_power_of_two_is_ever_used_again():
    """torch 2.13 hands a freed block to the next request of its power of two, even a smaller block to a larger request
    (pytorch/pytorch#192722). So what is not rounded may not be kept, and what is kept has to end at a power of two.
    """
    keys = dict(part.split(":") for part in before_torch({}, "2.13.0")["PYTORCH_CUDA_ALLOC_CONF"].split(","))
    rounded, kept = int(keys["pinned_max_round_threshold_mb"]), int(keys["pinned_max_cached_size_mb"])
    assert rounded == kept == PINNED_BLOCK_BYTES / 2**20 and kept.bit_count() == 1


@pytest.mark.parametrize(
    ("block_scales", "capability", "given", "added"),
    [
        ("auto", (9, 0), {}, FP32_SCALES),
        ("auto", (8, 9), {}, FP32_SCALES),
        ("auto", None, {}, FP32_SCALES),
        ("auto", (9, 0), TWO, FP32_SCALES),
        ("auto", (10, 0), {}, {}),
        ("auto", (10, 0), FP32_SCALES, TWO),
        ("auto", (12, 0), {}, {}),
        ("power_of_two", (9, 0), {}, {}),
        ("power_of_two", (9, 0), FP32_SCALES, TWO),
        ("power_of_two", None, {}, {}),
        ("float32", (9, 0), TWO, FP32_SCALES),
        ("float32", None, {}, FP32_SCALES),
    ],
)
def test_block_scales_are_as_configured_and_by_default_fp32_before_blackwell(block_scales, capability, given, added):
    config = make_config(fp8=dict(block_scales=block_scales))
    assert block_scale_variable(config.fp8, given, capability) == added
    told = (given | added).get(FLOAT32_SCALES_VARIABLE, "0")
    assert has_powers_of_two(block_scales, capability) == (told == "0")
    for name, gpu in GPUS.items():
        if gpu.capability == capability:
            named = make_config(fp8=dict(block_scales=block_scales), cluster=dict(gpu=name))
            assert publishes_powers_of_two(named.fp8, named.cluster) == (told == "0"), (
                "products and published weights agree"
            )


def test_a_program_without_a_configuration_keeps_what_is_set():
    assert block_scale_variable(None, TWO, (9, 0)) == block_scale_variable(None, FP32_SCALES, (10, 0)) == {}
    assert block_scale_variable(None, {}, (9, 0)) == FP32_SCALES and block_scale_variable(None, {}, (10, 0)) == {}


# A torch that looks at what is there when it is imported, as the real one's allocator and CUDA do.
TORCH = """
import os
FOUND = {name: os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")}
class cuda:
    chosen = None
    is_available = staticmethod(lambda: True)
    @staticmethod
    def set_device(index): cuda.chosen = index
    @staticmethod
    def get_device_capability(index=None):
        ours = (cuda.chosen, index) in ((3, None), (None, 3))
        assert ours, "a rank looks at its own GPU, and opens no other; a standby opens none"
        return (CAPABILITY, 0)
"""
PROGRAM = """
import os, sys
from pathlib import Path
from gspo_mega.train.gpu_variables import set_variables
opens_device = sys.argv[2] == "rank"
set_variables(os.environ, 3, devices=Path(sys.argv[1]), opens_device=opens_device)
import json, torch
assert (torch.cuda.chosen is not None) == opens_device
print(json.dumps([torch.FOUND, os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")]))
"""


def without_ours(**more: str) -> dict[str, str]:
    ours = {*EXPANDABLE, *ONE_QUEUE, *FP32_SCALES, "PYTORCH_ALLOC_CONF"}
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **more}


@pytest.mark.parametrize(
    ("capability", "scales", "process"), [(9, '"1"', "rank"), (10, "null", "rank"), (9, '"1"', "standby")]
)
def test_they_are_there_when_torch_is_imported(tmp_path, capability, scales, process):
    (tmp_path / "torch.py").write_text(TORCH.replace("CAPABILITY", str(capability)))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    environment = without_ours(PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}")
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "dev"), process],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert said.returncode == 0, said.stderr
    assert (
        said.stdout.strip()
        == f'[{{"PYTORCH_CUDA_ALLOC_CONF": "{EXPANDABLE["PYTORCH_CUDA_ALLOC_CONF"]}", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, {scales}]'
    )


def test_without_a_gpu_block_scales_alone_are_set(tmp_path):
    environment: dict[str, str] = {}
    gpu_variables.set_variables(environment, 0, devices=tmp_path)
    assert environment == FP32_SCALES
    gpu_variables.set_variables(environment, 0, make_config(fp8=dict(block_scales="power_of_two")).fp8, tmp_path)
    assert environment == TWO


def test_every_rank_sets_them_first(monkeypatch):
    """One machine, Slurm and torchrun start the same program."""
    seen = []

    class Enough(Exception):
        pass

    def note(environment, local_rank, fp8, opens_device):
        seen.append((environment is os.environ, local_rank, fp8.block_scales, opens_device))
        raise Enough

    monkeypatch.setattr(worker, "set_variables", note)
    with pytest.raises(Enough):
        config = make_config()
        place = worker.RankEnvironment(rank=9, world_size=16, local_rank=1)
        worker._prepare_torch(place, config.precision, config.engine, config.fp8)
    assert seen == [(True, 1, "auto", True)]
    assert (sys.executable, "-m", "gspo_mega.train.worker") == WORKER_COMMAND
    code = "import sys, gspo_mega.train.worker; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0, (
        "importing the program imports no torch yet"
    )


PYTHON = """#!/bin/bash
case "$1 $2" in
  tests/gpu/parts.py*) exec -a "$0" "$REAL" "$@" ;;  # which then starts this program for everything else
  "-c import torch"*) exit 0 ;;
  "-m gspo_mega.train.gpu_variables") echo "export A_VARIABLE='of a rank'" ;;
  *) echo "${1##*/}: ${A_VARIABLE:-none}" >> "$CALLS" ;;
esac
"""


def test_the_gpu_tests_give_their_programs_what_a_rank_has_and_a_server_none_of_it(tmp_path):
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    places = {"CALLS": str(tmp_path / "calls"), "OUT": str(tmp_path / "rows"), "REAL": sys.executable}
    environment = without_ours(GSPO_PYTHON=str(python), **places)
    ended = subprocess.run(
        [str(REPOSITORY / "tests/gpu/run.sh"), "products", "training", "rollout"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "calls").read_text().splitlines() == [
        "products.py: of a rank",
        "training.py: of a rank",
        "rollout.py: none",
    ]
    for file in ("run.sh", "parts.py"):
        text = (REPOSITORY / "tests/gpu" / file).read_text()
        assert not any(name in text for name in (*EXPANDABLE, *ONE_QUEUE, *FP32_SCALES)), "they have one home"
