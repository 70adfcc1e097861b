"""Bounds on counts that a plan goes through one by one: a number with too many digits is refused, and not counted to.

Owns those bounds; each is far beyond any machine. What fits a model or each other is `rules.py`'s and the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config

_MOST = {
    "cluster.num_nodes": 100_000,
    "cluster.ranks_per_node": 1024,
    "cluster.gpus_per_node": 1024,
    "cluster.num_rollout_nodes": 100_000,
    "server.num_servers": 100_000,
    "server.num_nodes": 10_000,
    "server.tensor": 10_000,
    "batch.num_mini_batches": 100_000,
}
_MOST_RANKS = 1_000_000
_MOST_NUMBER = 2**64


def size_violations(config: Config) -> list[Violation]:
    """Of the keys whose numbers are too large to plan with; nothing else may be checked while there are any."""
    tree = config.model_dump()
    found = [
        Violation(key, f"{value}: is larger than a plan can be made for; at most {most}", str(most))
        for key, most in _MOST.items()
        if (value := _at(tree, key)) is not None and value > most
    ]
    ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    if not found and ranks > _MOST_RANKS:
        text = f"{ranks} ranks on {config.cluster.num_nodes} nodes; a plan is made for at most {_MOST_RANKS}"
        found.append(Violation("cluster.num_nodes", text, str(_MOST_RANKS // config.cluster.ranks_per_node)))
    named = {one.key for one in found}
    for key, value in _numbers(tree, ""):
        if key not in named and abs(value) > _MOST_NUMBER:
            found.append(Violation(key, f"is a number of {value.bit_length()} bits; valid: at most 64", ""))
    return found


def _at(tree: Any, key: str) -> int | None:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, int) else None


def _numbers(tree: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """The whole numbers of the configuration, by dotted key."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        inner = f"{prefix}.{key}" if prefix else str(key)
        if type(value) is int:
            yield inner, value
        else:
            yield from _numbers(value, inner)
