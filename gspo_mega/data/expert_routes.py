"""The experts that the rollout engine sent each token to, in the layout of a pack.

Owns their check against the rows and the choice of layers: a pipeline stage gets those of its own layers with experts.
They are packed when they are handed out and not before, so that the whole batch's are in memory once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import MicroBatch, Trajectory, route_type
from gspo_mega.models.spec import ModelSpec

# Numbers that are compared at once: they stay in a core's cache.
_BLOCK = 2**17


class ExpertRoutes:
    """The routes of a batch's rows for a model with experts; `of` makes one. `experts_per_token` is the model's."""

    def __init__(self, rows: Sequence[Trajectory], spec: ModelSpec) -> None:
        assert spec.moe is not None, "a model without experts has no routes"
        self._rows, self._spec, self._moe = rows, spec, spec.moe

    @classmethod
    def of(cls, rows: Sequence[Trajectory], spec: ModelSpec, to_replay: bool) -> ExpertRoutes | None:
        """None where no row has routes. Raises RolloutError naming the row whose routes have another shape than its
        tokens and the model, or `to_replay`, where a token goes to one expert twice.
        """
        if spec.moe is None or all(row.routed_experts is None for row in rows):
            return None
        for row in rows:
            wanted = (row.num_tokens - 1, spec.num_layers, spec.moe.experts_per_token)
            given = row.routed_experts
            if given is None or given.shape != wanted:
                has = "no routed experts" if given is None else f"routed experts of shape {given.shape}"
                raise RolloutError(
                    f"trajectory {row.trajectory_id} has {has}; expected is {wanted} (tokens without the last, layers,"
                    " experts per token)"
                )
            if to_replay and has_repeated(given, spec.moe.num_dense_layers):
                raise RolloutError(f"trajectory {row.trajectory_id} has a token that goes to the same expert twice")
        return cls(rows, spec)

    def layers(self, chunks: Iterable[range]) -> list[int]:
        """The layers with experts among those of a pipeline stage's model chunks."""
        return [layer for chunk in chunks for layer in chunk if self._spec.has_experts(layer)]

    def packed(self, micro_batch: MicroBatch, layers: Sequence[int]) -> np.ndarray:
        """[T, len(layers), k] of `route_type` for a pack whose `trajectory_index` are places among the rows.

        A position of which the engine returned nothing (a sequence's last token, padding, filler) influences no
        log-prob and is spread over the experts by its place in its sequence: with one FP8 scale per tensor it may have
        an expert's largest value, which then does not depend on the pack.
        """
        k, num_experts = self._moe.experts_per_token, self._moe.num_experts
        routes = np.empty((micro_batch.num_tokens, len(layers), k), route_type(num_experts))
        runs = list(_runs(layers))
        for place, row in enumerate(micro_batch.trajectory_index.tolist()):
            start, end = (int(one) for one in micro_batch.cu_seqlens[place : place + 2])
            if row >= 0:
                given = self._rows[row].routed_experts
                assert given is not None
                for column, run in runs:
                    part = routes[start : start + len(given), column : column + len(run)]
                    part[...] = given[:, run.start : run.stop]
                _spread(routes, start + len(given), end, num_experts, start)
            else:
                _spread(routes, start, end, num_experts, start)
        last = int(micro_batch.cu_seqlens[-1])
        _spread(routes, last, micro_batch.num_tokens, num_experts, last)
        return routes

    def attach(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Give each pack the routes of all layers."""
        for micro_batch in micro_batches:
            micro_batch.routed_experts = self.packed(micro_batch, range(self._spec.num_layers))


def has_repeated(routes: np.ndarray, num_dense_layers: int = 0) -> bool:
    """Does a token go to one expert twice, in one layer behind the first `num_dense_layers`? routes: [tokens, layers,
    k] integers. A few passes over contiguous memory, a tenth of the time of sorting.
    """
    num_tokens, num_layers, k = routes.shape
    rows = max(1, _BLOCK // max(1, num_layers * k))
    column = np.arange(rows * num_layers * k) % k
    # Entry i and the one `apart` behind it belong to the same token and layer where this is True.
    together = {apart: column < k - apart for apart in range(1, k)}
    for start in range(0, num_tokens, rows):
        flat = np.ascontiguousarray(routes[start : start + rows, num_dense_layers:]).reshape(-1)
        for apart, same_token in together.items():
            equal = flat[:-apart] == flat[apart:]
            equal &= same_token[: len(equal)]
            if equal.any():
                return True
    return False


def _spread(routes: np.ndarray, start: int, end: int, num_experts: int, first: int) -> None:
    """Positions `start` to `end` go to experts in turn, counted from `first`."""
    k = routes.shape[2]
    routes[start:end] = ((np.arange(start - first, end - first)[:, None] * k + np.arange(k)) % num_experts)[:, None]


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, range]]:
    """(place in `layers`, range) of every stretch of adjacent layers."""
    for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        pairs = list(run)
        yield pairs[0][0], range(pairs[0][1], pairs[-1][1] + 1)
