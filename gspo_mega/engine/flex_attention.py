"""Attention over ancestors on a GPU, by torch's FlexAttention. `cpu/forest_attention.py` has the same for CPUs.

FlexAttention computes blocks of 128 queries and 128 keys, and takes the numbers of the blocks that have something to
compute. `blocks_of` derives them from the nodes of the forest on the host, so no mask of a pack is ever in memory, and
the host does not wait for the GPU. Inside of a block whose queries do not attend to all of its keys, the kernel asks a
function of two positions, which is compiled into it.

Nothing of this has run on a GPU. `gspo-mega trace` runs it on fake CUDA tensors, and the tests compare values and
gradients with loops on a CPU, by FlexAttention's formulas in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from gspo_mega.cpu.forest_attention import ForestNodes

BLOCK = 128
"""Queries, and keys, of a block."""


def flex_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    nodes: ForestNodes,
    softmax_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to their node up to themselves and to all ancestors of the node; with `window` to
    that many last tokens of this path, itself included. Returns [t, heads x v].

    query [t, heads, d], key [C, kv_heads, d], value [C, kv_heads, v] of one dtype. `softmax_scale`: 1 / sqrt(d) if
    None. `sinks` [heads]: the score of one more term of each head's softmax, which has no value. On a GPU the function
    is compiled; elsewhere it holds all scores in memory.
    """
    if window not in nodes.masks:
        nodes.masks[window] = block_mask(nodes, window, query.device)
    attend: Any = _compiled() if query.is_cuda else flex_attention
    out, more = attend(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        block_mask=nodes.masks[window],
        scale=softmax_scale,
        enable_gqa=query.size(1) > key.size(1),
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:  # one more term in the sum of each query, which has no value
        out = out * torch.sigmoid(more.lse - sinks.to(more.lse.dtype)[:, None])[..., None].to(out.dtype)
    return out[0].transpose(0, 1).flatten(1)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def block_mask(nodes: ForestNodes, window: int | None, target: torch.device) -> BlockMask:
    """What FlexAttention takes: which blocks it computes, and which keys of them each query attends to."""
    places = _positions(nodes)
    own, last, depths = (torch.from_numpy(x.astype(np.int32)).to(target) for x in places)
    some, whole = blocks_of(nodes, window)
    numbers = [torch.from_numpy(part) for blocks in (some & ~whole, whole) for part in _in_order(blocks)]
    mask = BlockMask.from_kv_blocks(
        *numbers,
        BLOCK_SIZE=BLOCK,
        mask_mod=_sees(own, last, depths, window),
        seq_lengths=(len(own), len(last)),
    )
    return mask.to(target)


def _sees(
    own: torch.Tensor, last: torch.Tensor, depths: torch.Tensor, window: int | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Whether query `row` attends to position `place`: a token's path are those before it whose node's last descendant
    comes after it.
    """
    limit = 0 if window is None else window

    def on_path(_batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        position = own[row]
        return (place <= position) & (position < last[place])

    def in_window(_batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        position = own[row]
        return (place <= position) & (position < last[place]) & (depths[position] - depths[place] < limit)

    return on_path if window is None else in_window


def blocks_of(nodes: ForestNodes, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Of each block of this rank's queries and of the pack's keys, whether any query attends to any key, and whether
    all queries attend to all keys: two of [query blocks, key blocks] bool. With a window the first may be True where
    only a block's corner comes near.
    """
    own, last, depths = _positions(nodes)
    places = np.arange(len(last))
    # The queries that attend to a key without a window are those from its own position to its last descendant.
    first, end = np.searchsorted(own, places), np.searchsorted(own, last)
    shape = -(-len(last) // BLOCK), -(-len(own) // BLOCK)

    def num_keys(begin: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """How many keys of each key block have each query block, if key k has those from begin[k] to stop[k]."""
        steps = np.zeros((shape[0], shape[1] + 1), np.int64)
        has = begin < stop
        np.add.at(steps, (places[has] // BLOCK, begin[has]), 1)
        np.add.at(steps, (places[has] // BLOCK, stop[has]), -1)
        return steps.cumsum(1)[:, :-1].T

    is_seen = first < end
    some = num_keys(np.where(is_seen, first // BLOCK, 0), np.where(is_seen, -(-end // BLOCK), 0)) > 0
    whole = num_keys(-(-first // BLOCK), end // BLOCK) == BLOCK
    if window is not None:
        of_queries, of_keys = depths[own], depths
        least, most = (
            [function.reduceat(x, np.arange(0, len(x), BLOCK)) for x in (of_queries, of_keys)]
            for function in (np.minimum, np.maximum)
        )
        some &= least[0][:, None] - most[1] < window
        whole &= most[0][:, None] - least[1] < window
    return some, whole


def _positions(nodes: ForestNodes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The positions of this rank's queries [t]; where the last descendant of each position's node ends, and each
    position's depth, both [C]. All int64, on the host.
    """
    starts = np.asarray(nodes.starts, np.int64)
    sizes = np.diff(starts)
    before = np.zeros(len(sizes), np.int64)  # depth of each node's first token
    for node, parent in enumerate(nodes.parents()):
        if parent >= 0:
            before[node] = before[parent] + sizes[parent]
    held = nodes.held or (slice(0, nodes.starts[-1]),)
    own = np.concatenate([np.arange(part.start, part.stop) for part in held])
    depths = np.arange(starts[-1]) + np.repeat(before - starts[:-1], sizes)
    return own, np.repeat(np.asarray(nodes.ends, np.int64), sizes), depths


def _in_order(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many key blocks each query block has, and their numbers, before those of the others: [1, 1, query blocks] and
    [1, 1, query blocks, key blocks] int32.
    """
    order = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(1, dtype=np.int32)[None, None], order.astype(np.int32)[None, None]
