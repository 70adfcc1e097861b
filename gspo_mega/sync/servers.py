"""What publishing needs from a rollout server, and how one operation runs on several servers at the same time.

Owns the protocol that a server's control fulfils (`gspo_mega.rollout.client.server_control` for SGLang), deadlines, and
collecting the servers' failures. No HTTP here.

Do the servers have the trainer's PyTorch and NCCL? Weights sent through NCCL's groups require it.

Owns a Python's report of its versions, and its comparison with those that servers recorded in the attempt's folder. The
check runs before the first publish; NCCL's own refusal ("Mismatched NCCL version") would come only after a whole step.
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

_ASK = "import json; from gspo_mega.sync.servers import here; print(json.dumps(here()))"


def ask(python: str, seconds: float) -> dict[str, str | None]:
    """The versions `torch` and `NCCL` of another Python. Raises PublishError if it does not report them within
    `seconds`.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        return dict(json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise PublishError(f"{python} does not report its PyTorch and NCCL versions: {error!r}") from error


def here() -> dict[str, str | None]:
    """The versions `torch` and `NCCL` of this process."""
    import torch
    from torch.cuda import nccl

    known = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {"torch": torch.__version__, "NCCL": ".".join(map(str, nccl.version())) if known else None}


def check_same(folder: Path, trainer: Mapping[str, str | None]) -> None:
    """Compare the trainer with every server that recorded its versions. Builds of one release (`+cu130`) are equal.

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


class ServerControl(Protocol):
    """One server. Methods block, and raise PublishError (or another GspoMegaError) naming the server when it refuses,
    fails, or does not answer within `deadline_seconds`. They are called from several threads, one call per server at a
    time.
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
        """Let running requests stand still, over the cache that they have, and new ones wait."""
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
        """Load the Hugging Face folder `path`, and report `weight_version` from then on. `keeps_cache`: cached prefixes
        of the earlier weights stay.
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
        """Have the server's ranks join a process group, as its ranks from `rank_offset` on. Returns when all
        `world_size` members have joined.
        """
        ...

    def destroy_group(self, group_name: str, *, deadline_seconds: float) -> None:
        """Have the server's ranks leave the group."""
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
        """Receive the bytes of these tensors, one after the other in this order, as one broadcast of uint8 from rank 0
        of the group, which the caller sends meanwhile from another thread. `dtypes` are names such as "float32".
        """
        ...

    def set_weight_version(self, weight_version: int, *, deadline_seconds: float) -> None:
        """Report `weight_version` from now on."""
        ...

    def weight_version(self, *, deadline_seconds: float) -> int:
        """The version that the server reports."""
        ...

    def checksums(self, *, deadline_seconds: float) -> list[dict[str, str]]:
        """The hash of every tensor by its name, as the server holds it (fused, sharded): one mapping per rank."""
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
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self, server_id: str) -> float:
        """Seconds left, for a call of that server. Raises PublishError when none are left."""
        left = self.seconds - self.passed()
        if left <= 0:
            raise PublishError(f"{server_id}: the deadline of {self.seconds:g} s (publish.deadline_seconds) has passed")
        return left


class Fleet:
    """The servers of one transaction: those that still take part (`active`), and why others do not (`failed`). Used by
    one thread.
    """

    def __init__(self, servers: Iterable[ServerControl], deadline: Deadline) -> None:
        self.active: list[ServerControl] = list(servers)
        self.failed: dict[str, str] = {}
        self.deadline = deadline
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self.active)), thread_name_prefix="publish")

    def close(self) -> None:
        """End the threads. Calls that still run end by their own deadlines."""
        self._pool.shutdown(wait=False)

    def fail(self, server: ServerControl, why: str) -> None:
        """The server takes no further part."""
        self.failed[server.server_id] = why
        self.active = [s for s in self.active if s is not server]

    def each(
        self, action: Callable[[ServerControl, float], object], servers: Iterable[ServerControl] | None = None
    ) -> dict[str, object]:
        """Run `action(server, seconds)` on all active servers, or on those of `servers`, at the same time; results by
        server id.

        A call gets half of the time left, so that the others still have time after a server that hangs. A server whose
        action raises a GspoMegaError has failed; any other exception is a defect and is raised.
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
    """Run all actions in threads and wait for the last; their errors. An exception of another kind is raised."""
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
