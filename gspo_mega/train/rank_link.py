"""How rank 0 leads the other ranks through a step: it hands out work, decisions and requests, and they follow.

Owns the messages and their meaning. How a message travels is `exchange.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gspo_mega.data.expert_routes import ExpertRoutes
from gspo_mega.plan.layout import Layout
from gspo_mega.train.assemble import MiniBatch
from gspo_mega.train.exchange import Exchange
from gspo_mega.train.parcels import Message, Parcels, take_routes


@dataclass
class Work:
    """What rank 0 hands out for one step: this rank's mini-batches, or the reason to stop.

    `num_positions`: positions computed on all data-parallel ranks together, padding and filler included; rank 0 only.
    """

    mini_batches: list[MiniBatch] = field(default_factory=list)
    stop: str | None = None
    num_positions: int = 0


class RankLink:
    """One on every rank, of which `rank` 0 leads.

    Other ranks carry out requests of rank 0 while they wait for a value or for work (`on_request`).
    """

    def __init__(self, exchange: Exchange, layout: Layout, rank: int) -> None:
        self._exchange, self._layout, self._rank = exchange, layout, rank
        self._acts: dict[str, Callable[[], None]] = {}

    def on_request(self, name: str, act: Callable[[], None]) -> None:
        """What the other ranks do when rank 0 calls `request(name)`."""
        self._acts[name] = act

    def request(self, name: str) -> None:
        """Rank 0: have the other ranks, which wait for it, begin their part of a collective act."""
        self._exchange.send_all(vars(Message("request", name)))

    def agree(self, value: Any) -> Any:
        """Rank 0's `value` (JSON types) on every rank. Collective."""
        if self._rank == 0:
            self._exchange.send_all(vars(Message("value", value)))
            return value
        return self._follow("value")

    def hand_out(self, shards: list[list[MiniBatch]], routes: ExpertRoutes | None = None) -> Work:
        """`send` of what is made meanwhile; arguments as for `Parcels`."""
        return self.send(Parcels(shards, routes, self._layout))

    def send(self, parcels: Parcels) -> Work:
        """Rank 0: send its shard to every rank and return its own. Each shard leaves rank 0 once, as do each stage's
        routes.
        """
        self._exchange.send_each(parcels.shards())
        self._exchange.send_more(parcels.routes())
        return Work(parcels.own, num_positions=parcels.num_positions)

    def hand_out_stop(self, reason: str) -> Work:
        """Rank 0: tell every rank to stop."""
        work = {"mini_batches": [], "stop": reason, "routes": False}
        self._exchange.send_all(vars(Message("work", work)))
        return Work(stop=reason)

    def receive_work(self) -> Work:
        """Other ranks: follow rank 0 until it hands out work."""
        content = self._follow("work")
        work = Work([MiniBatch.from_wire(m) for m in content["mini_batches"]], content["stop"])
        if content["routes"]:
            own = self._layout.coordinates(self._rank)
            take_routes(work.mini_batches, self._exchange.receive_more(self._layout.ranks_of(own.data, own.pipeline)))
        return work

    def _follow(self, until: str) -> Any:
        """Other ranks: carry out what rank 0 requests until it sends a message of the kind `until`; its content."""
        while True:
            message = Message(**self._exchange.receive())
            if message.kind == until:
                return message.content
            assert message.kind == "request", f"rank 0 sent {message.kind!r} where {until!r} was due"
            self._acts[message.content]()
