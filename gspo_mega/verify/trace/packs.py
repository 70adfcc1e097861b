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
    the first few tokens of each are response. If packs share prefixes, the sequences are those of groups with the
    longest prompt, whose responses are shorter only if a pack would not hold two of them.
    """
    moe = spec.moe
    rng = np.random.default_rng(0)
    rows = []
    for prompt, active in _lengths(config, layout):
        prompt_ids = rng.integers(0, spec.vocab_size, prompt) if prompt else rows[-1]["prompt_token_ids"]
        row: dict[str, Any] = dict(
            prompt_token_ids=prompt_ids,
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
        share_prefixes=config.batch.share_prefixes,
        num_top=num_top,
    )
    if moe is not None and config.moe.routing_replay == "R3":
        layers = sum(spec.has_experts(index) for index in range(spec.num_layers))
        pack.routed_experts = np.zeros((pack.num_tokens, layers, moe.experts_per_token), np.int16)
        held = [index for index in range(spec.num_layers) if spec.has_experts(index)]
        pack.routed_layers = np.asarray(held)
    return pack


def _lengths(config: Config, layout: Layout) -> list[tuple[int, int]]:
    """The tokens of prompt and response of each sequence; no prompt for one that has that of the sequence before."""
    tokens, prompt = config.batch.micro_batch_tokens, PROMPT_TOKENS
    least = 2 * PROMPT_TOKENS * layout.sequence_multiple_tokens
    longest = min(config.data.max_prompt_tokens + config.rollout.max_new_tokens, tokens)
    if config.batch.share_prefixes == "off":
        whole, left = [(prompt, longest - prompt)] * (tokens // longest), tokens % longest
    else:
        left = tokens // layout.pack_multiple_tokens * layout.pack_multiple_tokens
        prompt, whole = config.data.max_prompt_tokens, []
        response = min(config.rollout.max_new_tokens, (left - prompt) // min(2, config.batch.group_size))
        while (number := min(config.batch.group_size, (left - prompt) // response)) > 0:
            whole += [(prompt, response), *[(0, response)] * (number - 1)]
            left -= prompt + number * response
    return whole + [(PROMPT_TOKENS, left - PROMPT_TOKENS)] * (left > least)
