"""What publishing needs of a rollout server, and how several are told the same thing at once.

Owns the protocol that runtime's SGLang client fulfils, deadlines, and gathering the servers' failures. No HTTP here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from gspo_mega.errors import GspoMegaError, PublishError


class ServerControl(Protocol):
    """One server. Methods block, and raise PublishError (or another GspoMegaError) naming the server when it refuses,
    fails, or does not answer within `deadline_seconds`. They are called from several threads, one call a server at a
    time.

    `generation` counts the server's starts: weights, groups and sessions of an earlier one are gone.
    """

    @property
    def server_id(self) -> str: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def generation(self) -> int: ...

    def pause(self, *, deadline_seconds: float) -> None: ...
    def resume(self, *, deadline_seconds: float) -> None: ...
    def flush_cache(self, *, deadline_seconds: float) -> None: ...
    def update_from_disk(self, path: str, weight_version: int, *, deadline_seconds: float) -> None: ...
    def begin_update(self, *, deadline_seconds: float) -> None: ...
    def end_update(self, *, deadline_seconds: float) -> None: ...
    def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        deadline_seconds: float,
    ) -> None: ...

    def destroy_group(self, group_name: str, *, deadline_seconds: float) -> None: ...
    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        deadline_seconds: float,
    ) -> None: ...

    def set_weight_version(self, weight_version: int, *, deadline_seconds: float) -> None: ...
    def weight_version(self, *, deadline_seconds: float) -> int: ...
    def checksums(self, *, deadline_seconds: float) -> list[dict[str, str]]: ...
    def snapshot(self, *, deadline_seconds: float) -> None: ...
    def reset_tensors(self, *, deadline_seconds: float) -> None: ...
    def compare(self, *, deadline_seconds: float) -> None: ...


class Deadline:
    """The point in time by which a whole transaction must be over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self, server_id: str) -> float:
        """Seconds that are left for that server. Raises PublishError when there are none."""
        left = self.seconds - self.passed()
        if left <= 0:
            raise PublishError(f"{server_id}: the deadline of {self.seconds:g} s (publish.deadline_seconds) has passed")
        return left


class Fleet:
    """The servers of one transaction: those that still take part, and why the others do not. Used by one thread."""

    def __init__(self, servers: Iterable[ServerControl], deadline: Deadline) -> None:
        self.active: list[ServerControl] = list(servers)
        self.failed: dict[str, str] = {}
        self.deadline = deadline
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self.active)), thread_name_prefix="publish")

    def close(self) -> None:
        """Calls still running end by their own deadlines."""
        self._pool.shutdown(wait=False)

    def fail(self, server: ServerControl, why: str) -> None:
        """The server takes no further part."""
        self.failed[server.server_id] = why
        self.active = [s for s in self.active if s is not server]

    def each(
        self, action: Callable[[ServerControl, float], object], servers: Iterable[ServerControl] | None = None
    ) -> dict[str, object]:
        """`action(server, seconds)` on all active servers (or some of them) at once; results by server id.

        A call gets half of the time that is left, so that a server which hangs leaves the others time to go on. A
        server whose action raises a GspoMegaError has failed; any other exception is a defect and is raised.
        """
        targets = self.active if servers is None else [s for s in servers if s in self.active]
        calls: list[tuple[ServerControl, Future]] = [(s, self._pool.submit(self._call, action, s)) for s in targets]
        results = {}
        for server, call in calls:
            try:
                results[server.server_id] = call.result()
            except GspoMegaError as error:
                self.fail(server, str(error))
        return results

    def _call(self, action: Callable[[ServerControl, float], object], server: ServerControl) -> object:
        return action(server, self.deadline.left(server.server_id) / 2)
