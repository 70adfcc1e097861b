"""What ranks run in the tests of replayed routes with shared prefixes: rows with and without sharing."""

from __future__ import annotations

import numpy as np
import torch
from routing_jobs import EXPERTS, LAYERS, SETTINGS, TOP_K, Run

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt, Trajectory
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.plan import resolve_layout
from gspo_mega.train.batches import assemble, fill_advantages
from gspo_mega.verify.certify.measure import gather_tokens


def routed_batch() -> RolloutBatch:
    """Two groups of four. Within a group the third row has other experts from its prompt's fifth token on, the fourth
    from the first.
    """
    rng = np.random.default_rng(4)

    def routes(count: int) -> np.ndarray:
        return rng.random((count, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.uint8)

    groups = []
    for g, length in enumerate((9, 14)):
        prompt = Prompt(f"p{g}", "p", tuple(rng.integers(3, 500, length).tolist()), "")
        common, rows = routes(length), []
        for k in range(4):
            count = int(rng.integers(3, 12))
            chosen = np.concatenate([common, routes(count - 1)])
            if k >= 2:
                first = (4, 0)[k - 2]
                chosen[first:length] = routes(length - first)
            row: Trajectory = one_turn_row(
                trajectory_id=f"{g}-{k}",
                group_id=g,
                prompt=prompt,
                response_token_ids=rng.integers(3, 500, count).tolist(),
                response_mask=[1] * count,
                rollout_log_probs=rng.normal(-6.2, 0.3, count).tolist(),
                weight_versions=[0] * count,
                finish_reason="length",
                reward=float(k),
            )
            row.routed_experts = chosen
            rows.append(row)
        groups.append(Group.from_rows(g, prompt, rows))
    return RolloutBatch(0, groups)


def replayed(folder: str, parallel: dict, replay: str, share: str) -> dict | None:
    """Log-probs of the old pass and, after the routers have changed, the gradient of a pass with its routes or the
    servers'. Whole on rank 0, None elsewhere.
    """
    sections = dict(
        moe=dict(routing_replay=replay),
        rollout=dict(return_routed_experts=replay == "R3", max_new_tokens=16),
        data=dict(max_prompt_tokens=16),
        cluster=dict(ranks_per_node=torch.distributed.get_world_size()),
    )
    batch_section = dict(
        prompts_per_step=2, group_size=4, num_mini_batches=1, micro_batch_tokens=64, share_prefixes=share
    )
    with Run(folder, parallel, batch=batch_section, **sections) as run:
        batch = routed_batch()
        fill_advantages(batch, run.config, 0)
        shards = assemble(batch, run.config, resolve_layout(run.config, run.spec), 0)
        mine = shards[run.groups.data.rank][0]
        if replay == "R3":
            given = ExpertRoutes.of(batch.trajectories, run.spec, to_replay=True)
            assert given is not None
            given.attach(mine.micro_batches)
        old = run.engine.old_pass(mine.micro_batches)
        log_probs = gather_tokens(run.engine, batch, mine.micro_batches, [one.log_probs for one in old.micro_batches])
        run.perturb_routers()
        report = run.engine.policy_gradients(mine.micro_batches, SETTINGS, mine.denominator, old)
        gradient = run.gradient()
        computed = torch.tensor([sum(m.num_computed for m in mine.micro_batches) if run.groups.reports else 0])
        torch.distributed.all_reduce(computed)
        if run.groups.world.rank:
            return None
        assert report is not None
        return dict(log_probs=log_probs, gradient=gradient, computed=int(computed))
