"""What rank 0 hands out for one step: every data-parallel rank's shard, and every pipeline stage's routes.

Owns which ranks get which message. Messages are made one by one while they are sent, or all of them before, for a step
that is not due yet (`make`). Sending is `rank_link.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gspo_mega.data.expert_routes import ExpertRoutes
from gspo_mega.plan.layout import Layout
from gspo_mega.train.assemble import MiniBatch
from gspo_mega.train.message_codec import Encoded, encode


@dataclass(frozen=True)
class Message:
    """`content`: of `work`, its `mini_batches`, `stop`, and whether `routes` follow; of `value`, the value that all
    ranks agree on; of `request`, the name of a collective act that rank 0 begins.
    """

    kind: Literal["work", "value", "request"]
    content: Any


class Parcels:
    """The hand-out of one step; it is sent once. `shards`: one per data-parallel rank. `routes`: of the batch's rows;
    each pipeline stage is sent those of its own layers.

    Attributes:
        own: rank 0's shard; its routes are there once all messages were made.
        num_positions: positions computed on all data-parallel ranks together, padding and filler included.
    """

    def __init__(self, shards: list[list[MiniBatch]], routes: ExpertRoutes | None, layout: Layout) -> None:
        self.own = shards[0]
        self.num_positions = sum(m.num_tokens for shard in shards for mini in shard for m in mini.micro_batches)
        self._has_routes = routes is not None
        self._shards, self._routes, self._layout = shards, routes, layout
        self._made: tuple[list[Any], list[tuple[list[int], Any]]] | None = None

    def shards(self) -> Iterator[Any]:
        """The message of every replica, in their order: all of them come before the first of `routes`."""
        if self._made is not None:
            yield from self._made[0]
            return
        for shard in self._shards:
            content = {"mini_batches": [m.to_wire() for m in shard], "stop": None, "routes": self._has_routes}
            yield vars(Message("work", content))

    def routes(self) -> Iterator[tuple[list[int], Any]]:
        """(ranks, their routes) of every stage of every data-parallel rank; rank 0 takes its own."""
        if self._made is not None:
            yield from self._made[1]
            return
        if self._routes is None:
            return
        for data, shard in enumerate(self._shards):
            for stage in range(self._layout.pipeline):
                ranks = self._layout.ranks_of(data, stage)
                layers = self._routes.layers(self._layout.chunk_layers(stage))
                packs = [self._routes.packed(m, layers) for mini in shard for m in mini.micro_batches]
                part = {"layers": np.array(layers, np.int64), "packs": packs}
                if 0 in ranks:
                    take_routes(shard, part)
                yield ranks, part

    def make(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Make all messages now, in the memory that they take. Returns False where `is_wanted`, which is asked before
        each, says no; nothing is changed then but rank 0's routes.
        """
        shards, routes = [], []
        for data, value in enumerate(self.shards()):
            if not is_wanted():
                return False
            shards.append(_encoded(self._layout.ranks_of(data), value))
        for ranks, part in self.routes():
            if not is_wanted():
                return False
            routes.append((ranks, _encoded(ranks, part)))
        self._made = shards, routes
        self._shards, self._routes = [], None
        return True


def _encoded(ranks: Sequence[int], value: Any) -> Any:
    """As it is where rank 0 is alone, which keeps what it has."""
    return value if ranks == [0] else Encoded(encode(value))


def take_routes(mini_batches: list[MiniBatch], part: dict[str, Any]) -> None:
    """Put a stage's routes into its packs."""
    micro_batches = [m for mini in mini_batches for m in mini.micro_batches]
    for micro_batch, packed in zip(micro_batches, part["packs"], strict=True):
        micro_batch.routed_experts, micro_batch.routed_layers = packed, part["layers"]
