"""A model's shape with fewer layers, for a trace in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ModelError


def with_layers(model: Path, num_layers: int, folder: Path) -> Path:
    """Write a config.json with `num_layers` layers into `folder` and return it. Lists with an entry for each layer keep
    their first ones, or begin again.

    `model`: a Hugging Face folder or a config.json. Raises ModelError if it cannot be read.
    """
    source = model / "config.json" if model.is_dir() else model
    try:
        shape: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
        whole = shape["num_hidden_layers"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source}: not a model's shape: {type(error).__name__}: {error}") from None
    for key, value in shape.items():
        if isinstance(value, list) and len(value) == whole:
            shape[key] = (value * -(-num_layers // whole))[:num_layers]
    for key in ("first_k_dense_replace", "max_window_layers"):
        if isinstance(shape.get(key), int):
            shape[key] = min(shape[key], max(0, num_layers - 1))
    shape["num_hidden_layers"] = num_layers
    written = folder / "config.json"
    written.write_text(json.dumps(shape), encoding="utf-8")
    return written
