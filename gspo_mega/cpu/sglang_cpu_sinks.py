"""Sinks of gpt-oss in SGLang on a CPU: in the server's dtype, and with this package's attention.

Each function changes one module of SGLang after its import (`cpu_server.py`).
"""

from __future__ import annotations

import types


def keep_sinks_wide(module: types.ModuleType) -> None:
    """gpt-oss: keep sinks in the server's dtype. SGLang makes them bf16, as its kernels on a GPU want them."""
    attention = module.GptOssAttention
    stock = attention.__init__

    def init(self, *arguments, **named):
        import torch

        stock(self, *arguments, **named)
        self.sinks = torch.nn.Parameter(self.sinks.data.to(self.o_proj.weight.dtype), requires_grad=False)

    attention.__init__ = init


def allow_sinks(module: types.ModuleType, own: str) -> None:
    """Models with sinks ask for one of the backends that have them, by name. Ours has them: call it by another's."""
    stock = module.attention_backends_of

    def named(view):
        return tuple("intel_amx" if name == own else name for name in stock(view))

    vars(module)["attention_backends_of"] = named
