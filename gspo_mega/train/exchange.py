"""How rank 0 leads the other ranks: announcements through the store, payloads over the host group.

Rank 0 may wait for minutes while servers sample. The other ranks must not wait in a device collective meanwhile, so
they poll a store key, watch the heartbeat of rank 0's process, and receive only once rank 0 has announced a message.
(Work of a living rank 0 that makes no progress has deadlines of its own: requests, servers, publishes.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gspo_mega.base import beats
from gspo_mega.base.errors import RankError
from gspo_mega.engine.process_groups import Group
from gspo_mega.train.fan_out import Place, Sending, receive
from gspo_mega.train.message_codec import Encoded, decode, encode
from gspo_mega.train.worker_context import KeyValueStore

POLL_SECONDS = 0.01
HEARTBEAT_SECONDS = 1.0


class Exchange:
    """One per rank. Messages are numbered; every rank must send or receive each of them.

    `replicas`: the ranks in disjoint parts, each of which rank 0 sends a message once. `num_sent_bytes`: what rank 0
    has sent so far, of messages that their receivers pass on (`fan_out.py`). `store` is this rank's client of the job's
    key-value store. `heartbeat_store` is a second client on rank 0, for the heartbeat thread; None elsewhere.
    `silence_seconds`: the other ranks give up after this time without a heartbeat.
    """

    def __init__(
        self,
        store: KeyValueStore,
        host: Group,
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
        """Rank 0: send the same value to every rank. Raises as `send_each`."""
        message = Encoded(encode(value))
        self._announce()
        self._send((replica, message) for replica in self._replicas)

    def send_each(self, values: Iterable[Any]) -> None:
        """Rank 0: send a value to the ranks of each replica, in their order; the values may be made one by one. Raises
        RankError where the heartbeat has ended, because the other ranks would soon take rank 0 for dead.
        """
        self._announce()
        self._send(zip(self._replicas, values, strict=True))

    def send_more(self, parts: Iterable[tuple[Sequence[int], Any]]) -> None:
        """Rank 0: send (ranks, value) one after the other. Each of these ranks must know it from the last message, and
        call `receive_more`.
        """
        self._send(parts)

    def _announce(self) -> None:
        if self._beat_error is not None:
            raise RankError(f"rank 0's heartbeat ended: {self._beat_error}") from self._beat_error
        beats.beat()
        self._store.set(f"message/{self._sequence}", "ready")
        self._sequence += 1

    def _send(self, parts: Iterable[tuple[Sequence[int], Any]]) -> None:
        """While one message is on its way the next one is made, and no more than these two are in memory, unless they
        were made before.
        """
        under_way = None
        for ranks, value in parts:
            sending = None
            if receivers := [rank for rank in ranks if rank != 0]:
                message = encode(value)
                sending = Sending(message, receivers[0], self._host)
                self.num_sent_bytes += len(message)
            if under_way is not None:
                under_way.wait()
                beats.beat()
            under_way = sending
        if under_way is not None:
            under_way.wait()

    def receive(self) -> Any:
        """Other ranks: wait for the next message of rank 0. Raises RankError when its heartbeat stops."""
        with beats.during(beats.WAIT):
            self._await(f"message/{self._sequence}")
        self._sequence += 1
        return self.receive_more(next(ranks for ranks in self._replicas if self._host.rank in ranks))

    def receive_more(self, ranks: Sequence[int]) -> Any:
        """Other ranks: what rank 0 sends to these ranks, of which this is one, with `send_more`."""
        receivers = [rank for rank in ranks if rank != 0]
        return decode(receive(Place.of(self._host.rank, receivers, 0), self._host))

    def _await(self, key: str) -> None:
        seen, since = "", time.monotonic()
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
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
        """Collect every rank's value on rank 0, in rank order; None elsewhere. Collective over all ranks."""
        if self._host.rank != 0:
            Sending(encode(value), 0, self._host).wait()
            return None
        others = [Place(rank, ()) for rank in range(1, self._host.size)]
        return [value] + [decode(receive(place, self._host)) for place in others]
