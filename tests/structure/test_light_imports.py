"""Processes that start often, or that run where a library is missing, do not import it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("agents.episode_worker", ("numpy", "pydantic", "yaml", "torch")),
        ("rewards.scoring_worker", ("numpy", "pydantic", "yaml", "torch", "transformers")),
        ("cpu.sglang_hooks", ("numpy", "torch", "transformers")),
        ("cli.serve", ("torch", "megatron")),
        ("cli.plan", ("torch", "megatron")),
        ("cli.mismatch", ("torch", "megatron")),
        ("checkpoint.convert", ("megatron",)),
        ("checkpoint.hf_import", ("megatron",)),
        ("train.session", ("wandb",)),
        ("launcher.doctor", ("pydantic", "yaml", "numpy")),
    ],
)
def test_a_module_leaves_heavy_packages_alone(module, heavy):
    code = f"import sys, gspo_mega.{module}; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == [], done.stdout + done.stderr
