"""Several ranks that each send what they own: rank 0's part, who waits for whom, and what happens when one goes.

The ranks are threads of this process, their words go through queues in place of the host group, and groups are gloo's.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from queue import Queue

import pytest
import torch
from test_server_groups import DEADLINE, ELEMENTS, GlooServer

from gspo_mega.base.errors import PublishError
from gspo_mega.sync.broadcast import GroupSender
from gspo_mega.sync.broadcast_group import OwnTensors
from gspo_mega.sync.publish import senders_of
from gspo_mega.sync.remote_sender import OrderChannel, RemoteSender, serve_send_orders
from gspo_mega.sync.servers import Deadline, Fleet

SIZE = 4 * ELEMENTS


@pytest.mark.parametrize("num_owners, most", [(1, 8), (8, 8), (9, 8), (10, 4), (256, 8), (300, 7)])
def test_senders_are_owners_that_each_send_for_as_many_neighbours(num_owners, most):
    owners = [3 * place for place in range(num_owners)]
    found = senders_of(owners, most)
    shares = Counter(found.values())
    assert list(found) == owners and len(shares) == min(num_owners, most) and 0 in shares
    assert all(found[sender] == sender for sender in shares) and max(shares.values()) - min(shares.values()) <= 1
    assert list(found.values()) == sorted(found.values()), "neighbours, which are often on one node"


class Pipe(OrderChannel):
    """Between two threads."""

    def __init__(self, out: Queue, back: Queue) -> None:
        self._out, self._back, self._is_open = out, back, False

    def open(self) -> None:
        self._is_open = True

    def send(self, *, last: bool = False, **value) -> None:
        if self._is_open:
            self._is_open = not last
            self._out.put(json.dumps(value))

    def receive(self) -> dict:
        if (text := self._back.get(timeout=DEADLINE)) is None:
            raise RuntimeError("connection closed by peer")
        return json.loads(text)


class Ranks:
    """Rank 0 and others; `publish` sends `of_rank`'s tensors of each."""

    def __init__(self, num_ranks: int) -> None:
        queues = {rank: (Queue(), Queue()) for rank in range(1, num_ranks)}
        self.queues = queues
        self.there = {rank: Pipe(back, out) for rank, (out, back) in queues.items()}
        self.own = {rank: OwnTensors(rank) for rank in range(1, num_ranks)}
        others = [RemoteSender(rank, Pipe(out, back)) for rank, (out, back) in queues.items()]
        self.sender = GroupSender("127.0.0.1", "gloo", SIZE, DEADLINE, others=others)
        self.problems: dict[int, Exception] = {}

    def publish(self, servers: list[GlooServer], version: int, of_rank) -> Fleet:
        def run(rank: int) -> None:
            try:
                serve_send_orders(self.own[rank], self.there[rank], iter(of_rank(rank, version)), SIZE)
            except RuntimeError as error:
                self.problems[rank] = error

        fleet = Fleet(servers, Deadline(DEADLINE))
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in self.own]
        for thread in threads:
            thread.start()
        try:
            self.sender.send(fleet, servers, iter(of_rank(0, version)), version)
        finally:
            for thread in threads:
                thread.join(DEADLINE)
            fleet.close()
        assert not any(thread.is_alive() for thread in threads)
        return fleet

    def close(self) -> None:
        self.sender.close()
        for own in self.own.values():
            own.close()


@pytest.fixture
def ranks():
    made = []

    def make(num_ranks: int) -> Ranks:
        made.append(Ranks(num_ranks))
        return made[-1]

    yield make
    for one in made:
        one.close()


def names(rank: int, count: int) -> list[str]:
    return [f"tensor {number} of {rank}" for number in range(count)]


def some(count: int):
    """`count` tensors of each rank, which hold the version and the rank."""
    return lambda rank, version: [
        (name, torch.full((ELEMENTS,), version + rank / 10)) for name in names(rank, count if rank else 2)
    ]


def holds(server: GlooServer, version: int, num_ranks: int, count: int) -> bool:
    return server.version == version and all(
        bool((server.held[name] == torch.tensor(version + rank / 10)).all())
        for rank in range(num_ranks)
        for name in names(rank, count if rank else 2)
    )


@pytest.mark.parametrize("count", [1, 4])
def test_what_rank_0_gives_does_not_grow_with_what_others_own(ranks, count):
    servers = [GlooServer(number) for number in range(3)]
    three = ranks(3)
    for version in (1, 2):
        assert not three.publish(servers, version, some(count)).failed
        assert all(holds(server, version, 3, count) for server in servers)
    assert three.sender.bytes_by_rank == {0: 2 * 2 * SIZE, 1: 2 * count * SIZE, 2: 2 * count * SIZE}
    assert all(len(server.groups) == 3 for server in servers), "each rank has one group of all servers, kept"
    three.close()
    assert not any(server.groups for server in servers)


def test_other_ranks_gather_while_one_sends(ranks):
    """Rank 0's bucket does not end before the other rank has its first one ready and gathers the next."""
    gathers = threading.Event()

    class Waiting(GlooServer):
        def update_from_distributed(self, names, *more, **options) -> None:
            if names[0] == "tensor 0 of 0":
                assert gathers.wait(DEADLINE / 2), "the other rank waits for its turn before it gathers"
            super().update_from_distributed(names, *more, **options)

    def tensors(rank: int, version: int):
        for number, (name, tensor) in enumerate(some(3)(rank, version)):
            if rank == 1 and number == 1:
                gathers.set()
            if rank == 1 and number == 0:
                time.sleep(0.2)  # rank 0's goes first
            yield name, tensor

    server = Waiting(0)
    assert not ranks(2).publish([server], 1, tensors).failed and holds(server, 1, 2, 3)


@pytest.mark.parametrize("fails", ["dies", "refuses"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_that_goes_costs_itself_alone_whoever_sends(ranks, fails, rank):
    class Failing(GlooServer):
        """Fails at the second tensor of one rank."""

        def update_from_distributed(self, names, *more, **options) -> None:
            renamed = ["tensor 2" if name == f"tensor 1 of {rank}" else name for name in names]
            super().update_from_distributed(renamed, *more, **options)

    servers = [GlooServer(0), Failing(1, fails), GlooServer(2)]
    two = ranks(2)
    fleet = two.publish(servers, 1, some(3))
    assert set(fleet.failed) == {"server-1"}, fleet.failed
    others = [servers[0], servers[2]]
    assert all(holds(server, 1, 2, 3) for server in others)
    before = two.sender.bytes_by_rank.copy()
    assert not two.publish(others, 2, some(3)).failed and all(holds(server, 2, 2, 3) for server in others)
    assert two.sender.bytes_by_rank - before == {0: 2 * SIZE, 1: 3 * SIZE}, "they share groups again"


def test_what_a_rank_cannot_send_rank_0_is_told_and_the_next_publish_is_whole(ranks):
    def broken(rank: int, version: int):
        yield from some(2)(rank, version)
        if rank == 1:
            raise PublishError("model.norm: has a value that is not finite")

    servers, two = [GlooServer(0)], ranks(2)
    with pytest.raises(PublishError, match="model.norm: has a value that is not finite"):
        two.publish(servers, 1, broken)
    assert not two.publish(servers, 2, some(2)).failed and holds(servers[0], 2, 2, 2)


def test_a_rank_that_dies_ends_the_send_with_an_error_of_ranks(ranks):
    """Not one of servers, for which a run would start servers again."""
    two = ranks(2)

    def dying(rank: int, version: int):
        for name, tensor in some(3)(rank, version):
            if rank == 1 and name == "tensor 1 of 1":
                for queue in two.queues[1]:  # its end closes the connections both ways
                    queue.put(None)
            yield name, tensor

    with pytest.raises(RuntimeError, match="connection closed by peer"):
        two.publish([GlooServer(0)], 1, dying)
    assert "connection closed by peer" in str(two.problems[1])


def test_rank_0_that_fails_lets_other_ranks_gather_to_their_end(ranks):
    class Broken(GlooServer):
        def update_from_distributed(self, *_, **__) -> None:
            raise ZeroDivisionError

    drawn = []

    def tensors(rank: int, version: int):
        for name, tensor in some(4)(rank, version):
            drawn.append(name)
            yield name, tensor

    with pytest.raises(ZeroDivisionError):
        ranks(2).publish([Broken(0)], 1, tensors)
    assert sorted(drawn) == sorted([*names(0, 2), *names(1, 4)])
