"""How rank 0 leads the other ranks through a step: it sends them work, decisions and requests, and they follow.

The file goes from bytes to meaning. `encode` and `decode` turn values into messages. `PendingMessage` and `receive`
send one message to many ranks. `Exchange` announces messages through the key-value store and sends them over the host
group; no further process groups are made. `Parcels` is what rank 0 sends for one step. `RankLink` is what the training
loop uses.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.base import progress
from gspo_mega.base.errors import RankError
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.engine.process_groups import RankGroup
from gspo_mega.plan.layout import Layout
from gspo_mega.train.batches import MiniBatch
from gspo_mega.train.context import KeyValueStore

# The key that stands for an array in the header, and the alignment of the arrays in bytes.
_ARRAY = "__array__"
_ALIGNED = 64
CHUNK_BYTES = 4 * 2**20
# Ranks ask whether a message is there after at most this share of the time that they have waited for it.
_LATE_SHARE = 0.05
_LEAST_POLL_SECONDS, POLL_SECONDS = 0.0005, 0.01
HEARTBEAT_SECONDS = 1.0


class Encoded(NamedTuple):
    """A value that is encoded already. `message`: [bytes] uint8."""

    message: np.ndarray


def encode(value: Any) -> np.ndarray:
    """The value as a message, [bytes] uint8. `value`: JSON types in which any value may be a numpy array, or `Encoded`.
    Raises TypeError for anything else.

    A message is the length of the header (uint64, little-endian), a JSON header, and the raw bytes of the arrays, each
    at a multiple of 64 bytes. Nothing is pickled, so nothing in a message can run code. Arrays are copied once here,
    and not at all in `decode`.
    """
    if isinstance(value, Encoded):
        return value.message
    arrays: list[tuple[int, np.ndarray]] = []
    size = 0

    def strip(item: Any) -> Any:
        nonlocal size
        if isinstance(item, np.ndarray):
            start, size = size, _aligned(size + item.nbytes)
            arrays.append((start, item))
            return {_ARRAY: start, "dtype": item.dtype.str, "shape": list(item.shape)}
        if isinstance(item, dict):
            return {str(key): strip(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return [strip(entry) for entry in item]
        if isinstance(item, np.generic):
            return item.item()
        return item

    header = json.dumps(strip(value)).encode()
    begin = _aligned(8 + len(header))
    message = np.zeros(begin + size, np.uint8)
    message[: 8 + len(header)] = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    for start, array in arrays:
        _array(message, begin + start, array.dtype, array.shape)[...] = array
    return message


def decode(message: np.ndarray) -> Any:
    """The value that was given to `encode`. Tuples come back as lists, and arrays are views of `message`."""
    size = int.from_bytes(message[:8].tobytes(), "little")
    begin = _aligned(8 + size)

    def restore(item: Any) -> Any:
        if isinstance(item, dict):
            if _ARRAY in item:
                return _array(message, begin + item[_ARRAY], np.dtype(item["dtype"]), item["shape"])
            return {key: restore(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [restore(entry) for entry in item]
        return item

    return restore(json.loads(message[8 : 8 + size].tobytes()))


def _array(message: np.ndarray, start: int, dtype: np.dtype, shape: Any) -> np.ndarray:
    """A view of `message` as an array from the byte `start` on."""
    return np.ndarray(shape, dtype, message, start)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class TreePlace:
    """A receiver's place in the tree: the rank that it receives from, and those that it sends to.

    Rank 0 sends a message once. Its receivers form a tree in which each rank sends to two others, and they pass a chunk
    on while the next one arrives. So what rank 0 sends does not depend on the number of receivers.
    """

    parent: int
    children: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, receivers: Sequence[int], source: int) -> TreePlace:
        """`receivers`: all receivers of a message, of which `rank` is one. `source` sends to the first of them."""
        index = receivers.index(rank)
        parent = receivers[(index - 1) // 2] if index else source
        return cls(parent, tuple(receivers[2 * index + 1 : 2 * index + 3]))


class PendingMessage:
    """A message that is being sent to one rank. Its bytes must not change before `wait` has returned."""

    def __init__(self, message: np.ndarray, rank: int, host: RankGroup) -> None:
        self._works = [_start(torch.tensor([len(message)], dtype=torch.int64), rank, host)]
        self._works += [_start(chunk, rank, host) for chunk in torch.from_numpy(message).split(CHUNK_BYTES)]

    def wait(self) -> None:
        """Wait until the message is sent, after which its bytes may change."""
        for work in self._works:
            work.wait()


def receive(place: TreePlace, host: RankGroup) -> np.ndarray:
    """Receive the next message from the parent and pass it on. Returns it, [bytes] uint8, once the children have it."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=place.parent, group=host.group)
    works = [_start(size, child, host) for child in place.children]
    message = torch.empty(int(size), dtype=torch.uint8)
    for chunk in message.split(CHUNK_BYTES):
        dist.recv(chunk, src=place.parent, group=host.group)
        works += [_start(chunk, child, host) for child in place.children]
    for work in works:
        work.wait()
    return message.numpy()


def _start(tensor: torch.Tensor, rank: int, host: RankGroup) -> dist.Work:
    work = dist.isend(tensor, dst=rank, group=host.group)
    assert work is not None, "this rank is not in the host group"
    return work


class Exchange:
    """Messages between rank 0 and the others; one object per rank. Messages are numbered, and every rank must send or
    receive each of them.

    Rank 0 may wait for minutes while servers sample, and the other ranks must not wait for that in a device
    collective. So they poll a store key, watch the heartbeat of rank 0's process, and receive only once rank 0 has
    announced a message. (Work of a living rank 0 that makes no progress has its own deadlines: requests, servers,
    publishes.)

    `store`: this rank's client of the job's key-value store. `replicas`: the ranks in disjoint parts; rank 0 sends a
    message once to each part. `heartbeat_store`: on rank 0 a second client for the heartbeat thread; None on other
    ranks. `silence_seconds`: the other ranks give up after this time without a heartbeat.

    Attributes:
        num_sent_bytes: bytes that rank 0 has sent so far. What the receivers pass on is not counted.
    """

    def __init__(
        self,
        store: KeyValueStore,
        host: RankGroup,
        replicas: Sequence[Sequence[int]],
        heartbeat_store: KeyValueStore | None = None,
        silence_seconds: float = 120.0,
    ) -> None:
        self._store, self._host, self._silence_seconds = store, host, silence_seconds
        self._replicas = replicas
        self._sequence = 0
        self.num_sent_bytes = 0
        self._closed = threading.Event()
        self._beat_error: Exception | None = None
        if heartbeat_store is not None:
            threading.Thread(target=self._beat, args=(heartbeat_store,), name="heartbeat", daemon=True).start()

    def _beat(self, store: KeyValueStore) -> None:
        count = 0
        while not self._closed.wait(HEARTBEAT_SECONDS):
            count += 1
            try:
                store.set("heartbeat", str(count))
            except Exception as error:
                self._beat_error = error
                return

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closed.set()

    # --- rank 0 to the others ------------------------------------------------------------------------------

    def send_all(self, value: Any) -> None:
        """Rank 0: send the same value to every rank. Raises RankError as `send_each`."""
        message = Encoded(encode(value))
        self._announce()
        self._send((replica, message) for replica in self._replicas)

    def send_each(self, values: Iterable[Any]) -> None:
        """Rank 0: send one value to the ranks of each replica, in the order of the replicas. `values` may be a
        generator.

        Raises RankError if the heartbeat has ended, because the other ranks would soon take rank 0 for dead.
        """
        self._announce()
        self._send(zip(self._replicas, values, strict=True))

    def send_more(self, parts: Iterable[tuple[Sequence[int], Any]]) -> None:
        """Rank 0: send each (ranks, value) without a new announcement. The previous message must have told these ranks
        to call `receive_more`.
        """
        self._send(parts)

    def _announce(self) -> None:
        if self._beat_error is not None:
            raise RankError(f"rank 0's heartbeat ended: {self._beat_error}") from self._beat_error
        progress.beat()
        self._store.set(f"message/{self._sequence}", "ready")
        self._sequence += 1

    def _send(self, parts: Iterable[tuple[Sequence[int], Any]]) -> None:
        """Encode the next message while one is being sent. No more than these two are in memory, unless they were
        encoded in advance.
        """
        under_way = None
        for ranks, value in parts:
            sending = None
            if receivers := [rank for rank in ranks if rank != 0]:
                message = encode(value)
                sending = PendingMessage(message, receivers[0], self._host)
                self.num_sent_bytes += len(message)
            if under_way is not None:
                under_way.wait()
                progress.beat()
            under_way = sending
        if under_way is not None:
            under_way.wait()

    def receive(self) -> Any:
        """Other ranks: wait for the next message of rank 0 and return its value. Raises RankError if the heartbeat
        stops.
        """
        with progress.during(progress.WAIT):
            self._await(f"message/{self._sequence}")
        self._sequence += 1
        return self.receive_more(next(ranks for ranks in self._replicas if self._host.rank in ranks))

    def receive_more(self, ranks: Sequence[int]) -> Any:
        """Other ranks: the value that rank 0 sends to `ranks`, of which this rank is one, with `send_more`."""
        receivers = [rank for rank in ranks if rank != 0]
        return decode(receive(TreePlace.of(self._host.rank, receivers, 0), self._host))

    def _await(self, key: str) -> None:
        begun = time.monotonic()
        seen, since = "", begun
        while not self._store.check([key]):
            time.sleep(min(max((time.monotonic() - begun) * _LATE_SHARE, _LEAST_POLL_SECONDS), POLL_SECONDS))
            if time.monotonic() - since > self._silence_seconds / 4:
                beat = self._store.get("heartbeat").decode() if self._store.check(["heartbeat"]) else ""
                if beat != seen:
                    seen, since = beat, time.monotonic()
                elif time.monotonic() - since > self._silence_seconds:
                    raise RankError(
                        f"rank 0 gave no sign of life for {self._silence_seconds:.0f} s while this rank waited for"
                        f" {key}"
                    )

    # --- the others to rank 0 ------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any] | None:
        """Collect every rank's value on rank 0. Returns the values in rank order; None on other ranks. Collective."""
        if self._host.rank != 0:
            PendingMessage(encode(value), 0, self._host).wait()
            return None
        others = [TreePlace(rank, ()) for rank in range(1, self._host.size)]
        return [value] + [decode(receive(place, self._host)) for place in others]


@dataclass(frozen=True)
class StepMessage:
    """What rank 0 sends to all ranks. The `content` depends on the kind:

    work     a dictionary with the rank's `mini_batches`, the reason to `stop` or None, and whether `routes` follow
    value    the value that all ranks agree on
    request  the name of a collective action that rank 0 begins
    """

    kind: Literal["work", "value", "request"]
    content: Any


@dataclass(frozen=True)
class Sharing:
    """What prefixes that rows share did to a step, on all data-parallel ranks: positions that were not computed, and
    prefixes that were computed again because their rows were in several packs.
    """

    num_saved_positions: int = 0
    num_repeated_prefixes: int = 0


class Parcels:
    """What rank 0 sends for one step: the shard of every data-parallel rank, and the routes of every pipeline stage. It
    can be sent once. Its messages are encoded one by one while they are sent, or all in advance (`encode_all`) for a
    step that is not due yet.

    `shards`: the mini-batches of each data-parallel rank. `routes`: the experts of the batch's rows; each pipeline
    stage is sent those of its own layers.

    Attributes:
        own: rank 0's shard. It has its routes once all messages have been made.
        num_positions: positions computed on all data-parallel ranks together, padding and filler included.
        sharing: what shared prefixes saved of them.
    """

    def __init__(self, shards: list[list[MiniBatch]], routes: ExpertRoutes | None, layout: Layout) -> None:
        self.own = shards[0]
        packs = [m for shard in shards for mini in shard for m in mini.micro_batches]
        self.num_positions = sum(m.num_computed for m in packs)
        self.sharing = Sharing(
            sum(m.num_tokens - m.num_computed for m in packs),
            sum(mini.num_repeated_prefixes for mini in shards[0]),  # the same on every rank
        )
        self._has_routes = routes is not None
        self._shards, self._routes, self._layout = shards, routes, layout
        self._made: tuple[list[Any], list[tuple[list[int], Any]]] | None = None

    def shards(self) -> Iterator[Any]:
        """Yield the message of every replica, in their order. Use up this generator before `routes`."""
        if self._made is not None:
            yield from self._made[0]
            return
        for shard in self._shards:
            content = {"mini_batches": [m.to_wire() for m in shard], "stop": None, "routes": self._has_routes}
            yield vars(StepMessage("work", content))

    def routes(self) -> Iterator[tuple[list[int], Any]]:
        """Yield (ranks, their routes) for every pipeline stage of every data-parallel rank. Rank 0's are put into
        `own`.
        """
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

    def encode_all(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Encode all messages now and keep them in memory. `is_wanted` is called before each message; if it returns
        False, this method gives up and returns False, and nothing has changed but rank 0's routes.
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
    """The value encoded, unless rank 0 is the only receiver, which keeps what it has."""
    return value if ranks == [0] else Encoded(encode(value))


def take_routes(mini_batches: list[MiniBatch], part: dict[str, Any]) -> None:
    """Put a stage's routes into its packs."""
    micro_batches = [m for mini in mini_batches for m in mini.micro_batches]
    for micro_batch, packed in zip(micro_batches, part["packs"], strict=True):
        micro_batch.routed_experts, micro_batch.routed_layers = packed, part["layers"]


@dataclass
class Work:
    """A rank's work for one step: its mini-batches, or the reason to stop.

    `num_positions`: positions computed on all data-parallel ranks together, padding and filler included; rank 0 only,
    as is `sharing`.
    """

    mini_batches: list[MiniBatch] = field(default_factory=list)
    stop: str | None = None
    num_positions: int = 0
    sharing: Sharing = Sharing()


class RankLink:
    """Rank 0 leads, and the other ranks follow; one object on every rank.

    While the other ranks wait for a value or for work, they carry out requests of rank 0 (`on_request`).
    """

    def __init__(self, exchange: Exchange, layout: Layout, rank: int) -> None:
        self._exchange, self._layout, self._rank = exchange, layout, rank
        self._actions: dict[str, Callable[[], None]] = {}

    def on_request(self, name: str, action: Callable[[], None]) -> None:
        """Set what the other ranks do when rank 0 calls `request(name)`."""
        self._actions[name] = action

    def request(self, name: str) -> None:
        """Rank 0: make the other ranks, which must be waiting for rank 0, begin their part of a collective action."""
        self._exchange.send_all(vars(StepMessage("request", name)))

    def agree(self, value: Any) -> Any:
        """Return rank 0's `value` (JSON types) on every rank. Collective."""
        if self._rank == 0:
            self._exchange.send_all(vars(StepMessage("value", value)))
            return value
        return self._follow("value")

    def hand_out(self, shards: list[list[MiniBatch]], routes: ExpertRoutes | None = None) -> Work:
        """Rank 0: `send` the parcels of these shards, which are encoded while they are sent."""
        return self.send(Parcels(shards, routes, self._layout))

    def send(self, parcels: Parcels) -> Work:
        """Rank 0: send every rank its shard and return rank 0's own work. Rank 0 sends each shard once, and the routes
        of each stage once.
        """
        self._exchange.send_each(parcels.shards())
        self._exchange.send_more(parcels.routes())
        return Work(parcels.own, num_positions=parcels.num_positions, sharing=parcels.sharing)

    def hand_out_stop(self, reason: str) -> Work:
        """Rank 0: tell every rank to stop. Returns the same work that the other ranks get."""
        work = {"mini_batches": [], "stop": reason, "routes": False}
        self._exchange.send_all(vars(StepMessage("work", work)))
        return Work(stop=reason)

    def receive_work(self) -> Work:
        """Other ranks: carry out requests of rank 0 until it sends work, and return this rank's work."""
        content = self._follow("work")
        work = Work([MiniBatch.from_wire(m) for m in content["mini_batches"]], content["stop"])
        if content["routes"]:
            own = self._layout.coordinates(self._rank)
            take_routes(work.mini_batches, self._exchange.receive_more(self._layout.ranks_of(own.data, own.pipeline)))
        return work

    def _follow(self, until: str) -> Any:
        """Other ranks: carry out requests of rank 0 until it sends a message of the kind `until`. Returns its
        content.
        """
        while True:
            message = StepMessage(**self._exchange.receive())
            if message.kind == until:
                return message.content
            assert message.kind == "request", f"rank 0 sent {message.kind!r} where {until!r} was due"
            self._actions[message.content]()
