"""The rules that the tree of a recorded episode keeps: what is journalled, and what is read back, is checked by them.

Owns the refusals. The records themselves and the rows that follow from them are `episode_records.py`'s.
"""

from __future__ import annotations

import itertools

from gspo_mega.base.episode_records import Episode, Node


def num_routed_rows(episode: Episode, node_id: int) -> int:
    """How many positions the `routed_experts` of a sampled node have: those behind its nearest sampled ancestor's."""
    above = itertools.dropwhile(lambda node: not node.is_sampled, reversed(episode.path(node_id)[:-1]))
    ancestor = next(above, None)
    here = len(episode.tokens(node_id)) - 1
    return here if ancestor is None else here - (len(episode.tokens(ancestor.node_id)) - 1)


def check_episode(episode: Episode) -> None:
    """Raise ValueError, naming the node, for a tree that no recorder makes."""
    name = episode.episode_id
    for place, node in enumerate(episode.nodes):
        where = f"episode {name}, node {place}"
        if node.node_id != place:
            raise ValueError(f"{where}: its node_id is {node.node_id}")
        if not -1 <= node.parent < place:
            raise ValueError(f"{where}: its parent {node.parent} does not precede it")
        per_token = {"log_probs": len(node.log_probs), "weight_versions": len(node.weight_versions)}
        if node.kind == "sampled":
            _check_turn(episode, node, where, per_token)
        elif node.kind == "context":
            if any(per_token.values()) or node.routed_experts is not None or node.finish_reason:
                raise ValueError(f"{where}: a context node has no log-probs, versions, routes or finish reason")
            parent = episode.nodes[node.parent] if node.parent >= 0 else None
            if parent is not None and parent.finish_reason == "length" and not node.token_ids:
                raise ValueError(f"{where}: follows a turn that ended by length without the tokens that close it")
        else:
            raise ValueError(f"{where}: kind is {node.kind!r}, not 'context' or 'sampled'")
    if episode.is_scored and not episode.turns:
        raise ValueError(f"episode {name}: has a reward and no sampled turn, so there is nothing to train on")


def _check_turn(episode: Episode, node: Node, where: str, per_token: dict[str, int]) -> None:
    if not node.token_ids:
        raise ValueError(f"{where}: a sampled turn has at least one token")
    for name, length in per_token.items():
        if length != len(node.token_ids):
            raise ValueError(f"{where}: {length} {name} for {len(node.token_ids)} tokens")
    if node.parent < 0:
        raise ValueError(f"{where}: a sampled turn has a context before it")
    if node.finish_reason not in ("stop", "length"):
        raise ValueError(f"{where}: finish_reason is {node.finish_reason!r}, not 'stop' or 'length'")
    if len(node.messages) != 1:
        raise ValueError(f"{where}: a sampled turn is one message, not {len(node.messages)}")
    if node.routed_experts is not None:
        rows, expected = node.routed_experts.shape[0], num_routed_rows(episode, node.node_id)
        if rows != expected:
            raise ValueError(f"{where}: routes of {rows} positions; {expected} lie behind the turn before it")
