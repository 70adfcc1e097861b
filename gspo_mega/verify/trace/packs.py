"""The packs that a trace computes with, which are those that the plan counts on."""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo_mega.base.records import MicroBatch
from gspo_mega.config.derived import critic_of, has_served_teacher, leaves_out_by_covariance, num_served_top, teachers
from gspo_mega.config.schema import Config
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import Layout

PROMPT_TOKENS = 8


def full_pack(config: Config, layout: Layout, spec: ModelSpec) -> MicroBatch:
    """Return a full pack: as many sequences of the longest length as it takes, and a shorter one for the rest. All but
    the first few tokens of each are response.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = config.batch.micro_batch_tokens
    longest = min(longest, tokens)
    lengths = [longest] * (tokens // longest)
    if tokens % longest > 2 * PROMPT_TOKENS * layout.sequence_multiple_tokens:
        lengths.append(tokens % longest)
    moe = spec.moe
    rng = np.random.default_rng(0)
    rows = []
    for length in lengths:
        active = length - PROMPT_TOKENS
        row: dict[str, Any] = dict(
            prompt_token_ids=rng.integers(0, spec.vocab_size, PROMPT_TOKENS),
            response_token_ids=rng.integers(0, spec.vocab_size, active),
            response_mask=np.ones(active),
            rollout_log_probs=np.full(active, -1.0),
            advantage=1.0,
            group_size=float(config.batch.group_size),
            weight=1.0,
            truncated=0.0,
            token_rewards=np.zeros(active),
            teacher=0.0,
            draw=0.0,
            teacher_log_probs=np.full(active, -1.0),
            teacher_top_ids=np.tile(np.arange(num_served_top(config.teacher)), (active, 1)),
            teacher_top_log_probs=np.full((active, num_served_top(config.teacher)), -9.0),
        )
        rows.append(row)
    has_critic = critic_of(config.algorithm, config.critic) is not None
    has_sources = any(one.source is not None for one in teachers(config.teacher))
    num_top = num_served_top(config.teacher)
    by_token = ("token_rewards",) if has_critic else ()
    if has_served_teacher(config.teacher):
        by_token += ("teacher_log_probs", *(("teacher_top_ids", "teacher_top_log_probs") if num_top else ()))
    pack = build_micro_batch(
        rows,
        list(range(len(rows))),
        layout.sequence_multiple_tokens,
        (
            "advantage",
            "group_size",
            "weight",
            *(("truncated",) if has_critic else ()),
            *(("teacher",) if has_sources else ()),
            *(("draw",) if leaves_out_by_covariance(config.algorithm) else ()),
        ),
        layout.pack_multiple_tokens,
        by_token,
        num_top=num_top,
    )
    if moe is not None and config.moe.routing_replay == "R3":
        layers = sum(spec.has_experts(index) for index in range(spec.num_layers))
        pack.routed_experts = np.zeros((pack.num_tokens, layers, moe.experts_per_token), np.int16)
        held = [index for index in range(spec.num_layers) if spec.has_experts(index)]
        pack.routed_layers = np.asarray(held)
    return pack
