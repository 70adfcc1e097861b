"""The trainer's side of a process group with servers, and broadcasts through it that can be abandoned.

Owns creating that side, sending through it, and leaving it, in the process of the rank that sends. A broadcast may
never end: NCCL's first broadcast connects the group and returns only when every server has entered it, which a server
that refused or died never does. A group's timeout does not cover this. A broadcast therefore runs in a thread of its
own, which is abandoned if it does not end. `linked_servers.py` has the servers join, `server_groups.py` decides who
shares a group.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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

from gspo_mega.base.errors import PublishError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

LEAVE_SECONDS = 5.0
# Time for the end of a broadcast after the server has confirmed that it received everything.
_LEAST_WAIT_SECONDS = 1.0


class Sending:
    """A broadcast that has not ended, here or at another rank: who starts it calls `end`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._is_cut = False
        self._problem: Exception | None = None

    def end(self, problem: Exception | None = None) -> None:
        """The broadcast has ended, or failed by `problem`."""
        self._problem = problem
        self._ended.set()

    def cut(self) -> None:
        """End every `wait` now, unless the broadcast has ended. What the backend still does with it is abandoned."""
        if not self._ended.is_set():
            self._is_cut = True
            self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait until the tensor is sent. Raises PublishError if that takes over `seconds`, or the group failed."""
        if not self._ended.wait(max(seconds, _LEAST_WAIT_SECONDS)):
            raise PublishError(f"the broadcast has not ended after {seconds:g} s")
        if self._is_cut:
            raise PublishError("the group was cut, because a server in it failed")
        if isinstance(self._problem, RuntimeError):  # torch's error for any failure in a group
            raise PublishError(str(self._problem)) from self._problem
        if self._problem is not None:
            raise self._problem


def _broadcast(
    group: dist.ProcessGroup, tensor: torch.Tensor, stream: torch.cuda.Stream | None, sending: Sending
) -> None:
    problem = None
    try:
        # The stream sets the device, which a new thread does not have. Only this stream waits for a broadcast that
        # does not end, never the trainer's own stream.
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            group.broadcast(tensor, 0).wait()
        if stream is not None:
            stream.synchronize()
    except Exception as error:  # `wait` raises any error
        problem = error.with_traceback(None)  # which would keep the group
    sending.end(problem)


def stream_beside(tensor: torch.Tensor, after: torch.cuda.Stream | None = None) -> torch.cuda.Stream | None:
    """A new stream on the GPU of a local tensor of any shape and dtype, after the current one or `after`; None on a
    CPU.
    """
    if not tensor.is_cuda:
        return None
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_stream(after or torch.cuda.current_stream(tensor.device))
    return stream


@dataclass(frozen=True)
class Place:
    """Where a group's members meet: the store at `address` and `port`. `timeout_seconds` limits one gloo broadcast,
    `seconds` the time to join.
    """

    name: str
    size: int
    backend: str
    address: str
    port: int
    timeout_seconds: float
    seconds: float


class GroupEnd:
    """This process's side of one group, as its first rank. It joins in a thread."""

    def __init__(self, place: Place) -> None:
        self._lock = threading.Lock()
        self._making: _Making | None = _Making(place)
        self._group: dist.ProcessGroup | None = None
        self._sending: Sending | None = None

    def joined(self, seconds: float) -> None:
        """Wait until the group is whole. Raises RuntimeError if it is not after `seconds`."""
        making = self._making
        group = None if making is None else making.result(seconds)
        with self._lock:
            if self._making is not None:
                self._group, self._making = group, None

    def broadcast(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> Sending:
        """Send a local tensor of any shape and dtype to all other members. One at a time; returns at once.

        The caller must not change `tensor` before `wait` returns; on a GPU, `stream` must run after the work that fills
        it. Raises PublishError for a group that was cut.
        """
        with self._lock:
            if self._group is None:
                raise PublishError("the group was cut, because a server in it failed")
            self._sending = sending = Sending()
            arguments = (self._group, tensor, stream, sending)
        threading.Thread(target=_broadcast, args=arguments, daemon=True, name="broadcast").start()
        return sending

    def cut(self) -> None:
        """End unfinished work, as far as the backend can; the group is unusable afterwards."""
        with self._lock:
            group, making, sending = self._group, self._making, self._sending
            self._group = self._making = self._sending = None
        if sending is not None:
            sending.cut()
        if making is not None:
            making.give_up()
        if group is not None:
            # In a thread: aborting may itself wait for the broadcast, and so may dropping the last reference, which
            # closes the connections. Servers that wait for this rank are released by that.
            threading.Thread(target=_abort, args=(group,), daemon=True, name="abort").start()

    def leave(self) -> None:
        """Leave the group; takes a few seconds at most."""
        with self._lock:
            last_reference = [self._group]
            self._group = self._sending = None
        if last_reference[0] is not None:
            leaving = threading.Thread(target=_leave, args=(last_reference[0],), daemon=True, name="leave")
            leaving.start()
            leaving.join(LEAVE_SECONDS)
        # Dropping the last reference waits for the group's unfinished broadcasts: do it in a thread.
        threading.Thread(target=last_reference.clear, daemon=True).start()


class _Making:
    """The trainer's side of a new group, created in a thread: gloo waits for the server, which may refuse to join."""

    def __init__(self, place: Place) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._group: dist.ProcessGroup | None = None
        self._problem: RuntimeError | None = None
        self._is_wanted = True
        threading.Thread(target=self._run, args=(place,), daemon=True, name="join").start()

    def _run(self, place: Place) -> None:
        try:
            store = _join_store(place.address, place.port, place.seconds)
            # SGLang creates its side with the same function, so both agree on the store's keys. torch has no public
            # way to create a group with processes outside this process's world.
            with errors_left_to_us(place.backend):
                group, _ = _new_process_group_helper(
                    place.size,
                    0,
                    [],
                    dist.Backend(place.backend),
                    PrefixStore(place.name, store),
                    group_name=cast("GroupName", place.name),
                    timeout=timedelta(seconds=place.timeout_seconds),
                )
            _world.pg_group_ranks[group] = {rank: rank for rank in range(place.size)}
            with self._lock:
                is_wanted = self._is_wanted
                if is_wanted:
                    self._group = group
            if not is_wanted:
                _leave(group)
        except RuntimeError as error:
            self._problem = error.with_traceback(None)  # which would keep the store
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


def _join_store(address: str, port: int, seconds: float) -> Store:
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]


_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class _Nested:
    """Groups are made in several threads at once: the first of them changes the variable, the last changes it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.before: str | None = None


_nested = _Nested()


@contextlib.contextmanager
def errors_left_to_us(backend: str) -> Iterator[None]:
    """NCCL groups created inside this context do not end the process if a server dies in a broadcast.

    torch's watchdog of a group ends the whole process on an error or a timeout. That is right among the trainer's ranks
    and wrong towards a server. Only the environment, read when a group is created, can change it.
    """
    if backend != "nccl":
        yield
        return
    with _nested.lock:
        if _nested.depth == 0:
            _nested.before = os.environ.get(_HANDLING)
            os.environ[_HANDLING] = "0"
        _nested.depth += 1
    try:
        yield
    finally:
        with _nested.lock:
            _nested.depth -= 1
            if _nested.depth == 0:
                if _nested.before is None:
                    del os.environ[_HANDLING]
                else:
                    os.environ[_HANDLING] = _nested.before


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(
        RuntimeError, ValueError
    ):  # the group may have failed with the server, or may already have been left
        _abort_process_group(group)


def _leave(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)
