"""Small agreements between ranks: JSON values over the host (gloo) group. No pickle.

Ranks exchange names, digests and problems with these functions; tensors of the model take other paths.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from gspo_mega.engine.process_groups import RankGroup


def all_gather_json(value: Any, group: RankGroup) -> list[Any]:
    """Every rank's value, in group order, on every rank. Collective over `group`, which must take CPU tensors."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size)]
    dist.all_gather(lengths, torch.tensor([payload.numel()]), group=group.group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(group.size)]
    dist.all_gather(parts, padded, group=group.group)
    return [json.loads(bytes(part[: int(length)].numpy())) for part, length in zip(parts, lengths, strict=True)]


def broadcast_json(value: Any, group: RankGroup) -> Any:
    """The value of the group's first rank, on every rank; other values are ignored. Collective over `group`."""
    payload = (
        torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        if group.rank == 0
        else torch.empty(0)
    )
    length = torch.tensor([payload.numel()])
    dist.broadcast(length, src=group.ranks[0], group=group.group)
    if group.rank != 0:
        payload = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(payload, src=group.ranks[0], group=group.group)
    return json.loads(bytes(payload.numpy()))


def raise_together(problems: list[str], group: RankGroup, error: type[Exception], title: str, limit: int = 20) -> None:
    """Raise `error` on every rank if any rank has a problem. Its text is `title` and the distinct problems of all
    ranks, at most `limit` of them. Collective over `group`.
    """
    found = list(dict.fromkeys(problem for part in all_gather_json(problems, group) for problem in part))
    if found:
        more = [f"... and {len(found) - limit} more"] if len(found) > limit else []
        raise error("\n  ".join([f"{title}:", *found[:limit], *more]))
