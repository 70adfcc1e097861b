"""Experts of every token of the recorded batch, gathered from all ranks; and routers with ties on purpose."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.base.records import MicroBatch
from gspo_mega.base.rollout_batch import RolloutBatch
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.routing import Routes, choice_margins, influential_positions

# Relative difference of rows that are made equal: their scores then differ by about their rounding.
_TIE = 1e-7


def gather_routes(
    engine: PolicyEngine, batch: RolloutBatch, micro_batches: list[MicroBatch], routes: list[Routes]
) -> np.ndarray | None:
    """[sum of prompt + response - 1, layers, k] int64: the experts of each token that a prediction depends on, sorted
    by expert; -1 where no log-prob of the batch does. None for a model without experts, or whose routes are replayed
    and so not recorded. Collective over all ranks.
    """
    if engine.spec.moe is None or engine.config.moe.routing_replay == "R3":
        return None
    lengths = [t.num_tokens - 1 for t in batch.trajectories]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    k = engine.spec.moe.experts_per_token
    # Each (token, layer) is on one rank; the others leave zero.
    whole = torch.zeros(int(starts[-1]), engine.spec.num_layers, k, dtype=torch.int64)
    for micro_batch, recorded in zip(micro_batches, routes, strict=True):
        compared = engine.routers.compared(micro_batch).cpu().numpy()
        places = _places(micro_batch, starts)[engine.routers.rows(micro_batch).numpy()]
        rows = np.flatnonzero(compared & (places >= 0))
        for layer, experts in recorded.items():
            whole[torch.from_numpy(places[rows]), layer] = (
                experts.long().cpu()[torch.from_numpy(rows)].sort(dim=1).values + 1
            )
    dist.all_reduce(whole, group=engine.groups.host.group)
    return whole.numpy() - 1


def _places(micro_batch: MicroBatch, starts: np.ndarray) -> np.ndarray:
    """[T]: where each position of a pack stands among all tokens of the batch; -1 for padding and filler."""
    places = np.full(micro_batch.num_tokens, -1, np.int64)
    for s, row in enumerate(micro_batch.trajectory_index.tolist()):
        if row >= 0:
            begin, length = int(micro_batch.cu_seqlens[s]), int(starts[row + 1] - starts[row])
            places[begin : begin + length] = np.arange(length) + starts[row]
    return places


def num_route_flips(routes: np.ndarray | None, want: np.ndarray | None) -> int:
    """Pairs of token and layer whose set of experts differs. Both: sorted expert numbers, [tokens, layers, k] int,
    global; None without experts.
    """
    return 0 if routes is None or want is None else int((routes != want).any(axis=2).sum())


@torch.no_grad()
def tie_routers(engine: PolicyEngine) -> None:
    """Make the rows of each router equal up to the rounding of a score, in groups of one more than the experts of a
    token. Rounding then decides which expert of the best group is left out.
    """
    if engine.spec.moe is None:
        return
    group = engine.spec.moe.experts_per_token + 1
    for layer, router in engine.routers.all():
        noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        first = torch.arange(router.weight.size(0)) // group * group
        router.weight.copy_(router.weight[first].double() * (1 + _TIE * noise.to(router.weight.device)))
        if router.expert_bias is not None:
            router.expert_bias.copy_(router.expert_bias[first])


class RouterMargins:
    """The gap between the last expert chosen and the first one not chosen, of every token: the smallest over layers.

    For one rank that holds the whole model, inside the `with`, and one pass over `micro_batches`.
    """

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._gaps: list[np.ndarray] = []

    def __enter__(self) -> RouterMargins:
        self._hooks = [router.register_forward_hook(self._note) for _, router in self._engine.routers.all()]
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _note(self, router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _outputs: object) -> None:
        self._gaps.append(choice_margins(cast(Any, router), inputs[0]).cpu().numpy())

    def by_trajectory(self, batch: RolloutBatch, micro_batches: list[MicroBatch]) -> list[np.ndarray]:
        """[prompt + response - 1] float64 per trajectory; infinite where no prediction depends on the token."""
        lengths = [t.num_tokens - 1 for t in batch.trajectories]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        whole = np.full(int(starts[-1]), np.inf)
        layers = len(self._engine.routers.all())
        for k, micro_batch in enumerate(micro_batches if layers else []):
            places = _places(micro_batch, starts)
            counts = influential_positions(micro_batch) & (places >= 0)
            whole[places[counts]] = np.min(self._gaps[k * layers : (k + 1) * layers], axis=0)[counts]
        return np.split(whole, starts[1:-1])
