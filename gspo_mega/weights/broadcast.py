"""Sending tensors to servers through process groups that the servers join: method `distributed`.

Owns those groups. Each server has one of its own with the trainer's rank 0: a server that refuses or dies in the
middle leaves only its own broadcast unfinished, and the others go on. (A broadcast that a member never enters cannot be
taken back, with gloo not even by closing the group.) The price is that rank 0 sends the model once a server.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from gspo_mega.errors import GspoMegaError, PublishError
from gspo_mega.weights.hf_export import DTYPE_NAMES
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


class _Link:
    """The group of the trainer's rank 0 and one start of one server; rank 0 is its first rank."""

    def __init__(self, server: ServerControl, address: str, backend: str, timeout_seconds: float, seconds: float) -> None:
        """`timeout_seconds` bounds one broadcast. Raises GspoMegaError when the server does not join within `seconds`."""
        self.server = server
        self.generation = server.generation
        # Servers remember groups by name, and may outlive a trainer.
        self.name = f"weights-{secrets.token_hex(8)}"
        size = 1 + server.tensor_parallel
        # The store listens on the job's own address only.
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, size, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        made: list[dist.ProcessGroup] = []
        problems: list[RuntimeError] = []

        def make() -> None:
            try:
                # SGLang makes its side with the same function, so both agree on the store's keys. There is no public
                # way to make a group with processes outside this one's world.
                group, _ = _new_process_group_helper(
                    size, 0, [], dist.Backend(backend), PrefixStore(self.name, store), group_name=self.name,
                    timeout=timedelta(seconds=timeout_seconds),
                )  # fmt: skip
                made.append(group)
            except RuntimeError as error:
                problems.append(error)

        # In a thread, because it waits for the server, which may answer that it will not come.
        making = threading.Thread(target=make, daemon=True)
        making.start()
        server.init_group(
            master_address=address, master_port=port, rank_offset=1, world_size=size, group_name=self.name, backend=backend,
            deadline_seconds=seconds,
        )  # fmt: skip
        making.join(seconds)
        if not made:
            raise PublishError(f"{server.server_id}: says that it joined the weight group, and is not in it: {problems or 'no answer'}")
        self.group = made.pop()
        _world.pg_group_ranks[self.group] = {rank: rank for rank in range(size)}

    def close(self) -> None:
        """Leave the group on both sides; a server that is gone or hangs keeps nobody waiting."""
        if self.generation == self.server.generation:
            with contextlib.suppress(GspoMegaError):  # it may be why the link is closed
                self.server.destroy_group(self.name, deadline_seconds=_CLEAN_UP_SECONDS)
        dist.destroy_process_group(self.group)
        # Letting go of a group waits for its unfinished broadcasts, which end by their timeout.
        last_reference = [self.group]
        del self.group
        threading.Thread(target=last_reference.clear, daemon=True).start()


class GroupSender:
    """Rank 0's side of sending through groups. Links last from publish to publish, as long as the server does."""

    def __init__(self, address: str, backend: str, bucket_bytes: int, timeout_seconds: float) -> None:
        """`address`: this machine, as the servers reach it. `backend`: gloo, or nccl between GPUs."""
        self._address = address
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._links: dict[str, _Link] = {}

    def send(self, fleet: Fleet, servers: list[ServerControl], tensors: Iterator[tuple[str, torch.Tensor]], weight_version: int) -> None:
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
        for server in servers:
            if server.server_id in fleet.failed:
                self._abandon(server)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
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
                self._links[server.server_id] = _Link(server, self._address, self._backend, self._timeout_seconds, seconds)
            except GspoMegaError as error:
                fleet.fail(server, str(error))

    def _send_bucket(self, fleet: Fleet, servers: list[ServerControl], bucket: Bucket) -> None:
        names = [name for name, _ in bucket]
        dtypes = [DTYPE_NAMES[tensor.dtype] for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        contents = [tensor.contiguous() for _, tensor in bucket]
        links = {s.server_id: self._links[s.server_id] for s in servers if s in fleet.active}
        # Posted here and not in the servers' threads, which would use another CUDA device. A server answers when it has
        # received and loaded everything, or that it will not; only then is there anything to wait for.
        posted = {server_id: [link.group.broadcast(t, 0) for t in contents] for server_id, link in links.items()}
        fleet.each(
            lambda s, left: s.update_from_distributed(names, dtypes, shapes, links[s.server_id].name, deadline_seconds=left), servers
        )
        for server in [s for s in servers if s in fleet.active]:
            try:
                for work in posted[server.server_id]:
                    work.wait(timedelta(seconds=fleet.deadline.left(server.server_id)))
            except (RuntimeError, PublishError) as error:
                fleet.fail(server, f"{server.server_id}: says that it has received {names[0]} and following, and did not take them: {error}")

    def _abandon(self, server: ServerControl) -> None:
        """Clear up on both sides, so that the server can be published to again if it recovers by itself."""
        with contextlib.suppress(GspoMegaError):  # the session may not be open, the server may be gone
            server.end_update(deadline_seconds=_CLEAN_UP_SECONDS)
        if server.server_id in self._links:
            self._links.pop(server.server_id).close()
