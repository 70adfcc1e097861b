"""What ranks run in the tests of the expert bias: training steps, and what else goes through the routers."""

from __future__ import annotations

import numpy as np
import torch
from routing_jobs import SETTINGS, Run, rollout_routes

from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.reference import ReferencePolicy

RATE = 1e-3
ROUTES = dict(layers=4, experts=16, top_k=4)


def biases(run: Run) -> dict[str, np.ndarray]:
    """Every e_score_correction_bias on rank 0."""
    tensors = PolicyTensors(run.spec, run.groups, run.engine.chunks)
    return {
        name: value.clone().numpy()
        for name, value in tensors.stream(torch.bfloat16)
        if name.endswith("e_score_correction_bias")
    }


def train(folder: str, parallel: dict, steps: int = 3, rate: float = RATE, replay: str = "none", **sections) -> dict:
    """The biases before, and after each of `steps` optimizer steps on the recorded batch; the reported loads."""
    with Run(folder, parallel, moe=dict(expert_bias_update_rate=rate, routing_replay=replay), **sections) as run:
        packs = run.packs()
        if replay == "R3":
            for pack in packs:
                pack.routed_experts = rollout_routes(pack, run.sequences, 5, **ROUTES)
        seen, loads = [biases(run)], []
        old = run.engine.old_pass(packs)
        for _ in range(steps):
            result, report = run.engine.train_mini_batch(packs, SETTINGS, run.denominator, old)
            assert not result.skipped
            seen.append(biases(run))
            loads.append(run.routing(report))
        return dict(
            biases=seen,
            loads=loads,
            dtypes=sorted({str(router.expert_bias.dtype) for _, router in run.engine.routers.all()}),
        )


def counted_by_hand(folder: str, **sections) -> dict:
    """One training step on one rank: by layer, how many counted positions went to each expert, from the routers' own
    output.
    """
    with Run(folder, {}, moe=dict(expert_bias_update_rate=RATE), **sections) as run:
        packs = run.packs()
        calls: dict[int, list[np.ndarray]] = {layer: [] for layer, _ in run.engine.routers.all()}
        run.engine.old_pass(packs)
        hooks = [
            router.register_forward_hook(
                lambda _module, _given, result, layer=layer: calls[layer].append(result[1].numpy())
            )
            for layer, router in run.engine.routers.all()
        ]
        before = biases(run)
        run.engine.train_mini_batch(packs, SETTINGS, run.denominator, None)
        for hook in hooks:
            hook.remove()
        counts = {
            layer: sum(used[_counted(pack)].sum(axis=0) for used, pack in zip(called, packs, strict=True))
            for layer, called in calls.items()
        }
        everything = {layer: sum(used.sum(axis=0) for used in called) for layer, called in calls.items()}
        return dict(before=before, after=biases(run), counts=counts, everything=everything)


def _counted(pack: MicroBatch) -> np.ndarray:
    """[T] bool: positions up to their sequence's last active label, found by looking at each."""
    return np.array(
        [pack.loss_mask[t : pack.cu_seqlens[pack.sequence_ids[t] + 1]].any() for t in range(pack.num_tokens)]
    )


def left_alone(folder: str) -> dict[str, bool]:
    """What must not move the bias: whether it is as before after each."""
    with Run(folder, {}, moe=dict(expert_bias_update_rate=RATE)) as run:
        packs, first = run.packs(), biases(run)

        def same() -> bool:
            now = biases(run)
            return all(np.array_equal(now[name], first[name]) for name in first)

        seen = {}
        old = run.engine.old_pass(packs)
        seen["old pass"] = same()
        run.engine.policy_gradients(packs, SETTINGS, run.denominator, old)
        seen["gradients without a step"] = same()
        reference = ReferencePolicy(run.config, run.spec, run.groups)
        import_huggingface(folder, run.spec, run.groups, reference.chunks)
        reference.log_probs(packs)
        seen["reference"] = same()
        run.engine.policy_gradients(packs, SETTINGS, run.denominator, old)
        next(run.engine.chunks[0].parameters()).main_grad.fill_(torch.nan)
        assert run.engine._apply().skipped
        seen["skipped step"] = same()
        return seen


def skewed(folder: str, steps: int) -> list[float]:
    """Of a model whose bias sends nearly every token to the first experts: the load after each step with a large
    rate.
    """
    with Run(folder, {}, moe=dict(expert_bias_update_rate=0.05), optimizer=dict(lr=1e-6, distributed=False)) as run:
        with torch.no_grad():
            for _, router in run.engine.routers.all():
                router.expert_bias.copy_(torch.linspace(0.5, 0.0, len(router.expert_bias)))
        packs, loads = run.packs(), []
        for _ in range(steps):
            _, report = run.engine.train_mini_batch(packs, SETTINGS, run.denominator, None)
            loads.append(report.routing["load_max_over_mean"] / report.routing["num_loads"])
        return loads
