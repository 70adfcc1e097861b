"""How rank 0 leads the other ranks: announcements through the store, payloads over the host group.

Rank 0 may wait for minutes while servers sample. The other ranks must not wait in a device collective meanwhile, so
they poll a store key, watch the heartbeat of rank 0's process, and receive only once rank 0 has announced a message.
(Work of a living rank 0 that makes no progress has deadlines of its own: requests, servers, publishes.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gspo_mega import beats
from gspo_mega.engine.process_groups import Group
from gspo_mega.errors import RankError
from gspo_mega.runtime.message_codec import decode, encode
from gspo_mega.runtime.worker_context import KeyValueStore

POLL_SECONDS = 0.01
HEARTBEAT_SECONDS = 1.0


class Exchange:
    """One per rank. Messages are numbered; every rank must send or receive each of them.

    `store` is this rank's client of the job's key-value store. `heartbeat_store` is a second client on rank 0, for the
    heartbeat thread; None elsewhere. `silence_seconds`: the other ranks give up after this time without a heartbeat.
    """

    def __init__(
        self,
        store: KeyValueStore,
        host: Group,
        heartbeat_store: KeyValueStore | None = None,
        silence_seconds: float = 120.0,
    ) -> None:
        self._store, self._host, self._silence_seconds = store, host, silence_seconds
        self._sequence = 0
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

    def send_each(self, values: Sequence[Any]) -> Any:
        """Rank 0: send `values[r]` to rank r and return `values[0]`. Raises RankError where the heartbeat has ended,
        because the other ranks would soon take rank 0 for dead.
        """
        if self._beat_error is not None:
            raise RankError(f"rank 0's heartbeat ended: {self._beat_error}") from self._beat_error
        beats.beat()
        self._store.set(f"message/{self._sequence}", "ready")
        self._sequence += 1
        for rank in range(1, self._host.size):
            _send(encode(values[rank]), rank, self._host)
        return values[0]

    def send_all(self, value: Any) -> Any:
        """Rank 0: send the same value to every rank."""
        return self.send_each([value] * self._host.size)

    def receive(self) -> Any:
        """Other ranks: wait for the next message of rank 0. Raises RankError when its heartbeat stops."""
        with beats.during(beats.WAIT):
            self._await(f"message/{self._sequence}")
        self._sequence += 1
        return decode(_receive(0, self._host))

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
            _send(encode(value), 0, self._host)
            return None
        return [value] + [decode(_receive(rank, self._host)) for rank in range(1, self._host.size)]


def _send(message: bytes, rank: int, host: Group) -> None:
    dist.send(torch.tensor([len(message)], dtype=torch.int64), dst=rank, group=host.group)
    dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), dst=rank, group=host.group)


def _receive(rank: int, host: Group) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=rank, group=host.group)
    message = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(message, src=rank, group=host.group)
    return message.numpy().tobytes()
