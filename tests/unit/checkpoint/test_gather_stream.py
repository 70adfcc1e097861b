"""How tensors come to another rank: through the group of all ranks, and never by a connection of two ranks of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gspo_mega.checkpoint import gather
from gspo_mega.checkpoint.gather import PolicyTensors


class Distributed:
    """What `gather` may use of torch.distributed. With NCCL a plain `send` or `recv` makes a communicator for its two
    ranks.
    """

    isend, irecv = "isend", "irecv"

    def __init__(self) -> None:
        self.moved: list[tuple[str, int]] = []

    def P2POp(self, operation, tensor, peer, group):
        assert group == "all ranks"
        return operation, tensor, peer

    def batch_isend_irecv(self, operations):
        for operation, tensor, peer in operations:
            self.moved.append((operation, peer))
            assert tensor.dtype == torch.uint8  # not every dtype can be sent
            if operation == "irecv":
                tensor.view(torch.float32).fill_(peer)
        return [SimpleNamespace(wait=lambda: None)]


def policy(rank: int) -> PolicyTensors:
    entries = {name: [SimpleNamespace(name=name, shape=(2,), is_buffer=False)] for name in ("a", "b", "c")}
    made = PolicyTensors.__new__(PolicyTensors)
    made.groups = SimpleNamespace(world=SimpleNamespace(rank=rank, size=3, group="all ranks"), is_lead=rank == 0)
    made.table, made.owners = entries, {"a": 0, "b": 2, "c": 1}
    made._parameters = {"x": torch.zeros(1)}
    made._chunks = ()
    made._takes_part = {name for name, owner in made.owners.items() if owner == rank}
    made._gather = lambda name, entries, dtype: iter([(entries[0], torch.full((2,), -1.0))])
    return made


@pytest.mark.parametrize(
    ("rank", "moved"), [(0, [("irecv", 2), ("irecv", 1)]), (1, [("isend", 0)]), (2, [("isend", 0)])]
)
def test_sends_between_two_ranks_are_batches_in_the_group_of_all(monkeypatch, rank, moved):
    fake = Distributed()
    monkeypatch.setattr(gather, "dist", fake)
    found = {name: tensor.tolist() for name, tensor in policy(rank).stream(torch.float32)}
    assert fake.moved == moved
    assert found == ({"a": [-1.0, -1.0], "b": [2.0, 2.0], "c": [1.0, 1.0]} if rank == 0 else {})


@pytest.mark.parametrize(
    ("rank", "moved", "here"),
    [(0, [("irecv", 2)], ["a", "b"]), (1, [], ["c"]), (2, [("isend", 0)], [])],
)
def test_a_tensor_whose_home_is_its_owner_does_not_travel(monkeypatch, rank, moved, here):
    fake = Distributed()
    monkeypatch.setattr(gather, "dist", fake)
    homes = {"a": 0, "b": 0, "c": 1}
    found = [entry.name for entry, _ in policy(rank).brought_to(lambda entry: homes[entry.name], torch.float32)]
    assert (fake.moved, found) == (moved, here)
