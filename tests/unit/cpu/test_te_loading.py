"""Transformer Engine's Python in a process without a GPU: who sees it, what is missing, what stands in.

What needs a process of its own is asked of one program, because Megatron looks for Transformer Engine once.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_configs import make_config

from gspo_mega.base.errors import ModelError
from gspo_mega.config.precision import has_transformer_engine_layers
from gspo_mega.cpu import te_extension, te_loading

REPOSITORY = Path(__file__).parents[3]
PROGRAM = """
import json, sys
import gspo_mega.engine
import torch, transformer_engine
import megatron.core.extensions.transformer_engine as megatron
import transformer_engine_torch as extension
from transformer_engine.pytorch import onnx_extensions
from gspo_mega.cpu.backend import is_cpu_backend
from gspo_mega.engine.precision import describe_backends, require_precision
from run_configs import make_config
seen = {}
try:
    extension.newton_schulz(1)
except NotImplementedError as error:
    seen["unwritten"] = str(error)
try:
    onnx_extensions.onnx_gemm(1)
except NotImplementedError as error:
    seen["onnx"] = str(error)
require_precision(make_config(precision="bf16", engine=dict(transformer_engine=True)))
require_precision(make_config(precision="fp8"))
def refusal(**sections):
    try:
        require_precision(make_config(precision="fp8", **sections))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
seen["late"] = refusal(fp8=dict(block_scales="power_of_two"))
seen["published"] = refusal(server=dict(quantization="fp8_block"), cluster=dict(gpu="B200"))
print(json.dumps(seen | dict(
    have=megatron.HAVE_TE, version=transformer_engine.__version__, cpu=is_cpu_backend(),
    cuda=torch.cuda.is_available(), lines=describe_backends(),
    inside=[name for name in sys.modules if name == "onnxscript"],
)))
"""


@pytest.fixture(scope="module")
def loaded():
    environment = os.environ | {te_loading.VARIABLE: "1", "PYTHONPATH": str(REPOSITORY / "tests/support")}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_megatron_sees_it_and_nothing_pretends_a_gpu(loaded):
    assert loaded["have"] and loaded["version"] == "2.20.2" and loaded["cpu"] and not loaded["cuda"]
    assert "Transformer Engine 2.20.2 over CPU kernels: its numbers, not its speed" in loaded["lines"]


def test_what_is_not_written_says_its_name(loaded):
    assert loaded["unwritten"].startswith("transformer_engine_torch.newton_schulz has no CPU kernel")
    assert "left out" in loaded["onnx"] and loaded["inside"] == []


def test_block_scales_other_than_those_it_was_imported_with_are_refused(loaded):
    assert loaded["late"].startswith("ModelError: fp8.block_scales: power_of_two is powers of two on a CPU, but")
    assert "reads NVTE_FP8_BLOCK_SCALING_FP32_SCALES once" in loaded["late"]
    assert "follow cluster.gpu (B200)" in loaded["published"]


def test_the_manual_lists_what_is_written():
    entries = (te_extension.__doc__ or "").partition("These are written:")[2].split("\n- ")[1:]
    listed = {
        name: file
        for file, _, names in (entry.partition(".py:") for entry in entries)
        for name in re.findall(r"\w+", names)
    }
    manual = (REPOSITORY / "docs/transformer_engine.md").read_text()
    missing = manual.partition("## Which kernels are written")[2].partition("Everything else is an error")[2]
    for name in te_loading._KERNELS:
        importlib.import_module(f"gspo_mega.cpu.{name}")
    kernels = {name: value for name, value in vars(te_extension.extension).items() if inspect.isfunction(value)}
    assert listed == {name: kernel.__module__.rpartition(".")[2] for name, kernel in kernels.items()}
    assert len(kernels) > 40
    errors = set(re.findall(r"`([a-z]\w*)`", missing.partition("\n## ")[0]))
    assert "group_quantize" in errors and not errors & kernels.keys()


def test_a_process_that_does_not_ask_does_not_see_it():
    assert not te_loading.is_loaded() and te_extension.NAME not in sys.modules
    assert str(te_loading.wheel_folder()) not in sys.path
    assert not te_loading.is_requested({}) and not te_loading.is_requested({te_loading.VARIABLE: "0"})
    assert te_loading.is_requested({te_loading.VARIABLE: "1"})


def test_without_the_wheel_the_error_names_the_set_up(tmp_path):
    with pytest.raises(ModelError, match=r"launch/setup.sh installs it"):
        te_loading.load_transformer_engine(tmp_path)


def test_after_megatron_it_is_too_late():
    import megatron.core  # noqa: F401

    with pytest.raises(RuntimeError, match="imported before Transformer Engine"):
        te_loading.load_transformer_engine()


def test_two_kernels_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="has a kernel get_cudnn_version already"):
        te_extension.kernel(te_extension.get_cudnn_version)


@pytest.mark.parametrize(
    ("precision", "chosen", "on_cpu", "on_gpu"),
    [
        ("fp32", None, False, False),
        ("bf16", None, False, True),
        ("bf16", True, True, True),
        ("bf16", False, False, False),
        ("fp8", None, True, True),
    ],
)
def test_whose_layers(precision, chosen, on_cpu, on_gpu):
    config = make_config(precision=precision, engine=dict(transformer_engine=chosen))
    assert has_transformer_engine_layers(config.precision, config.engine, has_gpu=False) is on_cpu
    assert has_transformer_engine_layers(config.precision, config.engine, has_gpu=True) is on_gpu
