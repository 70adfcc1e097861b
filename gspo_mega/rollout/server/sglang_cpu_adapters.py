"""SGLang's adapters (LoRA) on a CPU: its backend `torch_native` computes them with plain PyTorch, and only its host
buffers need a GPU, because they are page-locked.

Owns that they are plain ones here. `cpu_server.py` calls it where SGLang's modules are imported.
"""

from __future__ import annotations

import types
from typing import Any, cast


class _PlainHostMemory:
    """Stands in for `torch` in a module of SGLang: no tensor that it makes is page-locked."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, *values: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.tensor(*values, **options)

    def zeros(self, *sizes: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.zeros(*sizes, **options)


def use_plain_host_memory(module: types.ModuleType) -> None:
    """Have this module of SGLang make plain tensors, and keep plain those that it would page-lock."""
    import torch

    vars(module)["torch"] = _PlainHostMemory(torch)
    cast("Any", torch.Tensor).pin_memory = _as_it_is


def _as_it_is(tensor: Any, *_device: Any) -> Any:
    """The tensor: without an accelerator there is nothing that reads page-locked memory faster."""
    return tensor
