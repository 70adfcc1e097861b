"""Transformer Engine's released Python in a process without a GPU.

A process asks for it with the variable of `config/precision.py`, which a rank sets from its configuration. This file
finds the wheel, and puts stand-ins in place of the parts that cannot be imported here: the compiled extension
(`te_extension.py`) and the ONNX export. Nothing is written into the wheel's folder. The kernels are in the other
`te_*.py`.

The wheel has its own folder, because Megatron-Core cannot be imported if a Transformer Engine without its library is on
the path. Only a process that calls `load_transformer_engine` has that folder on its path.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from gspo_mega.base.errors import ModelError
from gspo_mega.config.precision import TRANSFORMER_ENGINE_VARIABLE as VARIABLE
from gspo_mega.config.precision import block_scale_variable, wheel_folder

_SETS_UP = "launch/setup.sh"
# Each puts its functions into the extension when it is imported, which has to be before Transformer Engine copies them.
_KERNELS: tuple[str, ...] = (
    "te_fp8",
    "te_layers",
    "te_rows",
    "te_optimizer",
)
_ONNX_NAMES = (
    "torch_onnx_gemm_inf_op",
    "onnx_quantize_fp8_op",
    "onnx_dequantize_fp8_op",
    "onnx_quantize_mxfp8_op",
    "onnx_dequantize_mxfp8_op",
    "onnx_layernorm",
    "onnx_attention_mask_func",
    "onnx_gemm",
)
_loaded = False


def is_requested(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is to compute with Transformer Engine's layers."""
    return (os.environ if environment is None else environment).get(VARIABLE) == "1"


def is_loaded() -> bool:
    """Return whether this process has Transformer Engine's Python over the kernels of this package."""
    return _loaded


def load_transformer_engine(folder: Path | None = None) -> None:
    """Make Transformer Engine importable in this process. Idempotent. Call it before the first import of Megatron-Core,
    which looks for Transformer Engine once and remembers the answer.

    Raises ModelError without the wheel, RuntimeError if Megatron-Core is imported already.
    """
    global _loaded
    if _loaded:
        return
    folder = folder or wheel_folder()
    if not (folder / "transformer_engine" / "pytorch").is_dir():
        raise ModelError(
            f"precision: Transformer Engine's layers on a CPU need its Python in {folder}, and it is not there;"
            f" {_SETS_UP} installs it (see launch/env/cpu-te.txt)"
        )
    if "megatron.core" in sys.modules:
        raise RuntimeError(f"Megatron-Core was imported before Transformer Engine; set {VARIABLE}=1 before the start")
    os.environ.update(block_scale_variable(None, os.environ, None))  # a rank has set it from its configuration
    importlib.import_module("gspo_mega.cpu.te_extension").provide()
    for kernels in _KERNELS:
        importlib.import_module(f"gspo_mega.cpu.{kernels}")
    _stand_in_for_onnx()
    sys.path.append(str(folder))
    _import_without_library(folder)
    importlib.import_module("gspo_mega.cpu.te_device").pretend()
    importlib.import_module("gspo_mega.cpu.te_rows").replace_kernels()
    _loaded = True


def compute_as_gpu_of(recipe: str | None) -> None:
    """Choose the GPU whose code path Transformer Engine takes from now on: the first that has this FP8 recipe."""
    importlib.import_module("gspo_mega.cpu.te_device").compute_as_gpu_of(recipe)


def compute_sharply(on: bool) -> None:
    """Choose, from now on, how this process computes: as a sharp certificate of FP8 does, or as a run does (False).

    A sharp certificate compares layouts, so nothing but FP8's rounding may tell them apart. Products, attention and
    gated delta nets are computed in fp64 and rounded once, because a processor's fp32 kernels add in an order that
    depends on the number of rows, and some give another sigmoid where a row is shorter. Scales of a whole tensor are on
    a grid, so that an amax that is off by a rounding gives the same scale: powers of two for recipe `tensorwise`,
    `GRID_STEPS_PER_OCTAVE` steps per octave for `delayed`.
    """
    dtype = torch.float64 if on else torch.float32
    importlib.import_module("gspo_mega.cpu.te_layers").sum_in(dtype)
    importlib.import_module("gspo_mega.cpu.delta_rule").compute_in(dtype)
    importlib.import_module("gspo_mega.cpu.te_fp8").put_delayed_scales_on_grid(on)
    # Transformer Engine has a variable for this, which it reads once; these are the attributes that it fills then.
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling
    for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, role, dataclasses.replace(getattr(recipe, role), power_2_scale=on))


def _import_without_library(folder: Path) -> None:
    """Import the package in the order in which its loader of shared libraries can be replaced before it is called."""
    before = os.environ.get("NVTE_PROJECT_BUILDING")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the one switch with which `common` loads no library
    try:
        bare = types.ModuleType("transformer_engine")
        bare.__path__ = [str(folder / "transformer_engine")]
        sys.modules["transformer_engine"] = bare
        common: Any = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None  # `provide` has done it
        del sys.modules["transformer_engine"]
        package: Any = importlib.import_module("transformer_engine")
        package.common = common  # Python binds a submodule to its package at its first import: above, to `bare`
        # The package swallows an ImportError of its submodule for torch.
        importlib.import_module("transformer_engine.pytorch")
    finally:
        if before is None:
            del os.environ["NVTE_PROJECT_BUILDING"]
        else:
            os.environ["NVTE_PROJECT_BUILDING"] = before


def _stand_in_for_onnx() -> None:
    """Replace the export to ONNX, which needs packages that nothing here uses, and 15 s to import."""
    name = "transformer_engine.pytorch.onnx_extensions"

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("Transformer Engine's export to ONNX is left out on a machine without a GPU")

    module = types.ModuleType(name)
    vars(module).update(dict.fromkeys(_ONNX_NAMES, refuse), te_translation_table={})
    sys.modules[name] = module
