"""A plan as text for a person: model, ranks, batches, servers, notices."""

from __future__ import annotations

from gspo_mega.model.sizes import count_parameters, forward_flops_per_token
from gspo_mega.plan.checks import Sizes
from gspo_mega.plan.resolve import Plan

_MOST_RANKS_SHOWN = 16


def render_report(plan: Plan) -> str:
    """The report that `gspo-mega plan` prints, without a newline at its end."""
    sections = {
        "model": _model(plan),
        "ranks": [*_ranks(plan), *_rank_table(plan)],
        "batch": _batch(plan),
        "server": _servers(plan),
        "notice": list(plan.notices),
    }
    return "\n".join(
        f"{title if index == 0 else '':<8} {line}".rstrip() for title, lines in sections.items() for index, line in enumerate(lines)
    )


def _model(plan: Plan) -> list[str]:
    spec, config = plan.spec, plan.config
    counts = count_parameters(spec)
    longest = Sizes.of(config).longest_sequence
    shape = (
        f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} heads x {spec.head_dim} "
        f"({spec.num_kv_heads} key-value), vocabulary {spec.vocab_size} (padded {plan.layout.padded_vocab_size})"
    )
    if spec.moe is not None:
        shape += f", {spec.moe.num_experts} experts of {spec.moe.expert_intermediate_size}, {spec.moe.experts_per_token} a token"
    else:
        shape += f", intermediate {spec.intermediate_size}"
    return [
        f"{plan.model}, {config.precision}",
        shape,
        f"{_quantity(counts.total)} parameters, {_quantity(counts.active)} active a token; "
        f"{_quantity(forward_flops_per_token(spec, longest))} FLOPs a token forward, at {longest} tokens",
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
        extras.append(f"{layout.virtual_pipeline} virtual stages of {layout.layers_per_chunk} layers a rank")
    if layout.sequence_parallel:
        extras.append("sequence parallel")
    lines = [
        f"{layout.world_size} = {cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)} x {cluster.ranks_per_node}: "
        + " x ".join(f"{name} {size}" for name, size in sizes.items())
        + "".join(f", {extra}" for extra in extras)
    ]
    if plan.spec.moe is not None:
        lines.append(
            f"experts: expert {layout.expert} x expert tensor {layout.expert_tensor} x expert data {layout.expert_data} "
            f"x pipeline {layout.pipeline}, {plan.spec.moe.num_experts // layout.expert} experts a rank"
        )
    return lines


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
            f"{batch.prompts_per_step} prompts x {batch.group_size} = {batch.prompts_per_step * batch.group_size} trajectories a step, "
            f"{batch.num_mini_batches} mini-batches of {sizes}, {share} a data-parallel rank"
        )
    if config.train is not None:
        steps = config.train.num_steps
        lines.append(f"{steps} steps, {steps * batch.num_mini_batches} optimizer steps")
    if config.sft is not None:
        lines.append(f"supervised: {config.sft.sequences_per_step} demonstrations an optimizer step, at most {config.sft.max_steps} steps")
    lines.append(
        f"packs of at most {batch.micro_batch_tokens} tokens; longest sequence {Sizes.of(config).longest_sequence}"
        + (f", padded to multiples of {layout.sequence_multiple_tokens}" if layout.sequence_multiple_tokens > 1 else "")
        + (f", packs to multiples of {layout.pack_multiple_tokens}" if layout.pack_multiple_tokens > layout.sequence_multiple_tokens else "")
    )
    return lines


def _servers(plan: Plan) -> list[str]:
    config = plan.config
    server, rollout = config.server, config.rollout
    context = server.context_tokens or Sizes.of(config).longest_sequence
    return [
        f"{server.num_servers} x tensor {server.tensor} on {server.host}, {context} tokens of context, "
        f"at most {rollout.max_concurrent_requests} open requests each; weights by {config.publish.method}"
    ]


def _quantity(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
