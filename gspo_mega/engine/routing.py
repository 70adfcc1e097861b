"""The experts of each token: recorded in every pass, replayed if configured, compared, and balanced.

A rank's router sees the pack's positions on this context rank and, under sequence parallelism, this tensor rank's equal
share of them. First comes recording and replay, through Megatron's `RouterReplay` of each router: R2 replays the routes
of the old pass in the training passes, R3 replays the rollout engine's routes in all passes. Then come comparisons of
routes. They cover positions up to a sequence's last active label: attention is causal, so no trained log-prob depends
on the routes of later positions (the last token, padding, filler). Last come two ways to balance the load of experts:
the router losses of Megatron, and the expert bias, which needs no loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from gspo_mega.base.errors import NumericsError
from gspo_mega.base.records import MicroBatch
from gspo_mega.config.schema import Moe
from gspo_mega.cpu.forest_attention import forest_of
from gspo_mega.engine.device_batch import computed_rows
from gspo_mega.engine.precision import clear_router_losses, router_losses, router_losses_know_their_parts
from gspo_mega.engine.process_groups import ParallelGroups, device
from gspo_mega.models.spec import MoeSpec

# One micro-batch on one rank: zero-based layer of the model -> expert ids [t, k] int16 of the router's t positions.
Routes = dict[int, torch.Tensor]


# --- Recording and replay ------------------------------------------------------------------------------------


class Routers:
    """The routers of this rank's chunks, in order. Without experts there are none, and the methods do nothing."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        moe: MoeSpec | None,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        recompute: bool,
    ) -> None:
        self.moe, self._groups = moe, groups
        self._split = groups.tensor.size if sequence_parallel else 1
        self.recompute = recompute
        self.chunks: list[list[tuple[int, TopKRouter]]] = [
            [(_layer_of(module), module) for module in chunk.modules() if isinstance(module, TopKRouter)]
            for chunk in chunks
        ]
        self._followed: list[tuple[int, torch.Tensor]] = []
        for layer, router in self.all():
            router.register_forward_hook(self._check(layer))
            sort_chosen_experts(router)
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, BaseMoELayer):
                _forget_dispatched(module)
            if isinstance(module, TransformerLayer):
                for router in (part for part in module.modules() if isinstance(part, TopKRouter)):
                    RowWeights(router, module, self._own)
        # Megatron lists every router of the process for its static helpers. This class controls each router directly,
        # and the list would keep models alive.
        RouterReplay.clear_global_router_replay_instances()

    def all(self) -> list[tuple[int, TopKRouter]]:
        """(zero-based layer of the model, router) of all chunks of this rank."""
        return [entry for chunk in self.chunks for entry in chunk]

    def rows(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Positions of the pack's rows that this rank's routers see, in their order: [t] int64, on the host. The first
        of the rows that share a position stands for all of them.
        """
        return self._own(computed_rows(micro_batch, self._groups))

    def _own(self, held: torch.Tensor) -> torch.Tensor:
        """This tensor rank's part of the context rank's positions."""
        return held.chunk(self._split)[self._groups.tensor.rank] if self._split > 1 else held

    def all_rows(self, micro_batch: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
        """All positions of the pack's rows that are computed on this rank, and the place among its routers' positions
        where each is: two [n] int64, n >= t.
        """
        rows = self.rows(micro_batch).numpy()
        if micro_batch.computed_at is None:
            return rows, np.arange(len(rows))
        place = np.full(micro_batch.num_computed, -1, np.int64)
        place[micro_batch.computed_at[rows]] = np.arange(len(rows))
        places = place[micro_batch.computed_at]
        return np.flatnonzero(places >= 0), places[places >= 0]

    def num_rows(self, micro_batch: MicroBatch) -> torch.Tensor:
        """For how many rows each position of this rank's routers counts: [t] int64, on this rank's device. 0 where no
        trained log-prob depends on it; at most 1 unless rows share prefixes.
        """
        rows, places = self.all_rows(micro_batch)
        counted = influential_positions(micro_batch)[rows]
        counts = np.bincount(places[counted], minlength=len(self.rows(micro_batch)))
        return torch.from_numpy(counts.astype(np.int64)).to(device())

    def rollout_routes(self, micro_batch: MicroBatch) -> Routes:
        """The rollout engine's routes for this rank's layers and positions: [t, k] int16 per layer.

        Raises ValueError for a micro-batch without routes, or without those of one of this rank's layers.
        """
        if micro_batch.routed_experts is None:
            raise ValueError("the micro-batch has no routes of the rollout engine")
        routes = torch.from_numpy(micro_batch.routed_experts)[self.rows(micro_batch)].to(device())
        held = micro_batch.routed_layers
        columns = range(routes.shape[1]) if held is None else held.tolist()
        column = {layer: place for place, layer in enumerate(columns)}
        missing = [layer for layer, _ in self.all() if layer not in column]
        if missing:
            raise ValueError(f"the micro-batch has no routes of the rollout engine through layers {missing}")
        return {layer: routes[:, column[layer]].to(torch.int16).contiguous() for layer, _ in self.all()}

    def reset(self) -> None:
        """Clear every action and every index, including those of an interrupted pass."""
        self._followed.clear()
        for _, router in self.all():
            replay = _replay_of(router)
            replay.clear_router_replay_action()
            replay.clear_indices()

    def pop_followed(self) -> list[tuple[int, torch.Tensor]]:
        """(layer, whether the router used exactly the replayed experts as a 0-d bool) of every replayed forward on this
        rank since the last call.
        """
        followed, self._followed = self._followed, []
        return followed

    def _check(self, layer: int):
        def hook(router: TopKRouter, _inputs: object, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
            replay = _replay_of(router)
            if replay.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                prescribed, used = replay.target_topk_idx, outputs[1]
                assert prescribed is not None, "Megatron replays a router without indices"
                self._followed.append((layer, used.gather(1, prescribed).all() & (used.sum() == prescribed.numel())))

        return hook


def expert_bias_of(router: TopKRouter) -> torch.Tensor:
    """The router's expert bias, [num_experts] float32, the same on all ranks of the layer; shares its memory."""
    # A buffer that Megatron registers by name; the class declares only the None of routers without one.
    return cast(torch.Tensor, router.expert_bias)


def sort_chosen_experts(router: TopKRouter) -> None:
    """Make the router list a token's experts by falling score in every pass, with or without gradients.

    Megatron-Core 0.19 sorts them only if gradients are enabled. The weights of a token's experts are divided by their
    sum, and on a GPU the unsorted ones come in another order, so the sum has another last bit. The old pass then
    differs from the training pass of the same weights: on an H100, |log s| of a mixture reached 2e-3 to 6e-3 in bf16
    and FP8, ten times GSPO's clip range. The CPU sorts either way.
    """
    replay = _replay_of(router)
    choose = replay.get_replay_topk

    def choose_sorted(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            return choose(*args, **kwargs)

    replay.get_replay_topk = choose_sorted


def _replay_of(router: TopKRouter) -> RouterReplay:
    if router.router_replay is None:
        raise ValueError("the router was built without moe_enable_routing_replay")
    return router.router_replay


def _forget_dispatched(experts: BaseMoELayer) -> None:
    """After each forward of a layer of experts, drop what its dispatcher of tokens noted of the pass.

    Megatron-Core 0.16 and 0.19 keep it until the layer's next forward, through optimizer step, publish and checkpoint:
    the router's weights with their graph (with recomputation the layer's input and that input's gradient, 2 [t, H]
    tensors), the routing map ([t, experts] bool) and the rows of the permuted tokens ([t, 2 x experts + 1] int32). For
    Qwen3-30B-A3B in packs of 18,432 tokens the last two take 0.95 GiB. Autograd has its own references to what a
    backward pass needs.
    """
    dispatcher: Any = experts.token_dispatcher
    holders = [one for one in (dispatcher, getattr(dispatcher, "_comm_manager", None)) if one is not None]
    lasting = {id(value) for holder in holders for value in vars(holder).values() if isinstance(value, torch.Tensor)}

    def forget(*_: object) -> None:
        for holder in holders:
            noted = [
                name
                for name, value in vars(holder).items()
                if isinstance(value, torch.Tensor) and id(value) not in lasting
            ]
            vars(holder).update(dict.fromkeys(noted))

    experts.register_forward_hook(forget)


def _layer_of(router: TopKRouter) -> int:
    """The zero-based layer of the model."""
    if router.layer_number is None:
        raise ValueError("the router does not know its layer")
    return router.layer_number - 1


class RoutingPass:
    """The routes of one pass over micro-batches, one entry per micro-batch: `recorded` during the pass, or prescribed
    by `replay`.
    """

    def __init__(self, routers: Routers, num_micro_batches: int, replay: list[Routes] | None = None) -> None:
        self._routers, self._replay = routers, replay
        self.recorded: list[Routes] = [{} for _ in range(num_micro_batches)]
        routers.reset()

    def repeat(self) -> RoutingPass:
        """A new pass over the same micro-batches: with the same replay, or recorded anew."""
        return RoutingPass(self._routers, len(self.recorded), self._replay)

    @property
    def taken(self) -> list[Routes]:
        """The routes that the finished pass took: per micro-batch, [t, k] int16 for each layer of this rank."""
        return self.recorded if self._replay is None else self._replay

    @contextlib.contextmanager
    def forward(self, chunk: int, micro_batch: int, forward_only: bool) -> Iterator[None]:
        """The context of one chunk's forward pass. Forward passes of other micro-batches may follow before its backward
        pass.
        """
        recomputed = self._routers.recompute and not forward_only
        routers = self._routers.chunks[chunk]
        for layer, router in routers:
            replay = _replay_of(router)
            if self._replay is None:
                replay.set_router_replay_action(RouterReplayAction.RECORD)
            else:
                # Megatron also queues them for the layer's recomputations, which run in the order of forward passes.
                replay.set_target_indices(self._replay[micro_batch][layer].long())
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for layer, router in routers:
            replay = _replay_of(router)
            if self._replay is None:
                recorded = replay.get_recorded_indices()
                assert recorded is not None, "Megatron recorded no routes of a router that ran"
                self.recorded[micro_batch][layer] = recorded.to(torch.int16)
                replay.clear_router_replay_action()  # a recomputed router chooses as before
            elif recomputed:
                replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            else:
                replay.clear_router_replay_action()
                replay.clear_indices()

    def finish(self) -> None:
        """Raise NumericsError if a layer did not use exactly the replayed experts in every forward pass."""
        followed = self._routers.pop_followed()
        left = [
            layer
            for layer, router in self._routers.all()
            if self._replay is not None and _replay_of(router).replay_backward_list
        ]
        self._routers.reset()
        if self._replay is None:
            return
        if len(followed) != len(self._replay) * len(self._routers.all()):
            raise NumericsError(
                f"routing replay: {len(followed)} forward passes of routers;"
                f" {len(self._replay) * len(self._routers.all())} expected"
            )
        same_experts = torch.stack([same for _, same in followed]).tolist() if followed else []  # one device wait
        wrong = sorted({layer for (layer, _), same in zip(followed, same_experts) if not same})
        if wrong:
            raise NumericsError(f"routing replay: layers {wrong} used other experts than the replayed ones")
        if left:
            raise NumericsError(f"routing replay: layers {left} did not recompute every micro-batch with its experts")


# --- Comparisons ---------------------------------------------------------------------------------------------


def influential_positions(micro_batch: MicroBatch) -> np.ndarray:
    """Which positions are at or before their sequence's last active label: [T] bool of the whole pack, on the host."""
    result = np.zeros(micro_batch.num_tokens, bool)
    for start, end in zip(micro_batch.cu_seqlens, micro_batch.cu_seqlens[1:]):
        active = np.flatnonzero(micro_batch.loss_mask[start:end])
        if active.size:
            result[start : start + active[-1] + 1] = True
    return result


def count_changed(before: Routes, after: Routes, num_rows: torch.Tensor) -> torch.Tensor:
    """Count the changes between two sets of routes, for each layer in the order of `before`: [layers, 4] int64, those
    of this rank.

    The columns are tokens whose set of experts differs, tokens compared, choices of `before` that `after` does not
    make, and choices compared. before, after: [t, k] int16 per layer. num_rows: [t] int64, for how many rows each
    position counts.
    """
    counts = [num_rows.new_zeros(0, 4)]
    tokens = num_rows.sum()
    for layer, chosen in before.items():
        lost = (chosen[:, :, None] != after[layer][:, None, :]).all(dim=2)
        changed, replaced = (lost.any(dim=1) * num_rows).sum(), (lost.sum(dim=1) * num_rows).sum()
        counts.append(torch.stack([changed, tokens, replaced, tokens * chosen.shape[1]])[None])
    return torch.cat(counts)


def changed_sums(since: str, layers: Iterable[int], counts: torch.Tensor) -> dict[str, float]:
    """A rank's report of its layers' `counts` [layers, 4] of `count_changed`, by name. `since`: `old` (the old pass) or
    `rollout`.
    """
    sums = {f"changed_since_{since}": 0.0, f"compared_with_{since}": 0.0}
    for layer, (changed, compared, replaced, choices) in zip(layers, counts.tolist(), strict=True):
        sums[f"changed_since_{since}"] += changed
        sums[f"compared_with_{since}"] += compared
        if since == "old":
            sums |= {f"replaced/{layer}": float(replaced), f"choices/{layer}": float(choices)}
    return sums


@torch.no_grad()
def choice_margins(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
    """The margin between the router's last choice and the best rejected expert: [t] float64, for this rank's positions.

    hidden: [t, 1, H] of the model's dtype. The unit is that of the deciding scores: logits, or sigmoid scores with
    the expert bias. With groups it is the smaller of the margins between experts and between groups (each the sum of
    its best experts). Infinite if nothing was rejected.
    """
    scores = router.gating(hidden).flatten(0, -2).double()
    if router.score_function == "sigmoid":
        scores = scores.sigmoid() + expert_bias_of(router).double()
    limit, num_groups = router.config.moe_router_group_topk, router.config.moe_router_num_groups
    if not limit or not num_groups:
        return _margins(scores, router.topk)
    grouped = scores.view(len(scores), num_groups, -1)
    by_group = grouped.topk(router.topk // limit, dim=-1).values.sum(dim=-1)
    left_out = torch.ones_like(by_group, dtype=torch.bool).scatter_(1, by_group.topk(limit, dim=1).indices, False)
    inside = grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    return torch.minimum(_margins(by_group, limit), _margins(inside, router.topk))


def _margins(scores: torch.Tensor, count: int) -> torch.Tensor:
    if scores.size(1) == count:
        return torch.full_like(scores[:, 0], torch.inf)
    best = scores.topk(count + 1, dim=1).values
    return best[:, -2] - best[:, -1]


# --- Balance -------------------------------------------------------------------------------------------------


class LoadBalancing:
    """Megatron's load-balancing loss and router z-loss in the training passes of one rank: their scale and their
    reported values. Does nothing if both are off. `num_routers`: layers with experts on this rank.

    For one pack of T positions (padding included) and one layer of E experts, k per token, let f_i be the share of the
    T x k choices that went to expert i, and P_i the mean softmax probability of expert i:

        balance = E sum_i f_i P_i                            (arXiv:2101.03961; 1 when even)
        z       = mean_t logsumexp(router logits_t)^2        (arXiv:2202.08906)

    With sigmoid scores P_i is the mean share of a token's sum, and f_i ignores expert bias and groups. If rows of the
    pack share prefixes, T are the tokens of its rows, each with its own, and no padding (`RowWeights`).

    The loss of a mini-batch gains coefficient x sum over layers of the mean over its packs, weighted by T. This depends
    only on the packs: not on the number of micro-batches or data-parallel ranks, nor on tensor, context, expert or
    pipeline parallelism.
    """

    def __init__(
        self, settings: Moe, megatron_config: TransformerConfig, groups: ParallelGroups, num_routers: int
    ) -> None:
        self._settings, self._config, self._groups, self._num_routers = settings, megatron_config, groups, num_routers
        self._num_micro_batches = 0

    @property
    def is_on(self) -> bool:
        return has_router_losses(self._settings)

    def start(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the scale for a mini-batch, before its training pass. Collective over data-parallel ranks if a loss is
        on.

        Each rank back-propagates its part of a pack's mean times the T / (tensor x context) positions that it holds:
        Megatron expects a later division by tokens, which this loss has already had. So the scale is tensor x context
        (in Megatron versions that leave this factor out) over the mini-batch's positions.
        """
        if not self.is_on:
            return
        num_positions = torch.tensor(
            float(sum(_num_weighed(m) for m in micro_batches)), dtype=torch.float64, device=device()
        )
        if self._groups.data.size > 1:
            dist.all_reduce(num_positions, group=self._groups.data.group)
        scale = (1 if router_losses_know_their_parts() else self._parts) / float(num_positions)
        # Routers read the coefficients in every forward, recomputed ones included. Megatron has no other way to scale
        # them.
        self._config.moe_aux_loss_coeff = megatron_coefficient(self._settings) * scale
        if self._settings.z_loss_coefficient > 0:
            self._config.moe_z_loss_coeff = self._settings.z_loss_coefficient * scale
        self._num_micro_batches = len(micro_batches)
        clear_router_losses()

    def sums(self) -> dict[str, float]:
        """This rank's part of each loss (before its coefficient), summed over layers and packs, and their number.

        Valid after a training pass. Sums over all ranks, divided by the summed number, are means.
        """
        if not self.is_on:
            return {}
        losses = router_losses()
        sums = {"num_router_losses": self._num_routers * self._num_micro_batches / self._parts}
        if "load_balancing_loss" in losses:  # each rank of a pack holds its share of the value
            sums["load_balancing_loss"] = float(losses["load_balancing_loss"].sum())
        if "z_loss" in losses:  # each rank of a pack holds the mean over its own positions
            sums["z_loss"] = float(losses["z_loss"].sum()) / self._parts
        clear_router_losses()
        return sums

    @property
    def _parts(self) -> int:
        """Ranks that share one pack's positions."""
        return self._groups.tensor.size * self._groups.context.size


class RowWeights:
    """Makes Megatron's losses of one router count a token that rows share once for each of them, and no padding.

    `layer` is the one that holds the router: it is given the pack in every pass, recomputed ones included. `own` takes
    this tensor rank's part of the positions of the context rank. Packs that share nothing have Megatron's own losses.
    The attributes are those of the pack of the present pass: `weights` [t] float32 of this router's positions, or None;
    `num_tokens`, the sum of the whole pack's.
    """

    def __init__(
        self, router: TopKRouter, layer: TransformerLayer, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._router, self._own, self._plain = router, own, (router.apply_z_loss, router._apply_aux_loss)
        self.weights: torch.Tensor | None = None
        self.num_tokens = 0
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        replaced: Any = router  # Megatron calls both methods for the losses that are on
        replaced.apply_z_loss, replaced._apply_aux_loss = self._z_loss, self._balance_loss

    def _begin(self, _layer: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        params = kwargs.get("packed_seq_params")
        forest = None if params is None else forest_of(params)
        self.weights = None
        if forest is not None and forest.num_rows is not None:
            self.weights, self.num_tokens = self._own(forest.num_rows).float(), forest.num_row_tokens

    def _z_loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Megatron's `apply_z_loss`. logits: [t, experts]."""
        router, coefficient = self._router, self._router.config.moe_z_loss_coeff
        if self.weights is None or coefficient is None or not (router.training and torch.is_grad_enabled()):
            return self._plain[0](logits, *args, **kwargs)
        parts = router.tp_cp_group.size()
        # As Megatron's: the mean over this rank's share of the tokens, and each rank adds its share of the coefficient.
        mean = (self.weights * logits.logsumexp(dim=-1).square()).sum() * parts / self.num_tokens
        return self._attach(logits, coefficient / parts, mean * coefficient / parts, "z_loss")

    def _balance_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Megatron's `_apply_aux_loss`. All arguments: [t, experts]."""
        router, coefficient = self._router, self._router.get_aux_loss_coeff("aux_loss")
        if self.weights is None or coefficient == 0:
            return self._plain[1](probs, scores, routing_map, *args, **kwargs)
        counts, _, _ = get_tokens_per_expert_and_token_count(
            routing_map=routing_map * self.weights[:, None].long(), reduce_group=router.tp_cp_group, topk=router.topk
        )
        loss = switch_load_balancing_loss_func(
            probs=scores * self.weights[:, None],
            tokens_per_expert=counts,
            total_num_tokens=self.num_tokens,
            topk=router.topk,
            num_experts=scores.size(1),
            moe_aux_loss_coeff=coefficient,
            fused=router.config.moe_router_fusion,
        )
        return self._attach(probs, coefficient, loss, "load_balancing_loss")

    def _attach(self, activation: torch.Tensor, coefficient: float, loss: torch.Tensor, name: str) -> torch.Tensor:
        """Report loss / coefficient, and add the loss to that of the pass, times this rank's share of the tokens."""
        group = self._router.tp_cp_group
        share: Any = self.num_tokens / group.size()  # Megatron, which only multiplies by it, declares an integer
        return self._router.attach_and_log_load_balancing_loss(
            activation, coefficient, loss, name, group, valid_token_count=share
        )


def megatron_coefficient(settings: Moe) -> float:
    """The load-balancing coefficient in effect: 0 if the loss is off."""
    return settings.load_balancing_coefficient if settings.load_balancing != "none" else 0.0


def _num_weighed(micro_batch: MicroBatch) -> int:
    """T of a pack for the routers' losses: its positions, or the tokens of its rows if these share prefixes."""
    return micro_batch.num_tokens if micro_batch.computed_at is None else int(micro_batch.row_counts().sum())


def has_router_losses(settings: Moe) -> bool:
    """Whether one of the routers' losses is on."""
    return megatron_coefficient(settings) > 0 or settings.z_loss_coefficient > 0


# What `rank_loads` returns. Unlike the other sums of a report these depend on the layout.
RANK_LOADS = ("rank_load_max_over_mean", "num_rank_loads", "rank_load_max")


def rank_loads(routes: Sequence[Routes], moe: MoeSpec | None, groups: ParallelGroups) -> dict[str, float]:
    """Measure how unevenly tokens reach the expert-parallel ranks, which decides how long a layer takes and how much
    memory the busiest rank needs.

    For each pack and layer, the ratio is the tokens that the busiest rank's experts receive over the mean rank's,
    padding and filler included. Returns the sum of the ratios, their number and their maximum over this rank's layers,
    on one rank of each exchange of tokens, and nothing elsewhere or without expert parallelism.

    routes: per micro-batch the experts that the pass used, [t, k] int16 per layer. Collective over the exchange.
    """
    if moe is None or groups.expert.size == 1 or not any(routes):
        return {}
    per_rank = moe.num_experts // groups.expert.size
    layers = len(routes[0])
    counts = torch.zeros(len(routes) * layers, groups.expert.size, dtype=torch.int64, device=device())
    for place, experts in enumerate(experts for taken in routes for experts in taken.values()):
        ranks = experts.flatten().long() // per_rank
        counts[place].index_add_(0, ranks, torch.ones_like(ranks))
    for group in (groups.expert, groups.expert_tensor):
        if group.size > 1:
            dist.all_reduce(counts, group=group.group)
    if groups.expert.rank or groups.expert_tensor.rank:
        return {}
    received = counts.double()
    ratios = (received.amax(dim=1) / received.mean(dim=1).clamp(min=1)).tolist()
    return dict(zip(RANK_LOADS, (sum(ratios), float(len(ratios)), max(ratios)), strict=True))


class ExpertBias:
    """Balance without a loss: the expert bias favours experts that received too few tokens (arXiv:2408.15664). Does
    nothing if `rate` is 0.

    After an optimizer step, for each layer, where c_i tokens of the mini-batch went to expert i:

        bias_i += rate x sign(mean(c) - c_i)

    The counts cover positions that a trained log-prob depends on, in training passes only; they exclude padding,
    filler, the old pass and the reference's pass, and a position counts once for each row that shares it. The bias is
    therefore bitwise the same in every layout and packing with the same routes. Replayed routes count as taken. Under
    R2 all mini-batches of a step follow the bias of the old pass; under R3 they follow the servers' bias, which is the
    published one.

    Megatron's own update moves the bias during gradient reduction, before it is known if the step is applied, and
    counts padding. It runs at a rate of zero.
    """

    def __init__(self, rate: float, routers: Routers, groups: ParallelGroups, num_layers: int) -> None:
        self._rate, self._routers, self._groups, self._num_layers = rate, routers, groups, num_layers
        self._counts: torch.Tensor | None = None

    def count(self, micro_batches: Sequence[MicroBatch], routes: Sequence[Routes]) -> None:
        """Count the routes of one training pass over a mini-batch.

        routes: for each micro-batch the routes taken through this rank's routers, [t, k] int16 expert ids per layer.
        """
        if self._rate == 0:
            return
        assert self._routers.moe is not None
        num_experts = self._routers.moe.num_experts
        counts = torch.zeros(self._num_layers, num_experts, dtype=torch.int64, device=device())
        for micro_batch, taken in zip(micro_batches, routes, strict=True):
            rows = self._routers.num_rows(micro_batch)
            for layer, experts in taken.items():
                counts[layer].index_add_(0, experts.flatten().long(), rows.repeat_interleave(experts.shape[1]))
        self._counts = counts

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Move the biases by the last counts. Collective over all ranks if the rate is above 0.

        Returns this rank's part of the sum over layers of the largest count over the mean count, and of the number of
        layers.
        """
        if self._counts is None:
            return {}
        counts, self._counts = self._counts, None
        # Each (position, layer) is on exactly one rank.
        dist.all_reduce(counts, group=self._groups.world.group)
        mean = counts.double().mean(dim=1, keepdim=True)
        direction = (mean - counts).sign().float()
        for layer, router in self._routers.all():
            expert_bias_of(router).add_(self._rate * direction[layer])
        if not self._groups.is_lead:
            return {}
        used = mean[:, 0] > 0
        ratios = counts.amax(dim=1)[used] / mean[used, 0]
        return {"load_max_over_mean": float(ratios.sum()), "num_loads": float(used.sum())}
