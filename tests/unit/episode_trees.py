"""Random episode trees, for tests of whatever takes episodes. A strategy of hypothesis and a builder for hand-made ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from gspo_mega.base.episodes import Episode, Node, ToolRecord, num_routed_rows
from gspo_mega.base.records import Prompt

TASK = Prompt("tasks:7", "tasks", (3, 1, 4), "say it", "it", {"difficulty": 2})


def context(node_id: int, parent: int, token_ids: list[int], cause: str = "") -> Node:
    return Node(node_id, parent, "context", [{"role": "user", "content": f"m{node_id}"}], token_ids, cause=cause)


def sampled(node_id: int, parent: int, token_ids: list[int], version: int = 0, **more: Any) -> Node:
    """A turn whose log-probs say which token they are of: -(node_id + place / 1000)."""
    return Node(
        node_id,
        parent,
        "sampled",
        [{"role": "assistant", "content": f"t{node_id}"}],
        token_ids,
        [-(node_id + place / 1000) for place in range(len(token_ids))],
        [version] * len(token_ids),
        **{"finish_reason": "stop", "text": f"t{node_id}", "server_id": "server-0", **more},
    )


def routed(episode: Episode) -> Episode:
    """The same with routes on every turn: [position in the path, 0] in the first layer, the node in the second."""
    for node in episode.turns:
        rows = num_routed_rows(episode, node.node_id)
        end = len(episode.tokens(node.node_id)) - 1
        node.routed_experts = np.full((rows, 2, 2), node.node_id, np.int32)
        node.routed_experts[:, 0, 0] = np.arange(end - rows, end)
    return episode


@st.composite
def episodes(draw: st.DrawFn, most_nodes: int = 12, with_routes: bool | None = None) -> Episode:
    """Trees of any shape that a recorder can make: at least one root, turns below context or a turn, branches anywhere."""
    tokens = st.lists(st.integers(0, 499), min_size=1, max_size=5)
    nodes = [context(0, -1, draw(tokens))]
    for node_id in range(1, draw(st.integers(1, most_nodes))):
        parent = draw(st.integers(-1, node_id - 1))
        if parent < 0 or draw(st.booleans()):
            cause = draw(st.sampled_from(["", "edited", "template", "not_ours"]))
            nodes.append(context(node_id, parent, draw(tokens), cause))
        else:
            reason = draw(st.sampled_from(["stop", "length"]))
            reward = draw(st.none() | st.floats(-2, 2))
            version = draw(st.integers(0, 3))
            nodes.append(sampled(node_id, parent, draw(tokens), version, finish_reason=reason, reward=reward))
    if not any(node.is_sampled for node in nodes):
        nodes.append(sampled(len(nodes), draw(st.integers(0, len(nodes) - 1)), draw(tokens)))
    calls = [
        ToolRecord(draw(st.integers(-1, 3)), "calculator", {"expression": draw(st.text(max_size=5))}, *outcome, 0.25)
        for outcome in draw(st.lists(st.sampled_from([("4", None), (None, "too long")]), max_size=2))
    ]
    task = Prompt("tasks:7", "tasks", tuple(nodes[0].token_ids) if draw(st.booleans()) else (), "say it", "it")
    episode = Episode("step000003-g00012-s004", 12, task, nodes, tool_calls=calls, reward=draw(st.floats(-3, 3)))
    return routed(episode) if (draw(st.booleans()) if with_routes is None else with_routes) else episode
