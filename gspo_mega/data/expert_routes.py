"""The experts that the rollout engine sent each token to, in the layout of a pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_mega.errors import RolloutError
from gspo_mega.records import MicroBatch, Trajectory

# Expert numbers are sent and kept in two bytes: a model of a hundred layers has hundreds of them per token.
_DTYPE = np.int16


def packed_routes(micro_batch: MicroBatch, trajectories: Sequence[Trajectory], to_replay: bool) -> np.ndarray | None:
    """[T, layers, k] int16 for `micro_batch`, whose `trajectory_index` are rows of `trajectories`; None where they have
    none.

    An entry is -1 where the engine returned nothing: a sequence's last token, padding, filler, layers without experts.
    Raises RolloutError naming the trajectory whose routes have another shape than its tokens, or `to_replay`, where a
    token goes to one expert twice.
    """
    shape = next((t.routed_experts.shape[1:] for t in trajectories if t.routed_experts is not None), None)
    if shape is None:
        return None
    routes = np.full((micro_batch.num_tokens, *shape), -1, _DTYPE)
    for place, row in enumerate(micro_batch.trajectory_index.tolist()):
        if row >= 0:
            given = _checked(trajectories[row], shape, to_replay)
            start = int(micro_batch.cu_seqlens[place])
            routes[start : start + len(given)] = given
    return routes


def _checked(trajectory: Trajectory, shape: tuple[int, ...], to_replay: bool) -> np.ndarray:
    given, wanted = trajectory.routed_experts, (trajectory.num_tokens - 1, *shape)
    if given is None or given.shape != wanted:
        has = "no routed experts" if given is None else f"routed experts of shape {given.shape}"
        raise RolloutError(
            f"trajectory {trajectory.trajectory_id} has {has}; expected is {wanted} (tokens without the last, layers,"
            " experts per token)"
        )
    ordered = np.sort(given, axis=-1)
    if to_replay and ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise RolloutError(f"trajectory {trajectory.trajectory_id} has a token that goes to the same expert twice")
    return given
