"""What the command asks of the process that traces one rank."""

from __future__ import annotations

from dataclasses import dataclass


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
