"""Jobs of ranks: what rank 0 sends, over a real store and the host group, and what arrives."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import torch.distributed as dist

from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.train.scatter import Exchange


def hand_out(size: int, num_bytes: int, num_messages: int) -> dict:
    """Rank 0 sends each replica of `size` ranks a message of its own and every pair of ranks within it more, then the
    same to all; everybody answers. Returns what this rank got, and the bytes that it sent to each rank.
    """
    groups = create_groups()
    sent: Counter[int] = Counter()
    isend = dist.isend

    def counted(tensor, dst, group):
        sent[dst] += tensor.numel() * tensor.element_size()
        return isend(tensor, dst=dst, group=group)

    dist.isend = counted
    try:
        replicas = [list(range(first, first + size)) for first in range(0, groups.host.size, size)]
        parts = [ranks[start : start + 2] for ranks in replicas for start in range(0, size, 2)]
        rank = groups.host.rank
        store = dist.PrefixStore(f"hand_out/{size}", dist.distributed_c10d._get_default_store())
        exchange = Exchange(store, groups.host, replicas)
        got = []
        for number in range(num_messages):
            if rank == 0:
                exchange.send_each(_message(num_bytes, number, data) for data in range(len(replicas)))
                exchange.send_more((part, _message(num_bytes, number, part[0])) for part in parts)
            else:
                got.append(_digest(exchange.receive()))
                got.append(_digest(exchange.receive_more(next(part for part in parts if rank in part))))
        if rank == 0:
            exchange.send_all({"stop": None})
        else:
            assert exchange.receive() == {"stop": None}
        gathered = exchange.gather({"rank": rank, "array": np.full(3, rank)})
        if rank == 0:
            assert [(one["rank"], one["array"].tolist()) for one in gathered] == [
                (other, [other] * 3) for other in range(groups.host.size)
            ]
        return dict(got=got, sent=dict(sent), counted=exchange.num_sent_bytes)
    finally:
        dist.isend = isend
        destroy_groups()


def expected(num_bytes: int, number: int, which: int) -> str:
    return _digest(_message(num_bytes, number, which))


def _message(num_bytes: int, number: int, which: int) -> dict:
    values = np.random.default_rng((number, which)).integers(0, 256, num_bytes, dtype=np.uint8)
    return {"number": number, "which": which, "values": values}


def _digest(message: dict) -> str:
    return hashlib.sha256(
        repr((message["number"], message["which"])).encode() + message["values"].tobytes()
    ).hexdigest()
