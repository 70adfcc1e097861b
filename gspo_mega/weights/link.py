"""The process group of the trainer's rank 0 and one server, and broadcasts through it that can be abandoned.

Owns creating such a group, sending through it, and leaving it. A broadcast may never end: NCCL's first broadcast
connects the group and returns only when the server has entered it, which a server that refused or died never does. A
group's timeout does not cover this. A broadcast therefore runs in a thread of its own, which is abandoned if it does
not end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from gspo_mega.errors import GspoMegaError, PublishError
from gspo_mega.weights.servers import ServerControl

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_LEAVE_SECONDS = 5.0
# Time for the end of a broadcast after the server has confirmed that it received everything.
_LEAST_WAIT_SECONDS = 1.0


class Broadcast:
    """An unfinished broadcast of tensors through one group."""

    def __init__(
        self, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None
    ) -> None:
        """Returns at once. The caller must not change `tensors` before `wait` returns; on a GPU, `stream` must run
        after the work that fills them.
        """
        self._ended = threading.Event()
        self._problem: Exception | None = None
        threading.Thread(target=self._run, args=(group, tensors, stream), daemon=True, name="broadcast").start()

    def _run(self, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        try:
            # The stream sets the device, which a new thread does not have. Only this stream waits for a broadcast that
            # does not end, never the trainer's own stream.
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                for work in [group.broadcast(tensor, 0) for tensor in tensors]:
                    work.wait()
            if stream is not None:
                stream.synchronize()
        except Exception as error:  # `wait` raises any error
            self._problem = error
        finally:
            self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait until all tensors are sent. Raises PublishError if that takes over `seconds`, or the group failed."""
        if not self._ended.wait(max(seconds, _LEAST_WAIT_SECONDS)):
            raise PublishError(f"the broadcast has not ended after {seconds:g} s")
        if isinstance(self._problem, RuntimeError):  # torch's error for any failure in a group
            raise PublishError(str(self._problem)) from self._problem
        if self._problem is not None:
            raise self._problem


def stream_beside(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """A new stream on the GPU of a local tensor of any shape and dtype, after the current one; None on a CPU."""
    if not tensor.is_cuda:
        return None
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    return stream


class Link:
    """The group of the trainer's rank 0 and one server process (generation); rank 0 is its first rank."""

    def __init__(
        self, server: ServerControl, address: str, backend: str, timeout_seconds: float, seconds: float
    ) -> None:
        """`timeout_seconds` limits one gloo broadcast. Raises GspoMegaError if the server does not join within
        `seconds`.
        """
        self.server = server
        self.generation = server.generation
        # Servers identify groups by name and may outlive a trainer, so the name is random.
        self.name = f"weights-{secrets.token_hex(8)}"
        self._aborted = False
        until = time.monotonic() + seconds
        size = 1 + server.tensor_parallel
        # The store listens on the job's own address only.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = listener.getsockname()[1]
        # Documented under this name, and marked as private by the package's annotations.
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        making = _Making(self.name, size, backend, store, timeout_seconds)
        try:
            server.init_group(
                master_address=address,
                master_port=port,
                rank_offset=1,
                world_size=size,
                group_name=self.name,
                backend=backend,
                deadline_seconds=seconds,
            )
            self._group = making.result(until - time.monotonic())
        except RuntimeError as error:
            making.give_up()
            raise PublishError(
                f"{server.server_id}: reports that it joined the weight group, but is not in it: {error}"
            ) from error
        except BaseException:
            making.give_up()
            raise

    def broadcast(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> Broadcast:
        """Send `tensors` (whole, any shape and dtype, on rank 0), in this order, to all ranks of the server."""
        return Broadcast(self._group, tensors, stream)

    def abort(self) -> None:
        """Cut the group's unfinished work, as far as its backend can; the link is unusable afterwards."""
        if not self._aborted:
            self._aborted = True
            # In a thread: aborting may itself wait for the broadcast.
            threading.Thread(target=_abort, args=(self._group,), daemon=True, name="abort").start()

    def close(self) -> None:
        """Leave the group on both sides; a server that is dead or hangs delays this by a few seconds at most."""
        if self.generation == self.server.generation:
            with contextlib.suppress(GspoMegaError):  # the server's failure may be why the link is closed
                self.server.destroy_group(self.name, deadline_seconds=_LEAVE_SECONDS)
        if not self._aborted:
            self._aborted = True
            leaving = threading.Thread(target=_leave, args=(self._group,), daemon=True, name="leave")
            leaving.start()
            leaving.join(_LEAVE_SECONDS)
        # Dropping the last reference waits for the group's unfinished broadcasts: do it in a thread.
        last_reference = [self._group]
        del self._group
        threading.Thread(target=last_reference.clear, daemon=True).start()


class _Making:
    """The trainer's side of a new group, created in a thread: gloo waits for the server, which may refuse to join."""

    def __init__(self, name: str, size: int, backend: str, store: Store, timeout_seconds: float) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._group: dist.ProcessGroup | None = None
        self._problem: RuntimeError | None = None
        self._is_wanted = True
        threading.Thread(
            target=self._run, args=(name, size, backend, store, timeout_seconds), daemon=True, name="join"
        ).start()

    def _run(self, name: str, size: int, backend: str, store: Store, timeout_seconds: float) -> None:
        try:
            # SGLang creates its side with the same function, so both agree on the store's keys. torch has no public
            # way to create a group with processes outside this process's world.
            with errors_left_to_us(backend):
                group, _ = _new_process_group_helper(
                    size,
                    0,
                    [],
                    dist.Backend(backend),
                    PrefixStore(name, store),
                    group_name=cast("GroupName", name),
                    timeout=timedelta(seconds=timeout_seconds),
                )
            _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
            with self._lock:
                is_wanted = self._is_wanted
                if is_wanted:
                    self._group = group
            if not is_wanted:
                _leave(group)
        except RuntimeError as error:
            self._problem = error
        finally:
            self._ended.set()

    def result(self, seconds: float) -> dist.ProcessGroup:
        """The group. Raises RuntimeError if there is none after `seconds`."""
        self._ended.wait(max(0.0, seconds))
        if self._group is None:
            raise self._problem or RuntimeError("no answer")
        return self._group

    def give_up(self) -> None:
        """Leave the group, now or as soon as it exists."""
        with self._lock:
            self._is_wanted = False
            group, self._group = self._group, None
        if group is not None:
            _leave(group)


@contextlib.contextmanager
def errors_left_to_us(backend: str) -> Iterator[None]:
    """NCCL groups created inside this context do not end the process if a server dies in a broadcast.

    torch's watchdog of a group ends the whole process on an error or a timeout. That is right among the trainer's ranks
    and wrong towards a server. Only the environment, read when a group is created, can change it.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if backend != "nccl":
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(
        RuntimeError, ValueError
    ):  # the group may have failed with the server, or may already have been left
        _abort_process_group(group)


def _leave(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)
