"""Sending tensors to servers through process groups that the servers join: method `distributed`.

Owns the groups and the order of what they carry. Each server shares one group with the trainer's rank 0 (`link.py`). A
server that refuses, hangs or dies leaves only its own broadcast unfinished, and the others continue. The price is that
rank 0 sends the model once per server.
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

# A healthy server joins in well under a second; an unhealthy one must not consume the whole deadline.
_JOIN_SECONDS = 60.0
_CLEAN_UP_SECONDS = 5.0

Bucket = list[tuple[str, torch.Tensor]]


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors in lists of at most `bucket_bytes`; a larger tensor is in a list of its own.

    tensors: (name, whole tensor of any shape and dtype), on rank 0 only. A tensor that the server loads only together
    with the one before it is in the same bucket, at any size.
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


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of whole tensors of any shape and dtype, one after the other: [bytes] uint8, on their device.

    One broadcast of bytes takes the place of one for each tensor, and carries dtypes that a backend does not know (gloo
    has no FP8). Shares the memory of a lone tensor.
    """
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class GroupSender:
    """Rank 0's side of sending through groups. A link lasts until its server ends, over many publishes."""

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
        """Send all tensors to `servers`, in one update session each; servers that fail leave the fleet.

        tensors: (name, whole tensor of any shape, as servers load it), on rank 0 only. The iterator always runs to its
        end: other ranks take part in producing it.
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
        _run_in_parallel([link.close for link in self._links.values()])
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
        # Larger elements first: each tensor's bytes then begin at a multiple of its element's size.
        bucket = sorted(bucket, key=lambda named: -named[1].element_size())
        names = [name for name, _ in bucket]
        dtypes = [DTYPE_NAMES[tensor.dtype] for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        content = flattened([tensor for _, tensor in bucket])
        links = {s.server_id: self._links[s.server_id] for s in servers if s in fleet.active}
        stream = stream_beside(content)

        def update(server: ServerControl, seconds: float) -> None:
            """Run the request and its broadcasts in parallel: a server enters a broadcast only within the request, and
            NCCL's first broadcast returns only when the server has entered it.
            """
            link, until = links[server.server_id], time.monotonic() + seconds
            sending = link.broadcast([content], stream)
            try:
                try:
                    server.update_from_distributed(names, dtypes, shapes, link.name, deadline_seconds=seconds)
                except PublishError as error:
                    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                    raise PublishError(f"{error} (sent were {', '.join(names[:3])}{more})") from error
                try:
                    sending.wait(until - time.monotonic())
                except PublishError as error:
                    raise PublishError(
                        f"{server.server_id}: reports that it received {names[0]} and following tensors, but the"
                        f" broadcast did not finish: {error}"
                    ) from error
            except BaseException:
                link.abort()
                raise

        fleet.each(update, servers)

    def _abandon(self, servers: list[ServerControl]) -> None:
        """Clean up on both sides, so that a server which recovers by itself can be published to again."""
        _run_in_parallel([partial(self._clear, server, self._links.pop(server.server_id, None)) for server in servers])

    @staticmethod
    def _clear(server: ServerControl, link: Link | None) -> None:
        with contextlib.suppress(GspoMegaError):  # the session may not be open; the server may be dead
            server.end_update(deadline_seconds=_CLEAN_UP_SECONDS)
        if link is not None:
            link.close()


def _run_in_parallel(actions: list[Callable[[], None]]) -> None:
    """Run all actions in threads and wait for the last. A server that hangs delays only its own action."""
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
