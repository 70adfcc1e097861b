"""The GPU parts, each in a process of its own; and on any machine all of them but the GPU's own code, with tiny
shapes.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from parts import MOST_SECONDS, PARTS

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
@pytest.mark.parametrize("name", PARTS)
def test_part(name):
    part = PARTS[name]
    done = run(part.file.removesuffix(".py"), *part.arguments)
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
        (
            "training",
            ["--shapes", "tiny-moe", "--longest", "32", "--steps", "6", "--rate", "3e-4"],
            ["first", "last", "furthest"],
        ),
        (
            "throughput",
            ["--shapes", "tiny-moe", "--tokens", "32", "--packs", "2", "--times", "1"],
            ["old_seconds", "step_tflops"],
        ),
        ("resumed_recipes", ["--shapes", "tiny-moe", "--longest", "32"], ["first", "after_load", "write_seconds"]),
    ],
)
def test_the_same_on_a_cpu(tmp_path, part, arguments, numbers):
    done = run(part, "--device", "cpu", *arguments, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert result["failures"] == [] and {"bf16"} <= {row["precision"] for row in result["rows"]} <= {"fp32", "bf16"}
    origin, _, head, rule, *rows = file.with_suffix(".md").read_text().splitlines()
    assert f"tests/gpu/{part}.py --device cpu" in origin and f"torch {torch.__version__}" in origin
    assert origin.startswith("20") and "no GPU, commit " in origin
    assert head.count("|") == rule.count("|") and len([row for row in rows if row]) == len(result["rows"])
    for row in result["rows"]:
        assert all(row[number] >= 0 for number in numbers), row
    if part == "log_probs":
        of = {(row["shape"], row["precision"]): row for row in result["rows"]}
        assert of["tiny-dense", "fp32"]["token_max"] == 0 < of["tiny-dense", "bf16"]["token_max"]
        assert of["tiny-moe", "bf16"]["unchanged_log_s"] == 0  # the CPU's kernels repeat


ALL_PARTS = """
import contextlib, io, runpy, sys
sys.path.insert(0, "tests/gpu")
from parts import PARTS
for name, part in PARTS.items():
    # What a dry run hands over is parsed, too; on a CPU it would go on.
    for arguments in (part.arguments, (*part.arguments, *(part.dry or ()))):
        sys.argv, said = [f"tests/gpu/{part.file}", *arguments], io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            print(name, end.code, said.getvalue().splitlines()[-1])
"""


@on_cpu
def test_every_part_can_be_imported_takes_its_arguments_and_says_that_there_is_no_gpu():
    done = subprocess.run(
        [sys.executable, "-c", ALL_PARTS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} 77 skipped: no CUDA device" for name in PARTS for _ in "ab"]


def test_every_part_ends_within_ten_minutes_and_has_a_file():
    assert all(0 < part.seconds <= MOST_SECONDS < 600 and (HERE / part.file).is_file() for part in PARTS.values())
    # A part that starts processes of its own gives them no variables of a rank.
    assert {name for name, part in PARTS.items() if not part.is_rank} == {"rollout", "publish", "run_r3", "budget"}


def call_script(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"GSPO_PYTHON": sys.executable, "OUT": os.environ.get("OUT", "/tmp")}
    return subprocess.run([HERE / "run.sh", *arguments], env=environment, capture_output=True, text=True, timeout=120)


@on_cpu
def test_the_script_without_a_gpu_says_so_and_knows_its_parts():
    done = call_script()
    assert done.returncode == 77 and "no CUDA device" in done.stdout
    done = call_script("speed")
    assert done.returncode == 2 and "'speed' is no part" in done.stderr
    done = call_script("--list")
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()] == list(PARTS)
    done = call_script("--dry", "products")
    assert done.returncode == 0 and "skipped: nothing of it runs without a GPU" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["products", "0", "s", "skipped"]


def test_a_part_that_takes_too_long_is_ended_with_what_it_started(tmp_path, monkeypatch):
    import parts

    monkeypatch.setattr(parts, "HERE", tmp_path)
    (tmp_path / "slow.py").write_text(
        "import signal, subprocess, sys, time\n"
        "try:\n"
        f"    child = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        f"    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124)); open({str(tmp_path / 'ready')!r}, 'w')\n"
        "    time.sleep(60)\n"
        f"finally: open({str(tmp_path / 'ended')!r}, 'w')\n"
    )
    part = parts.Part("slow", "slow.py", 3)
    assert parts._run("slow", part, dict(os.environ), dry=False) == 124
    assert (tmp_path / "ended").exists() == (tmp_path / "ready").exists()
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    # A killed process takes a moment to end, and is a zombie until whoever inherited it looks.
    deadline = time.monotonic() + 30
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "what the part started is still alive"
        time.sleep(0.05)


def test_the_bounds_can_be_missed():
    from log_probs import judge

    good = dict(shape="tiny-dense", precision="fp8-blockwise", token_mean=0.1, unchanged_log_s=6e-5)
    assert judge(good, moe=False) == []
    assert "on average; at most 0.25" in judge(good | dict(token_mean=0.3), moe=False)[0]
    assert judge(good | dict(token_mean=0.3), moe=True) == []
    assert "unchanged policy is 8e-05; at most 7e-05" in judge(good | dict(unchanged_log_s=8e-5), moe=False)[0]
    assert judge(good | dict(token_mean=float("nan")), moe=False) and judge(
        good | dict(unchanged_log_s=float("nan")), moe=False
    )
