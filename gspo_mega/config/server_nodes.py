"""Rules about the nodes of servers: how many there are, and how a server is divided over several."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config


def server_node_violations(config: Config) -> Iterator[Violation]:
    """What does not fit the nodes that servers run on."""
    cluster, server = config.cluster, config.server
    rewards = sum(model.num_servers for model in config.reward.model if model.path)
    most = server.num_servers * server.num_nodes + rewards
    if cluster.num_rollout_nodes > most:
        over = f" over {server.num_nodes} nodes each" if server.num_nodes > 1 else ""
        over += f" and {rewards} of reward models" if rewards else ""
        yield Violation(
            "cluster.num_rollout_nodes",
            f"{cluster.num_rollout_nodes} nodes for server.num_servers {server.num_servers}{over}: some would have"
            f" nothing to do; at most {most}",
        )
    if server.num_nodes == 1:
        return
    if server.tensor % server.num_nodes:
        yield Violation(
            "server.num_nodes",
            f"{server.num_nodes} does not divide server.tensor {server.tensor}: SGLang has as many ranks on each node;"
            f" valid: {', '.join(str(n) for n in range(1, server.tensor + 1) if server.tensor % n == 0)}",
        )
    key, there = (
        ("num_rollout_nodes", cluster.num_rollout_nodes)
        if cluster.num_rollout_nodes
        else (
            "num_nodes",
            cluster.num_nodes,
        )
    )
    if there % server.num_nodes:
        near = max(there // server.num_nodes, 1) * server.num_nodes
        yield Violation(
            "server.num_nodes",
            f"{server.num_nodes}, and the servers' nodes are {there} (cluster.{key}): a server is on"
            f" {server.num_nodes} whole neighbours; valid: a multiple of {server.num_nodes} as cluster.{key}, as"
            f" {near}, or another size here",
        )
