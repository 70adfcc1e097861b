"""An episode of several turns, or one that failed, turn by turn: for a terminal of 80 columns, and as JSON types.

Owns how the tree is shown. Which episodes are shown, and those of one turn, are `inspect.py`'s.
"""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_mega.base.episode_records import Episode, Node
from gspo_mega.base.printable import printable
from gspo_mega.base.records import Trajectory

WIDTH = 80


def is_plain(episode: Episode) -> bool:
    """One response to one prompt: nothing of it is a tree."""
    return episode.failure is None and len(episode.nodes) == 2 and not episode.tool_calls


def describe_episode(episode: Episode) -> dict[str, Any]:
    """The episode as JSON types: nodes with all tokens, calls of tools, and the rows that are trained on."""
    return {
        "episode_id": episode.episode_id,
        "failure": episode.failure,
        "reward": episode.reward,
        "reward_parts": episode.reward_parts,
        "reward_error": episode.reward_error,
        "correct": episode.correct,
        "info": episode.info,
        "tools": [_tool_name(tool) for tool in episode.tools],
        "nodes": [_node(episode, node) for node in episode.nodes],
        "tool_calls": [vars(call) for call in episode.tool_calls],
        "rows": [_row(row, episode) for row in episode.rows()],
    }


def _node(episode: Episode, node: Node) -> dict[str, Any]:
    shown = {
        "node_id": node.node_id,
        "parent": node.parent,
        "kind": node.kind,
        "messages": node.messages,
        "token_ids": list(node.token_ids),
    }
    if node.cause:
        shown["cause"] = node.cause
    if node.is_sampled:
        shown |= {
            "turn": episode.turns.index(node),
            "text": node.text,
            "finish_reason": node.finish_reason,
            "reward": node.reward,
            "server_id": node.server_id,
            "log_probs": list(node.log_probs),
            "weight_versions": list(node.weight_versions),
        }
    return shown


def _row(row: Trajectory, episode: Episode) -> dict[str, Any]:
    leaf = row.turn_nodes[-1] if row.turn_nodes else -1
    return {
        "trajectory_id": row.trajectory_id,
        "nodes": [node.node_id for node in episode.path(leaf)],
        "turn_nodes": row.turn_nodes,
        "weight": row.weight,
        "mask": [[value, count] for value, count in _runs(row.response_mask)],
        "num_context_tokens": len(row.prompt.token_ids),
        "advantage": row.advantage,
        "turn_advantages": _turn_advantages(row),
    }


def _turn_advantages(row: Trajectory) -> list[float] | None:
    if row.token_advantages is None:
        return None
    return [row.token_advantages[start] for start, _ in row.turns]


def tree_text(shown: dict[str, Any]) -> list[str]:
    """The lines of what `describe_episode` returned."""
    turns = [node for node in shown["nodes"] if node["kind"] == "sampled"]
    num_sampled = sum(len(turn["token_ids"]) for turn in turns)
    lines = [f"--- {shown['episode_id']}"]
    facts = [f"reward {_number(shown['reward'])}", _count(len(turns), "turn"), _count(num_sampled, "sampled token")]
    if len(shown["rows"]) > 1:
        facts.append(f"{len(shown['rows'])} rows")
    if shown["correct"] is not None:
        facts.append("correct" if shown["correct"] else "not correct")
    if shown["tools"]:
        facts.append("tools " + ", ".join(shown["tools"]))
    lines += _wrapped("  ".join(facts), 4)
    for name, what in (
        ("failure", "not trained on, it failed"),
        ("reward_error", "not trained on, its scoring failed"),
    ):
        if shown[name] is not None:
            lines += _wrapped(f"{what}: {shown[name]}", 4)
    if shown["info"]:
        lines += _wrapped(f"info {json.dumps(shown['info'], ensure_ascii=False)}", 4)
    calls = {turn: list(found) for turn, found in itertools.groupby(shown["tool_calls"], lambda call: call["turn"])}
    lines += [line for call in calls.get(-1, ()) for line in _call_text(call)]
    for node in shown["nodes"]:
        lines += _node_text(node)
        if node["kind"] == "sampled":
            lines += [line for call in calls.get(node["turn"], ()) for line in _call_text(call)]
    return lines + [line for number, row in enumerate(shown["rows"]) for line in _row_text(number, row)]


def _node_text(node: dict[str, Any]) -> Iterator[str]:
    number = f"#{node['node_id']}"
    behind = (
        "" if node["parent"] == node["node_id"] - 1 else f"  behind #{node['parent']}" if node["parent"] >= 0 else ""
    )
    branch = f"  branch: {node['cause']}" if node.get("cause") else ""
    if node["kind"] == "context":
        roles = ", ".join(str(message.get("role", "?")) for message in node["messages"]) or "template"
        yield f"{number:<4}{roles}: {_count(len(node['token_ids']), 'token')}, mask 0{behind}{branch}"
        for message in node["messages"]:
            yield from _message_text(message)
        return
    mean = math.fsum(node["log_probs"]) / max(1, len(node["log_probs"]))
    yield from _wrapped(
        f"turn {node['turn']}: {_count(len(node['token_ids']), 'token')}, mask 1, {node['finish_reason']},"
        f" {_versions(node['weight_versions'])}, log-prob per token {mean:.4f} (lowest"
        f" {min(node['log_probs'], default=0.0):.2f})"
        + (f", reward {node['reward']:g}" if node["reward"] is not None else "")
        + (f", {node['server_id']}" if node["server_id"] else "")
        + behind
        + branch,
        4,
        first=f"{number:<4}",
    )
    yield from _wrapped(node["text"], 4)


def _message_text(message: dict[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if content is not None:
        yield from _wrapped(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), 4)
    for call in message.get("tool_calls") or ():
        yield from _wrapped(f"calls {json.dumps(call.get('function', call), ensure_ascii=False)}", 4)


def _call_text(call: dict[str, Any]) -> Iterator[str]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    answer = f"error: {call['error']}" if call["error"] is not None else str(call["result"])
    yield from _wrapped(f"tool {call['name']} {arguments} -> {answer} ({call['seconds']:.3g} s)", 4)


def _row_text(number: int, row: dict[str, Any]) -> Iterator[str]:
    mask = " ".join(f"{value}x{count}" for value, count in row["mask"])
    advantage = f"advantage {_number(row['advantage'], '+.3f')}"
    if row["turn_advantages"] is not None:
        advantage = "advantages of its turns " + ", ".join(f"{value:+.3f}" for value in row["turn_advantages"])
    path = " ".join(f"#{node}" for node in row["nodes"])
    yield from _wrapped(
        f"row {number}: {path}; {advantage}; weight {row['weight']:.3g}; mask behind the first"
        f" {row['num_context_tokens']} tokens: {mask}",
        4,
    )


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    return [(value, len(list(run))) for value, run in itertools.groupby(values)]


def _versions(versions: Sequence[int]) -> str:
    runs = _runs(versions)
    if len(runs) == 1:
        return f"version {runs[0][0]}"
    return "versions " + ", ".join(f"{version} ({_count(count, 'token')})" for version, count in runs)


def _number(value: float | None, form: str = "g") -> str:
    return "-" if value is None else format(value, form)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _tool_name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", "?"))


def _wrapped(text: str, indent: int, first: str = "") -> Iterator[str]:
    """Lines of at most `WIDTH` columns."""
    safe = printable(text)
    margin = " " * indent
    for number, line in enumerate(safe.split("\n")):
        start = first if first and number == 0 else margin
        yield from textwrap.wrap(
            line, WIDTH, initial_indent=start, subsequent_indent=margin, break_on_hyphens=False
        ) or [start.rstrip()]
