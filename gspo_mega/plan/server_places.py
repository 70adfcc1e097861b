"""Which nodes of a job its servers are on, and which GPUs of these they have: the policy's, and those of reward models.

Owns the dealing, for the plan, the simulation and the launcher. Knows no node by name and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gspo_mega.base.errors import PlanError
from gspo_mega.config.schema import Config, ModelReward


@dataclass(frozen=True)
class RewardPlace:
    """A server of a reward model: the model's name, its number among that model's, its node among those with servers,
    and `num_gpus` GPUs there, from `first_gpu` on.
    """

    name: str
    index: int
    node: int
    first_gpu: int
    num_gpus: int


@dataclass(frozen=True)
class ServerPlaces:
    """`by_node[n]`: indices of the policy's servers on the n-th node with servers. `gpus`: in use on each of these
    nodes, the ranks' among them where they are there.
    """

    by_node: tuple[tuple[int, ...], ...]
    rewards: tuple[RewardPlace, ...]
    gpus: tuple[int, ...]


def reward_servers(config: Config) -> list[tuple[ModelReward, int]]:
    """The servers that a run starts for its reward models: (entry of `reward.model`, number among its servers)."""
    return [(model, index) for model in config.reward.model if model.path for index in range(model.num_servers)]


def reward_gpus(config: Config) -> int:
    """The GPUs of all of them."""
    return sum(model.tensor for model, _ in reward_servers(config))


def place_servers(config: Config, num_servers: int, num_nodes: int, num_ranks: int = 0) -> ServerPlaces:
    """Deal servers to nodes, those with the most GPUs first, each to the node with the fewest in use, a server of the
    policy over several nodes to as many neighbours; where only the policy has servers, that is in turn. On a node the
    policy's come first, behind the `num_ranks` ranks, or in turns with these, where they take no further GPUs.
    """
    server = config.server
    own, over = server.tensor // server.num_nodes, server.num_nodes
    groups = [range(first, min(first + over, num_nodes)) for first in range(0, max(1, num_nodes - over + 1), over)]
    by_node: list[list[int]] = [[] for _ in range(num_nodes)]
    scored: list[list[tuple[ModelReward, int]]] = [[] for _ in range(num_nodes)]
    load, load_of_policy = [0] * num_nodes, [0] * num_nodes
    if not config.cluster.colocated:
        load_of_policy = load  # the same GPUs
    waiting: list[tuple[int, int, tuple[ModelReward, int] | int]] = [(-own, 0, index) for index in range(num_servers)]
    waiting += [(-one[0].tensor, 1, one) for one in reward_servers(config)]
    for _, _, one in sorted(waiting, key=lambda entry: entry[:2]):
        if isinstance(one, int):
            group = min(groups, key=lambda nodes: max(load_of_policy[node] for node in nodes))
            for node in group:
                by_node[node].append(one)
                load_of_policy[node] += own
        else:
            node = load.index(min(load))
            scored[node].append(one)
            load[node] += one[0].tensor
    rewards, used = [], []
    for node, servers in enumerate(by_node):
        gpus = len(servers) * own
        gpus = max(num_ranks, gpus) if config.cluster.colocated else num_ranks + gpus
        for model, index in scored[node]:
            rewards.append(RewardPlace(model.name, index, node, gpus, model.tensor))
            gpus += model.tensor
        used.append(gpus)
    return ServerPlaces(tuple(map(tuple, by_node)), tuple(rewards), tuple(used))


def check_rollout_nodes(config: Config, where: Callable[[str], str]) -> None:
    """Raises PlanError, with the key's place, where the nodes that only hold servers have fewer GPUs than these need. A
    run on recorded rollouts starts no servers.
    """
    cluster, server = config.cluster, config.server
    replays = config.train is not None and config.train.from_rollouts is not None
    if cluster.gpus_per_node is None or not cluster.num_rollout_nodes or replays:
        return
    needed = max(place_servers(config, server.num_servers, cluster.num_rollout_nodes).gpus)
    if needed <= cluster.gpus_per_node:
        return
    rewards = reward_gpus(config)
    both = f" and {rewards} of reward.model" if rewards else ""
    raise PlanError(
        f"{where('cluster.num_rollout_nodes')}: cluster.num_rollout_nodes: {cluster.num_rollout_nodes}"
        f" node{'s' * (cluster.num_rollout_nodes > 1)} of {cluster.gpus_per_node} GPUs (cluster.gpus_per_node) for"
        f" {server.num_servers * server.tensor} GPUs of servers (server.num_servers {server.num_servers} x"
        f" server.tensor {server.tensor}){both}: one node would need {needed}; valid: at least"
        f" {enough_nodes(config, cluster.num_rollout_nodes)} nodes, or fewer servers"
    )


def check_shared_nodes(config: Config, where: Callable[[str], str]) -> None:
    """As `check_rollout_nodes`, for ranks and servers on the same nodes (`cluster.num_rollout_nodes` 0)."""
    cluster, server = config.cluster, config.server
    replays = config.train is not None and config.train.from_rollouts is not None
    if cluster.gpus_per_node is None or cluster.num_rollout_nodes or replays:
        return
    needed = max(place_servers(config, server.num_servers, cluster.num_nodes, cluster.ranks_per_node).gpus)
    if needed <= cluster.gpus_per_node:
        return
    colocated = ", in turns (cluster.colocated)" if cluster.colocated else ""
    raise PlanError(
        f"{where('cluster.gpus_per_node')}: cluster.gpus_per_node: a node of {cluster.gpus_per_node} GPUs for its"
        f" {cluster.ranks_per_node} ranks and its share of server.num_servers {server.num_servers} x server.tensor"
        f" {server.tensor}{' and of reward.model' if reward_gpus(config) else ''}{colocated} would need {needed};"
        f" valid: nodes of their own for the servers (cluster.num_rollout_nodes: {enough_nodes(config, 1)}), fewer of"
        " them, or fewer cluster.ranks_per_node"
    )


def enough_nodes(config: Config, at_least: int) -> int:
    """The fewest nodes, and at least so many, on which all servers find their GPUs, each server within
    `cluster.gpus_per_node` on each of its nodes.
    """
    server, node = config.server, config.cluster.gpus_per_node
    assert node is not None
    nodes = max(at_least, server.num_nodes)
    most = nodes + server.num_servers * server.num_nodes + len(reward_servers(config))
    while nodes < most and max(place_servers(config, server.num_servers, nodes).gpus) > node:
        nodes += 1
    return nodes
