"""The process group of a rank that sends and some servers, as rank 0 leads it.

Owns that the servers and the sender join one group through a store of rank 0, and how they leave it. The sender's side
is `link.py`'s, in the sender's process; `senders.py` tells that process what to do. `server_groups.py` decides who
shares a group.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate

import torch.distributed as dist

from gspo_mega.base.errors import GspoMegaError, PublishError
from gspo_mega.sync.link import LEAVE_SECONDS, Place, Sending
from gspo_mega.sync.senders import Sender
from gspo_mega.sync.servers import ServerControl, in_parallel

# How much later than the first server another one comes to a group at most.
_LATE_SECONDS = 3.0

Member = tuple[str, int]
"""A server process: the server's id, and its start (generation)."""


def members(servers: Iterable[ServerControl]) -> tuple[Member, ...]:
    """The processes that serve now."""
    return tuple((server.server_id, server.generation) for server in servers)


class Link:
    """The group of one sender and some server processes; the sender is its first rank."""

    def __init__(
        self,
        sender: Sender,
        servers: Sequence[ServerControl],
        address: str,
        backend: str,
        timeout_seconds: float,
        seconds: float,
    ) -> None:
        """`address`: rank 0's machine, as servers and senders reach it. `timeout_seconds` limits one gloo broadcast.
        Raises GspoMegaError if a server does not join within `seconds`; then the others do not join either.
        """
        self.sender = sender
        self.servers = tuple(servers)
        self.members = members(servers)
        # Servers identify groups by name and may outlive a trainer, so the name is random.
        self.name = f"weights-{secrets.token_hex(8)}"
        self.is_cut = False
        self._lock = threading.Lock()
        self._sending: Sending | None = None
        until = time.monotonic() + seconds
        offsets = list(accumulate((server.tensor_parallel for server in servers), initial=1))
        size = offsets.pop()
        host, port = _host_store(address, seconds)
        # The store ends with this list's last reference to it: then who still waits for others to join is released.
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
                # Not at once: a server that does not find the store at all tries for long.
                threading.Timer(_LATE_SECONDS, self._hosts.clear).start()
                raise

        try:
            sender.begin(Place(self.name, size, backend, address, port, timeout_seconds, seconds))
            joins = [partial(join, server, offset) for server, offset in zip(servers, offsets, strict=True)]
            for problem in in_parallel(joins):
                if problem is not None:
                    raise problem
            sender.joined(self.name, until - time.monotonic())
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

    def broadcast(self) -> Sending:
        """Send the sender's bucket to all ranks of all servers. One at a time."""
        with self._lock:
            if self.is_cut:
                raise PublishError("the group was cut, because a server in it failed")
            self._sending = self.sender.broadcast(self.name)
            return self._sending

    def abort(self, failed: ServerControl) -> None:
        """Cut the group's unfinished work, as far as its backend can; the link is unusable afterwards.

        `failed`, if it still answers, leaves the group: other servers that wait for what it would pass on are released
        by that.
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
            with contextlib.suppress(GspoMegaError):  # the server's failure may be why the link is closed
                server.destroy_group(self.name, deadline_seconds=LEAVE_SECONDS)

    def close(self) -> None:
        """Leave the group on both sides; a server that is dead or hangs delays this by a few seconds at most."""
        in_parallel([partial(self._destroy, server) for server in self.servers])
        with self._lock:
            self.is_cut = True
            self._sending = None
        self.sender.leave(self.name)
        threading.Thread(target=self._hosts.clear, daemon=True).start()


def _host_store(address: str, seconds: float) -> tuple[dist.TCPStore, int]:  # pyright: ignore[reportPrivateImportUsage]
    """The store through which a group's members find each other, and its port, on the job's own address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    # Documented under this name, and marked as private by the package's annotations.
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
