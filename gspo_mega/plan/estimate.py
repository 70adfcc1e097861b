"""All figures of a plan: exact state, estimated memory and time, checkpoint size, the nodes that groups span.

Owns putting them together and the verdict against a GPU; `report.py` and `export.py` show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.errors import FitError
from gspo_mega.config.critic_config import critic_config
from gspo_mega.config.schema import Config
from gspo_mega.models.sizes import ParameterCounts, count_parameters, forward_flops_per_token
from gspo_mega.plan.colocated_memory import rank_host_bytes, run_memory, servers_host_bytes
from gspo_mega.plan.critic_needs import critic_state, saved_bytes
from gspo_mega.plan.gpus import GPUS
from gspo_mega.plan.layout_sizes import Sizes
from gspo_mega.plan.memory import GIB, Memory, ServerMemory, gpu_bytes, server_memory
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.reward_needs import RewardNeeds, reward_needs
from gspo_mega.plan.save_memory import save_host_bytes
from gspo_mega.plan.server_places import check_rollout_nodes, place_servers, reward_gpus, reward_servers
from gspo_mega.plan.shares import ModelShares, State
from gspo_mega.plan.state_bytes import StateBytes, state_bytes
from gspo_mega.plan.stop_deadlines import check_deadlines, stop_seconds
from gspo_mega.plan.timing import StepTime, save_seconds, step_time


@dataclass(frozen=True)
class Span:
    """A kind of group: its number of ranks, and the number of nodes that one group spans."""

    name: str
    size: int
    nodes: int


@dataclass(frozen=True)
class Servers:
    """`nodes`: machines that servers need besides the trainer's, those of reward models included; None where all
    servers fit beside the ranks of one machine. `num_gpus`, `memory`: of the policy's.
    """

    num_gpus: int
    nodes: int | None
    memory: ServerMemory | None


@dataclass(frozen=True)
class Estimate:
    """`states`: of the fullest rank of each pipeline stage; `critic_states`: of it the critic's, empty without one.
    `rewards`: of each reward model that the run serves. `memory` is None where the GPU's memory is not known, `time`
    where `cluster.gpu` is not given. `stop_seconds`: from a stop request to the end of the save. `limit`: bytes of one
    GPU. `node_host_bytes`: what the ranks of one node keep in its own memory, at most. `node_save_bytes`: what they
    need there besides while they save or load a checkpoint. `notices`: what these figures warn of.
    """

    counts: ParameterCounts
    flops_per_token: float
    states: tuple[tuple[State, StateBytes], ...]
    critic_states: tuple[tuple[State, StateBytes], ...]
    spans: tuple[Span, ...]
    servers: Servers
    rewards: tuple[RewardNeeds, ...]
    limit: int | None
    node_host_bytes: int
    node_save_bytes: int
    memory: Memory | None
    time: StepTime | None
    checkpoint_bytes: int
    save_seconds: float
    stop_seconds: float
    notices: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Does the estimate stay within the GPU's memory? None where that memory is not known."""
        return None if self.memory is None or self.limit is None else self.memory.peak <= self.limit


def only_evaluates(config: Config) -> bool:
    """Whether a configuration trains nothing, so that what training would need does not matter."""
    return config.train is None and config.sft is None and config.eval is not None


def estimate(plan: Plan, where: Callable[[str], str] = lambda key: "configuration") -> Estimate:
    """Raises, with the key's place, FitError where weights, gradients and optimizer state alone exceed the GPU, what is
    kept on a node's host exceeds its memory, or a server has no room for one response; PlanError where the servers'
    nodes have too few GPUs, a reward model's server does not fit, or a deadline is shorter than what it bounds.
    """
    config, layout, spec = plan.config, plan.layout, plan.spec
    shares, counts = ModelShares(spec), count_parameters(spec)
    states, critic_states, saves = [], [], []
    for stage in range(layout.pipeline):
        held = shares.state(config, layout, stage)
        size = state_bytes(config, held.largest)
        states.append((held.largest, size))
        saves.append(save_host_bytes(config, held, size))
        critic = critic_state(config, layout, shares, stage)
        if critic is not None:
            critic_states.append((critic[0].largest, critic[1]))
            saves[-1] += save_host_bytes(critic_config(config), *critic)
    limit = gpu_bytes(config)
    memory = run_memory(config, layout, shares, counts.total, limit) if limit is not None else None
    key = "cluster.gpu_memory_gib" if config.cluster.gpu_memory_gib is not None else "cluster.gpu"
    if memory is not None and limit is not None and memory.exact > limit and not only_evaluates(config):
        besides = f", {memory.always['critic'] / GIB:.1f} GiB of it the critic's," if critic_states else ""
        raise FitError(
            f"{where(key)}: {key}: weights, gradients and optimizer state take {memory.exact / GIB:.1f} GiB{besides} of"
            f" a GPU with {limit / GIB:.1f} GiB before anything is computed. Use more ranks, more parallelism, or"
            " optimizer.distributed, optimizer.moments_dtype or optimizer.cpu_offload_fraction"
        )
    ranks_per_node = config.cluster.ranks_per_node
    shared = ranks_per_node * max(rank_host_bytes(config, size) for _, size in states)
    shared += servers_host_bytes(config, shares, counts.total)
    by_stage = [[size for _, size in pair] for pair in (zip(states, critic_states) if critic_states else zip(states))]
    node_host = ranks_per_node * max(sum(size.on_host for size in sizes) for sizes in by_stage) + shared
    node_save = ranks_per_node * max(saves)
    room = config.cluster.host_memory_gib
    if room is not None and node_host + node_save > room * GIB:
        largest = max(by_stage, key=lambda sizes: sum(size.on_host for size in sizes))
        offloaded, snapshots = (sum(getattr(s, part) for s in largest) / GIB for part in ("offloaded", "snapshots"))
        raise FitError(
            f"{where('cluster.host_memory_gib')}: cluster.host_memory_gib: the {ranks_per_node} ranks of"
            f" a node keep {node_host / GIB:.1f} GiB in its memory of {room:g} GiB, and need {node_save / GIB:.1f} GiB"
            f" besides while they save or load a checkpoint. Per rank: optimizer state {offloaded:.1f} GiB"
            f" (optimizer.cpu_offload_fraction), weights of earlier versions {snapshots:.1f} GiB"
            " (diagnostics.exact_staleness, rollout.max_staleness); for ranks and"
            f" servers in turns on the same GPUs {shared / GIB:.1f} GiB (cluster.colocated). Lower these, or use more"
            " nodes or parallelism"
        )
    time = None
    if config.cluster.gpu is not None:
        time = step_time(config, layout, shares, GPUS[config.cluster.gpu], counts.total)
    servers = _servers(plan, counts.total, limit)
    longest = Sizes.of(config).longest_sequence
    if servers.memory is not None and servers.memory.cache_tokens < longest:
        raise FitError(
            f"{where('server.tensor')}: server.tensor: the weights of a server take {servers.memory.weights / GIB:.1f}"
            f" GiB on each of its {config.server.tensor} GPUs, and server.memory_fraction"
            f" {config.server.memory_fraction:g} of {(limit or 0) / GIB:.1f} GiB leaves a cache of"
            f" {servers.memory.cache_tokens} tokens, while one response may take {longest}; use more GPUs per server"
            " (server.tensor, server.num_nodes), GPUs with more memory, server.quantization, a larger"
            " server.memory_fraction, or shorter responses (rollout.max_new_tokens)"
        )
    check_rollout_nodes(config, where)
    rewards = reward_needs(config, limit, where, is_elsewhere=plan.model != Path(config.model.path))
    saved = saved_bytes(config, spec, counts.total)
    check_deadlines(config, time, save_seconds(saved), where)
    spans = tuple(_spans(plan))
    return Estimate(
        counts=counts,
        flops_per_token=forward_flops_per_token(spec, Sizes.of(config).longest_sequence),
        states=tuple(states),
        critic_states=tuple(critic_states),
        spans=spans,
        servers=servers,
        rewards=rewards,
        limit=limit,
        node_host_bytes=node_host,
        node_save_bytes=node_save,
        memory=memory,
        time=time,
        checkpoint_bytes=saved,
        save_seconds=save_seconds(saved),
        stop_seconds=stop_seconds(time, save_seconds(saved)),
        notices=tuple(_notices(plan, spans, memory, limit)),
    )


def _spans(plan: Plan) -> list[Span]:
    layout, node = plan.layout, plan.config.cluster.ranks_per_node
    model = layout.tensor * layout.context
    # (name, ranks per group, distance between neighbouring ranks)
    kinds = [
        ("tensor", layout.tensor, 1),
        ("context", layout.context, layout.tensor),
        ("data", layout.data, model),
        ("pipeline", layout.pipeline, layout.world_size // layout.pipeline),
    ]
    if plan.spec.moe is not None:
        kinds += [
            ("expert", layout.expert, layout.expert_tensor),
            ("expert tensor", layout.expert_tensor, 1),
            ("expert data", layout.expert_data, layout.expert_tensor * layout.expert),
        ]
    return [
        Span(name, size, len({index * apart // node for index in range(size)}))
        for name, size, apart in kinds
        if size > 1
    ]


def _servers(plan: Plan, total_parameters: int, limit: int | None) -> Servers:
    config = plan.config
    server, cluster = config.server, config.cluster
    num_gpus = server.num_servers * server.tensor
    node = cluster.gpus_per_node or cluster.ranks_per_node
    if cluster.colocated:
        memory = server_memory(config, plan.spec, total_parameters, limit) if limit is not None else None
        return Servers(num_gpus, None, memory)
    nodes = cluster.num_rollout_nodes or None
    if nodes is None and (cluster.num_nodes > 1 or cluster.ranks_per_node + num_gpus + reward_gpus(config) > node):
        nodes = math.ceil(server.num_servers / max(1, node * server.num_nodes // server.tensor)) * server.num_nodes
        for _ in reward_servers(config):  # at most one more for each
            nodes += max(place_servers(config, server.num_servers, nodes).gpus) > node
    memory = server_memory(config, plan.spec, total_parameters, limit) if limit is not None else None
    return Servers(num_gpus, nodes, memory)


def _notices(plan: Plan, spans: tuple[Span, ...], memory: Memory | None, limit: int | None) -> list[str]:
    found = []
    for span in spans:
        # Tensor groups are the layout's own notice.
        if span.name == "expert" and span.nodes > 1:
            found.append(
                f"expert groups of {span.size} ranks span {span.nodes} nodes: tokens go over the network in every"
                " layer; slower than inside a node"
            )
    if memory is not None and limit is not None and memory.peak > limit:
        part = max(memory.parts, key=lambda name: memory.parts[name])
        found.append(
            f"does not fit by estimate: {memory.peak / GIB:.1f} GiB in {memory.peak_phase} on GPUs of {limit / GIB:.1f}"
            f" GiB, most of it {part} ({memory.parts[part] / GIB:.1f} GiB)"
        )
    sizes = plan.config.server
    if sizes.num_nodes > 1:
        found.append(
            f"servers of {sizes.tensor} ranks span {sizes.num_nodes} nodes: two sums over all their ranks per layer go"
            " over the network in every decode step; slower than inside a node"
        )
    if sizes.speculative is not None:
        found.append(
            "server.speculative: the time of a rollout is estimated without it, because nobody knows how many drafts"
            " are accepted; a draft model is not trained and not published, so that fewer are as the policy moves"
        )
    server = _servers(plan, 0, None)
    if (
        limit is not None
        and plan.config.cluster.gpus_per_node is None
        and server.nodes is not None
        and plan.config.cluster.num_nodes == 1
    ):
        found.append("cluster.gpus_per_node is not given: servers are counted on machines of their own")
    return found
