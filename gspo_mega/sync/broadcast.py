"""Rank 0's side of sending tensors through process groups that the servers join: method `distributed`.

`GroupSender` decides which rank sends when. At most `publish.max_senders` of the ranks that own tensors send
(`broadcast_group.py`); the others hand their tensors to them. Rank 0 makes the requests to the servers. A server
receives one bucket at a time and blocks until it has it, so ranks take turns: the bucket that is ready first goes
first. While it is sent, this rank and others gather their next ones.

`ServerGroups` decides which servers share a group with a sending rank, and keeps the groups from one publish to the
next. By default all servers share one group, so the bytes that leave a rank do not grow with the number of servers.
Every sending rank has its own groups, because only the first rank of a group sends in it. A server that refuses, hangs
or dies in a broadcast breaks it for all. Each server then gets that bucket through a group of its own, which shows
which one failed, and the servers that did not fail share a new group for the rest.

`ServerGroup` is one group: the servers and the sender join it through a store of rank 0.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate
from queue import SimpleQueue

import torch
import torch.distributed as dist

from gspo_mega.base.errors import GspoMegaError, PublishError
from gspo_mega.sync.broadcast_group import LEAVE_SECONDS, Listing, MeetingPoint, OwnTensors, PendingBroadcast, Sender
from gspo_mega.sync.remote_sender import RemoteSender
from gspo_mega.sync.servers import Fleet, ServerControl, in_parallel

# How much later than the first server another one may come to a group.
_LATE_SECONDS = 3.0
# A healthy server joins in well under a second; an unhealthy one must not use up the whole deadline.
_JOIN_SECONDS = 60.0
_CLEAN_UP_SECONDS = 5.0
# If shared groups break, or are not joined, this often in one send, the rest of the send uses a group per server.
_MAX_BREAKS = 2

Member = tuple[str, int]
"""A server process: the server's id and its generation, which counts its starts."""


@dataclass
class _SendState:
    """One send. `num_breaks` counts the shared groups that broke in it. `not_made` is `ServerGroups.num_not_made` when
    it began.
    """

    fleet: Fleet
    servers: list[ServerControl]
    not_made: int
    num_breaks: int = 0
    problem: BaseException | None = None


@dataclass
class _Delivery:
    """One bucket on its way through some groups. If a shared group breaks, `refused` has the error of each server in
    it.
    """

    links: dict[str, ServerGroup]
    sending: dict[str, PendingBroadcast]
    refused: dict[str, str] = field(default_factory=dict)


def _nothing(_: str) -> None:
    """A note that nobody keeps."""


class GroupSender:
    """Rank 0's side of sending. `bytes_by_rank` counts the bytes that each rank has given to groups, over all sends."""

    def __init__(
        self,
        address: str,
        backend: str,
        bucket_bytes: int,
        timeout_seconds: float,
        servers_per_group: int | None = None,
        own: OwnTensors | None = None,
        others: Sequence[RemoteSender] = (),
        note_group: Callable[[str], object] = _nothing,
    ) -> None:
        """`address` is this machine as the servers and other ranks reach it. `backend` is gloo, or nccl between GPUs.
        `servers_per_group` says how many servers share a group; None means all. `others` are the other sending ranks.
        `note_group` gets the name of each group before a server is asked to join it.
        """
        self._bucket_bytes = bucket_bytes
        self._groups = ServerGroups(address, backend, timeout_seconds, servers_per_group, note_group)
        self._own = own or OwnTensors(0)
        self._others = tuple(others)
        self.bytes_by_rank: Counter[int] = Counter()

    @property
    def num_bytes_sent(self) -> int:
        """The bytes that all ranks have given to groups, over all sends."""
        return self.bytes_by_rank.total()

    def send(
        self,
        fleet: Fleet,
        servers: list[ServerControl],
        tensors: Iterator[tuple[str, torch.Tensor]],
        weight_version: int,
    ) -> None:
        """Send all tensors to `servers`, in one update session per server. Servers that fail leave the fleet.

        tensors: (name, whole tensor of any shape, as servers load it), those that rank 0 owns. The iterator always runs
        to its end, because other ranks take part in producing it. While a bucket is sent, the iterator is advanced to
        the next one. Other ranks must be in `remote_sender.serve_send_orders`. Raises their errors.
        """
        send = _SendState(fleet, servers, self._groups.num_not_made)
        ready: SimpleQueue[tuple[Sender, Listing | None]] = SimpleQueue()
        self._own.open()
        for other in self._others:
            other.start(partial(_announce, ready, other))
        try:
            try:
                self._groups.connect(self._own, fleet, servers)
                fleet.each(lambda s, left: s.begin_update(deadline_seconds=left), servers)
                sending = threading.Thread(target=self._send_ready, args=(send, ready), daemon=True, name="publish")
                sending.start()
                try:
                    self._own.offer(tensors, self._bucket_bytes, partial(_announce, ready, self._own))
                finally:
                    ready.put((self._own, None))
                    sending.join()
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

    def _send_ready(self, send: _SendState, ready: SimpleQueue[tuple[Sender, Listing | None]]) -> None:
        """Send the buckets that senders have ready, until none of them has more.

        The main thread raises an error from here. The ranks then run their gathers to the end without sending.
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

    def _send_bucket(self, send: _SendState, sender: Sender, listing: Listing) -> None:
        alone = send.num_breaks + self._groups.num_not_made - send.not_made >= _MAX_BREAKS
        links = self._groups.connect(sender, send.fleet, send.servers, alone)
        delivery = self._deliver(send.fleet, links, sender, listing)
        if delivery.refused:
            # Which server failed, and which only shared a group with it? In a group of its own, each shows that.
            send.num_breaks += 1
            again = [s for s in send.servers if s in send.fleet.active and s.server_id in delivery.refused]
            links = self._groups.connect(sender, send.fleet, again, alone=True)
            self._deliver(send.fleet, links, sender, listing)

    def _deliver(self, fleet: Fleet, links: list[ServerGroup], sender: Sender, listing: Listing) -> _Delivery:
        """Send one bucket to the servers of `links`. A server that fails in a group of its own leaves the fleet."""
        by_server = {server.server_id: link for link in links for server in link.servers}
        delivery = _Delivery(by_server, {})
        # NCCL's first broadcast returns only when all servers have entered it. They enter it during their requests, so
        # the broadcast must run at the same time as the requests.
        for link in links:
            delivery.sending[link.name] = link.broadcast()
            self.bytes_by_rank[sender.rank] += listing.num_bytes
        targets = [server for server in fleet.active if server.server_id in by_server]
        fleet.each(partial(_deliver_to_server, delivery, listing), targets)
        return delivery


def _announce(ready: SimpleQueue[tuple[Sender, Listing | None]], sender: Sender, listing: Listing | None) -> None:
    ready.put((sender, listing))


def _deliver_to_server(delivery: _Delivery, listing: Listing, server: ServerControl, seconds: float) -> None:
    """Make one server receive the bucket.

    If it fails in a group of its own, this raises PublishError. In a shared group, `delivery` notes the error.
    """
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
    """End the update session of a server that failed. If it recovers by itself, it can then be published to again."""
    with contextlib.suppress(GspoMegaError):  # the session may not be open; the server may be dead
        server.end_update(deadline_seconds=_CLEAN_UP_SECONDS)


class ServerGroups:
    """The groups of all sending ranks. A group lasts over many publishes, until a server in it ends or fails.

    `num_not_made` counts groups of several servers that could not be made because one of them did not join.
    """

    def __init__(
        self,
        address: str,
        backend: str,
        timeout_seconds: float,
        servers_per_group: int | None,
        note_group: Callable[[str], object] = _nothing,
    ) -> None:
        """`address`, `backend`, `timeout_seconds` and `note_group` as for `ServerGroup`. `servers_per_group`: None for
        all.
        """
        self._note_group = note_group
        self._address = address
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._servers_per_group = servers_per_group
        self._links: dict[tuple[int, tuple[Member, ...]], ServerGroup] = {}
        self.num_not_made = 0

    def connect(
        self, sender: Sender, fleet: Fleet, servers: Iterable[ServerControl], alone: bool = False
    ) -> list[ServerGroup]:
        """Return groups of `sender` that together contain the active ones of `servers`. `alone`: each gets its own
        group.

        If a server does not join a group of several, each of them gets its own. A server that does not join its own
        group leaves the fleet.
        """
        targets = [server for server in servers if server in fleet.active]
        now = dict(members(targets))
        self._leave(lambda link: link.is_cut or any(now.get(name, start) != start for name, start in link.members))
        size = 1 if alone else self._servers_per_group or max(1, len(targets))
        parts = [targets[start : start + size] for start in range(0, len(targets), size)]
        links: list[ServerGroup] = []
        split: list[ServerControl] = []
        problems = in_parallel([partial(self._make, sender, fleet, part) for part in parts])
        for part, problem in zip(parts, problems, strict=True):
            if problem is None:
                links.append(self._links[sender.rank, members(part)])
            elif len(part) == 1:
                fleet.fail(part[0], str(problem))
            else:
                self.num_not_made += 1
                split += part
        return [*links, *self.connect(sender, fleet, split, alone=True)] if split else links

    def _make(self, sender: Sender, fleet: Fleet, servers: Sequence[ServerControl]) -> None:
        if (sender.rank, members(servers)) not in self._links:
            seconds = min(_JOIN_SECONDS, fleet.deadline.left(servers[0].server_id) / 2)
            link = ServerGroup(
                sender, servers, self._address, self._backend, self._timeout_seconds, seconds, self._note_group
            )
            self._links[sender.rank, link.members] = link

    def tidy(self, failed: Sequence[ServerControl]) -> None:
        """Leave groups that are broken, groups with a server of `failed`, and groups whose servers are all in another,
        larger group of the same sender.
        """
        gone = {server.server_id for server in failed}
        whole = {
            key: set(key[1])
            for key, link in self._links.items()
            if not link.is_cut and gone.isdisjoint(name for name, _ in link.members)
        }

        def ends(link: ServerGroup) -> bool:
            rank, mine = link.sender.rank, set(link.members)
            return (rank, link.members) not in whole or any(
                mine < larger for (other, _), larger in whole.items() if other == rank
            )

        self._leave(ends)

    def close(self) -> None:
        """Leave all groups at the same time, so that a server that hangs delays only its own."""
        self._leave(lambda _: True)

    def _leave(self, ends: Callable[[ServerGroup], bool]) -> None:
        gone = [key for key, link in self._links.items() if ends(link)]
        in_parallel([self._links.pop(key).close for key in gone])


class ServerGroup:
    """The group of one sender and some server processes. The sender is its first rank."""

    def __init__(
        self,
        sender: Sender,
        servers: Sequence[ServerControl],
        address: str,
        backend: str,
        timeout_seconds: float,
        seconds: float,
        note_group: Callable[[str], object] = _nothing,
    ) -> None:
        """`address` is rank 0's machine as servers and senders reach it. `timeout_seconds` limits one gloo broadcast.
        `note_group` gets the group's name.

        Raises GspoMegaError if a server does not join within `seconds`. Then the others do not join either.
        """
        self.sender = sender
        self.servers = tuple(servers)
        self.members = members(servers)
        # Servers identify groups by name and may outlive a trainer, so the name is random.
        self.name = f"weights-{secrets.token_hex(8)}"
        note_group(self.name)
        self.is_cut = False
        self._lock = threading.Lock()
        self._sending: PendingBroadcast | None = None
        until = time.monotonic() + seconds
        offsets = list(accumulate((server.tensor_parallel for server in servers), initial=1))
        size = offsets.pop()
        host, port = _host_store(address, seconds)
        # The store ends when this list drops the last reference to it. That releases those who still wait for others.
        self._hosts = [host]
        del host

        def join(server: ServerControl, rank_offset: int) -> None:
            try:
                server.init_group(
                    master_address=address,
                    master_port=port,
                    rank_offset=rank_offset,
                    world_size=size,
                    group_name=self.name,
                    backend=backend,
                    deadline_seconds=seconds,
                )
            except BaseException:
                # Not at once, because a server that does not find the store at all keeps trying for a long time.
                threading.Timer(_LATE_SECONDS, self._hosts.clear).start()
                raise

        try:
            sender.join_group(MeetingPoint(self.name, size, backend, address, port, timeout_seconds, seconds))
            joins = [partial(join, server, offset) for server, offset in zip(servers, offsets, strict=True)]
            for problem in in_parallel(joins):
                if problem is not None:
                    raise problem
            sender.wait_joined(self.name, until - time.monotonic())
        except RuntimeError as error:
            self._give_up()
            names = ", ".join(server.server_id for server in servers)
            verbs = ("reports", "it", "is") if len(servers) == 1 else ("report", "they", "are")
            raise PublishError(
                f"{names}: {verbs[0]} that {verbs[1]} joined the weight group, but {verbs[2]} not in it: {error}"
            ) from error
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._hosts.clear()
        self.sender.cut(self.name)
        self.sender.leave(self.name)

    def broadcast(self) -> PendingBroadcast:
        """Start to send the sender's bucket to all ranks of all servers, and return the broadcast. One at a time."""
        with self._lock:
            if self.is_cut:
                raise PublishError("the group was cut, because a server in it failed")
            self._sending = self.sender.broadcast(self.name)
            return self._sending

    def abort(self, failed: ServerControl) -> None:
        """Cut the group's unfinished work, as far as its backend can. The group is unusable afterwards.

        If the server `failed` still answers, it leaves the group. That releases other servers that wait for data that
        it would pass on.
        """
        with self._lock:
            first, self.is_cut = not self.is_cut, True
            sending, self._sending = self._sending, None
        if sending is not None:
            sending.cut()
        if first:
            self.sender.cut(self.name)
        if len(self.servers) > 1:
            self._destroy(failed)

    def _destroy(self, server: ServerControl) -> None:
        if (server.server_id, server.generation) in self.members:
            with contextlib.suppress(GspoMegaError):  # the server's failure may be the reason to leave
                server.destroy_group(self.name, deadline_seconds=LEAVE_SECONDS)

    def close(self) -> None:
        """Leave the group on both sides. A server that is dead or hangs delays this by a few seconds at most."""
        in_parallel([partial(self._destroy, server) for server in self.servers])
        with self._lock:
            self.is_cut = True
            self._sending = None
        self.sender.leave(self.name)
        threading.Thread(target=self._hosts.clear, daemon=True).start()


def _host_store(address: str, seconds: float) -> tuple[dist.TCPStore, int]:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store through which a group's members find each other, and its port. It listens only on `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    # torch documents this name, but the package's annotations mark it as private.
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def members(servers: Iterable[ServerControl]) -> tuple[Member, ...]:
    """Return the current processes of the servers."""
    return tuple((server.server_id, server.generation) for server in servers)
