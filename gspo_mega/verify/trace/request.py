"""What the command asks of the process that traces one rank, and a model's shape with fewer layers to ask with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ModelError


@dataclass(frozen=True)
class TraceRequest:
    """One rank of one configuration.

    `model`: a folder or config.json in place of `model.path`, or None. `packs`: micro-batches of the mini-batch.
    `imbalance`: tokens that this rank's experts receive, as a multiple of the mean. `megatron`,
    `transformer_engine`: the folders of their wheels. `out`: the file for the result, JSON.
    """

    config: str
    overrides: list[str]
    model: str | None
    rank: int
    packs: int
    imbalance: float
    megatron: str
    transformer_engine: str
    out: str


def with_layers(model: Path, num_layers: int, folder: Path) -> Path:
    """Write a config.json with `num_layers` layers into `folder` and return it. Lists with an entry for each layer keep
    their first ones, or begin again.

    `model`: a Hugging Face folder or a config.json. Raises ModelError if it cannot be read.
    """
    source = model / "config.json" if model.is_dir() else model
    try:
        raw: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
        shape = raw.get("text_config", raw)  # of a vision-language model
        whole = shape["num_hidden_layers"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{source}: not a model's shape: {type(error).__name__}: {error}") from None
    for key, value in shape.items():
        if isinstance(value, list) and len(value) == whole:
            shape[key] = (value * -(-num_layers // whole))[:num_layers]
    for key in ("first_k_dense_replace", "max_window_layers"):
        if isinstance(shape.get(key), int):
            shape[key] = min(shape[key], max(0, num_layers - 1))
    shape["num_hidden_layers"] = num_layers
    written = folder / "config.json"
    written.write_text(json.dumps(raw), encoding="utf-8")
    return written
