"""What ranks run in the routing tests: passes that record, replay and compare routes."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from layout_jobs import CLIP_HIGH, CLIP_LOW, layout_config, pack, recorded_sequences

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.errors import NumericsError
from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import ParallelGroups, create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec

# One alignment in every layout, so that packs are the same to the last position of padding.
ALIGN = 4
SETTINGS = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
# Two data-parallel ranks take the even and the odd packs, one rank takes all of them.
PACKS = ([0, 3, 5], [1, 8, 10], [4, 7], [2, 6, 9, 11])
LAYERS, EXPERTS, TOP_K = 4, 8, 2


class Run:
    """An engine of one layout with the folder's weights; a context manager."""

    def __init__(self, folder: str, parallel: dict, **sections) -> None:
        parallel = {"expert_tensor": 1, **parallel}
        sections = {"optimizer": dict(lr=1e-3, distributed=False), **sections}
        self.folder, self.config, self.spec = (
            folder,
            layout_config(folder, parallel, **sections),
            read_model_spec(folder),
        )
        sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
        self.groups: ParallelGroups = create_groups(virtual_pipeline=parallel.get("virtual_pipeline"), **sizes)
        self.engine = PolicyEngine(self.config, self.spec, self.groups, num_optimizer_steps=100)
        import_huggingface(folder, self.spec, self.groups, self.engine.chunks)
        self.engine.after_weights_loaded()
        self.sequences = recorded_sequences()
        self.denominator = float(sum(s["mask"].any() for s in self.sequences))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        destroy_groups()

    def packs(self, routes_seed: int | None = None) -> list[MicroBatch]:
        rank, size = self.groups.data.rank, self.groups.data.size
        packs = [pack(self.sequences, rows, ALIGN) for rows in PACKS[rank::size]]
        if routes_seed is not None:
            mine = np.array([layer for layer, _ in self.engine.routers.all()], np.int64)
            for micro_batch in packs:  # as they are handed out: a pipeline stage has those of its own layers
                micro_batch.routed_experts = rollout_routes(micro_batch, self.sequences, routes_seed)[:, mine]
                micro_batch.routed_layers = mine
        return packs

    def log_ratios(self, packs: list[MicroBatch], old) -> np.ndarray:
        """Sum over each trajectory's tokens of trainer - rollout log-probs, [12], from an old pass; the same
        everywhere.
        """
        whole = torch.zeros(len(self.sequences), dtype=torch.float64)
        if old.report.columns:
            whole.index_add_(
                0,
                torch.from_numpy(old.report.trajectory_index),
                torch.from_numpy(old.report.columns["mismatch_sums"][:, 1]),
            )
        torch.distributed.all_reduce(whole, group=self.groups.host.group)
        return whole.numpy()

    def log_s(self, report) -> np.ndarray:
        """log s of each trajectory, [12], from a training pass; the same everywhere."""
        whole = torch.full((len(self.sequences),), -np.inf, dtype=torch.float64)
        if report.columns:
            whole[torch.from_numpy(report.trajectory_index)] = torch.from_numpy(report.columns["log_s"])
        torch.distributed.all_reduce(whole, op=torch.distributed.ReduceOp.MAX, group=self.groups.host.group)
        return whole.numpy()

    def gradient(self) -> dict[str, np.ndarray]:
        tensors = PolicyTensors(
            self.spec, self.groups, self.engine.chunks, values=lambda parameter: parameter.main_grad
        )
        return {name: value.clone().numpy() for name, value in tensors.stream(torch.float32)}

    def routing(self, report) -> dict[str, float]:
        """The report's routing sums over all ranks."""
        parts: list = [None] * self.groups.world.size
        torch.distributed.all_gather_object(parts, report.routing)
        return {name: sum(p.get(name, 0.0) for p in parts) for name in sorted({n for p in parts for n in p})}

    def perturb_routers(self, scale: float = 0.3) -> None:
        """Other router weights, the same in every layout. On rank 0's generator: one per layer."""
        with torch.no_grad():
            for layer, router in self.engine.routers.all():
                generator = torch.Generator().manual_seed(100 + layer)
                router.weight.add_(scale * torch.randn(router.weight.shape, generator=generator))


def rollout_routes(
    micro_batch: MicroBatch,
    sequences: list[dict],
    seed: int,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
) -> np.ndarray:
    """Random routes of every position but a sequence's last token and padding, a function of the trajectory alone; the
    others are spread evenly.
    """
    spread = (np.arange(micro_batch.num_tokens)[:, None] * top_k + np.arange(top_k)) % experts
    routes = np.repeat(spread[:, None], layers, axis=1).astype(np.uint8)
    for place, row in enumerate(micro_batch.trajectory_index.tolist()):
        rng = np.random.default_rng((seed, row))
        count = len(sequences[row]["tokens"]) - 1
        chosen = rng.random((count, layers, experts)).argsort(axis=-1)[..., :top_k]
        start = int(micro_batch.cu_seqlens[place])
        routes[start : start + count] = chosen
    return routes


def experts_sorted(folder: str, parallel: dict) -> list[bool]:
    """For every choice of experts in an old pass, whether gradients were enabled: Megatron-Core 0.19 then sorts."""
    chosen, topk = [], torch.topk

    def noted(scores: torch.Tensor, k: int, *args: object, **kwargs: object):
        chosen.append(torch.is_grad_enabled())
        return topk(scores, k, *args, **kwargs)

    with Run(folder, parallel) as run, mock.patch.object(torch, "topk", noted):
        run.engine.old_pass(run.packs())
    return chosen


def replay_old_routes(folder: str, parallel: dict, **sections) -> dict:
    """R2: the old pass, then training passes under the same and under other router weights, with and without replay."""
    with Run(folder, parallel, moe=dict(routing_replay="R2"), **sections) as run:
        packs = run.packs()
        old = run.engine.old_pass(packs)
        same = run.log_s(run.engine.policy_gradients(packs, SETTINGS, run.denominator, old))
        run.perturb_routers()
        replayed = run.log_s(run.engine.policy_gradients(packs, SETTINGS, run.denominator, old))
        gradient = run.gradient()
        after = run.engine.old_pass(packs)
        changed = run.routing(_compare(run, packs, old, after))
        free = run.log_ratios(packs, after) - run.log_ratios(packs, old)
        return dict(
            same=same,
            replayed=replayed,
            free=free,
            gradient=gradient,
            changed=changed,
            log_ratios=run.log_ratios(packs, old),
        )


def _compare(run: Run, packs: list[MicroBatch], before, after):
    after.report.routing = run.engine._changed("old", packs, before.routes, after.routes)
    return after.report


def replay_rollout_routes(
    folder: str, parallel: dict, mode: str, seed: int, permuted: bool = False, **sections
) -> dict:
    """R3 (or none, which compares): the old pass and the gradient with routes as a rollout engine would return them."""
    with Run(folder, parallel, moe=dict(routing_replay=mode), **sections) as run:
        packs = run.packs(routes_seed=seed)
        if permuted:
            for micro_batch in packs:
                micro_batch.routed_experts = (micro_batch.routed_experts + 3) % EXPERTS
        old = run.engine.old_pass(packs)
        report = run.engine.policy_gradients(packs, SETTINGS, run.denominator, old)
        return dict(
            log_ratios=run.log_ratios(packs, old),
            log_s=run.log_s(report),
            gradient=run.gradient(),
            routing=run.routing(old.report),
            routing_of_training=run.routing(report),
            rank_loads=report.routing if mode == "R3" else {},
            counted=_counted(run, packs, parallel.get("expert", 1)),
        )


def _counted(run: Run, packs: list[MicroBatch], size: int) -> np.ndarray:
    """Tokens for each of `size` ranks' experts, [packs, layers, size], by the routes that were handed out. The packs of
    two data-parallel ranks are exchanged together; two tensor ranks have the same pack.
    """
    mine = [
        [np.bincount(layer.flatten() // (EXPERTS // size), minlength=size) for layer in m.routed_experts.swapaxes(0, 1)]
        for m in packs
    ]
    whole: list = [None] * run.groups.data.size
    torch.distributed.all_gather_object(whole, mine, group=run.groups.data.group)
    return np.sum(whole, axis=0)


def replay_own_routes(folder: str, parallel: dict) -> dict:
    """What a free pass chose, handed back as the rollout engine's: nothing may change."""
    with Run(folder, parallel, moe=dict(routing_replay="R3")) as run:
        packs = run.packs(routes_seed=1)
        run.engine.config = run.config.model_copy(
            update={"moe": run.config.moe.model_copy(update={"routing_replay": "none"})}
        )
        free = run.engine.old_pass(packs)
        run.engine.config = run.config
        for micro_batch, routes in zip(packs, free.routes, strict=True):
            micro_batch.routed_experts = torch.stack([routes[layer] for layer in range(LAYERS)], dim=1).numpy()
        replayed = run.engine.old_pass(packs)
        return dict(free=run.log_ratios(packs, free), replayed=run.log_ratios(packs, replayed))


def spoilt_replay(folder: str) -> str:
    """The error of a router that does not go where it is told."""
    with Run(folder, {}, moe=dict(routing_replay="R2")) as run:
        packs = run.packs()
        old = run.engine.old_pass(packs)
        _, router = run.engine.routers.all()[2]
        router.router_replay.get_replay_topk = lambda scores, topk, groups, group_topk, choose: choose(
            scores, topk, groups, group_topk
        )
        run.perturb_routers()
        try:
            run.engine.policy_gradients(packs, SETTINGS, run.denominator, old)
        except NumericsError as error:
            return str(error)
        return "nothing was refused"


def balance(folder: str, parallel: dict, steps: int = 0, **sections) -> dict:
    """Gradient and reported values with router losses; with `steps`, the load-balancing loss after each of them."""
    with Run(folder, parallel, **sections) as run:
        packs = run.packs()
        old = run.engine.old_pass(packs)
        sums = run.routing(run.engine.policy_gradients(packs, SETTINGS, run.denominator, old))
        gradient = run.gradient()
        values = []
        for _ in range(steps):
            values.append(run.routing(run.engine.train_mini_batch(packs, SETTINGS, run.denominator, old)[1]))
        return dict(gradient=gradient, sums=sums, values=values, old=run.routing(old.report))


def by_hand(folder: str, **sections) -> dict:
    """The gradient that the router losses add to the last router's weights, and the same from their definition in
    float64.
    """
    with Run(folder, {}, **sections) as run:
        packs, moe = run.packs(), run.config.moe
        _, router = run.engine.routers.all()[-1]
        old = run.engine.old_pass(packs)
        inputs: list[torch.Tensor] = []
        hook = router.register_forward_hook(
            lambda module, given, result: inputs.append(given[0].detach().flatten(0, 1).double())
        )
        run.engine.policy_gradients(packs, SETTINGS, run.denominator, old)
        hook.remove()
        gradient = router.weight.main_grad.clone()
        run.engine.balancing._settings = moe.model_copy(
            update={"load_balancing_coefficient": 1e-12, "z_loss_coefficient": 1e-12}
        )
        run.engine.policy_gradients(packs, SETTINGS, run.denominator, old)
        gradient -= router.weight.main_grad

        weight = router.weight.detach().double().requires_grad_()
        total = 0.0
        for hidden in inputs:
            logits = hidden @ weight.t()
            probs = logits.softmax(dim=1)
            chosen = torch.zeros_like(probs).scatter_(1, logits.detach().topk(TOP_K, dim=1).indices, 1.0)
            balance = EXPERTS * (chosen.mean(dim=0) / TOP_K * probs.mean(dim=0)).sum()
            z = logits.logsumexp(dim=1).square().mean()
            term = moe.load_balancing_coefficient * balance + moe.z_loss_coefficient * z
            total = total + term * len(hidden) / sum(map(len, inputs))
        total.backward()
        return dict(added=gradient.numpy(), defined=weight.grad.numpy(), sizes=[len(hidden) for hidden in inputs])
