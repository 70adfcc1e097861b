"""Rank 0's orders to another rank that sends, and that rank's answers, over the host group.

The messages are JSON, sent point to point with their own tag. During a send, one thread per pair of ranks reads them on
each side. `RemoteSender` is rank 0's side, and `serve_send_orders` the other rank's, which carries the orders out with
`broadcast_group.OwnTensors`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gspo_mega.base.errors import PublishError
from gspo_mega.sync.broadcast_group import Listing, MeetingPoint, OwnTensors, PendingBroadcast

if TYPE_CHECKING:
    from gspo_mega.engine.process_groups import RankGroup


_TAG = 1907


class OrderChannel:
    """JSON values between this rank and another one. Several threads may send while it is open; one thread receives."""

    def __init__(self, group: RankGroup, peer: int) -> None:
        """`group` sends CPU tensors. `peer` is the place of the other rank in it."""
        self._group, self._peer = group.group, group.ranks[peer]
        self._lock = threading.Lock()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def send(self, *, last: bool = False, **value: Any) -> None:
        """Send a value. After the `last` one this does nothing, because the other side has stopped reading.

        Raises RuntimeError if the other rank is gone.
        """
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self._lock:
            if self._is_open:
                self._is_open = not last
                dist.send(torch.tensor([payload.numel()]), self._peer, self._group, _TAG)
                dist.send(payload, self._peer, self._group, _TAG)

    def receive(self) -> dict[str, Any]:
        """Wait for the next value and return it. Raises RuntimeError if the other rank is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, self._peer, self._group, _TAG)
        payload = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(payload, self._peer, self._group, _TAG)
        return json.loads(bytes(payload.numpy()))


class _Joining:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.problem: str | None = "no answer"


class RemoteSender:
    """Another rank as a `Sender`, on rank 0. It answers between `start` and `end`. `problem` is what went wrong
    there.
    """

    def __init__(self, rank: int, channel: OrderChannel) -> None:
        self.rank = rank
        self.problem: Exception | None = None
        self._channel = channel
        self._joining: dict[str, _Joining] = {}
        self._sending: dict[int, PendingBroadcast] = {}
        self._num_sent = 0
        self._reading: threading.Thread | None = None
        self._is_gone = False

    def start(self, ready: Callable[[Listing | None], None]) -> None:
        """Begin a send there. `ready` is called with each bucket that the rank has ready, and with None after the
        last.
        """
        self.problem, self._is_gone = None, False
        self._channel.open()
        self._reading = threading.Thread(target=self._read, args=(ready,), daemon=True, name=f"rank-{self.rank}")
        self._reading.start()

    def _read(self, ready: Callable[[Listing | None], None]) -> None:
        try:
            while (what := (answer := self._channel.receive()).pop("what")) != "ended":
                if what == "ready":
                    ready(Listing(**answer))
                elif what == "joined":
                    joining = self._joining.get(answer["name"], _Joining())
                    joining.problem = answer["problem"]
                    joining.ended.set()
                elif what == "sent":
                    problem = answer["problem"]
                    sending = self._sending.pop(answer["number"], None)
                    if sending is not None:  # it may belong to an earlier send, which was cut
                        sending.end(None if problem is None else RuntimeError(problem))
                elif what == "finished":
                    if answer["problem"] is not None:
                        self.problem = PublishError(answer["problem"])
                    ready(None)
            if answer["problem"] is not None:
                raise RuntimeError(f"rank {self.rank}: {answer['problem']}")
        except Exception as error:  # rank 0's main thread raises it
            self.problem = error
        finally:
            self._is_gone = True
            for sending in list(self._sending.values()):
                sending.end(RuntimeError(f"rank {self.rank} no longer sends"))
            for joining in list(self._joining.values()):
                joining.ended.set()
            ready(None)

    def end(self) -> None:
        """End the send there, and wait until the rank has nothing more to say."""
        with contextlib.suppress(RuntimeError):  # the reading thread gets this error too
            self._channel.send(do="end", last=True)
        if self._reading is not None:
            self._reading.join()
        self._joining.clear()
        self._sending.clear()

    def join_group(self, place: MeetingPoint) -> None:
        self._joining[place.name] = _Joining()
        self._channel.send(do="begin", place=asdict(place))

    def wait_joined(self, name: str, seconds: float) -> None:
        joining = self._joining[name]
        while not joining.ended.wait(min(1.0, max(0.0, seconds))) and seconds > 0 and not self._is_gone:
            seconds -= 1.0
        if joining.problem is not None:
            raise RuntimeError(f"rank {self.rank}: {joining.problem}")

    def broadcast(self, name: str) -> PendingBroadcast:
        sending = PendingBroadcast()
        self._num_sent += 1
        self._sending[self._num_sent] = sending
        self._channel.send(do="broadcast", name=name, number=self._num_sent)
        if self._is_gone:
            sending.end(RuntimeError(f"rank {self.rank} no longer sends"))
        return sending

    def cut(self, name: str) -> None:
        self._send_order("cut", name)

    def leave(self, name: str) -> None:
        self._send_order("leave", name)

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._channel.send(do="release")

    def _send_order(self, do: str, name: str) -> None:
        """Send an order without an answer. Between sends nobody listens; at the end a rank leaves its groups by
        itself.
        """
        with contextlib.suppress(RuntimeError):
            self._channel.send(do=do, name=name)


def serve_send_orders(
    own: OwnTensors, channel: OrderChannel, tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int
) -> None:
    """Offer `tensors` in buckets, and carry out rank 0's orders until it sends `end`: the other rank's side of a send.

    tensors: (name, whole tensor of any shape, as servers load it), local. The iterator always runs to its end. If it
    raises PublishError, rank 0 is told, and fails the publish on all ranks. Raises RuntimeError if rank 0 is gone.
    """
    own.open()
    channel.open()
    problems: list[str] = []
    reading = threading.Thread(target=_follow_orders, args=(own, channel, problems), daemon=True, name="orders")
    reading.start()
    problem = None
    try:
        own.offer(tensors, bucket_bytes, lambda listing: channel.send(what="ready", **asdict(listing)))
    except PublishError as error:
        problem = str(error)
    channel.send(what="finished", problem=problem)
    reading.join()
    failed = problems[0] if problems else None
    with contextlib.suppress(RuntimeError):
        channel.send(what="ended", problem=failed, last=True)
    if failed is not None:
        raise RuntimeError(failed)


def _follow_orders(own: OwnTensors, channel: OrderChannel, problems: list[str]) -> None:
    try:
        while (do := (order := channel.receive())["do"]) != "end":
            if do == "begin":
                own.join_group(place := MeetingPoint(**order["place"]))
                _start_thread(_report_joined, own, channel, place)
            elif do == "broadcast":
                _start_thread(_report_sent, channel, _start_broadcast(own, order["name"]), order["number"])
            elif do == "release":
                own.release()
            elif do == "cut":
                own.cut(order["name"])
            else:
                _start_thread(own.leave, order["name"])
    except Exception as error:  # `serve_send_orders` raises it, in the main thread
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        own.end()


def _start_broadcast(own: OwnTensors, name: str) -> PendingBroadcast:
    try:
        return own.broadcast(name)
    except PublishError as error:
        failed = PendingBroadcast()
        failed.end(error)
        return failed


def _start_thread(action: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=action, args=arguments, daemon=True, name=action.__name__).start()


def _report_joined(own: OwnTensors, channel: OrderChannel, place: MeetingPoint) -> None:
    problem = None
    try:
        own.wait_joined(place.name, place.seconds)
    except RuntimeError as error:
        problem = str(error)
    with contextlib.suppress(RuntimeError):
        channel.send(what="joined", name=place.name, problem=problem)


def _report_sent(channel: OrderChannel, sending: PendingBroadcast, number: int) -> None:
    problem = None
    try:
        sending.wait(threading.TIMEOUT_MAX)
    except Exception as error:  # rank 0 gets every error
        problem = str(error)
    with contextlib.suppress(RuntimeError):
        channel.send(what="sent", number=number, problem=problem)
