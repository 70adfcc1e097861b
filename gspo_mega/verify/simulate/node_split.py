"""How to divide nodes between trainer and servers: every division that the plan accepts, simulated for a few steps.

The layout's sizes stay the configuration's; data parallelism and the number of servers follow the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gspo_mega.base.errors import PlanError
from gspo_mega.config.schema import Config
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.layout_checks import check_layout
from gspo_mega.plan.layout_of_config import layout_of
from gspo_mega.plan.memory import gpu_bytes, trainer_memory
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.server_places import place_servers, reward_gpus, reward_servers
from gspo_mega.plan.shares import ModelShares

_MOST_SIMULATED = 12


@dataclass(frozen=True)
class Split:
    """A division that can run, as a configuration."""

    config: Config
    layout: Layout

    @property
    def trainer_nodes(self) -> int:
        return self.config.cluster.num_nodes

    @property
    def server_nodes(self) -> int:
        return self.config.cluster.num_rollout_nodes


def splits(plan: Plan, shares: ModelShares, num_nodes: int, where: Callable[[str], str]) -> list[Split]:
    """The divisions of `num_nodes` nodes that the plan accepts and whose trainer fits its memory by estimate, fewest
    nodes for the trainer first; with many, a selection over the whole range. Raises PlanError where there is none.
    """
    config, spec, limit = plan.config, plan.spec, gpu_bytes(plan.config)
    found: list[Split] = []
    reasons: dict[str, str] = {}
    gpus, tensor = config.cluster.gpus_per_node or config.cluster.ranks_per_node, config.server.tensor
    for trainer in range(1, num_nodes):
        groups, over = divmod(num_nodes - trainer, config.server.num_nodes)
        servers = groups * (gpus * config.server.num_nodes // tensor)
        # As many as leave room for the servers of reward models.
        while servers >= 1 and max(place_servers(config, servers, num_nodes - trainer).gpus) > gpus:
            servers -= 1
        if servers < 1 or over:
            scored = f" and {reward_gpus(config)} GPUs of reward models" if reward_gpus(config) else ""
            reasons["server.tensor"] = f"{num_nodes - trainer} nodes of {gpus} GPUs for servers of {tensor}{scored}"
            continue
        scorers = len(reward_servers(config))
        used = min(num_nodes - trainer, servers * config.server.num_nodes + scorers)
        cluster = config.cluster.model_copy(update={"num_nodes": trainer, "num_rollout_nodes": used})
        server = config.server.model_copy(update={"num_servers": servers})
        candidate = config.model_copy(update={"cluster": cluster, "server": server})
        if problems := check_layout(candidate, spec, "gpu"):
            reasons[problems[0].key] = f"{trainer} nodes: {problems[0].text}"
            continue
        layout = layout_of(candidate, spec, plan.layout.attention_crossover_tokens)
        if limit is not None and (memory := trainer_memory(candidate, layout, shares)).peak > limit:
            reasons["memory"] = f"{trainer} nodes need {memory.peak / 2**30:.0f} GiB per GPU of {limit / 2**30:.0f} GiB"
            continue
        found.append(Split(candidate, layout))
    if not found:
        told = "; ".join(f"{key}: {reason}" for key, reason in reasons.items()) or "one node cannot be divided"
        raise PlanError(
            f"{where('cluster.num_nodes')}: {num_nodes} nodes cannot be divided between trainer and servers: {told}"
        )
    if len(found) <= _MOST_SIMULATED:
        return found
    last = len(found) - 1
    return [found[round(place * last / (_MOST_SIMULATED - 1))] for place in range(_MOST_SIMULATED)]
