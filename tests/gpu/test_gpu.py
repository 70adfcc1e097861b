"""The GPU parts, each in a process of its own; and on any machine all of them but the GPU's own code, with tiny
shapes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the engine takes it")


def run(part: str, *arguments: str, out: Path | None = None) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"OUT": str(out)} if out else {}
    return subprocess.run(
        [sys.executable, HERE / f"{part}.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("part", ["products", "log_probs", "training", "throughput", "rollout"])
def test_part(part):
    done = run(part)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


@on_cpu
@pytest.mark.parametrize(
    ("part", "arguments", "numbers"),
    [
        (
            "log_probs",
            ["--shapes", "tiny-dense,tiny-moe", "--longest", "48"],
            ["token_mean", "sequence_max", "unchanged_log_s"],
        ),
        ("training", ["--shapes", "tiny-moe", "--longest", "32", "--steps", "6"], ["first", "last", "furthest"]),
        (
            "throughput",
            ["--shapes", "tiny-moe", "--tokens", "32", "--packs", "2", "--times", "1"],
            ["old_seconds", "step_tflops"],
        ),
    ],
)
def test_the_same_on_a_cpu(tmp_path, part, arguments, numbers):
    done = run(part, "--device", "cpu", *arguments, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / f"{part}.json").read_text())
    assert result["failures"] == [] and {"bf16"} <= {row["precision"] for row in result["rows"]} <= {"fp32", "bf16"}
    for row in result["rows"]:
        assert all(row[number] >= 0 for number in numbers), row
    if part == "log_probs":
        of = {(row["shape"], row["precision"]): row for row in result["rows"]}
        assert of["tiny-dense", "fp32"]["token_max"] == 0 < of["tiny-dense", "bf16"]["token_max"]
        assert of["tiny-moe", "bf16"]["unchanged_log_s"] == 0  # the CPU's kernels repeat


@on_cpu
@pytest.mark.parametrize("part", ["products", "log_probs", "training", "throughput", "rollout"])
def test_without_a_gpu_a_part_says_so(part):
    done = run(part)
    assert done.returncode == 77 and done.stdout.splitlines()[-1] == "skipped: no CUDA device", done.stderr


@on_cpu
def test_the_script_without_a_gpu_says_so_and_knows_its_parts():
    script = HERE / "run.sh"
    environment = os.environ | {"GSPO_PYTHON": sys.executable}
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 77 and "no CUDA device" in done.stdout
    done = subprocess.run([script, "speed"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "'speed' is no part" in done.stderr


def test_the_bounds_can_be_missed():
    sys.path.insert(0, str(HERE))
    from log_probs import judge

    good = dict(shape="tiny-dense", precision="fp8-blockwise", token_mean=0.1, unchanged_log_s=6e-5)
    assert judge(good, moe=False) == []
    assert "on average; at most 0.25" in judge(good | dict(token_mean=0.3), moe=False)[0]
    assert judge(good | dict(token_mean=0.3), moe=True) == []
    assert "unchanged policy is 8e-05; at most 7e-05" in judge(good | dict(unchanged_log_s=8e-5), moe=False)[0]
    assert judge(good | dict(token_mean=float("nan")), moe=False) and judge(
        good | dict(unchanged_log_s=float("nan")), moe=False
    )
