"""A plan as text for a person, as one JSON object for programs, and as shell variables for a job script.

`render_report` has a function for each title of the report: model, ranks, batch, servers, state, memory, time and so
on. `plan_json` holds everything that the report says, and `plan_shell` what a job script needs.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from gspo_mega.config.derived import penalises_kl
from gspo_mega.config.precision import describe_server_precision, publishes, publishes_adapters
from gspo_mega.config.validate_sharing import validate_sharing as rules_between_keys
from gspo_mega.models.block_fp8 import served_layout
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.delta import ASSUMED_SHARE, HOST_LINK_BYTES_PER_SECOND, DeltaCost
from gspo_mega.plan.disk import disk_lines, disk_notices, disk_use
from gspo_mega.plan.estimate import Estimate, estimate, signal_seconds
from gspo_mega.plan.gpus import ASSUMPTIONS, SHA256_BYTES_PER_SECOND, is_on_gpu
from gspo_mega.plan.layout import Layout, Sizes
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.peer_copies import peer_copy_lines, standby_lines
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.sampling_masks import mask_cost, mask_lines
from gspo_mega.plan.server_buffers import num_owners, num_senders
from gspo_mega.plan.servers import needs_start_folder
from gspo_mega.plan.sharing import StepPositions, step_positions
from gspo_mega.plan.state import State
from gspo_mega.plan.teacher import served_lines
from gspo_mega.plan.timing import HashCost, StepTime, hand_out, hand_out_lines
from gspo_mega.plan.validate import validate_sharing
from gspo_mega.plan.watchdog_bounds import patience

_MOST_RANKS_SHOWN = 16
# The least share of positions for which sharing is named to a run that has none.
_WORTH_SHARING = 0.1


def render_report(plan: Plan, figures: Estimate | None = None, only: Collection[str] | None = None) -> str:
    """Return the report that `gspo-mega plan` prints, without a newline at its end. `figures`: the plan's; made here if
    absent. `only`: the titles to show; all by default.
    """
    figures = figures or estimate(plan)
    disk = disk_use(plan.config, plan.spec, figures.counts.total, figures.checkpoint_bytes)
    sections = {
        "model": _model(plan, figures),
        "engine": list(plan.operations),
        "ranks": [*_ranks(plan), *_groups(figures), *_rank_table(plan)],
        "batch": _batch(plan),
        "server": _servers(plan, figures),
        "reward": _rewards(figures),
        "state": _state(figures, "penalty" if penalises_kl(plan.config.algorithm, plan.config.critic) else "term"),
        "memory": _memory(figures),
        "time": _time(figures),
        "save": [
            *_save(figures),
            *peer_copy_lines(figures.peer_copies, plan.config.cluster),
            *standby_lines(figures.standby_bytes, plan.config.cluster),
        ],
        "stuck": _stuck(plan, figures),
        "hand-out": [
            *hand_out_lines(hand_out(plan.config, plan.spec, plan.layout)),
            *mask_lines(mask_cost(plan.config, plan.spec)),
            *served_lines(plan.config),
        ],
        "disk": disk_lines(disk),
        "notice": [*plan.notices, *figures.notices, *disk_notices(disk)],
    }
    return "\n".join(
        f"{title if index == 0 else '':<8} {line}".rstrip()
        for title, lines in sections.items()
        if only is None or title in only
        for index, line in enumerate(lines)
    )


def _model(plan: Plan, figures: Estimate) -> list[str]:
    spec, config, counts = plan.spec, plan.config, figures.counts
    longest = Sizes.of(config).longest_sequence
    return [
        f"{plan.model}, {config.precision}",
        shape_text(spec, plan.layout.padded_vocab_size),
        *window_lines(spec),
        (
            f"{_quantity(counts.total)} parameters, {_quantity(counts.active)} active per token; "
            f"{_quantity(figures.flops_per_token)} FLOPs per token forward, at {longest} tokens"
        ),
    ]


def shape_text(spec: ModelSpec, padded_vocab_size: int) -> str:
    """Return a model's shape in one line: layers, heads, vocabulary, latents, experts."""
    shape = (
        f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} heads x {spec.head_dim} "
        f"({spec.num_kv_heads} key-value), vocabulary {spec.vocab_size} (padded {padded_vocab_size})"
    )
    if spec.latent is not None:
        shape += (
            f", latents of {spec.latent.query_rank or 'no'} (query) and {spec.latent.key_value_rank} (key and value)"
        )
    if spec.delta is not None:
        shape += (
            f", gated delta nets in {sum(spec.delta.layers)} layers ({spec.delta.key_heads} x {spec.delta.key_dim}"
            f" keys, {spec.delta.value_heads} x {spec.delta.value_dim} values)"
        )
    if spec.moe is not None:
        shape += (
            f", {spec.moe.num_experts} experts of {spec.moe.expert_intermediate_size}, {spec.moe.experts_per_token} per"
            " token"
        )
        if spec.moe.shared_intermediate_size:
            shape += f", shared {spec.moe.shared_intermediate_size}"
    if not spec.has_experts(0):
        dense = f" in the first {spec.moe.num_dense_layers} layers" if spec.moe is not None else ""
        shape += f", intermediate {spec.intermediate_size}{dense}"
    return shape


def window_lines(spec: ModelSpec) -> list[str]:
    """Return what sliding windows change, and what is estimated as if there were none."""
    if spec.window is None:
        return []
    return [
        f"{sum(spec.window.layers)} of {spec.num_layers} layers attend to the last {spec.window.tokens} tokens: FLOPs"
        " and times are of that; a server's cache is estimated as if every layer kept all tokens"
    ]


def _ranks(plan: Plan) -> list[str]:
    layout, cluster = plan.layout, plan.config.cluster
    sizes = {
        "data": layout.data,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "tensor": layout.tensor,
    }
    extras = []
    if layout.virtual_pipeline is not None:
        extras.append(f"{layout.virtual_pipeline} virtual stages of {_layers(layout)} layers per rank")
    elif len(set(layout.stage_layers)) > 1:
        extras.append(f"stages of {_layers(layout)} layers")
    if layout.sequence_parallel:
        extras.append("sequence parallel")
    lines = [
        f"{layout.world_size} = {cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)} x {cluster.ranks_per_node}: "
        + " x ".join(f"{name} {size}" for name, size in sizes.items())
        + "".join(f", {extra}" for extra in extras)
    ]
    if plan.spec.moe is not None:
        lines.append(
            f"experts: expert {layout.expert} x expert tensor {layout.expert_tensor} x expert data {layout.expert_data}"
            f" x pipeline {layout.pipeline}, {plan.spec.moe.num_experts // layout.expert} experts per rank"
        )
    return lines


def _layers(layout: Layout) -> str:
    """Return the layers of a stage's model chunk, stage by stage if they differ: "3, 10 x 4, 2"."""
    counts = [count // (layout.virtual_pipeline or 1) for count in layout.stage_layers]
    if len(set(counts)) == 1:
        return str(counts[0])
    runs = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)


def _groups(figures: Estimate) -> list[str]:
    inside = [span.name for span in figures.spans if span.nodes == 1]
    outside = [f"{span.name} over {span.nodes} nodes" for span in figures.spans if span.nodes > 1]
    parts = [f"inside a node: {', '.join(inside)}"] if inside else []
    return ["groups " + "; ".join([*parts, *outside])] if figures.spans else []


def _rank_table(plan: Plan) -> list[str]:
    layout = plan.layout
    columns = ["rank", "data", "pipeline", "context", "tensor", *(["expert"] if plan.spec.moe is not None else [])]
    shown = list(range(layout.world_size))
    if layout.world_size > _MOST_RANKS_SHOWN:
        shown = [*range(_MOST_RANKS_SHOWN - 1), layout.world_size - 1]
    lines = ["  ".join(columns)]
    for previous, rank in zip([-1, *shown], shown):
        if rank != previous + 1:
            lines.append(f"{'...':>4}")
        place = layout.coordinates(rank)
        values = [rank, *(getattr(place, column) for column in columns[1:])]
        lines.append("  ".join(f"{value:>{len(column)}}" for column, value in zip(columns, values)))
    return lines


def _batch(plan: Plan) -> list[str]:
    config, layout = plan.config, plan.layout
    batch, mini = config.batch, layout.mini_batch_sequences
    sizes = str(mini[0]) if mini[0] == mini[-1] else f"{mini[0]} or {mini[-1]}"
    share = mini[0] // layout.data if mini[0] % layout.data == 0 else f"about {mini[0] / layout.data:.1f}"
    lines = []
    if config.train is not None or config.sft is None:
        lines.append(
            f"{batch.prompts_per_step} prompts x {batch.group_size} = {batch.prompts_per_step * batch.group_size}"
            f" trajectories per step, {batch.num_mini_batches} mini-batches of {sizes}, {share} per data-parallel rank"
        )
    if config.train is not None:
        steps = config.train.num_steps
        lines.append(f"{steps} steps, {steps * batch.num_mini_batches} optimizer steps")
    if config.sft is not None:
        lines.append(
            f"supervised: {config.sft.sequences_per_step} demonstrations per optimizer step, at most"
            f" {config.sft.max_steps} steps"
        )
    lines.append(
        f"packs of at most {batch.micro_batch_tokens} tokens; longest sequence {Sizes.of(config).longest_sequence}"
        + (f", padded to multiples of {layout.sequence_multiple_tokens}" if layout.sequence_multiple_tokens > 1 else "")
        + (
            f", packs to multiples of {layout.pack_multiple_tokens}"
            if layout.pack_multiple_tokens > layout.sequence_multiple_tokens
            else ""
        )
    )
    lines += _sharing(plan)
    return lines


def _sharing(plan: Plan) -> list[str]:
    """Return the lines about what packs compute once, or, of packs that share nothing, what they could; none if that is
    little or would be refused.
    """
    config, batch = plan.config, plan.config.batch
    if config.train is None and config.sft is not None:
        return []
    if batch.share_prefixes == "off":
        could = config.model_copy(update={"batch": batch.model_copy(update={"share_prefixes": "prompts"})})
        step = step_positions(could, plan.layout)
        refused = [*rules_between_keys(could), *validate_sharing(could, plan.spec, plan.device)]
        if step.shared_fraction < _WORTH_SHARING or refused:
            return []
        untried = ", which has not yet run on a GPU," if is_on_gpu(config.cluster, plan.device) else ","
        return [f"batch.share_prefixes off: with `prompts`{untried} {_saving(step, plan.spec)}"]
    what = "the prompt of a group" if batch.share_prefixes == "prompts" else "what rows have in common"
    more = "; what else rows share is not known before a run" if batch.share_prefixes == "full" else ""
    return [
        f"batch.share_prefixes {batch.share_prefixes}: a pack computes {what} once{more}",
        f"  {_saving(step_positions(config, plan.layout), plan.spec)}",
        f"  a pack has at most {batch.micro_batch_tokens} computed positions, which bounds its layers' memory; its head"
        " has a state for each trained token" + (", also for those that are computed once" if more else ""),
    ]


def _saving(step: StepPositions, spec: ModelSpec) -> str:
    reached, ideal = step.fewer_flops(spec)
    again = "each prompt once"
    if step.num_repeated:
        again = f"{step.num_repeated} prompts again, as packs or ranks divide their groups"
    return (
        f"of {step.rows.tokens} positions of a step's rows {step.computed.tokens} are computed, {again}:"
        f" {step.shared_fraction:.1%} fewer; the layers take {reached:.2f} times fewer FLOPs, at best {ideal:.2f}"
        " (prompts and responses of half their most tokens)"
    )


def _servers(plan: Plan, figures: Estimate) -> list[str]:
    config = plan.config
    server, rollout = config.server, config.rollout
    context = server.context_tokens or Sizes.of(config).longest_sequence
    over = f" over {server.num_nodes} nodes" if server.num_nodes > 1 else ""
    if server.expert > 1:
        by = f" by {server.expert_dispatcher}" if server.expert_dispatcher != "none" else ""
        over += f", expert {server.expert}{by}"
    over += f", drafts by {server.speculative.algorithm}" if server.speculative is not None else ""
    over += f", attention in {server.attention_data} groups" if server.attention_data > 1 else ""
    lines = [
        (
            f"{server.num_servers} x tensor {server.tensor}{over} on {server.host}, ports chosen at start, {context}"
            f" tokens of context, at most {rollout.max_concurrent_requests} open requests per server;"
            f" {'adapters' if publishes_adapters(config) else 'weights'} by {config.publish.method}{_senders(plan)}"
        ),
        f"weights {plan.verification}",
        *_hashes(plan, figures.hashes),
        *_changes(config.publish.full_every, figures.delta),
        describe_server_precision(config.server, config.precision),
    ]
    if needs_start_folder(config, plan.spec):
        form = "plain weights" if served_layout(config) is None else "FP8 blocks"
        lines.append(
            f"they start from a copy of model.path as {form}, which the first of them writes into weights/start-*"
        )
    if config.cluster.colocated:
        lines.append(
            f"on {figures.servers.num_gpus} of the ranks' own GPUs, in turns (cluster.colocated): sample, publish,"
            " train"
        )
    if figures.servers.nodes is not None and figures.limit is not None:
        rewards = sum(model.num_gpus for model in figures.rewards)
        scores = f", and {rewards} of reward models," if rewards else ""
        lines.append(f"{figures.servers.num_gpus} GPUs{scores} on {figures.servers.nodes} nodes of their own")
    if (memory := figures.servers.memory) is not None:
        drafts = f" ({_gib(memory.draft)} of the draft)" if memory.draft else ""
        lines.append(
            f"per GPU: {_gib(memory.weights)} weights{drafts}, {_gib(memory.cache)} cache; the cache holds"
            f" {_quantity(memory.cache_tokens)} tokens per server"
        )
        outside = ", ".join(f"{_gib(size)} {what}" for what, size in memory.outside.items())
        lines.append(f"  outside server.memory_fraction: {outside}")
    return lines


def _senders(plan: Plan) -> str:
    """Return, for a publish through groups, how many ranks send."""
    senders, owners = num_senders(plan.config.publish, plan.spec, plan.layout), num_owners(plan.layout)
    if not senders:
        return ""
    whole = "" if senders == owners else f" for {owners} that own tensors (publish.max_senders)"
    return f" from {senders} rank{'s' * (senders > 1)}{whole}"


def _hashes(plan: Plan, hashes: HashCost) -> list[str]:
    """Return the line about what verification hashes."""
    config = plan.config
    train = config.train
    if not publishes(train, config.sft) or (train and (train.from_rollouts or train.rollouts_only)):
        return []
    every = config.publish.verify_all_every
    whole = "all weights" if every == 1 else f"the mean of {every} publishes (publish.verify_all_every: {every})"
    on_gpu = is_on_gpu(config.cluster, plan.device)
    how = {True: ", by SGLang's GPU kernel", False: ", SHA-256", None: ""}[on_gpu]
    seconds = "" if hashes.server_seconds is None else f" in {hashes.server_seconds:.2f} s"
    return [
        f"hashed per publish, {whole}: {_gib(hashes.trainer_bytes)} in {hashes.trainer_seconds:.2f} s on each of"
        f" {hashes.num_owners} ranks that own tensors (SHA-256, {SHA256_BYTES_PER_SECOND / 1e9:g} GB/s on one core),"
        f" {_gib(hashes.server_bytes)}{seconds} on each rank of a server{how}"
    ]


def _changes(full_every: int, delta: DeltaCost | None) -> list[str]:
    """Return the lines about publishes that send only what changed."""
    if delta is None:
        return []
    keeps = "has a copy" if delta.num_senders == 1 else "have copies"
    return [
        f"one publish in {full_every} sends all weights, {_gib(delta.full_bytes)}, the others what"
        f" changed (publish.full_every): {_gib(delta.delta_bytes)} if {ASSUMED_SHARE:.0%} of the values do; not known"
        " before a run, see publish/changed_share",
        f"  {delta.num_senders} rank{'s' * (delta.num_senders > 1)} {keeps} of {_gib(delta.sender_bytes)} in the host's"
        f" memory for it, and each server of {_gib(delta.server_bytes)}; read at an assumed"
        f" {HOST_LINK_BYTES_PER_SECOND / 1e9:g} GB/s per GPU",
    ]


def _rewards(figures: Estimate) -> list[str]:
    """Return the lines about servers of reward models."""
    lines = []
    for model in figures.rewards:
        lines.append(
            f"model {model.name}: {model.num_servers} x tensor {model.tensor}, {model.context_tokens} tokens of context"
        )
        if model.weights is None:
            lines.append("  its folder is not here, so its size is not known")
        elif model.cache is not None and model.cache_tokens is not None:
            lines.append(
                f"  per GPU: {_gib(model.weights)} weights, {_gib(model.cache)} cache; the cache holds"
                f" {_quantity(model.cache_tokens)} tokens per server"
            )
        elif figures.limit is not None:
            lines.append(f"  per GPU: {_gib(model.weights)} weights; config.json does not say how large a cache is")
    return lines


def _state(figures: Estimate, compared: str) -> list[str]:
    """Return the exact elements and bytes of the fullest rank of the first and of the last stage. `compared`: `term` or
    `penalty`, the kind of KL that a reference is for.
    """
    shown = sorted({0, len(figures.states) - 1})
    lines = []
    for stage in shown:
        state, size = figures.states[stage]
        where = "per rank" if len(figures.states) == 1 else f"per rank of stage {stage}"
        lines.append(
            f"{where}: {_quantity(state.parameters)} parameters{_trained(state)}, {_quantity(state.padding)} padding,"
            f" optimizer state of {_quantity(state.optimized)}: {_gib(size.on_device)}"
            + (f" and {_gib(size.offloaded)} on the host" if size.offloaded else "")
        )
        if size.snapshots:
            lines.append(f"{where}, weights of earlier versions on the host: {_gib(size.snapshots)}")
        if size.teacher:
            lines.append(f"{where}, including the frozen teacher or teachers: {_gib(size.teacher)}")
        if size.reference:
            lines.append(f"{where}, including the frozen reference of the KL {compared}: {_gib(size.reference)}")
    for stage in shown if figures.critic_states else ():
        state, size = figures.critic_states[stage]
        where = "per rank" if len(figures.states) == 1 else f"per rank of stage {stage}"
        lines.append(
            f"{where}, the critic in addition: {_quantity(state.parameters)} parameters and gradients,"
            f" {_quantity(state.padding)} padding, optimizer state of {_quantity(state.optimized)}:"
            f" {_gib(size.on_device)}" + (f" and {_gib(size.offloaded)} on the host" if size.offloaded else "")
        )
    if figures.node_host_bytes:
        lines.append(f"per node, all its ranks, on the host: {_gib(figures.node_host_bytes)}")
    lines.append(
        f"per node, all its ranks, on the host while a checkpoint is saved or loaded: {_gib(figures.node_save_bytes)}"
    )
    return lines


def _trained(state: State) -> str:
    if not state.frozen:
        return " and gradients"
    return f", {_quantity(state.parameters - state.frozen)} of them of adapters, with gradients"


def _memory(figures: Estimate) -> list[str]:
    memory, limit = figures.memory, figures.limit
    if memory is None or limit is None:
        return []
    verdict = (
        f"fits, {_gib(limit - memory.peak)} to spare"
        if figures.fits
        else f"does not fit, over by {_gib(memory.peak - limit)}"
    )
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in memory.parts.items() if size >= 2**20)
    return [
        f"peak {_gib(memory.peak)} of {_gib(limit)} in {memory.peak_phase}, on stage {memory.stage}: {verdict}",
        parts,
        "phases: " + ", ".join(f"{phase} {_gib(size)}" for phase, size in memory.phases.items()),
        "estimate: the state is exact; the rest is formulas, checked on one H100 with two small models",
    ]


def _time(figures: Estimate) -> list[str]:
    time = figures.time
    if time is None:
        return []
    return [
        f"about {time.total:.0f} s per step: "
        + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in time.phases.items())
        + f"; bottleneck {time.bottleneck}",
        "training: " + ", ".join(f"{part} {seconds:.1f}" for part, seconds in time.train.training.items()),
        _overlap(time),
        *(f"assumed: {line}" for line in ASSUMPTIONS),
    ]


def _overlap(time: StepTime) -> str:
    if not time.samples_ahead:
        return (
            f"sampling ahead (rollout.max_staleness: 1) would save about {time.hidden_by_overlap:.0f} s per step, with"
            " tokens of weights up to one version old"
        )
    waits = "the trainer waits for rollouts" if time.rollout > time.train.total else "servers wait for the trainer"
    return (
        f"sampling ahead saves about {time.hidden_by_overlap:.0f} s per step; {waits} for about"
        f" {abs(time.rollout - time.train.total):.0f} s of it"
    )


def _save(figures: Estimate) -> list[str]:
    if figures.time is None:
        return []
    return [
        f"checkpoint {figures.checkpoint_bytes / GIB:.3g} GiB, {figures.save_seconds:.0f} s at the bandwidth assumed; a"
        f" stop takes up to {figures.stop_seconds:.0f} s"
    ]


def _stuck(plan: Plan, figures: Estimate) -> list[str]:
    bounds = patience(plan.config, figures)
    if bounds is None:
        return ["the watchdog is off (watchdog.enabled): only the timeout of collectives notices a stuck rank"]
    kinds = ", ".join(f"{seconds:g} in {kind}" for kind, seconds in bounds.bounds.items())
    return [
        f"seconds without progress after which a rank counts as stuck: {kinds}; without a heartbeat:"
        f" {bounds.silence:g} (watchdog)"
    ]


def plan_json(plan: Plan, figures: Estimate) -> str:
    """Return a JSON object with everything that the report says, in bytes, seconds and elements. Estimates are under
    `memory` and `time`.
    """
    memory, time = figures.memory, figures.time
    disk = disk_use(plan.config, plan.spec, figures.counts.total, figures.checkpoint_bytes)
    handed_out = hand_out(plan.config, plan.spec, plan.layout)
    masks = mask_cost(plan.config, plan.spec)
    value: dict[str, Any] = {
        "run": {"name": plan.config.run.name, "dir": plan.config.run.dir},
        "model": {
            "path": str(plan.model),
            "family": plan.spec.family,
            "parameters": figures.counts.total,
            "active_parameters": figures.counts.active,
            "forward_flops_per_token": figures.flops_per_token,
        },
        "cluster": plan.config.cluster.model_dump(),
        "layout": asdict(plan.layout),
        "groups": [asdict(span) for span in figures.spans],
        "positions": asdict(step_positions(plan.config, plan.layout)),
        "servers": {
            "num_servers": plan.config.server.num_servers,
            "tensor": plan.config.server.tensor,
            "nodes_per_server": plan.config.server.num_nodes,
            "expert": plan.config.server.expert,
            "attention_data": plan.config.server.attention_data,
            "num_gpus": figures.servers.num_gpus,
            "nodes": figures.servers.nodes,
            "weights": plan.verification,
            "memory_bytes": asdict(figures.servers.memory) if figures.servers.memory is not None else None,
            "hashes_per_publish": asdict(figures.hashes),
            "delta_publish": asdict(figures.delta) if figures.delta is not None else None,
        },
        "reward_models": [asdict(model) | {"num_gpus": model.num_gpus} for model in figures.rewards],
        "state": [
            {"stage": stage, "elements": asdict(state), "bytes": asdict(size)}
            for stage, (state, size) in enumerate(figures.states)
        ],
        "critic_state": [
            {"stage": stage, "elements": asdict(state), "bytes": asdict(size)}
            for stage, (state, size) in enumerate(figures.critic_states)
        ],
        "memory": None,
        "time": None,
        "checkpoint": {
            "bytes": figures.checkpoint_bytes,
            "save_seconds": figures.save_seconds,
            "stop_seconds": figures.stop_seconds,
            "peer_copies": asdict(figures.peer_copies) if figures.peer_copies is not None else None,
            "standby_bytes": figures.standby_bytes,
        },
        "hand_out": {
            "shards_bytes": handed_out.shards,
            "ahead_bytes": handed_out.ahead_bytes,
            "routes": None if handed_out.routes is None else asdict(handed_out.routes),
            "masks": None if masks is None else asdict(masks),
        },
        "disk": None
        if disk is None
        else {
            "journal_step_bytes": disk.journal_step,
            "routes_step_bytes": disk.routes_step,
            "masks_step_bytes": disk.masks_step,
            "run_bytes": disk.parts,
            "free_bytes": disk.free,
            "fits": disk.fits,
        },
        "fits": figures.fits,
        "notices": [*plan.notices, *figures.notices, *disk_notices(disk)],
    }
    if memory is not None:
        value["memory"] = {
            "limit_bytes": figures.limit,
            "peak_bytes": memory.peak,
            "peak_phase": memory.peak_phase,
            "stage": memory.stage,
            "parts_bytes": memory.parts,
            "phases_bytes": memory.phases,
            "offloaded_bytes": memory.offloaded,
            "verified_on_gpu": False,
        }
    if time is not None:
        value["time"] = {
            "phases_seconds": time.phases,
            "training_seconds": time.train.training,
            "total_seconds": time.total,
            "bottleneck": time.bottleneck,
            "samples_ahead": time.samples_ahead,
            "hidden_by_overlap_seconds": time.hidden_by_overlap,
            "assumptions": list(ASSUMPTIONS),
        }
    return json.dumps(value, indent=2)


def plan_shell(plan: Plan, figures: Estimate) -> str:
    """Return `GSPO_NAME=value` lines for `eval` in a job script. Nothing in them needs further quoting."""
    cluster, server = plan.config.cluster, plan.config.server
    values = {
        "RUN_NAME": plan.config.run.name,
        "RUN_DIR": f"{plan.config.run.dir}/{plan.config.run.name}",
        "TRAINER_NODES": cluster.num_nodes,
        "RANKS_PER_NODE": cluster.ranks_per_node,
        "WORLD_SIZE": plan.layout.world_size,
        "GPUS_PER_NODE": cluster.gpus_per_node or cluster.ranks_per_node,
        "NUM_SERVERS": server.num_servers,
        "SERVER_TENSOR": server.tensor,
        "SERVER_GPUS": figures.servers.num_gpus,
        "REWARD_GPUS": sum(model.num_gpus for model in figures.rewards),
        "ROLLOUT_NODES": cluster.num_rollout_nodes,
        "CHECKPOINT_BYTES": figures.checkpoint_bytes,
        "SIGNAL_SECONDS": signal_seconds(figures.stop_seconds),
        "FITS": {None: "unknown", True: "yes", False: "no"}[figures.fits],
    }
    return "\n".join(f"GSPO_{name}={shlex.quote(str(value))}" for name, value in values.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def _quantity(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
