"""Answer what Transformer Engine's Python asks about a GPU, inside its own modules only.

Its modules see a `torch` whose `cuda` describes the GPU whose numbers they must compute. For all other code in the
process there is no GPU. Random states are those of the CPU. Kernels are in the other `te_*.py`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

import torch

from gspo_mega.cpu.te_quantized import dequantized

_PACKAGE = "transformer_engine"
# Hopper has every recipe but mxfp8, and block scales in fp32 or powers of two; mxfp8 came with Blackwell.
_HOPPER, _BLACKWELL = (9, 0), (10, 0)
_capability = _HOPPER


class _Seen(types.ModuleType):
    """A module as Transformer Engine sees it: `replaced` where it is there, else the real one's attributes."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        vars(self).update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)


def _properties(device: object = None) -> types.SimpleNamespace:
    # The number of multiprocessors only divides work; it changes no result here.
    return types.SimpleNamespace(major=_capability[0], minor=_capability[1], multi_processor_count=1)


_CUDA = _Seen(
    torch.cuda,
    dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_capability=lambda device=None: _capability,
        get_device_properties=_properties,
        is_current_stream_capturing=lambda: False,
    ),
)


@contextlib.contextmanager
def _one_after_the_other(*arguments: object, **settings: object) -> Iterator[types.SimpleNamespace]:
    """Stand in for NCCL's way to send several tensors as one, which gloo lacks: run each collective immediately."""
    yield types.SimpleNamespace(wait=lambda: None)


_DISTRIBUTED = _Seen(cast(types.ModuleType, torch.distributed), dict(_coalescing_manager=_one_after_the_other))
_VERSION = _Seen(cast(types.ModuleType, torch.version), dict(cuda="13.0"))  # the first with every recipe is 12.9
_TORCH = _Seen(torch, dict(cuda=_CUDA, distributed=_DISTRIBUTED, version=_VERSION))


def pretend() -> None:
    """Show Transformer Engine's modules a GPU. Call it once, after they are imported."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = _TORCH
    _see_tensors_on_a_gpu()
    distributed: Any = sys.modules[f"{_PACKAGE}.pytorch.distributed"]
    distributed._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=True: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, device=-1, graph_safe=True: torch.set_rng_state(state)
    # Transformer Engine moves an MXFP8 tensor that lies elsewhere to a GPU before it reads it.
    mx: Any = sys.modules[f"{_PACKAGE}.pytorch.tensor.storage.mxfp8_tensor_storage"]
    mx._FromMXFP8Func.forward = staticmethod(lambda context, tensor, dtype: _read_mx(tensor).to(dtype))


def _read_mx(tensor: Any) -> torch.Tensor:
    return dequantized(tensor, columnwise=tensor._rowwise_data is None)


def compute_as_gpu_of(recipe: str | None) -> None:
    """Choose the GPU whose code path Transformer Engine takes from now on: the first with this FP8 recipe."""
    global _capability
    wanted = _BLACKWELL if recipe == "mxfp8" else _HOPPER
    if wanted == _capability:
        return
    _capability = wanted
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for member in list(vars(module).values()):
                if isinstance(member, functools._lru_cache_wrapper):
                    member.cache_clear()


def _see_tensors_on_a_gpu() -> None:
    """Make `tensor.is_cuda` true in Transformer Engine's modules, which refuse other tensors, and nowhere else."""
    plain: Any = torch.Tensor.is_cuda  # the class attribute: the descriptor that reads it

    def is_cuda(tensor: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.partition(".")[0] == _PACKAGE or plain.__get__(tensor)

    tensor_class: Any = torch.Tensor
    tensor_class.is_cuda = property(is_cuda)
