"""What ranks run in the tests of the critic: values, advantages, value gradients and steps on a recorded batch."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from layout_jobs import layout_config, recorded_sequences, shard
from token_values import row_values, token_values

from gspo_mega.algorithm.advantages import token_rewards
from gspo_mega.algorithm.objective import ObjectiveSettings, sequence_coefficients
from gspo_mega.checkpoint.critic import CriticTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.critic import (
    AdvantageEstimator,
    CriticEngine,
    LogProbs,
    TokenRewards,
    ValueModel,
    estimate_returns,
)
from gspo_mega.engine.device_batch import to_device
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.verify.certify.steps import complete_gradients

SETTINGS = ObjectiveSettings(aggregation="token_mean")
# With all that a layout could change: bootstrapping reads the value behind a sequence, whitening sums over data ranks.
ESTIMATOR = AdvantageEstimator(discount=0.99, trace=0.95, bootstraps=True, whitens=True, kl_coefficient=0.1, std_ddof=0)


def run(folder: str, parallel: dict, steps: int = 3, clip_range: float | None = 0.2, **sections) -> dict | None:
    """Whole on rank 0, None elsewhere. `sections`: of the configuration; its optimizer is the critic's."""
    parallel = {"expert_tensor": 1, **parallel}
    config = layout_config(folder, parallel, **sections)
    spec = read_model_spec(folder)
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(virtual_pipeline=parallel.get("virtual_pipeline"), **sizes)
    try:
        critic = CriticEngine(config, spec, groups, num_optimizer_steps=100)
        import_huggingface(folder, spec, groups, critic.chunks)
        sequences = recorded_sequences()
        multiple = 2 * groups.context.size * groups.tensor.size
        packs = shard(sequences, groups.data.rank, groups.data.size, multiple)
        at_zero = critic.values(packs)
        if groups.is_last_stage:
            generator = torch.Generator().manual_seed(2)
            with torch.no_grad():
                weight = cast(ValueModel, critic.chunks[-1]).value_weight()
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        critic.after_weights_loaded()
        start = whole_weights(critic, spec, groups)
        values = critic.values(packs)

        # Old values a little off, each token's alike in every layout, so that some tokens are clipped.
        num_tokens = float(sum(int(s["mask"].sum()) for s in sequences))
        olds, returns, white, coefficients = [], [], [], []
        if groups.is_last_stage:
            # Every second trajectory was cut off; the reference is a little off the server's log-probs.
            rewards = [rewards_of(pack) for pack in packs]
            recorded = [to_device(pack, groups).rollout_log_probs for pack in packs]
            log_probs = [LogProbs(one, one.sin()) for one in recorded]
            returns = estimate_returns(packs, values, rewards, ESTIMATOR, groups, log_probs)
            white = [one for pack in packs if (one := to_device(pack, groups).token_advantages) is not None]
            for pack, one, noise in zip(packs, values, recorded, strict=True):
                olds.append(one.before + 0.3 * torch.sign(torch.sin(100 * noise)))
                length = torch.from_numpy(pack.sequence["length"])
                coefficients.append(sequence_coefficients(SETTINGS, length, num_tokens))
        sums = critic.value_gradients(packs, olds, returns, coefficients, clip_range)
        dist.all_reduce(sums)
        complete_gradients(critic)
        gradient = whole_weights(critic, spec, groups, lambda parameter: parameter.main_grad)
        results = [critic.train_mini_batch(packs, olds, returns, coefficients, clip_range) for _ in range(steps)]
        weights = whole_weights(critic, spec, groups)
        columns = dict(
            before=[v.before for v in values],
            zero=[v.before for v in at_zero],
            returns=returns,
            white=white,
        )
        tokens = {name: token_values(packs, parts, groups) for name, parts in columns.items()}
        tokens["behind"] = row_values(packs, [value.after for value in values], groups)
        if groups.world.rank:
            return None
        return dict(
            tokens=tokens,
            sums=sums.numpy(),
            start=start,
            gradient=gradient,
            weights=weights,
            grad_norms=[result.grad_norm for result, _ in results],
        )
    finally:
        destroy_groups()


def rewards_of(pack) -> TokenRewards:
    """Each sequence's advantage as the reward of its last active token."""
    ids = torch.from_numpy(pack.sequence_ids[pack.loss_mask > 0])
    lengths = torch.bincount(ids, minlength=pack.num_sequences).tolist()
    parts = [
        token_rewards(length, [length] if length else [], [float(reward)] if length else [])
        for length, reward in zip(lengths, pack.sequence["advantage"], strict=True)
    ]
    return TokenRewards(torch.cat(parts), torch.from_numpy(pack.trajectory_index % 2 == 1))


def whole_weights(critic: CriticEngine, spec, groups, values=None) -> dict[str, np.ndarray]:
    found = CriticTensors(spec, groups, critic.chunks, values).stream(torch.float32)
    return {name: value.clone().numpy() for name, value in found}
