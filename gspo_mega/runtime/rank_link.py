"""How rank 0 leads the other ranks through a step: it hands out work, decisions and requests, and they follow.

Owns the messages and their meaning. How a message travels is `exchange.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo_mega.batches.assemble import MiniBatch, for_ranks
from gspo_mega.plan.layout import Layout
from gspo_mega.runtime.exchange import Exchange


@dataclass(frozen=True)
class Message:
    """`content`: of `work`, the wire form of a `Work`; of `value`, the value that all ranks agree on; of `request`, the
    name of a collective act that rank 0 begins.
    """

    kind: Literal["work", "value", "request"]
    content: Any


@dataclass
class Work:
    """What rank 0 hands out for one step: this rank's mini-batches, or the reason to stop.

    `num_positions`: positions computed on all data-parallel ranks together, padding and filler included; rank 0 only.
    """

    mini_batches: list[MiniBatch] = field(default_factory=list)
    stop: str | None = None
    num_positions: int = 0

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> Work:
        return cls([MiniBatch.from_wire(m) for m in value["mini_batches"]], value["stop"])


class RankLink:
    """One on every rank. `leads`: whether this is rank 0.

    Other ranks carry out requests of rank 0 while they wait for a value or for work (`on_request`).
    """

    def __init__(self, exchange: Exchange, layout: Layout, leads: bool) -> None:
        self._exchange, self._layout, self._leads = exchange, layout, leads
        self._acts: dict[str, Callable[[], None]] = {}

    def on_request(self, name: str, act: Callable[[], None]) -> None:
        """What the other ranks do when rank 0 calls `request(name)`."""
        self._acts[name] = act

    def request(self, name: str) -> None:
        """Rank 0: have the other ranks, which wait for it, begin their part of a collective act."""
        self._exchange.send_all(vars(Message("request", name)))

    def agree(self, value: Any) -> Any:
        """Rank 0's `value` (JSON types) on every rank. Collective."""
        if self._leads:
            self._exchange.send_all(vars(Message("value", value)))
            return value
        return self._follow("value")

    def hand_out(self, shards: list[list[MiniBatch]]) -> Work:
        """Rank 0: send its shard to every rank and return its own. `shards`: one per data-parallel rank."""
        works = [{"mini_batches": shard, "stop": None} for shard in for_ranks(shards, self._layout)]
        self._exchange.send_each([vars(Message("work", work)) for work in works])
        own = Work.from_wire(works[0])
        own.num_positions = sum(m.num_tokens for shard in shards for mini in shard for m in mini.micro_batches)
        return own

    def hand_out_stop(self, reason: str) -> Work:
        """Rank 0: tell every rank to stop."""
        work = {"mini_batches": [], "stop": reason}
        self._exchange.send_all(vars(Message("work", work)))
        return Work.from_wire(work)

    def receive_work(self) -> Work:
        """Other ranks: follow rank 0 until it hands out work."""
        return Work.from_wire(self._follow("work"))

    def _follow(self, until: str) -> Any:
        """Other ranks: carry out what rank 0 requests until it sends a message of the kind `until`; its content."""
        while True:
            message = Message(**self._exchange.receive())
            if message.kind == until:
                return message.content
            assert message.kind == "request", f"rank 0 sent {message.kind!r} where {until!r} was due"
            self._acts[message.content]()
