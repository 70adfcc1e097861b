"""Encode prompts, trajectories and batches as the journal's records, and decode them without loss.

Owns how each field is kept. Token ids and log-probs are arrays (log-probs in float64, as the server sent them); the
other fields are JSON. The advantage is not kept: it follows from the rewards of the group and the configuration.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from gspo_mega.journal.frames import encode_frame
from gspo_mega.records import Prompt, RolloutBatch, Trajectory

_VALUES = ("trajectory_id", "group_id", "finish_reason", "response_text", "reward", "reward_parts", "reward_error")


def encode_prompt(group_id: int, prompt: Prompt) -> bytes:
    values = asdict(prompt)
    tokens = np.array(values.pop("token_ids"), dtype=np.int32)
    return encode_frame({"kind": "prompt", "group_id": group_id, **values}, {"token_ids": tokens})


def decode_prompt(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Prompt:
    """The prompt of a record. `arrays`: `token_ids`, [prompt tokens] int32."""
    names = ("prompt_id", "source", "text", "answer", "metadata")
    return Prompt(token_ids=tuple(arrays["token_ids"].tolist()), **{name: values[name] for name in names})


def encode_trajectory(trajectory: Trajectory, **more: Any) -> bytes:
    """The record of a trajectory. `more`: further values for the record's reader."""
    arrays = {
        "response_token_ids": np.array(trajectory.response_token_ids, dtype=np.int32),
        "response_mask": np.array(trajectory.response_mask, dtype=np.uint8),
        "rollout_log_probs": np.array(trajectory.rollout_log_probs, dtype=np.float64),
        "weight_versions": np.array(trajectory.weight_versions, dtype=np.int32),
    }
    if trajectory.routed_experts is not None:
        arrays["routed_experts"] = trajectory.routed_experts
    return encode_frame({"kind": "trajectory", **{name: getattr(trajectory, name) for name in _VALUES}, **more}, arrays)


def decode_trajectory(values: dict[str, Any], arrays: dict[str, np.ndarray], prompt: Prompt) -> Trajectory:
    """The trajectory of a record. `arrays`: per token of the response, [response tokens], the ids (int32), the mask
    (uint8), the log-probs (float64 nats) and the weight versions; with routing, `routed_experts`.
    """
    lists = ("response_token_ids", "response_mask", "rollout_log_probs", "weight_versions")
    return Trajectory(
        prompt=prompt,
        **{name: arrays[name].tolist() for name in lists},
        **{name: values[name] for name in _VALUES},
        routed_experts=arrays.get("routed_experts"),
    )


def encode_batch(batch: RolloutBatch, prompts: dict[str, Any]) -> bytes:
    """The record that ends a step: the groups of its batch. `prompts`: the prompt order's state behind the batch."""
    group_ids = [group.group_id for group in batch.groups]
    values = {"group_ids": group_ids, "counts": batch.counts, "phase_seconds": batch.phase_seconds, "prompts": prompts}
    return encode_frame({"kind": "batch", **values})
