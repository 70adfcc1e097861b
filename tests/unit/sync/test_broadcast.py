"""Sending through groups where a broadcast blocks until every member is in it, as NCCL's first one does.

The group is one of torch.distributed's own kind, registered as a backend, and the trainer's side is the real one. The
servers are stand-ins that enter a broadcast inside the handler of the request, as SGLang does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from waiting import until

from gspo_mega.base.errors import PublishError
from gspo_mega.sync import broadcast_group
from gspo_mega.sync.broadcast import GroupSender
from gspo_mega.sync.broadcast_group import no_nccl_abort
from gspo_mega.sync.servers import Deadline, Fleet

# What a test waits for a sender that hangs, in place of for ever.
PATIENCE_SECONDS = 20.0


class HeldGroup(dist.ProcessGroup):
    """`broadcast` returns when all servers take part in it, or fails when the group is aborted."""

    made: list[HeldGroup] = []
    deaf_to_abort = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.taken = threading.Semaphore(0)
        self.aborted = threading.Event()
        self.threads: set[int] = set()
        HeldGroup.made.append(self)

    def getBackendName(self) -> str:
        return "held"

    def broadcast(self, tensor, source=0, *options):
        self.threads.add(threading.get_ident())
        for _ in range(self.size() - 1):
            while not self.taken.acquire(timeout=0.01):
                if self.aborted.is_set() and not self.deaf_to_abort:
                    raise RuntimeError("the group was aborted")
        done = torch.futures.Future()
        done.set_result([tensor])
        return _create_work_from_future(done)

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        self.aborted.set()


@pytest.fixture(scope="module", autouse=True)
def held_backend():
    if not hasattr(dist.Backend, "HELD"):
        dist.Backend.register_backend("held", lambda store, rank, size, timeout: HeldGroup(rank, size), devices=["cpu"])


@pytest.fixture(autouse=True)
def groups():
    HeldGroup.made.clear()
    HeldGroup.deaf_to_abort = False
    yield HeldGroup.made
    for group in HeldGroup.made:  # let go of every thread that a failed test leaves
        group.aborted.set()
        group.deaf_to_abort = False


class Server:
    """Takes what is broadcast inside its handler, like SGLang. `update`: what the handler does instead."""

    tensor_parallel = 1
    generation = 1

    def __init__(self, server_id: str, update: Callable[[Server, float], None] | None = None) -> None:
        self.server_id, self._update = server_id, update
        self.calls: list[str] = []
        # In the order in which they came first: the others of a broken group receive its bucket again.
        self.received: dict[str, None] = {}
        self.version: int | None = None
        self.groups: dict[str, HeldGroup] = {}
        self.group: HeldGroup | None = None

    def init_group(self, *, deadline_seconds: float, **place) -> None:
        self.calls.append("init_group")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            names = dict(dist.distributed_c10d._world.pg_names)
            found = [group for group, name in names.items() if name == place["group_name"]]
            if found:
                self.groups[place["group_name"]] = found[0]
                return
            time.sleep(0.005)
        raise PublishError(f"{self.server_id}: the trainer made no group")

    def update_from_distributed(self, names, dtypes, shapes, group_name, *, deadline_seconds: float) -> None:
        self.calls.append("update")
        self.group = self.groups[group_name]
        if self._update is not None and "lm_head" in names:
            self._update(self, deadline_seconds)
        self.take(1)
        self.received |= dict.fromkeys(names)

    def take(self, count: int) -> None:
        assert self.group is not None
        for _ in range(count):
            self.group.taken.release()

    def set_weight_version(self, weight_version: int, *, deadline_seconds: float) -> None:
        self.version = weight_version

    def begin_update(self, *, deadline_seconds: float) -> None:
        self.calls.append("begin")

    def end_update(self, *, deadline_seconds: float) -> None:
        self.calls.append("end")

    def destroy_group(self, group_name: str, *, deadline_seconds: float) -> None:
        self.calls.append("destroy")


NAMES = ["model.norm", "lm_head", "tail"]


def publish(
    servers: list[Server],
    seconds: float = 10.0,
    sender: GroupSender | None = None,
    names: list[str] = NAMES,
    on_draw: Callable[[str], object] = str,
) -> tuple[Fleet, list[str]]:
    """The fleet after one send in buckets of one tensor, and the tensors that were drawn from the trainer; fails where
    the sender hangs.
    """
    sender = sender or GroupSender("127.0.0.1", "held", bucket_bytes=1024, timeout_seconds=seconds)
    fleet = Fleet(servers, Deadline(seconds))
    drawn: list[str] = []
    problems: list[BaseException] = []

    def tensors():
        for name in names:
            drawn.append(name)
            on_draw(name)
            yield name, torch.zeros(256)

    def send() -> None:
        try:
            sender.send(fleet, servers, tensors(), 7)
        except BaseException as error:
            problems.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(PATIENCE_SECONDS)
    assert not sending.is_alive(), f"the trainer hangs in a broadcast; calls so far: {[s.calls for s in servers]}"
    if problems:
        raise problems[0]
    return fleet, drawn


def test_a_broadcast_that_blocks_until_the_server_is_in_it_reaches_all_servers():
    servers = [Server("a"), Server("b")]
    fleet, _ = publish(servers)
    assert not fleet.failed
    for server in servers:
        assert list(server.received) == NAMES and server.version == 7
        assert server.calls == ["init_group", "begin", "update", "update", "update", "end"]


def refuse(server: Server, seconds: float) -> None:
    raise PublishError(f"{server.server_id}: 400, refused")


def hang(server: Server, seconds: float) -> None:
    time.sleep(seconds)
    raise PublishError(f"{server.server_id}: no answer within {seconds:g} s")


def lie(server: Server, seconds: float) -> None:
    """It says that it has received everything, and never took part."""
    server.take = lambda count: None


def die(server: Server, seconds: float) -> None:
    """Its end closes the request's connection and the group's; NCCL may not notice the latter."""
    server.group.aborted.set()
    raise PublishError(f"{server.server_id}: connection reset")


@pytest.mark.parametrize("deaf", [False, True], ids=["abort-works", "abort-does-nothing"])
@pytest.mark.parametrize(
    "fault, words",
    [
        (refuse, "400, refused"),
        (die, "connection reset"),
        (hang, "no answer within"),
        (lie, "the broadcast did not finish"),
    ],
)
def test_a_server_that_leaves_the_trainer_in_a_broadcast_fails_alone(fault, words, deaf, monkeypatch):
    """Whether closing the group ends the broadcast (NCCL) or not (gloo, and NCCL while it connects)."""
    monkeypatch.setattr(
        broadcast_group, "_LEAST_WAIT_SECONDS", 0.1
    )  # of the deadlines of real publishes it is a small part
    HeldGroup.deaf_to_abort = deaf
    bad, good = Server("bad", fault), Server("good")
    fleet, drawn = publish([bad, good], seconds=4.0)
    assert set(fleet.failed) == {"bad"} and words in fleet.failed["bad"], fleet.failed
    assert list(good.received) == NAMES and good.version == 7
    assert drawn == NAMES, "every rank takes part in making all tensors"
    assert "tail" not in bad.received and "destroy" in bad.calls and bad.calls[-1] == "end", (
        "no more is sent to it, and it is cleared up"
    )
    assert bad.group.aborted.wait(PATIENCE_SECONDS), "what is left of its broadcast is ended as far as the backend can"


def test_a_server_that_failed_in_a_broadcast_is_sent_to_through_a_new_group():
    bad, good = Server("bad", refuse), Server("good")
    sender = GroupSender("127.0.0.1", "held", bucket_bytes=1024, timeout_seconds=4.0)
    publish([bad, good], 4.0, sender)
    bad._update = None
    bad.calls.clear()
    good.calls.clear()
    fleet, _ = publish([bad, good], 4.0, sender)
    assert not fleet.failed and list(bad.received) == NAMES
    assert bad.calls.count("init_group") == good.calls.count("init_group") == 1, "they share a new group"
    sender.close()


def test_many_servers_that_hang_share_one_deadline():
    """Of eight servers four hang: the others finish, and time is left for them."""
    servers = [Server(str(n), hang if n % 2 else None) for n in range(8)]
    fleet, _ = publish(servers, seconds=3.0)
    assert set(fleet.failed) == {"1", "3", "5", "7"}
    assert all(list(server.received) == NAMES for server in servers[::2])


def test_a_server_that_refuses_to_join_leaves_no_group_behind():
    class Stranger(Server):
        def init_group(self, **place) -> None:
            super().init_group(**place)
            raise PublishError("bad: 400, no such backend")

    before = set(torch.distributed.distributed_c10d._world.pg_map)
    fleet, _ = publish([Stranger("bad"), Server("good")])
    assert "no such backend" in fleet.failed["bad"] and set(fleet.failed) == {"bad"}
    until(lambda: sum(group.aborted.is_set() for group in HeldGroup.made) >= 2)
    *others, good = sorted(HeldGroup.made, key=lambda group: not group.aborted.is_set())
    assert len(others) == 2 and all(group.aborted.is_set() for group in others) and not good.aborted.is_set()
    assert set(torch.distributed.distributed_c10d._world.pg_map) - before == {good}


def test_groups_are_left_side_by_side():
    """At the end of a run, too, a server that hangs must not hold up the others' leave."""
    servers = [Server(str(n)) for n in range(4)]
    sender = GroupSender("127.0.0.1", "held", bucket_bytes=1024, timeout_seconds=5.0, servers_per_group=2)
    publish(servers, 5.0, sender)
    assert len(HeldGroup.made) == 2
    all_there = threading.Barrier(len(servers), timeout=PATIENCE_SECONDS)
    left = []
    for server in servers:
        server.destroy_group = lambda name, *, deadline_seconds: left.append(all_there.wait())
    sender.close()
    assert sorted(left) == [0, 1, 2, 3]


def test_the_watchdog_of_a_group_with_a_server_is_told_to_leave_the_trainer_alone(monkeypatch):
    """torch ends a whole process for an error in any NCCL group made without this."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with no_nccl_abort("gloo"):
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    for before in (None, "1"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        with no_nccl_abort("nccl"):
            assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before


def test_a_defect_in_sending_is_raised_and_not_taken_for_a_server_that_failed():
    def broken(server: Server, seconds: float) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish([Server("a", broken)])


@pytest.mark.parametrize("num_servers, per_group, groups", [(1, None, 1), (4, None, 1), (4, 3, 2), (4, 1, 4)])
def test_what_leaves_the_trainer_is_counted_once_for_each_group(num_servers, per_group, groups):
    sender = GroupSender("127.0.0.1", "held", 1024, 10.0, per_group)
    fleet, _ = publish([Server(str(n)) for n in range(num_servers)], 10.0, sender)
    assert not fleet.failed and sender.num_bytes_sent == groups * len(NAMES) * 1024


def test_a_break_costs_its_bucket_again_for_each_server_and_no_more():
    sender = GroupSender("127.0.0.1", "held", 1024, 10.0)
    servers = [Server("bad", refuse), *(Server(str(n)) for n in range(4))]
    fleet, _ = publish(servers, 10.0, sender)
    assert set(fleet.failed) == {"bad"}
    # Every server that had not received the bucket when the group broke is sent it alone.
    assert 4 * 1024 <= sender.num_bytes_sent <= (3 + 5) * 1024
    before = sender.num_bytes_sent
    assert not publish(servers[1:], 10.0, sender)[0].failed and sender.num_bytes_sent - before == 3 * 1024


def test_a_group_that_breaks_again_and_again_is_given_up_for_the_rest_of_a_publish():
    """Each server can be reached by itself, and no two of them in one group."""

    class Shy(Server):
        def update_from_distributed(self, names, dtypes, shapes, group_name, *, deadline_seconds: float) -> None:
            if self.groups[group_name].size() > 2:
                raise PublishError(f"{self.server_id}: 400, unreachable")
            super().update_from_distributed(names, dtypes, shapes, group_name, deadline_seconds=deadline_seconds)

    servers = [Shy("shy"), Server("a")]
    sender = GroupSender("127.0.0.1", "held", bucket_bytes=1024, timeout_seconds=10.0)
    names = [f"tensor {n}" for n in range(8)]
    fleet, _ = publish(servers, 10.0, sender, names)
    assert not fleet.failed and all(list(server.received) == names for server in servers)
    assert len([group for group in HeldGroup.made if group.size() == 3]) == 2, "a group of both, made twice"


def test_the_next_bucket_is_gathered_while_one_is_sent():
    """The first bucket stays on its way until the second has been drawn from the trainer."""
    second_drawn = threading.Event()

    class Waiting(Server):
        def update_from_distributed(self, names, *more, deadline_seconds: float) -> None:
            if NAMES[0] in names and not second_drawn.wait(60):
                raise PublishError("nothing is gathered while the first bucket is sent")
            super().update_from_distributed(names, *more, deadline_seconds=deadline_seconds)

    fleet, _ = publish([Waiting("a")], 120.0, on_draw=lambda name: name == NAMES[1] and second_drawn.set())
    assert not fleet.failed
