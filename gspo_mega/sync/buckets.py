"""What one broadcast carries: consecutive tensors, and their bytes one after the other.

Owns how tensors are put together and described. Talks to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from gspo_mega.checkpoint.hf_export import DTYPE_NAMES
from gspo_mega.sync.link import stream_beside
from gspo_mega.sync.server_tensors import loads_with

Bucket = list[tuple[str, torch.Tensor]]


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors in lists of at most `bucket_bytes`; a larger tensor is in a list of its own.

    tensors: (name, whole tensor of any shape and dtype), local. A tensor that the server loads only together with the
    one before it is in the same bucket, at any size.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > bucket_bytes and not loads_with(name, bucket[-1][0]):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of whole tensors of any shape and dtype, one after the other: [bytes] uint8, on their device.

    One broadcast of bytes takes the place of one for each tensor, and carries dtypes that a backend does not know (gloo
    has no FP8). Shares the memory of a lone tensor.
    """
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Listing:
    """What a server is told about a bucket before it receives it. `num_bytes`: of the whole bucket."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    num_bytes: int


class Message:
    """One bucket as servers receive it: its listing by request, the bytes of all its tensors by broadcast."""

    def __init__(self, bucket: Bucket) -> None:
        # Larger elements first: each tensor's bytes then begin at a multiple of its element's size.
        bucket = sorted(bucket, key=lambda named: -named[1].element_size())
        self.content = flattened([tensor for _, tensor in bucket])
        self.stream = stream_beside(self.content)
        self.listing = Listing(
            [name for name, _ in bucket],
            [DTYPE_NAMES[tensor.dtype] for _, tensor in bucket],
            [list(tensor.shape) for _, tensor in bucket],
            self.content.numel(),
        )
