"""Sending tensors to servers through process groups that the servers join: method `distributed`.

Owns which groups there are, and what goes through them when. Each server has one of its own with the trainer's rank 0
(`link.py`): a server that refuses, hangs or dies in the middle leaves only its own broadcast unfinished, and the others
go on. The price is that rank 0 sends the model once per server.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from gspo_mega.errors import GspoMegaError, PublishError
from gspo_mega.weights.hf_export import DTYPE_NAMES
from gspo_mega.weights.link import Link, stream_beside
from gspo_mega.weights.server_tensors import loads_with
from gspo_mega.weights.servers import Fleet, ServerControl

# A healthy server joins in well under a second; one that does not must not use up the whole deadline.
_JOIN_SECONDS = 60.0
_CLEAN_UP_SECONDS = 5.0

Bucket = list[tuple[str, torch.Tensor]]


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors in lists of at most `bucket_bytes`, a single larger tensor by itself.

    A tensor that the server loads only together with the one before it is in that one's bucket, whatever their size.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > bucket_bytes and not loads_with(name, bucket[-1][0]):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


class GroupSender:
    """Rank 0's side of sending through groups. Links last from publish to publish, as long as the server does."""

    def __init__(self, address: str, backend: str, bucket_bytes: int, timeout_seconds: float) -> None:
        """`address`: this machine, as the servers reach it. `backend`: gloo, or nccl between GPUs."""
        self._address = address
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._links: dict[str, Link] = {}

    def send(
        self,
        fleet: Fleet,
        servers: list[ServerControl],
        tensors: Iterator[tuple[str, torch.Tensor]],
        weight_version: int,
    ) -> None:
        """Send all tensors to `servers`, as one update session each; servers that fail leave the fleet.

        `tensors` is always run to its end: other ranks take part in making them.
        """
        try:
            self._connect(fleet, servers)
            fleet.each(lambda s, left: s.begin_update(deadline_seconds=left), servers)
            for bucket in buckets(tensors, self._bucket_bytes):
                self._send_bucket(fleet, servers, bucket)
        finally:
            for _ in tensors:
                pass
        fleet.each(lambda s, left: s.end_update(deadline_seconds=left), servers)
        fleet.each(lambda s, left: s.set_weight_version(weight_version, deadline_seconds=left), servers)
        self._abandon([server for server in servers if server.server_id in fleet.failed])

    def close(self) -> None:
        _at_once([link.close for link in self._links.values()])
        self._links.clear()

    def _connect(self, fleet: Fleet, servers: list[ServerControl]) -> None:
        for server in servers:
            link = self._links.get(server.server_id)
            if link is not None and link.generation == server.generation:
                continue
            if link is not None:
                self._links.pop(server.server_id).close()
            try:
                seconds = min(_JOIN_SECONDS, fleet.deadline.left(server.server_id) / 2)
                self._links[server.server_id] = Link(
                    server, self._address, self._backend, self._timeout_seconds, seconds
                )
            except GspoMegaError as error:
                fleet.fail(server, str(error))

    def _send_bucket(self, fleet: Fleet, servers: list[ServerControl], bucket: Bucket) -> None:
        names = [name for name, _ in bucket]
        dtypes = [DTYPE_NAMES[tensor.dtype] for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        contents = [tensor.contiguous() for _, tensor in bucket]
        links = {s.server_id: self._links[s.server_id] for s in servers if s in fleet.active}
        stream = stream_beside(contents[0])

        def update(server: ServerControl, seconds: float) -> None:
            """The request and the broadcasts that it asks for, side by side: a server enters a broadcast only inside of
            the request, and a first broadcast of NCCL returns only when the server is in it.
            """
            link, until = links[server.server_id], time.monotonic() + seconds
            sending = link.broadcast(contents, stream)
            try:
                server.update_from_distributed(names, dtypes, shapes, link.name, deadline_seconds=seconds)
                try:
                    sending.wait(until - time.monotonic())
                except PublishError as error:
                    raise PublishError(
                        f"{server.server_id}: says that it has received {names[0]} and following, and did not take"
                        f" them: {error}"
                    ) from error
            except BaseException:
                link.abort()
                raise

        fleet.each(update, servers)

    def _abandon(self, servers: list[ServerControl]) -> None:
        """Clear up on both sides, so that a server can be published to again if it recovers by itself."""
        _at_once([partial(self._clear, server, self._links.pop(server.server_id, None)) for server in servers])

    @staticmethod
    def _clear(server: ServerControl, link: Link | None) -> None:
        with contextlib.suppress(GspoMegaError):  # the session may not be open, the server may be gone
            server.end_update(deadline_seconds=_CLEAN_UP_SECONDS)
        if link is not None:
            link.close()


def _at_once(acts: list[Callable[[], None]]) -> None:
    """All of them side by side, until the last is done: each that meets a server which hangs takes its time."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
