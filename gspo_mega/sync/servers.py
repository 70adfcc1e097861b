"""What publishing needs from a rollout server, and how one operation runs on several servers at the same time.

`ServerControl` is the protocol; for SGLang, `gspo_mega.rollout.client.server_control` implements it. There is no HTTP
here. A `Fleet` has the servers of one transaction: it calls them in parallel under one `Deadline`, and collects their
failures.

The last part checks that the servers have the trainer's PyTorch and NCCL, which weights sent through NCCL's groups
require. It compares the trainer with the versions that servers recorded in the attempt's folder, before the first
publish. NCCL's own refusal ("Mismatched NCCL version") would come only after a whole step.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, cast

from gspo_mega.base.errors import GspoMegaError, PublishError
from gspo_mega.base.run_folder import read_json

_PRINT_VERSIONS = (
    "import json; from gspo_mega.sync.servers import loaded_versions; print(json.dumps(loaded_versions()))"
)


class ServerControl(Protocol):
    """One server.

    Methods block. They raise PublishError (or another GspoMegaError) naming the server if it refuses, fails, or does
    not answer within `deadline_seconds`. Several threads call them, with one call per server at a time.
    """

    @property
    def server_id(self) -> str: ...
    @property
    def tensor_parallel(self) -> int:
        """The number of ranks of the server."""
        ...

    @property
    def generation(self) -> int:
        """Counts the server's starts. A new start loses the weights, groups and sessions of the earlier one."""
        ...

    def pause(self, *, deadline_seconds: float) -> None:
        """End running requests early, with their tokens so far, and let new requests wait."""
        ...

    def pause_in_place(self, *, deadline_seconds: float) -> None:
        """Let running requests stand still and keep their cache, and let new ones wait."""
        ...

    def resume(self, *, deadline_seconds: float) -> None:
        """Serve requests again."""
        ...

    def flush_cache(self, *, deadline_seconds: float) -> None:
        """Forget all cached prefixes."""
        ...

    def update_from_disk(
        self, path: str, weight_version: int, *, deadline_seconds: float, keeps_cache: bool = False
    ) -> None:
        """Load the Hugging Face folder `path`, and report `weight_version` from then on.

        With `keeps_cache`, cached prefixes of the earlier weights stay.
        """
        ...

    def begin_update(self, *, deadline_seconds: float) -> None:
        """Open the session that `update_from_distributed` needs."""
        ...

    def end_update(self, *, deadline_seconds: float) -> None:
        """Close the session."""
        ...

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
    ) -> None:
        """Make the server's ranks join a process group, as the group's ranks from `rank_offset` on.

        Returns when all `world_size` members have joined.
        """
        ...

    def destroy_group(self, group_name: str, *, deadline_seconds: float) -> None:
        """Make the server's ranks leave the group."""
        ...

    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        deadline_seconds: float,
    ) -> None:
        """Receive the bytes of these tensors, in this order, as one broadcast of uint8 from rank 0 of the group.

        During this call, the caller sends the broadcast from another thread. `dtypes` are names such as "float32".
        """
        ...

    def set_weight_version(self, weight_version: int, *, deadline_seconds: float) -> None:
        """Report `weight_version` from now on."""
        ...

    def weight_version(self, *, deadline_seconds: float) -> int:
        """Return the version that the server reports."""
        ...

    def checksums(self, *, deadline_seconds: float, skip: Sequence[str] = ()) -> list[dict[str, str]]:
        """Return the hash of every tensor as the server holds it (fused, sharded), by name: one mapping per rank.

        The server need not hash tensors whose name contains one of `skip`, and leaves out those that it does not hash.
        """
        ...

    def snapshot(self, *, deadline_seconds: float) -> None:
        """Remember all weights, for `compare`."""
        ...

    def reset_tensors(self, *, deadline_seconds: float) -> None:
        """Overwrite every weight with random numbers."""
        ...

    def compare(self, *, deadline_seconds: float) -> None:
        """Raise PublishError naming the tensors that differ from the snapshot."""
        ...


class Deadline:
    """The time by which a whole transaction must end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    def passed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def left(self, server_id: str) -> float:
        """Return the seconds left for a call to that server. Raises PublishError if none are left."""
        left = self.seconds - self.passed()
        if left <= 0:
            raise PublishError(f"{server_id}: the deadline of {self.seconds:g} s (publish.deadline_seconds) has passed")
        return left


class Fleet:
    """The servers of one transaction: those that still take part (`active`), and why others do not (`failed`).

    Only one thread may use it.
    """

    def __init__(self, servers: Iterable[ServerControl], deadline: Deadline) -> None:
        self.active: list[ServerControl] = list(servers)
        self.failed: dict[str, str] = {}
        self.deadline = deadline
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self.active)), thread_name_prefix="publish")

    def close(self) -> None:
        """End the threads. Calls that are still running end by their own deadlines."""
        self._pool.shutdown(wait=False)

    def fail(self, server: ServerControl, why: str) -> None:
        """Record that the server takes no further part, and why."""
        self.failed[server.server_id] = why
        self.active = [s for s in self.active if s is not server]

    def each(
        self, action: Callable[[ServerControl, float], object], servers: Iterable[ServerControl] | None = None
    ) -> dict[str, object]:
        """Run `action(server, seconds)` at the same time on all active servers, or on the active ones of `servers`.

        Returns the results by server id. A call gets half of the time left, so that there is still time for the others
        after a server that hangs. A server whose action raises a GspoMegaError has failed. Any other exception is a
        defect and is raised.
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


def in_parallel(actions: Sequence[Callable[[], object]]) -> list[GspoMegaError | None]:
    """Run all actions in threads and wait for the last one. Returns the error of each action, or None.

    An exception that is not a GspoMegaError is raised.
    """
    problems: list[Exception | None] = [None] * len(actions)

    def run(number: int, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # raised below, in the caller's thread
            problems[number] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in problems:
        if problem is not None and not isinstance(problem, GspoMegaError):
            raise problem
    return cast("list[GspoMegaError | None]", problems)


def loaded_versions_of(python: str, seconds: float) -> dict[str, str | None]:
    """Return the versions `torch` and `NCCL` of another Python.

    Raises PublishError if it does not report them within `seconds`.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _PRINT_VERSIONS], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        return dict(json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise PublishError(f"{python} does not report its PyTorch and NCCL versions: {error!r}") from error


def loaded_versions() -> dict[str, str | None]:
    """Return the versions `torch` and `NCCL` that this process has loaded. `NCCL` is None if torch has none."""
    import torch
    from torch.cuda import nccl

    known = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {"torch": torch.__version__, "NCCL": ".".join(map(str, nccl.version())) if known else None}


def check_same_versions(folder: Path, trainer: Mapping[str, str | None]) -> None:
    """Compare the trainer with every server that recorded its versions in `folder`. Builds of one release (`+cu130`)
    are equal.

    Raises PublishError naming each server that has another PyTorch or NCCL.
    """
    wrong = []
    for path in sorted(folder.glob("server-*.json")):
        server = read_json(path) or {}
        differing = [name for name in ("torch", "NCCL") if _release(server.get(name)) != _release(trainer.get(name))]
        if differing:
            wrong.append(
                f"{path.stem}: "
                + ", ".join(
                    f"{name} {server.get(name) or '(none)'} where the trainer has {trainer.get(name) or '(none)'}"
                    for name in differing
                )
            )
    if wrong:
        raise PublishError(
            "weights cannot be published by `publish.method: distributed` between different versions of PyTorch or"
            " NCCL:\n  "
            + "\n  ".join(wrong)
            + "\ninstall the same in both Pythons (launch/env/gpu.txt, launch/env/gpu-server.txt), or use"
            " `publish.method: disk`"
        )


def _release(version: str | None) -> str | None:
    return version.partition("+")[0] if version else None
