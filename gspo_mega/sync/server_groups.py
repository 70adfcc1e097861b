"""Which servers share a process group with a rank that sends, from one publish to the next.

Owns making groups, keeping them, and leaving those that are broken or of no more use. `linked_servers.py` is one
group. Every rank that sends has groups of its own, since the first rank of a group is the one that sends in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from gspo_mega.sync.linked_servers import Link, Member, members
from gspo_mega.sync.senders import Sender
from gspo_mega.sync.servers import Fleet, ServerControl, in_parallel

# A healthy server joins in well under a second; an unhealthy one must not consume the whole deadline.
_JOIN_SECONDS = 60.0


class ServerGroups:
    """The groups of some servers each. A group lasts until a server in it ends or fails, over many publishes.

    `num_not_made` counts groups of several servers that one of them did not join.
    """

    def __init__(self, address: str, backend: str, timeout_seconds: float, servers_per_group: int | None) -> None:
        """`address`, `backend` and `timeout_seconds` as for `Link`. `servers_per_group`: None for all."""
        self._address = address
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._servers_per_group = servers_per_group
        self._links: dict[tuple[int, tuple[Member, ...]], Link] = {}
        self.num_not_made = 0

    def connect(
        self, sender: Sender, fleet: Fleet, servers: Iterable[ServerControl], alone: bool = False
    ) -> list[Link]:
        """The groups of `sender` that together contain those of `servers` that are active; `alone`: a group each.

        If a server does not join a group of several, each of them gets its own. One that does not join its own leaves
        the fleet.
        """
        targets = [server for server in servers if server in fleet.active]
        now = dict(members(targets))
        self._leave(lambda link: link.is_cut or any(now.get(name, start) != start for name, start in link.members))
        size = 1 if alone else self._servers_per_group or max(1, len(targets))
        parts = [targets[start : start + size] for start in range(0, len(targets), size)]
        links: list[Link] = []
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
            link = Link(sender, servers, self._address, self._backend, self._timeout_seconds, seconds)
            self._links[sender.rank, link.members] = link

    def tidy(self, failed: Sequence[ServerControl]) -> None:
        """Leave groups that are broken, that have a server of `failed`, and whose servers are all in another one of the
        same sender.
        """
        gone = {server.server_id for server in failed}
        whole = {
            key: set(key[1])
            for key, link in self._links.items()
            if not link.is_cut and gone.isdisjoint(name for name, _ in link.members)
        }

        def ends(link: Link) -> bool:
            rank, mine = link.sender.rank, set(link.members)
            return (rank, link.members) not in whole or any(
                mine < larger for (other, _), larger in whole.items() if other == rank
            )

        self._leave(ends)

    def close(self) -> None:
        """Leave all groups, side by side: a server that hangs delays only its own."""
        self._leave(lambda _: True)

    def _leave(self, ends: Callable[[Link], bool]) -> None:
        gone = [key for key, link in self._links.items() if ends(link)]
        in_parallel([self._links.pop(key).close for key in gone])
