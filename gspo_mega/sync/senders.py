"""A rank that sends tensors to servers: what rank 0 asks of it, and how it does that in its own process.

Owns the bucket that a rank has ready and its sides of the groups. Which bucket is sent when, and to whom, rank 0 says:
`turns.py` and `broadcast.py`. `other_rank.py` carries its words to another process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from gspo_mega.base.errors import PublishError
from gspo_mega.sync.buckets import Listing, Message, buckets
from gspo_mega.sync.link import GroupEnd, Place, Sending, stream_beside


class Sender(Protocol):
    """One rank that sends. Methods are called from several threads of rank 0 and do not wait, except `joined`."""

    @property
    def rank(self) -> int:
        """Its global rank."""
        ...

    def begin(self, place: Place) -> None:
        """Begin to join the group at `place`, as its first rank."""
        ...

    def joined(self, name: str, seconds: float) -> None:
        """Wait until that group is whole. Raises RuntimeError if it is not after `seconds`."""
        ...

    def broadcast(self, name: str) -> Sending:
        """Send the bucket that is ready through the group."""
        ...

    def cut(self, name: str) -> None:
        """End the group's unfinished work; the group is unusable afterwards."""
        ...

    def leave(self, name: str) -> None:
        """Leave the group."""
        ...

    def release(self) -> None:
        """The bucket has reached all that it was for: the next one may be made ready."""
        ...


class OwnTensors:
    """The process's own rank as a `Sender`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._ends: dict[str, GroupEnd] = {}
        self._message: Message | None = None
        self._changed = threading.Condition()
        self._is_over = False

    def begin(self, place: Place) -> None:
        self._ends[place.name] = GroupEnd(place)

    def joined(self, name: str, seconds: float) -> None:
        if (end := self._ends.get(name)) is None:
            raise RuntimeError(f"rank {self.rank} has left the group")
        end.joined(seconds)

    def broadcast(self, name: str) -> Sending:
        message, end = self._message, self._ends.get(name)
        if message is None or end is None:
            raise PublishError(f"rank {self.rank} has no bucket ready, or has left the group")
        return end.broadcast(message.content, stream_beside(message.content, message.stream))

    def cut(self, name: str) -> None:
        if (end := self._ends.get(name)) is not None:
            end.cut()

    def leave(self, name: str) -> None:
        if (end := self._ends.pop(name, None)) is not None:
            end.leave()

    def release(self) -> None:
        with self._changed:
            self._message = None
            self._changed.notify_all()

    def open(self) -> None:
        """A send begins: `offer` may follow."""
        self._is_over = False

    def offer(
        self, tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int, ready: Callable[[Listing], None]
    ) -> None:
        """Make one bucket after the other of `tensors`, and say that it is ready when the one before is released. The
        next one is gathered meanwhile. Returns when the last is ready, or after `end`; the iterator always runs to its
        end, because other ranks take part in it.

        tensors: (name, whole tensor of any shape, as servers load it), local.
        """
        try:
            for bucket in buckets(tensors, bucket_bytes):
                message = Message(bucket)
                del bucket[:]  # its memory goes before the next bucket is gathered
                with self._changed:
                    self._changed.wait_for(lambda: self._message is None or self._is_over)
                    if self._is_over:
                        break
                    self._message = message
                listing = message.listing
                del message  # `release` ends its memory
                ready(listing)
        finally:
            for _ in tensors:
                pass

    def end(self) -> None:
        """No bucket is wanted any more."""
        with self._changed:
            self._is_over, self._message = True, None
            self._changed.notify_all()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._ends):
            self.leave(name)
