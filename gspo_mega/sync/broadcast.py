"""Sending tensors to servers through process groups that the servers join: method `distributed`.

Owns which rank sends when, the order of what the groups carry, and what a server that fails in between does to the
others. Every rank that owns tensors sends them itself (`senders.py`); rank 0 makes the requests to the servers. A
server receives one bucket at a time and blocks until it has it, so ranks go in turn: what is ready first goes first,
and the next buckets are gathered meanwhile, by this rank and by others.

All servers share one group with each rank that sends (`server_groups.py`), so what leaves a rank does not grow with
their number. A server that refuses, hangs or dies in a broadcast breaks it for all: each of them then gets that bucket
through a group of its own, which shows who failed, and the others share a new group for what follows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from gspo_mega.base.errors import GspoMegaError, PublishError
from gspo_mega.sync.buckets import Listing
from gspo_mega.sync.link import Sending
from gspo_mega.sync.linked_servers import Link
from gspo_mega.sync.other_rank import OtherRank
from gspo_mega.sync.senders import OwnTensors, Sender
from gspo_mega.sync.server_groups import ServerGroups
from gspo_mega.sync.servers import Fleet, ServerControl, in_parallel

_CLEAN_UP_SECONDS = 5.0
# Groups that break, or are not joined, this often in one send are given up for its rest.
_MAX_BREAKS = 2


@dataclass
class _Send:
    """One send. `num_breaks`: shared groups that broke in it; `not_made`: the groups' count when it began."""

    fleet: Fleet
    servers: list[ServerControl]
    not_made: int
    num_breaks: int = 0
    problem: BaseException | None = None


@dataclass
class _Delivery:
    """One bucket on its way through some groups. `refused`: what each server of a shared group that broke says."""

    links: dict[str, Link]
    sending: dict[str, Sending]
    refused: dict[str, str] = field(default_factory=dict)


class GroupSender:
    """Rank 0's side of sending through groups. `bytes_by_rank` counts what each rank has given to groups, in all
    sends.
    """

    def __init__(
        self,
        address: str,
        backend: str,
        bucket_bytes: int,
        timeout_seconds: float,
        servers_per_group: int | None = None,
        own: OwnTensors | None = None,
        others: Sequence[OtherRank] = (),
    ) -> None:
        """`address`: this machine, as the servers and other ranks reach it. `backend`: gloo, or nccl between GPUs.
        `servers_per_group`: how many servers share a group, None for all. `others`: the ranks that send besides.
        """
        self._bucket_bytes = bucket_bytes
        self._groups = ServerGroups(address, backend, timeout_seconds, servers_per_group)
        self._own = own or OwnTensors(0)
        self._others = tuple(others)
        self.bytes_by_rank: Counter[int] = Counter()

    @property
    def num_bytes_sent(self) -> int:
        """What all ranks have given to groups, in all sends."""
        return self.bytes_by_rank.total()

    def send(
        self,
        fleet: Fleet,
        servers: list[ServerControl],
        tensors: Iterator[tuple[str, torch.Tensor]],
        weight_version: int,
    ) -> None:
        """Send all tensors to `servers`, in one update session each; servers that fail leave the fleet.

        tensors: (name, whole tensor of any shape, as servers load it), those that rank 0 owns. The iterator always runs
        to its end: other ranks take part in producing it. It is advanced to the next bucket while a bucket is sent.
        Other ranks must be in `other_rank.obey`. Raises what they fail with.
        """
        send = _Send(fleet, servers, self._groups.num_not_made)
        ready: SimpleQueue[tuple[Sender, Listing | None]] = SimpleQueue()
        self._own.open()
        for other in self._others:
            other.start(partial(_put, ready, other))
        try:
            try:
                self._groups.connect(self._own, fleet, servers)
                fleet.each(lambda s, left: s.begin_update(deadline_seconds=left), servers)
                beside = threading.Thread(target=self._send_ready, args=(send, ready), daemon=True, name="publish")
                beside.start()
                try:
                    self._own.offer(tensors, self._bucket_bytes, partial(_put, ready, self._own))
                finally:
                    ready.put((self._own, None))
                    beside.join()
            finally:
                for _ in tensors:
                    pass
            if send.problem is not None:
                raise send.problem
            for other in self._others:
                if other.problem is not None:
                    raise other.problem
            fleet.each(lambda s, left: s.end_update(deadline_seconds=left), servers)
            fleet.each(lambda s, left: s.set_weight_version(weight_version, deadline_seconds=left), servers)
            failed = [server for server in servers if server.server_id in fleet.failed]
            in_parallel([partial(_end_session, server) for server in failed])
            self._groups.tidy(failed)
        finally:
            self._own.end()
            in_parallel([other.end for other in self._others])

    def close(self) -> None:
        """Leave all groups. Other ranks leave theirs by themselves."""
        self._groups.close()

    def _send_ready(self, send: _Send, ready: SimpleQueue[tuple[Sender, Listing | None]]) -> None:
        """Send what senders have ready until none of them has more. What fails here is raised in the main thread; ranks
        then go on to the end of their gathers without sending.
        """
        unfinished: set[int] = {self._own.rank, *(other.rank for other in self._others)}
        while unfinished:
            sender, listing = ready.get()
            if listing is None:
                unfinished.discard(sender.rank)
                continue
            try:
                if send.problem is None and all(other.problem is None for other in self._others):
                    self._send_bucket(send, sender, listing)
            except BaseException as error:
                send.problem = error
            sender.release()

    def _send_bucket(self, send: _Send, sender: Sender, listing: Listing) -> None:
        alone = send.num_breaks + self._groups.num_not_made - send.not_made >= _MAX_BREAKS
        links = self._groups.connect(sender, send.fleet, send.servers, alone)
        delivery = self._deliver(send.fleet, links, sender, listing)
        if delivery.refused:
            # Who failed, and who only shared a group with it? By itself, each says so.
            send.num_breaks += 1
            again = [s for s in send.servers if s in send.fleet.active and s.server_id in delivery.refused]
            links = self._groups.connect(sender, send.fleet, again, alone=True)
            self._deliver(send.fleet, links, sender, listing)

    def _deliver(self, fleet: Fleet, links: list[Link], sender: Sender, listing: Listing) -> _Delivery:
        """Send to the servers of `links`. A server that fails in a group of its own leaves the fleet."""
        by_server = {server.server_id: link for link in links for server in link.servers}
        delivery = _Delivery(by_server, {})
        # NCCL's first broadcast returns only when all servers have entered it, which they do within the requests: a
        # broadcast runs beside them.
        for link in links:
            delivery.sending[link.name] = link.broadcast()
            self.bytes_by_rank[sender.rank] += listing.num_bytes
        targets = [server for server in fleet.active if server.server_id in by_server]
        fleet.each(partial(_update, delivery, listing), targets)
        return delivery


def _put(ready: SimpleQueue[tuple[Sender, Listing | None]], sender: Sender, listing: Listing | None) -> None:
    ready.put((sender, listing))


def _update(delivery: _Delivery, listing: Listing, server: ServerControl, seconds: float) -> None:
    """Have one server receive the bucket. Raises PublishError in a group of its own; in a shared one it is noted."""
    link, until = delivery.links[server.server_id], time.monotonic() + seconds
    names = listing.names
    try:
        try:
            server.update_from_distributed(names, listing.dtypes, listing.shapes, link.name, deadline_seconds=seconds)
        except PublishError as error:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise PublishError(f"{error} (sent were {', '.join(names[:3])}{more})") from error
        try:
            delivery.sending[link.name].wait(until - time.monotonic())
        except PublishError as error:
            raise PublishError(
                f"{server.server_id}: reports that it received {names[0]} and following tensors, but the"
                f" broadcast did not finish: {error}"
            ) from error
    except GspoMegaError as error:
        link.abort(server)
        if len(link.servers) == 1:
            raise
        delivery.refused[server.server_id] = str(error)
    except BaseException:
        link.abort(server)
        raise


def _end_session(server: ServerControl) -> None:
    """So that a server which recovers by itself can be published to again."""
    with contextlib.suppress(GspoMegaError):  # the session may not be open; the server may be dead
        server.end_update(deadline_seconds=_CLEAN_UP_SECONDS)
