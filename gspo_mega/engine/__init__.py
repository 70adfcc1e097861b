"""The Megatron-Core policy and critic: process groups, model, log-probs, losses, optimizer step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from gspo_mega.cpu import backend as _backend


@contextmanager
def _without_wandb() -> Iterator[None]:
    """Let Megatron import as if wandb were not installed. Megatron imports it for its own inference engine, which is
    not used here, and this is a fifth of the time of all imports of a rank. The sink `wandb` imports it afterwards.
    """
    modules = cast("dict[str, Any]", sys.modules)
    if "wandb" in modules:
        yield
        return
    modules["wandb"] = None
    try:
        yield
    finally:
        del modules["wandb"]


with _without_wandb():
    _backend.install()
    import megatron.core  # noqa: F401
