"""One gloo group of the trainer and several servers, of which one goes: who still gets the weights.

The servers are threads of this process with a real gloo group each; they enter a broadcast inside the handler of the
request, as SGLang does.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gspo_mega.base.errors import PublishError
from gspo_mega.sync.broadcast import GroupSender
from gspo_mega.sync.servers import Deadline, Fleet, in_parallel

NAMES = [f"tensor {number}" for number in range(4)]
ELEMENTS = 50_000
DEADLINE = 20.0


class GlooServer:
    """Takes what is sent. `fails`: what it does instead at the third tensor, `at_join` when it is to join company."""

    tensor_parallel = 1
    generation = 1

    def __init__(self, number: int, fails: str = "") -> None:
        self.server_id, self.fails, self.version = f"server-{number}", fails, 0
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.is_dead = False

    def _answer(self) -> None:
        if self.is_dead:
            raise PublishError(f"{self.server_id}: connection refused")

    def init_group(
        self, *, master_address, master_port, rank_offset, world_size, group_name, backend, deadline_seconds
    ):
        self._answer()
        if self.fails == "at_join" and world_size > 2:
            raise PublishError(f"{self.server_id}: 400, no company")
        limit = timedelta(seconds=DEADLINE)
        try:
            store = dist.TCPStore(master_address, master_port, world_size, False, timeout=limit, wait_for_workers=False)
            # The prefixes under which torch makes a group of this name.
            inner = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group_name}/", dist.PrefixStore(group_name, store)))
            self.groups[group_name] = dist.ProcessGroupGloo(inner, rank_offset, world_size, limit)
        except RuntimeError as error:
            raise PublishError(f"{self.server_id}: 400, {error}") from error

    def destroy_group(self, group_name: str, *, deadline_seconds: float) -> None:
        self._answer()
        self.groups.pop(group_name, None)

    def update_from_distributed(self, names, dtypes, shapes, group_name, *, deadline_seconds: float) -> None:
        self._answer()
        if self.fails == "dies" and NAMES[2] in names:
            self.is_dead = True
            self.groups.clear()  # its connections close with it
            self._answer()
        if self.fails == "refuses" and NAMES[2] in names:
            raise PublishError(f"{self.server_id}: 400, refused")
        content = torch.zeros(ELEMENTS)
        try:
            self.groups[group_name].broadcast(content, 0).wait()
        except RuntimeError as error:
            raise PublishError(f"{self.server_id}: 400, {error}") from error
        self.held[names[0]] = content

    def begin_update(self, *, deadline_seconds: float) -> None:
        self._answer()

    end_update = begin_update

    def set_weight_version(self, weight_version: int, *, deadline_seconds: float) -> None:
        self._answer()
        self.version = weight_version


def publish(sender: GroupSender, servers: list[GlooServer], version: int) -> tuple[Fleet, float]:
    fleet = Fleet(servers, Deadline(DEADLINE))
    tensors = ((name, torch.full((ELEMENTS,), float(version))) for name in NAMES)
    start = time.monotonic()
    sender.send(fleet, servers, tensors, version)
    return fleet, time.monotonic() - start


def holds(server: GlooServer, version: int) -> bool:
    return server.version == version and all(bool((server.held[name] == version).all()) for name in NAMES)


@pytest.fixture
def sender():
    made = GroupSender("127.0.0.1", "gloo", ELEMENTS * 4, DEADLINE)
    yield made
    made.close()
    # A thread that is inside gloo when the interpreter ends would end it with SIGABRT.
    for thread in threading.enumerate():
        if thread.name in ("join", "broadcast", "abort", "leave"):
            thread.join(2 * DEADLINE)


@pytest.mark.parametrize(
    "fails, place",
    [("dies", 0), ("dies", 1), ("dies", 4), ("refuses", 0), ("refuses", 1), ("refuses", 4), ("at_join", 2)],
)
def test_the_others_of_a_group_get_the_version_when_a_server_goes(sender, fails, place):
    """Wherever it is in the tree by which gloo passes on a broadcast."""
    servers = [GlooServer(number, fails if number == place else "") for number in range(5)]
    fleet, seconds = publish(sender, servers, 1)
    others = [server for server in servers if not server.fails]
    assert all(holds(server, 1) for server in others), fleet.failed
    if fails == "at_join":  # it takes weights through a group of its own
        assert not fleet.failed and holds(servers[place], 1)
    else:
        assert set(fleet.failed) == {servers[place].server_id}
        word = "connection refused" if fails == "dies" else "400, refused"
        assert word in fleet.failed[servers[place].server_id]
    assert seconds < DEADLINE / 2 + 5, "nobody waits for the whole deadline"
    before = sender.num_bytes_sent
    fleet, _ = publish(sender, others, 2)
    assert not fleet.failed and all(holds(server, 2) for server in others)
    assert sender.num_bytes_sent - before == len(NAMES) * ELEMENTS * 4, "they share one group again"


def test_a_server_that_comes_joins_the_others_and_one_of_an_earlier_start_is_left(sender):
    servers = [GlooServer(number) for number in range(3)]
    assert not publish(sender, servers[:2], 1)[0].failed
    assert not publish(sender, servers[2:], 1)[0].failed, "it catches up alone"
    servers[0].generation = 2
    servers[0].groups.clear()
    assert not publish(sender, servers, 2)[0].failed and all(holds(server, 2) for server in servers)
    assert all(len(server.groups) == 1 for server in servers), "no group is kept of which another has all servers"


def test_actions_run_side_by_side_and_a_defect_is_raised():
    barrier = threading.Barrier(3, timeout=120)
    assert in_parallel([barrier.wait] * 3) == [None] * 3

    def fail() -> None:
        raise PublishError("no")

    assert [str(problem) for problem in in_parallel([fail, int])] == ["no", "None"]
    with pytest.raises(ZeroDivisionError):
        in_parallel([fail, lambda: 1 / 0])
