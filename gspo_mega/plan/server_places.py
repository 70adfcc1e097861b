"""Which nodes of a job its servers are on, and which GPUs of these they have: the policy's, and those of reward models.

Owns the dealing, for the plan, the simulation and the launcher. Knows no node by name and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

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
