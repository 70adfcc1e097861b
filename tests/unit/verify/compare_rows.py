"""A small scored batch and a configuration for the comparison's unit tests."""

from __future__ import annotations

import json

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.config.schema import Config

LENGTHS = ((2, 1), (3, 4))
REWARDS = ((0.0, 1.0), (1.0, 0.0))


def config(**changes) -> Config:
    return Config.model_validate_json(
        json.dumps(
            {
                "run": {"name": "run"},
                "model": {"path": "model"},
                "batch": {"prompts_per_step": 2, "group_size": 2, "micro_batch_tokens": 64},
                "optimizer": {"lr": 1e-3},
                "data": {"path": "rows.jsonl", "max_prompt_tokens": 8},
                "reward": {"functions": [{"function": "exact_match"}]},
                "rollout": {"max_new_tokens": 8},
                **changes,
            }
        )
    )


def batch() -> RolloutBatch:
    groups = []
    for number, (lengths, rewards) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        prompt = Prompt(f"train:{number}", "train", (1, 2), "prompt", answer="1")
        rows = [
            one_turn_row(
                trajectory_id=f"g{number}-s{sample}",
                group_id=number,
                prompt=prompt,
                response_token_ids=[3] * length,
                response_mask=[1] * length,
                rollout_log_probs=[-1.0] * length,
                weight_versions=[0] * length,
                finish_reason="stop",
                response_text="text",
                reward=reward,
                reward_parts={},
            )
            for sample, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
        ]
        groups.append(Group.from_rows(number, prompt, rows))
    return RolloutBatch(0, groups)
