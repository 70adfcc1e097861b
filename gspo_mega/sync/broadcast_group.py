"""The sending rank's side of method `distributed`, in its own process.

`Sender` is the protocol by which rank 0 orders a rank to send, and `OwnTensors` implements it: it holds the next bucket
of tensors and this rank's side of the groups. Rank 0 decides when a bucket is sent and to whom (`broadcast.py`);
`remote_sender.py` carries its orders to another process. A bucket is the bytes of consecutive tensors.

`BroadcastGroup` is this rank's side of one group with servers. A broadcast may never end: NCCL's first broadcast
connects the group and returns only when every server has entered it, and a server that refused or died never does. A
group's timeout does not cover this. Therefore each broadcast runs in its own thread, which is abandoned if it does not
end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

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
from gspo_mega.checkpoint.hf_export import DTYPE_NAMES
from gspo_mega.sync.verify import loads_with

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

LEAVE_SECONDS = 5.0
# A broadcast has at least this time to end after the server has confirmed that it received everything.
_LEAST_WAIT_SECONDS = 1.0
# Records of what changed (`delta.py`) are bytes.
_DTYPE_NAMES = {**DTYPE_NAMES, torch.uint8: "uint8"}
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

Bucket = list[tuple[str, torch.Tensor]]


class Sender(Protocol):
    """One rank that sends. Several threads of rank 0 call these methods. Only `wait_joined` waits."""

    @property
    def rank(self) -> int:
        """Its global rank."""
        ...

    def join_group(self, place: MeetingPoint) -> None:
        """Start to join the group at `place`, as its first rank."""
        ...

    def wait_joined(self, name: str, seconds: float) -> None:
        """Wait until all members of that group have joined. Raises RuntimeError if they have not after `seconds`."""
        ...

    def broadcast(self, name: str) -> PendingBroadcast:
        """Start to send the bucket that is ready through the group."""
        ...

    def cut(self, name: str) -> None:
        """End the group's unfinished work. The group is unusable afterwards."""
        ...

    def leave(self, name: str) -> None:
        """Leave the group."""
        ...

    def release(self) -> None:
        """Record that all receivers have the bucket, so the next one may be made ready."""
        ...


class OwnTensors:
    """This process's own rank as a `Sender`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._groups: dict[str, BroadcastGroup] = {}
        self._message: BucketMessage | None = None
        self._changed = threading.Condition()
        self._is_over = False

    def join_group(self, place: MeetingPoint) -> None:
        self._groups[place.name] = BroadcastGroup(place)

    def wait_joined(self, name: str, seconds: float) -> None:
        if (group := self._groups.get(name)) is None:
            raise RuntimeError(f"rank {self.rank} has left the group")
        group.wait_joined(seconds)

    def broadcast(self, name: str) -> PendingBroadcast:
        message, group = self._message, self._groups.get(name)
        if message is None or group is None:
            raise PublishError(f"rank {self.rank} has no bucket ready, or has left the group")
        return group.broadcast(message.content, new_stream_after(message.content, message.stream))

    def cut(self, name: str) -> None:
        if (group := self._groups.get(name)) is not None:
            group.cut()

    def leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.leave()

    def release(self) -> None:
        with self._changed:
            self._message = None
            self._changed.notify_all()

    def open(self) -> None:
        """Begin a send. `offer` may follow."""
        self._is_over = False

    def offer(
        self, tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int, ready: Callable[[Listing], None]
    ) -> None:
        """Make buckets of `tensors`, and call `ready` with each one when the one before it is released.

        The next bucket is gathered while one is sent. Returns when the last one is ready, or after `end`. The iterator
        always runs to its end, because other ranks take part in it.

        tensors: (name, whole tensor of any shape, as servers load it), local.
        """
        try:
            for bucket in buckets(tensors, bucket_bytes):
                message = BucketMessage(bucket)
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
        """End the send: no bucket is wanted any more."""
        with self._changed:
            self._is_over, self._message = True, None
            self._changed.notify_all()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Yield consecutive tensors in lists of at most `bucket_bytes`. A larger tensor has a list of its own.

    tensors: (name, whole tensor of any shape and dtype), local. If the server can load a tensor only together with the
    one before it, both are in the same bucket at any size.
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
    """Return the bytes of whole tensors of any shape and dtype, one after the other: [bytes] uint8, on their device.

    One broadcast of bytes replaces one broadcast per tensor, and carries dtypes that a backend does not know (gloo has
    no FP8). The result of a single tensor shares its memory.
    """
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Listing:
    """What rank 0 tells a server before it receives a bucket. `num_bytes` is the size of the whole bucket."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    num_bytes: int


class BucketMessage:
    """One bucket as servers receive it: the listing in a request, and the bytes of all its tensors in a broadcast."""

    def __init__(self, bucket: Bucket) -> None:
        # With larger elements first, each tensor's bytes begin at a multiple of its element's size.
        bucket = sorted(bucket, key=lambda named: -named[1].element_size())
        self.content = flattened([tensor for _, tensor in bucket])
        self.stream = new_stream_after(self.content)
        self.listing = Listing(
            [name for name, _ in bucket],
            [_DTYPE_NAMES[tensor.dtype] for _, tensor in bucket],
            [list(tensor.shape) for _, tensor in bucket],
            self.content.numel(),
        )


@dataclass(frozen=True)
class MeetingPoint:
    """Where a group's members meet: the store at `address` and `port`.

    `timeout_seconds` limits one gloo broadcast, and `seconds` the time to join.
    """

    name: str
    size: int
    backend: str
    address: str
    port: int
    timeout_seconds: float
    seconds: float


class PendingBroadcast:
    """A broadcast that has not ended, from this rank or another one. The code that starts it calls `end`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._is_cut = False
        self._problem: Exception | None = None

    def end(self, problem: Exception | None = None) -> None:
        """Record that the broadcast has ended, or failed with `problem`."""
        self._problem = problem
        self._ended.set()

    def cut(self) -> None:
        """End every `wait` now, unless the broadcast has ended. The backend's unfinished work is abandoned."""
        if not self._ended.is_set():
            self._is_cut = True
            self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait until the tensor is sent. Raises PublishError after `seconds`, or if the group failed."""
        if not self._ended.wait(max(seconds, _LEAST_WAIT_SECONDS)):
            raise PublishError(f"the broadcast has not ended after {seconds:g} s")
        if self._is_cut:
            raise PublishError("the group was cut, because a server in it failed")
        if isinstance(self._problem, RuntimeError):  # torch's error for any failure in a group
            raise PublishError(str(self._problem)) from self._problem
        if self._problem is not None:
            raise self._problem


class BroadcastGroup:
    """This process's side of one group, as its first rank. It joins in a thread."""

    def __init__(self, place: MeetingPoint) -> None:
        self._lock = threading.Lock()
        self._creation: _GroupCreation | None = _GroupCreation(place)
        self._group: dist.ProcessGroup | None = None
        self._sending: PendingBroadcast | None = None

    def wait_joined(self, seconds: float) -> None:
        """Wait until all members have joined. Raises RuntimeError if they have not after `seconds`."""
        creation = self._creation
        group = None if creation is None else creation.result(seconds)
        with self._lock:
            if self._creation is not None:
                self._group, self._creation = group, None

    def broadcast(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> PendingBroadcast:
        """Start to send a local tensor of any shape and dtype to all other members, and return at once. One at a time.

        The caller must not change `tensor` before `wait` returns. On a GPU, `stream` must run after the work that fills
        the tensor. Raises PublishError if the group was cut.
        """
        with self._lock:
            if self._group is None:
                raise PublishError("the group was cut, because a server in it failed")
            self._sending = sending = PendingBroadcast()
            arguments = (self._group, tensor, stream, sending)
        threading.Thread(target=_broadcast, args=arguments, daemon=True, name="broadcast").start()
        return sending

    def cut(self) -> None:
        """End unfinished work, as far as the backend can. The group is unusable afterwards."""
        with self._lock:
            group, creation, sending = self._group, self._creation, self._sending
            self._group = self._creation = self._sending = None
        if sending is not None:
            sending.cut()
        if creation is not None:
            creation.give_up()
        if group is not None:
            # In a thread, because aborting may itself wait for the broadcast, and so may dropping the last reference.
            # That closes the connections, which releases servers that wait for this rank.
            threading.Thread(target=_abort, args=(group,), daemon=True, name="abort").start()

    def leave(self) -> None:
        """Leave the group. This takes a few seconds at most."""
        with self._lock:
            last_reference = [self._group]
            self._group = self._sending = None
        if last_reference[0] is not None:
            leaving = threading.Thread(target=_leave, args=(last_reference[0],), daemon=True, name="leave")
            leaving.start()
            leaving.join(LEAVE_SECONDS)
        # In a thread, because dropping the last reference waits for the group's unfinished broadcasts.
        threading.Thread(target=last_reference.clear, daemon=True).start()


def _broadcast(
    group: dist.ProcessGroup, tensor: torch.Tensor, stream: torch.cuda.Stream | None, sending: PendingBroadcast
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
        problem = error.with_traceback(None)  # the traceback would keep the group alive
    sending.end(problem)


def new_stream_after(tensor: torch.Tensor, after: torch.cuda.Stream | None = None) -> torch.cuda.Stream | None:
    """Return a new stream on the GPU of a local tensor of any shape and dtype, or None on a CPU.

    The stream's work begins after that of the current stream, or of the stream `after`.
    """
    if not tensor.is_cuda:
        return None
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_stream(after or torch.cuda.current_stream(tensor.device))
    return stream


class _GroupCreation:
    """Creates the trainer's side of a group in a thread, because gloo waits for servers, which may refuse to join."""

    def __init__(self, place: MeetingPoint) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._group: dist.ProcessGroup | None = None
        self._problem: RuntimeError | None = None
        self._is_wanted = True
        threading.Thread(target=self._run, args=(place,), daemon=True, name="join").start()

    def _run(self, place: MeetingPoint) -> None:
        try:
            store = _join_store(place.address, place.port, place.seconds)
            # SGLang creates its side with the same function, so both agree on the store's keys. torch has no public
            # way to create a group with processes outside this process's world.
            with no_nccl_abort(place.backend):
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
            self._problem = error.with_traceback(None)  # the traceback would keep the store alive
        finally:
            self._ended.set()

    def result(self, seconds: float) -> dist.ProcessGroup:
        """Return the group. Raises RuntimeError if there is none after `seconds`."""
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


class _EnvironmentChange:
    """Several threads create groups at once: the first one changes the variable, and the last one changes it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.before: str | None = None


_environment_change = _EnvironmentChange()


@contextlib.contextmanager
def no_nccl_abort(backend: str) -> Iterator[None]:
    """NCCL groups created inside this context do not end the process if a server dies in a broadcast.

    torch's watchdog of a group ends the whole process on an error or a timeout. That is right among the trainer's
    ranks, but wrong in a group with servers. Only an environment variable, read when a group is created, can change it.
    """
    if backend != "nccl":
        yield
        return
    with _environment_change.lock:
        if _environment_change.depth == 0:
            _environment_change.before = os.environ.get(_HANDLING)
            os.environ[_HANDLING] = "0"
        _environment_change.depth += 1
    try:
        yield
    finally:
        with _environment_change.lock:
            _environment_change.depth -= 1
            if _environment_change.depth == 0:
                if _environment_change.before is None:
                    del os.environ[_HANDLING]
                else:
                    os.environ[_HANDLING] = _environment_change.before


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(
        RuntimeError, ValueError
    ):  # the group may have failed with the server, or may already have been left
        _abort_process_group(group)


def _leave(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)
