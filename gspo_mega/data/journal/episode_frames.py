"""Encode prompts, episodes and batches as the journal's records, and decode them without loss.

Owns how each field is kept. Token ids, log-probs (float64, as the server sent them) and weight versions of all nodes
are arrays, one behind the other; routed experts are an array for each node, so that they can be taken out; the other
fields are JSON. What follows from the prompt, or is empty, is left out. Advantages are not kept: they follow from the
rewards of the group and the configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from gspo_mega.base.episode_check import check_episode
from gspo_mega.base.episode_records import Episode, Node, ToolRecord
from gspo_mega.base.records import Prompt
from gspo_mega.base.rollout_batch import RolloutBatch
from gspo_mega.base.token_columns import floats, ints
from gspo_mega.data.journal.frames import encode_frame

_PROMPT = ("prompt_id", "source", "text", "answer", "metadata")
_ROUTES = "routed_experts."
_IN_ARRAYS = ("node_id", "token_ids", "log_probs", "weight_versions", "routed_experts")
_OF_EPISODE = ("reward", "reward_parts", "reward_error", "correct", "failure", "info", "counts")

Tools = list[dict[str, Any]]


def encode_prompt(group_id: int, prompt: Prompt, **more: Any) -> bytes:
    """The record of a group's prompt. `more`: further values for the record's reader."""
    values = {name: getattr(prompt, name) for name in _PROMPT}
    tokens = np.array(prompt.token_ids, dtype=np.int32)
    return encode_frame({"kind": "prompt", "group_id": group_id, **values, **more}, {"token_ids": tokens})


def decode_prompt(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Prompt:
    """The prompt of a record. `arrays`: `token_ids`, [prompt tokens] int32."""
    return Prompt(token_ids=tuple(arrays["token_ids"].tolist()), **{name: values[name] for name in _PROMPT})


def tools_id(tools: Tools) -> str:
    """The name under which the schemas of tools are recorded once for many episodes; empty for none."""
    return hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()[:16] if tools else ""


def encode_tools(tools: Tools) -> bytes:
    return encode_frame({"kind": "tools", "tools_id": tools_id(tools), "tools": tools})


def encode_episode(episode: Episode) -> bytes:
    """The record of an episode; that of its tools, if it has any, is another one. Raises ValueError for a tree that no
    recorder makes, and for a NaN outside the log-probs.
    """
    check_episode(episode)
    turns = episode.turns
    arrays = {
        "num_tokens": np.array([len(node.token_ids) for node in episode.nodes], np.int32),
        "token_ids": _joined([n.token_ids for n in episode.nodes if not _is_prompt(n, episode.prompt)], np.int32),
        "log_probs": _joined([node.log_probs for node in turns], np.float64),
        "weight_versions": _joined([node.weight_versions for node in turns], np.int32),
        **{f"{_ROUTES}{n.node_id}": n.routed_experts for n in episode.nodes if n.routed_experts is not None},
    }
    values: dict[str, Any] = {
        "kind": "episode",
        "episode_id": episode.episode_id,
        "group_id": episode.group_id,
        **{name: value for name in _OF_EPISODE if (value := getattr(episode, name)) not in (None, {})},
        "nodes": [_node_values(node, episode.prompt) for node in episode.nodes],
    }
    if episode.tool_calls:
        values["tool_calls"] = [asdict(call) for call in episode.tool_calls]
    if episode.tools:
        values["tools_id"] = tools_id(episode.tools)
    return encode_frame(values, arrays)


def decode_episode(
    values: dict[str, Any], arrays: dict[str, np.ndarray], prompt: Prompt, tools: Mapping[str, Tools]
) -> Episode:
    """The episode of a record of kind `episode`. `tools`: the recorded schemas, by `tools_id`.

    Raises ValueError, KeyError for a record that `encode_episode` does not make.
    """
    token_ids, log_probs, versions = (_Parts(arrays[name]) for name in ("token_ids", "log_probs", "weight_versions"))
    nodes = []
    for node_id, (given, count) in enumerate(zip(values["nodes"], arrays["num_tokens"].tolist(), strict=True)):
        is_sampled, is_prompt = given["kind"] == "sampled", given.pop("is_prompt", False)
        messages = [_only_message(is_sampled, given.get("text", ""), prompt)]
        node = Node(node_id, **{"parent": node_id - 1, "messages": messages, **given}, token_ids=[])
        node.token_ids = ints(prompt.token_ids) if is_prompt else ints(token_ids.next(count))
        if is_sampled:
            node.log_probs = floats(log_probs.next(count))
            node.weight_versions = ints(versions.next(count))
        node.routed_experts = arrays.get(f"{_ROUTES}{node_id}")
        nodes.append(node)
    calls = [ToolRecord(**call) for call in values.get("tool_calls", ())]
    schemas = tools[values["tools_id"]] if "tools_id" in values else []
    given = {name: values[name] for name in _OF_EPISODE if name in values}
    episode = Episode(values["episode_id"], values["group_id"], prompt, nodes, list(schemas), calls, **given)
    check_episode(episode)
    return episode


def drop_routes(arrays: dict[str, np.ndarray]) -> bool:
    """Take the routed experts of every node out of a record's arrays, of format 1, too. Whether there were any."""
    routes = [name for name in arrays if name.startswith(_ROUTES) or name == "routed_experts"]
    for name in routes:
        del arrays[name]
    return bool(routes)


def encode_batch(batch: RolloutBatch, prompts: dict[str, Any], **more: Any) -> bytes:
    """The record that ends a step: the groups of its batch. `prompts`: the prompt order's state behind the batch.
    `more`: further values for the record's reader.
    """
    group_ids = [group.group_id for group in batch.groups]
    values = {
        "group_ids": group_ids,
        "counts": batch.counts,
        "phase_seconds": batch.phase_seconds,
        "sampled": batch.sampled,
        "prompts": prompts,
    }
    return encode_frame({"kind": "batch", **values, **more})


_DEFAULTS = {f.name: f.default for f in fields(Node)}


def _node_values(node: Node, prompt: Prompt) -> dict[str, Any]:
    values = {
        name: value
        for name in _DEFAULTS
        if name not in _IN_ARRAYS and (value := getattr(node, name)) != _DEFAULTS[name]
    }
    if node.parent == node.node_id - 1:
        del values["parent"]
    of_role = (
        {"role": "assistant", "content": node.text} if node.is_sampled else {"role": "user", "content": prompt.text}
    )
    if node.messages == [of_role]:
        del values["messages"]
    if _is_prompt(node, prompt):
        values["is_prompt"] = True
    return values


def _only_message(is_sampled: bool, text: str, prompt: Prompt) -> dict[str, Any]:
    """The message of a node that is left out where it is the only one."""
    return {"role": "assistant", "content": text} if is_sampled else {"role": "user", "content": prompt.text}


def _is_prompt(node: Node, prompt: Prompt) -> bool:
    return not node.is_sampled and node.parent < 0 and tuple(node.token_ids) == prompt.token_ids


class _Parts:
    """The values of an array, one node's behind the other's. What is missing at its end is not there."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._place = array, 0

    def next(self, count: int) -> np.ndarray:
        self._place += count
        return self._array[self._place - count : self._place]


def _joined(parts: Sequence[Sequence[Any]], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])
