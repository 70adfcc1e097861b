"""What ranks run in the tests of a critic's folders: import, a step, export, and Megatron's files of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from critic_jobs import whole_weights
from layout_jobs import layout_config, recorded_sequences, shard
from megatron.core import dist_checkpointing

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.critic import export_critic, import_critic
from gspo_mega.checkpoint.load import sharded_state
from gspo_mega.engine.critic import CriticEngine, ValueModel
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.value_models import read_critic_spec


def run(folder: str, parallel: dict, out: str | None = None) -> dict | str | None:
    """The critic of `folder` on the recorded batch: {"weights", "values" by row}, on rank 0, or why it is refused. With
    `out` its head is made random if the folder has none, and it is written to `out`/hf and `out`/critic.
    """
    parallel = {"expert_tensor": 1, **parallel}
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(**sizes)
    try:
        spec = read_critic_spec(folder)
        critic = CriticEngine(layout_config(folder, parallel), spec, groups, num_optimizer_steps=1)
        try:
            import_critic(folder, spec, groups, critic.chunks)
        except ModelError as error:
            return str(error)
        if groups.is_last_stage and out is not None:
            weight = cast(ValueModel, critic.chunks[-1]).value_weight()
            with torch.no_grad():
                weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
        critic.after_weights_loaded()
        if out is not None:
            export_critic(Path(out) / "hf", spec, groups, critic.chunks, torch.float32, folder, weight_version=5)
            state = sharded_state(critic, loading=False, with_optimizer=False)
            if groups.is_lead:
                (Path(out) / "critic").mkdir()
            torch.distributed.barrier(group=groups.host.group)
            dist_checkpointing.save(state, str(Path(out) / "critic"))
        packs = shard(recorded_sequences(), 0, 1, 2 * groups.tensor.size * groups.context.size)
        values = critic.values(packs)
        by_row = {}
        for pack, one in zip(packs, values, strict=False):
            ids = pack.sequence_ids[pack.loss_mask > 0]
            for number, row in enumerate(pack.trajectory_index):
                by_row[int(row)] = (one.before.numpy()[ids == number], float(one.after[number]))
        weights = whole_weights(critic, spec, groups)
        parts: list = [None] * groups.world.size
        torch.distributed.all_gather_object(parts, by_row, group=groups.host.group)
        return dict(weights=weights, values={row: v for part in parts for row, v in part.items()})
    finally:
        destroy_groups()
