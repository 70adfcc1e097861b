"""All figures of a plan, and whether it can run with them: exact state, estimated memory and time, checkpoints,
servers.

`estimate` puts the figures together and raises for what cannot run at all. `refuse_what_does_not_fit` is asked later,
by `gspo-mega plan`, the start of a run and the submission of a job, after they have shown the report (`report.py`).
Everything that no figure can change is refused before, by `validate.py`. The parts between them: the nodes that groups
span and servers need, the servers of reward models, and how long a job takes to stop. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gspo_mega.base.errors import ConfigError, FitError, PlanError
from gspo_mega.config.derived import critic_config, episode_lengths
from gspo_mega.config.precision import server_dtype
from gspo_mega.config.schema import Cluster, Config, Eval, ModelReward, Reward, Server, Sft, Train
from gspo_mega.models.tensors import ParameterCounts, count_parameters, forward_flops_per_token
from gspo_mega.models.value_models import ClassifierSizes, check_head, read_sizes
from gspo_mega.plan.delta import DeltaCost, copies_host_bytes, delta_cost
from gspo_mega.plan.gpus import GPUS, is_on_gpu
from gspo_mega.plan.layout import Sizes
from gspo_mega.plan.memory import (
    GIB,
    GRAPHS,
    GROUPS,
    GpuMemory,
    ServerMemory,
    critic_state,
    gpu_bytes,
    rank_host_bytes,
    run_memory,
    save_host_bytes,
    save_rounding_bytes,
    saved_bytes,
    server_memory,
    servers_host_bytes,
)
from gspo_mega.plan.peer_copies import PeerCopyCost, peer_copy_cost, peer_copy_notices, standby_bytes
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.server_buffers import num_senders, publish_group_bytes
from gspo_mega.plan.servers import (
    DTYPE_BYTES,
    place_servers,
    reward_gpus,
    reward_servers,
)
from gspo_mega.plan.state import ModelShares, State, StateBytes, state_bytes, with_teacher
from gspo_mega.plan.timing import HashCost, StepTime, hash_cost, save_seconds, step_time
from gspo_mega.plan.validate import validate_deadlines
from gspo_mega.plan.validate_servers import validate_rollout_nodes, validate_shared_nodes

# Part of the time between Slurm's signal and the limit that is reserved for queueing the job again, no matter what the
# ranks do.
RESERVE_SECONDS = 20.0
LEAST_SIGNAL_SECONDS = 300
# The factor by which the estimates may be too low.
MARGIN = 1.25
# A text may be this many times as long in the tokens of another model.
_LONGER_BY = 4
# A part of the memory below this share of the peak is not worth a change.
_WORTH = 0.1


@dataclass(frozen=True)
class Span:
    """A kind of group. `size`: ranks of one group. `nodes`: the nodes that one group spans."""

    name: str
    size: int
    nodes: int


@dataclass(frozen=True)
class ServerNodes:
    """`num_gpus`, `memory`: those of the policy's servers. `nodes`: machines that servers need in addition to the
    trainer's, those of reward models included; None if all servers fit next to the ranks of one machine.
    """

    num_gpus: int
    nodes: int | None
    memory: ServerMemory | None


@dataclass(frozen=True)
class RewardModelEstimate:
    """The servers of one reward model. `weights`, `cache`: bytes on one GPU. `weights` is None if the folder is not
    here, `cache` if config.json or the configuration does not say enough. `cache_tokens`: tokens in the cache of one
    server.
    """

    name: str
    num_servers: int
    tensor: int
    context_tokens: int
    weights: int | None
    cache: int | None
    cache_tokens: int | None

    @property
    def num_gpus(self) -> int:
        return self.num_servers * self.tensor


@dataclass(frozen=True)
class Estimate:
    """`states`: state of the fullest rank of each pipeline stage; `critic_states`: the critic's, empty without a
    critic. `rewards`: an entry for each reward model that the run serves. `limit`: bytes of one GPU. `memory` is None
    if the GPU's memory is not known, `time` if `cluster.gpu` is not given. `hashes`: what verifying a publish hashes.
    `delta`: what sending only changes costs, None without `publish.full_every`. `peer_copies`: what copies of the
    ranks' state in memory cost, None without `checkpoint.peer_copies`. `standby_bytes`: of a node's standby processes.
    `node_host_bytes`: the most that the ranks of one node keep in its host memory. `node_save_bytes`: what they need
    there in addition while they save or load a checkpoint. `stop_seconds`: from a stop request to the end of the save.
    `notices`: what these figures warn of.
    """

    counts: ParameterCounts
    flops_per_token: float
    states: tuple[tuple[State, StateBytes], ...]
    critic_states: tuple[tuple[State, StateBytes], ...]
    spans: tuple[Span, ...]
    servers: ServerNodes
    rewards: tuple[RewardModelEstimate, ...]
    limit: int | None
    delta: DeltaCost | None
    peer_copies: PeerCopyCost | None
    standby_bytes: int
    node_host_bytes: int
    node_save_bytes: int
    memory: GpuMemory | None
    time: StepTime | None
    hashes: HashCost
    checkpoint_bytes: int
    save_seconds: float
    stop_seconds: float
    notices: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the estimate stays within the GPU's memory; None if that memory is not known."""
        return None if self.memory is None or self.limit is None else self.memory.peak <= self.limit


def estimate(plan: Plan, where: Callable[[str], str] = lambda key: "configuration") -> Estimate:
    """Return all figures of a plan. `where` turns a dotted key into its place (`LoadedConfig.where`).

    Raises FitError, with the key's place, if the weights, gradients and optimizer state already exceed the GPU, if what
    is kept on a node's host exceeds its memory, or if a server has no room for one response. Raises PlanError if the
    servers' nodes have too few GPUs, a reward model's server does not fit, or a deadline is shorter than what it
    bounds.
    """
    config, layout, spec = plan.config, plan.layout, plan.spec
    shares, counts = ModelShares(spec), count_parameters(spec)
    states, critic_states, saves = [], [], []
    for stage in range(layout.pipeline):
        held = shares.state(config, layout, stage)
        size = with_teacher(state_bytes(config, held.largest), config, layout, stage)
        states.append((held.largest, size))
        saves.append(save_host_bytes(config.optimizer, held, size))
        critic = critic_state(config, layout, shares, stage)
        if critic is not None:
            critic_states.append((critic[0].largest, critic[1]))
            saves[-1] += save_host_bytes(critic_config(config).optimizer, *critic)
        if is_on_gpu(config.cluster, plan.device):
            saves[-1] += save_rounding_bytes(config.precision, config.optimizer, held)
            if critic is not None:
                own = critic_config(config)
                saves[-1] += save_rounding_bytes(own.precision, own.optimizer, critic[0])
    limit = gpu_bytes(config.cluster)
    memory = run_memory(config, layout, shares, counts.total, limit) if limit is not None else None
    key = "cluster.gpu_memory_gib" if config.cluster.gpu_memory_gib is not None else "cluster.gpu"
    if (
        memory is not None
        and limit is not None
        and memory.exact > limit
        and not only_evaluates(config.train, config.sft, config.eval)
    ):
        of_critic = f", {memory.always['critic'] / GIB:.1f} GiB of it the critic's," if critic_states else ""
        raise FitError(
            f"{where(key)}: {key}: weights, gradients and optimizer state take {memory.exact / GIB:.1f}"
            f" GiB{of_critic} of"
            f" a GPU with {limit / GIB:.1f} GiB before anything is computed. Use more ranks, more parallelism, or"
            " optimizer.distributed, optimizer.moments_dtype or optimizer.cpu_offload_fraction"
        )
    ranks_per_node = config.cluster.ranks_per_node
    shared = ranks_per_node * max(rank_host_bytes(config.cluster, size) for _, size in states)
    shared += servers_host_bytes(config, shares, counts.total)
    delta = delta_cost(config, spec, layout, counts.total)
    copies = copies_host_bytes(config.cluster, config.server.num_servers, delta)
    by_stage = [[size for _, size in pair] for pair in (zip(states, critic_states) if critic_states else zip(states))]
    node_host = ranks_per_node * max(sum(size.on_host for size in sizes) for sizes in by_stage) + shared + copies
    peers = peer_copy_cost(config, [*zip(states, critic_states)] if critic_states else [[one] for one in states])
    standbys = standby_bytes(config, bool(is_on_gpu(config.cluster, plan.device)))
    node_host += standbys + (0 if peers is None else peers.node_bytes)
    node_save = ranks_per_node * max(saves)
    room = config.cluster.host_memory_gib
    if room is not None and node_host + node_save > room * GIB:
        largest = max(by_stage, key=lambda sizes: sum(size.on_host for size in sizes))
        offloaded, snapshots = (sum(getattr(s, part) for s in largest) / GIB for part in ("offloaded", "snapshots"))
        raise FitError(
            f"{where('cluster.host_memory_gib')}: cluster.host_memory_gib: the {ranks_per_node} ranks of"
            f" a node keep {node_host / GIB:.1f} GiB in its memory of {room:g} GiB, and need {node_save / GIB:.1f} GiB"
            f" more while they save or load a checkpoint. Per rank: optimizer state {offloaded:.1f} GiB"
            f" (optimizer.cpu_offload_fraction), weights of earlier versions {snapshots:.1f} GiB"
            " (diagnostics.exact_staleness, rollout.max_staleness); for ranks and"
            f" servers in turns on the same GPUs {shared / GIB:.1f} GiB (cluster.colocated); copies of what was"
            f" published {copies / GIB:.1f} GiB (publish.full_every); copies of the ranks' state"
            f" {(0 if peers is None else peers.node_bytes) / GIB:.1f} GiB (checkpoint.peer_copies); standby"
            f" processes {standbys / GIB:.1f} GiB (train.standby_processes). Lower these, or use"
            " more nodes or parallelism"
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
    validate_rollout_nodes(config, where)
    rewards = estimate_reward_models(config, limit, where, is_elsewhere=plan.model != Path(config.model.path))
    saved = saved_bytes(config, spec, counts.total)
    validate_deadlines(config, time, save_seconds(saved), where)
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
        delta=delta,
        peer_copies=peers,
        standby_bytes=standbys,
        hashes=hash_cost(
            config,
            spec,
            layout,
            counts.total,
            is_on_gpu(config.cluster, plan.device),
            GPUS.get(config.cluster.gpu or ""),
        ),
        checkpoint_bytes=saved,
        save_seconds=save_seconds(saved),
        stop_seconds=stop_seconds(time, save_seconds(saved)),
        notices=(
            *_notices(plan, spans, memory, limit),
            *_server_notices(config.cluster, config.server, servers.memory, limit),
            *_sender_notices(plan),
            *peer_copy_notices(peers, config.cluster),
        ),
    )


def only_evaluates(train: Train | None, sft: Sft | None, held_out: Eval | None) -> bool:
    """Return whether a configuration trains nothing, so that what training would need does not matter."""
    return train is None and sft is None and held_out is not None


def _spans(plan: Plan) -> list[Span]:
    """Return how many nodes each kind of group with several ranks spans."""
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


def _servers(plan: Plan, total_parameters: int, limit: int | None) -> ServerNodes:
    config = plan.config
    server, cluster = config.server, config.cluster
    num_gpus = server.num_servers * server.tensor
    node = cluster.gpus_per_node or cluster.ranks_per_node
    if cluster.colocated:
        memory = server_memory(config, plan.spec, total_parameters, limit) if limit is not None else None
        return ServerNodes(num_gpus, None, memory)
    nodes = cluster.num_rollout_nodes or None
    if nodes is None and (
        cluster.num_nodes > 1 or cluster.ranks_per_node + num_gpus + reward_gpus(config.reward) > node
    ):
        nodes = math.ceil(server.num_servers / max(1, node * server.num_nodes // server.tensor)) * server.num_nodes
        for _ in reward_servers(config.reward):  # each needs at most one more node
            nodes += max(place_servers(config, server.num_servers, nodes).gpus) > node
    memory = None
    if limit is not None:
        memory = server_memory(config, plan.spec, total_parameters, limit)
        memory = replace(memory, groups=publish_group_bytes(config, plan.spec, plan.layout)[0])
    return ServerNodes(num_gpus, nodes, memory)


def _sender_notices(plan: Plan) -> Iterator[str]:
    """Yield that `publish.max_senders` has no effect on a model whose files have experts in stacks."""
    publish = plan.config.publish
    senders = num_senders(plan.config.publish, plan.spec, plan.layout)
    if senders > publish.max_senders:
        yield (
            f"publish.max_senders {publish.max_senders}: all {senders} ranks that own tensors of a {plan.spec.family}"
            " send, because files have its experts in stacks, whose parts have several owners; if their groups take too"
            " much memory, use `publish.method: disk`"
        )


def _server_notices(cluster: Cluster, server: Server, memory: ServerMemory | None, limit: int | None) -> Iterator[str]:
    """Yield what a server's GPU has no room for, outside the share that SGLang fills."""
    if memory is None or limit is None or cluster.colocated:
        return
    left = limit - round(limit * server.memory_fraction)
    if sum(memory.outside.values()) > left:
        needed = ", ".join(f"{size / GIB:.1f} GiB {what}" for what, size in memory.outside.items())
        yield (
            f"server.memory_fraction {server.memory_fraction:g} leaves {left / GIB:.1f} GiB of a server's GPU,"
            f" and by estimate more is needed: {needed}; lower it, or publish.max_senders, or use"
            " smaller graphs (server.options cuda_graph_max_bs_decode, cuda_graph_max_bs_prefill)"
        )


def _notices(plan: Plan, spans: tuple[Span, ...], memory: GpuMemory | None, limit: int | None) -> list[str]:
    found = []
    for span in spans:
        # The layout's notices cover tensor groups.
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
            " are accepted; a draft model is not trained and not published, so fewer are accepted as the policy moves"
        )
    server = _servers(plan, 0, None)
    if (
        limit is not None
        and plan.config.cluster.gpus_per_node is None
        and server.nodes is not None
        and plan.config.cluster.num_nodes == 1
    ):
        found.append("cluster.gpus_per_node is not given: servers are assumed to have machines of their own")
    return found


def estimate_reward_models(
    config: Config, limit: int | None, where: Callable[[str], str], is_elsewhere: bool = False
) -> tuple[RewardModelEstimate, ...]:
    """Return an estimate for each reward model that the run starts servers for; a run on recorded rollouts starts none.
    `limit`: bytes of one GPU, None if not known. `is_elsewhere`: the plan is for another machine, so a folder may not
    be here.

    Raises PlanError, with the key's place, if a model's folder cannot be served or the model does not fit on its GPUs
    or nodes.
    """
    if config.train is not None and config.train.from_rollouts is not None:
        return ()
    estimates = []
    for number, model in enumerate(config.reward.model):
        if model.path is None:
            continue
        place = f"reward.model.{number}"
        if is_elsewhere and not Path(model.path).exists():
            tokens = text_tokens(config, model, None)
            estimates.append(RewardModelEstimate(model.name, model.num_servers, model.tensor, tokens, None, None, None))
            continue
        try:
            sizes = read_sizes(model.path)
            check_head(model.path)
        except ConfigError as error:
            raise PlanError(f"{where(place)}: {place}.path: {error}") from None
        estimates.append(_estimate_reward_model(config, model, sizes, limit, f"{where(place)}: {place}"))
    if estimates:
        _validate_reward_nodes(config.cluster, config.reward, where)
    return tuple(estimates)


def _estimate_reward_model(
    config: Config, model: ModelReward, sizes: ClassifierSizes, limit: int | None, place: str
) -> RewardModelEstimate:
    if sizes.num_heads is not None and sizes.num_heads % model.tensor:
        valid = [count for count in range(1, sizes.num_heads + 1) if sizes.num_heads % count == 0]
        raise PlanError(
            f"{place}.tensor: {model.tensor} does not divide the {sizes.num_heads} attention heads of {model.path};"
            f" valid: {', '.join(map(str, valid))}"
        )
    dtype = server_dtype(config.server, config.precision) if model.dtype == "auto" else model.dtype
    tokens = text_tokens(config, model, sizes.positions)
    if sizes.positions is not None and tokens > sizes.positions:
        raise PlanError(
            f"{place}.context_tokens: {tokens} tokens, but the positions of {model.path} end at {sizes.positions}; at"
            f" most {sizes.positions}"
        )
    weights = -(-sizes.elements * DTYPE_BYTES[dtype] // model.tensor)
    element = sizes.cached_elements(model.tensor)
    if limit is None or not element:
        return RewardModelEstimate(model.name, model.num_servers, model.tensor, tokens, weights, None, None)
    token = element * DTYPE_BYTES[dtype]
    cached = max(0, int(limit * model.memory_fraction) - weights) // token
    if cached < tokens:
        raise FitError(
            f"{place}.tensor: the weights of {Path(model.path or '').name} take {weights / GIB:.1f} GiB on each of"
            f" {model.tensor} GPUs, and memory_fraction {model.memory_fraction:g} of {limit / GIB:.1f} GiB leaves room"
            f" for {cached} tokens, while a text may have {tokens} (context_tokens); use more GPUs per server (tensor),"
            " GPUs with more memory, a larger memory_fraction or a smaller context_tokens"
        )
    return RewardModelEstimate(model.name, model.num_servers, model.tensor, tokens, weights, cached * token, cached)


def text_tokens(config: Config, model: ModelReward, positions: int | None) -> int:
    """Return the most tokens of a text for a reward model: `context_tokens`, or else room for the policy's longest
    episode with another tokenizer, as far as the model's `positions` go.
    """
    wanted = _LONGER_BY * (config.server.context_tokens or episode_lengths(config).tokens)
    return model.context_tokens or min(wanted, positions or wanted)


def _validate_reward_nodes(cluster: Cluster, reward: Reward, where: Callable[[str], str]) -> None:
    """Raises PlanError if a single server of a reward model is larger than a node. Whether all find room is checked by
    `validate_rollout_nodes` and `validate_shared_nodes`.
    """
    node = cluster.gpus_per_node
    if node is None:
        return
    for number, model in enumerate(reward.model):
        if model.path is not None and model.tensor > node:
            raise PlanError(
                f"{where(f'reward.model.{number}')}: reward.model.{number}.tensor: a server on {model.tensor} GPUs does"
                f" not fit on a node of {node} (cluster.gpus_per_node); at most {node}"
            )


def refuse_what_does_not_fit(plan: Plan, figures: Estimate, where: Callable[[str], str]) -> None:
    """Raises PlanError, with the key's place, if ranks and servers need more GPUs than their nodes have, and FitError
    if the estimate of a rank's peak exceeds its GPU and `plan.over_memory` is `refuse`. On a machine without GPUs
    neither matters; the peak does not matter if nothing is trained.
    """
    config, memory, limit = plan.config, figures.memory, figures.limit
    if plan.device == "cpu":
        return
    validate_shared_nodes(config, where)
    if (
        figures.fits is not False
        or config.plan.over_memory == "warn"
        or only_evaluates(config.train, config.sft, config.eval)
    ):
        return
    if memory is None or limit is None:
        return
    key = "cluster.gpu_memory_gib" if config.cluster.gpu_memory_gib is not None else "cluster.gpu"
    largest = sorted(memory.parts, key=lambda part: -memory.parts[part])
    parts = [part for part in largest if memory.parts[part] >= _WORTH * memory.peak]
    changes = list(dict.fromkeys(change for part in parts for change in _changes(config, part)))
    shown = ", ".join(f"{part} {memory.parts[part] / GIB:.1f} GiB" for part in parts)
    raise FitError(
        f"{where(key)}: {key}: by estimate a rank of stage {memory.stage} needs {memory.peak / GIB:.1f} GiB in"
        f" {memory.peak_phase} and its GPU has {limit / GIB:.1f} GiB: over by {(memory.peak - limit) / GIB:.1f} GiB"
        f" ({shown}). What would help: {'; '.join(changes)}. These formulas were checked on one H100 with"
        " two small models only: `plan.over_memory:"
        " warn` starts the run all the same"
    )


def _changes(config: Config, part: str) -> list[str]:
    """Return the keys that would make a part of the memory smaller and are not set yet, in words."""
    more_ranks = "more parallelism (parallel.tensor, parallel.pipeline, parallel.expert) on more ranks"
    optimizer = config.optimizer
    if part in ("activations", "fragmentation", "pipeline buffers"):
        full = config.recompute.granularity == "full"
        return [
            *([] if full else ["`recompute.granularity: full`"]),
            f"a smaller batch.micro_batch_tokens than {config.batch.micro_batch_tokens}",
            "a larger parallel.context or parallel.tensor",
        ]
    if part == "logits":
        return [f"a smaller batch.log_prob_chunk_tokens than {config.batch.log_prob_chunk_tokens}"]
    if part in ("main weights", "moments"):
        return [
            *([] if optimizer.distributed else ["`optimizer.distributed: true`"]),
            *(["a smaller optimizer.moments_dtype"] if optimizer.moments_dtype == "fp32" else []),
            f"a larger optimizer.cpu_offload_fraction than {optimizer.cpu_offload_fraction:g}",
            more_ranks,
        ]
    if part == "reference":
        return ["no reference (kl.coefficient: 0)", more_ranks]
    if part in ("teacher", "teacher states"):
        return ["a smaller teacher", "`teacher.divergence: sampled_token`, which keeps no states", more_ranks]
    if part == GRAPHS:
        return ["smaller graphs (server.options cuda_graph_max_bs_decode, cuda_graph_max_bs_prefill)"]
    if part == GROUPS:
        return ["fewer groups per sender (publish.servers_per_group)", "`publish.method: disk`"]
    if part == "publish":
        return [f"a smaller publish.bucket_bytes than {config.publish.bucket_bytes}, or `publish.method: disk`"]
    return [more_ranks, "GPUs with more memory"] if part != "reserve" else []


def stop_seconds(time: StepTime | None, save_seconds: float) -> float:
    """Return the seconds from a stop request to the end of the save, by estimate: the batch in training is finished
    first.
    """
    return save_seconds + (0.0 if time is None else time.train.total + time.publish)


def signal_seconds(stop: float) -> int:
    """Return how many seconds before its time limit Slurm signals a job, in whole minutes. `stop`: the seconds that the
    job takes to stop, by estimate.
    """
    return max(LEAST_SIGNAL_SECONDS, 60 * math.ceil((MARGIN * stop + RESERVE_SECONDS) / 60))


def grace_seconds(signal_seconds: float) -> float:
    """Return the part of the seconds between Slurm's signal and the time limit in which ranks end their
    step and save.
    """
    return max(signal_seconds - RESERVE_SECONDS, signal_seconds / 2)
