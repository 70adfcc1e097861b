"""torch.compile keeps compiling a function whose arguments vary, and says so when it gives up.

Each test has a process of its own: elsewhere on a CPU, torch.compile is switched off.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

VARIANTS = """
import sys

import torch

import gspo_mega.engine
from gspo_mega.engine.precision import fusion_settings
from run_configs import make_config

# As a rank's model is built; without the key, nothing is fused on a CPU.
fusion_settings(make_config(engine=dict(fuse_activation=True) if sys.argv[1] == "ours" else {}), has_experts=True)
if len(sys.argv) > 2:
    torch._dynamo.config.recompile_limit = int(sys.argv[2])

inside = []

@torch.compile(backend="eager")
def activation(x):
    inside.append(torch.compiler.is_compiling())
    return torch.nn.functional.silu(x) * 2

for width in range(2, 14):
    for gradient in (False, True):
        activation(torch.ones(3, width, dtype=torch.bfloat16, requires_grad=gradient) if width % 2 else
                   torch.ones(3, 3, width, requires_grad=gradient))
        activation(torch.ones([1] * width, requires_grad=gradient))
# A compiled function's Python runs while it is traced, and never again: what is False ran uncompiled.
print("uncompiled calls:", inside.count(False))
"""


CASES = {"ours": ["ours"], "torch's default": ["torch"], "ours, at most 8": ["ours", "8"]}


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of each case; they run side by side."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}", "TORCHDYNAMO_DISABLE": "0"}
    command = [sys.executable, "-W", "ignore", "-c", VARIANTS]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = {name: subprocess.Popen([*command, *words], env=environment, **pipes) for name, words in CASES.items()}
    outputs = {name: process.communicate(timeout=300) for name, process in running.items()}
    return {name: (running[name].returncode, *output) for name, output in outputs.items()}


def test_a_function_of_many_kinds_of_arguments_stays_compiled(ended):
    code, output, errors = ended["ours"]
    assert code == 0 and output.splitlines()[-1] == "uncompiled calls: 0", output + errors


def test_torch_alone_would_run_it_uncompiled_without_an_error(ended):
    code, output, errors = ended["torch's default"]
    assert code == 0, errors
    assert int(output.split()[-1]) > 0


def test_more_kinds_than_the_limit_are_an_error(ended):
    code, _, errors = ended["ours, at most 8"]
    assert code != 0 and "FailOnRecompileLimitHit" in errors
