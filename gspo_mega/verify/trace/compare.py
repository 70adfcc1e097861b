"""Set what was traced beside what the plan says, and name the plan's formula where they differ.

The plan's reserve and its allowance for fragmentation are left out, because nothing of the kind is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_mega.config.derived import critic_config, needs_old_log_prob_pass
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import attended_positions, forward_flops_per_token
from gspo_mega.plan import Plan
from gspo_mega.plan.layout import Layout, Sizes
from gspo_mega.plan.memory import (
    GROUPS,
    critic_state,
    rank_host_bytes,
    save_rounding_bytes,
    stage_memory,
    written_host_bytes,
)
from gspo_mega.plan.state import WEIGHT_BYTES, ModelShares, state_bytes, with_teacher
from gspo_mega.plan.timing import attended_value_dim, tensor_rows

STATE_TOLERANCE, TOLERANCE = 0.01, 0.05
# How the ledger names what belongs to the state.
STATE = "state: "
# Workspaces that Transformer Engine allocates itself are traced; the plan's reserve stands for them.
_WORKSPACES = 2**28
_MEMORY = ("memory, ", "rollout, ")
_NOT_TRACED = ("reserve", "fragmentation", GROUPS)
# The parts that stay on the GPU while servers sample, with `cluster.colocated`.
_MOVED = ("weights", "padding", "gradients", "main weights", "moments", "reference", "teacher")


@dataclass(frozen=True)
class Difference:
    """One figure of both. `what` names it; `unit` is `bytes` or `FLOPs`. `formula`: where the plan's figure is made."""

    what: str
    planned: float
    traced: float
    unit: str
    tolerance: float
    formula: str

    @property
    def share(self) -> float:
        """By how much the trace is above the plan, as a share of the plan."""
        if self.planned == 0:
            return 0.0 if self.traced == 0 else float("inf")
        return self.traced / self.planned - 1

    @property
    def agrees(self) -> bool:
        """Whether the two are as near as they have to be; of memory, what the plan's reserve stands for may be more."""
        slack = _WORKSPACES if self.what.partition(": ")[2].startswith(_MEMORY) or self.what.startswith(_MEMORY) else 0
        return abs(self.traced - self.planned) <= max(self.tolerance * self.planned, slack)


def kinds_of_rank(layout: Layout) -> list[int]:
    """One rank for each kind: pipeline stages that differ in their layers, or have the embedding or the head."""
    found: dict[tuple[int, bool, bool], int] = {}
    for stage in range(layout.pipeline):
        kind = (layout.stage_layers[stage], stage == 0, stage == layout.pipeline - 1)
        found.setdefault(kind, layout.ranks_of(0, stage)[0])
    return sorted(found.values())


def num_packs(layout: Layout) -> int:
    """Micro-batches of the traced mini-batch: enough that each stage holds as many at once as it ever does."""
    return 2 if layout.pipeline == 1 else layout.pipeline * (1 if layout.virtual_pipeline is None else 2)


def kept_between_steps(traced: Mapping[str, Any]) -> tuple[int, list[Mapping[str, Any]]]:
    """Bytes that a rank keeps after an optimizer step besides its state, and who holds them, the most first."""
    left = next(phase["left"] for phase in traced["phases"] if phase["name"] == "second optimizer")
    kept = [one for one in left if not one["holder"].startswith(STATE)]
    return sum(one["bytes"] for one in kept), kept


def compare(plan: Plan, traced: Mapping[str, Any]) -> list[Difference]:
    """Compare one rank's trace (`rank.py`'s JSON) with the plan's figures for its pipeline stage."""
    config, layout, spec = plan.config, plan.layout, plan.spec
    stage = traced["coordinates"]["pipeline"]
    memory = stage_memory(config, layout, ModelShares(spec), stage)
    phases = {phase["name"]: phase for phase in traced["phases"]}
    always = sum(size for part, size in memory.always.items() if part not in _NOT_TRACED)

    def planned(phase: str) -> float:
        own = memory.by_phase[phase]
        return always + sum(size for part, size in own.items() if part not in _NOT_TRACED)

    rows = [
        Difference(
            "state",
            always,
            sum(one["bytes"] for one in phases["second optimizer"]["left"] if one["holder"].startswith(STATE)),
            "bytes",
            STATE_TOLERANCE,
            "plan/state.py: state_bytes",
        )
    ]
    # The trace marks the two frozen models alike.
    second = {"reference": memory.always["reference"] + memory.always["teacher"], "critic": memory.always["critic"]}
    for part, size in second.items():
        if size:
            rows.append(
                Difference(
                    f"state, {part}",
                    size,
                    _held(phases["second optimizer"], f"{STATE}{part}"),
                    "bytes",
                    STATE_TOLERANCE,
                    "plan/state.py: state_bytes",
                )
            )
    for name, phase, figure in (
        ("old pass", "second old pass", "old pass"),
        ("reference pass", "second reference pass", "old pass"),
        ("teacher pass", "second teacher pass", "old pass"),
        ("critic training", "second critic training", "critic"),
        ("critic optimizer", "second critic optimizer", "optimizer"),
        ("training", "second training", "training"),
        ("optimizer", "second optimizer", "optimizer"),
        ("publish", "publish", "publish"),
        ("save", "save", "checkpoint"),
    ):
        if phase in phases:
            rows.append(_peak(name, planned(figure), phases[phase]))
    rows += _host(config, layout, spec, traced, phases)
    if "rollout" in phases:
        stays = sum(size for part, size in memory.always.items() if part not in (*_NOT_TRACED, *_MOVED))
        rows.append(
            Difference(
                "rollout, what a rank leaves on the GPU",
                stays,
                phases["rollout"]["after"],
                "bytes",
                TOLERANCE,
                "plan/memory.py: run_memory",
            )
        )
    return [*rows, *_exchange(config, layout, spec, traced, phases)]


def _held(phase: Mapping[str, Any], holder: str) -> int:
    return sum(one["bytes"] for one in phase["left"] if one["holder"] == holder)


def _host(
    config: Config, layout: Layout, spec: ModelSpec, traced: Mapping[str, Any], phases: Mapping[str, Any]
) -> list[Difference]:
    """What a rank has on the host: always, in addition while it saves, and in addition while servers sample."""
    shares, stage = ModelShares(spec), traced["coordinates"]["pipeline"]
    held = shares.state(config, layout, stage)
    models = [(config, held, with_teacher(state_bytes(config, held.largest), config, layout, stage))]
    critic = critic_state(config, layout, shares, stage)
    if critic is not None:
        models.append((critic_config(config), *critic))
    found = []
    if (offloaded := sum(size.offloaded for *_, size in models)) > 0:
        after = phases["second optimizer"]["host_after"]
        found.append(("offloaded optimizer", offloaded, after, "plan/state.py: state_bytes"))
    if "save" in phases:
        written = sum(
            written_host_bytes(own.optimizer, state, size, traced["rank"])
            + save_rounding_bytes(own.precision, own.optimizer, state)
            for own, state, size in models
        )
        found.append(("a save's copies", written, _host_peak(phases["save"]), "plan/memory.py: written_host_bytes"))
    if "rollout" in phases:
        kept = rank_host_bytes(config.cluster, models[0][-1])
        took = _host_peak(phases["rollout"])
        found.append(("page-locked while servers sample", kept, took, "plan/memory.py: rank_host_bytes"))
    return [
        Difference(f"host, {what}", planned, traced, "bytes", TOLERANCE, formula)
        for what, planned, traced, formula in found
    ]


def _host_peak(phase: Mapping[str, Any]) -> int:
    return phase["host_peak"] - phase["host_before"]


def _peak(name: str, planned: float, phase: Mapping[str, Any]) -> Difference:
    formula = "plan/state.py: state_bytes" if name.endswith("optimizer") else "plan/memory.py: stage_memory"
    if name.endswith(("pass", "training")):
        formula = "plan/activations.py: layer_activations, head_activations"
    return Difference(f"memory, {name}", planned, phase["peak"], "bytes", TOLERANCE, formula)


def _exchange(
    config: Config, layout: Layout, spec: ModelSpec, traced: Mapping[str, Any], phases: Mapping[str, Any]
) -> list[Difference]:
    """What a forward pass of one pack gives to other ranks: of the old pass, where there is one."""
    passed = phases.get("second old pass") if needs_old_log_prob_pass(config) else None
    if passed is None:
        return []
    layers = [layer for chunk in layout.chunk_layers(traced["coordinates"]["pipeline"]) for layer in chunk]
    tokens = traced["pack_tokens"] / layout.context
    row = tokens * spec.hidden_size * WEIGHT_BYTES[config.precision]
    rows = []
    if layout.tensor > 1:
        found = _bytes(passed, "tensor") / traced["packs"]
        rows.append(
            Difference(
                "tensor exchange, a pack's forward pass",
                tensor_rows(spec, layout) * row * len(layers),
                found,
                "bytes",
                TOLERANCE,
                "plan/timing.py: tensor_rows",
            )
        )
    if spec.moe is not None and layout.expert > 1:
        # Each token's copies leave for the experts and come back; the plan's experts are evenly loaded.
        copies = row / (layout.tensor if layout.sequence_parallel else 1) * spec.moe.experts_per_token
        found = _bytes(passed, "expert") / traced["packs"] / traced["imbalance"]
        rows.append(
            Difference(
                "expert exchange, a pack's forward pass",
                2 * copies * sum(map(spec.has_experts, layers)),
                found,
                "bytes",
                TOLERANCE,
                "plan/timing.py: _Layer._exchange",
            )
        )
    return rows


def _bytes(phase: Mapping[str, Any], group: str) -> float:
    return sum(one["bytes"] for one in phase["collectives"] if one["group"] == group)


def compare_flops(plan: Plan, traced: Sequence[Mapping[str, Any]]) -> Difference | None:
    """The FLOPs of a pack's forward pass over all pipeline stages. `traced`: one rank of each kind."""
    layout, spec = plan.layout, plan.spec
    by_kind = {}
    for one in traced:
        phases = {phase["name"]: phase for phase in one["phases"]}
        if "second old pass" not in phases:
            return None
        stage = one["coordinates"]["pipeline"]
        kind = (layout.stage_layers[stage], stage == 0, stage == layout.pipeline - 1)
        # The plan's experts are evenly loaded.
        by_kind[kind] = (
            sum(
                number / (one["imbalance"] if name.startswith("experts'") else 1.0)
                for name, number in phases["second old pass"]["flops"].items()
            )
            / one["packs"]
        )
    kinds = [(layers, stage == 0, stage == layout.pipeline - 1) for stage, layers in enumerate(layout.stage_layers)]
    if any(kind not in by_kind for kind in kinds):
        return None
    tokens = traced[0]["pack_tokens"] / layout.context / layout.tensor
    length = min(Sizes.of(plan.config).longest_sequence, traced[0]["pack_tokens"])
    headless = 0.0  # positions of prompts, which do not reach the head: many only in packs of whole groups
    if plan.config.batch.share_prefixes != "off":
        length = round(traced[0]["attended_length"])
        headless = 1 - traced[0]["trained_tokens"] / traced[0]["pack_tokens"]
    # The model's own FLOPs do not have the values' padding.
    padding = 2 * spec.num_heads * (attended_value_dim(spec) - spec.value_head_dim)
    padding *= spec.num_layers * attended_positions(spec, length)
    return Difference(
        "FLOPs, a pack's forward pass",
        tokens * (forward_flops_per_token(spec, length) + padding - headless * 2 * spec.hidden_size * spec.vocab_size),
        sum(by_kind[kind] for kind in kinds),
        "FLOPs",
        TOLERANCE,
        "models/tensors.py: forward_flops_per_token",
    )
