"""Rank the layouts of a model on a number of GPUs: which fit, how long a step takes, and why the others lose.

`search_layouts` tries every combination of sizes that the checks accept; batches, precision and lengths stay those of
the configuration. `render_search` writes the ranking.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan.gpus import DEFAULT_GPU, GPUS
from gspo_mega.plan.layout import Layout, divisors, lighter_ends, stage_layers
from gspo_mega.plan.memory import GIB, GpuMemory, gpu_bytes, run_memory
from gspo_mega.plan.resolve import layout_of
from gspo_mega.plan.state import ModelShares
from gspo_mega.plan.timing import TrainTime, train_time
from gspo_mega.plan.validate import validate_layout

# The largest sizes that are tried.
_MOST_TENSOR, _MOST_CONTEXT, _MOST_VIRTUAL = 8, 8, 8
_SHOWN = 10


@dataclass(frozen=True)
class Candidate:
    """A layout that can run."""

    config: Config
    layout: Layout
    memory: GpuMemory
    time: TrainTime
    fits: bool

    @property
    def seconds(self) -> float:
        """The time of a step's old pass and training."""
        return self.time.total

    @property
    def name(self) -> str:
        layout = self.layout
        virtual = f" VPP{layout.virtual_pipeline}" if layout.virtual_pipeline else ""
        if len(set(layout.stage_layers)) > 1:
            virtual += f" ({layout.stage_layers[0]}..{layout.stage_layers[-1]} layers)"
        experts = f" EP{layout.expert} ETP{layout.expert_tensor}" if layout.expert * layout.expert_tensor > 1 else ""
        recompute = " recompute" if self.config.recompute.granularity == "full" else ""
        return f"TP{layout.tensor} CP{layout.context} PP{layout.pipeline}{virtual} DP{layout.data}{experts}{recompute}"


@dataclass(frozen=True)
class Search:
    """`fitting`: fastest first; `too_large`: least memory first; `refused`: how many layouts each key refuses."""

    fitting: list[Candidate]
    too_large: list[Candidate]
    refused: Counter[str]
    memory_bytes: int
    gpu: str


def parse_grid(text: str) -> tuple[int, int]:
    """Return (nodes, GPUs per node) of a text such as `4x8`. Raises ConfigError for any other text."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(f"--search {text}: give nodes x GPUs per node, for example 4x8")
    return int(found[1]), int(found[2])


def search_layouts(config: Config, spec: ModelSpec, nodes: int, gpus_per_node: int) -> Search:
    """Try every layout on `nodes` x `gpus_per_node` ranks. Raises PlanError if none can run."""
    gpu = config.cluster.gpu or DEFAULT_GPU
    limit = gpu_bytes(config.cluster) or int(GPUS[gpu].memory_gib * GIB)
    shares, total, crossover = ModelShares(spec), count_parameters(spec).total, None
    fitting, too_large, refused = [], [], Counter()
    for candidate in _configurations(config, spec, nodes, gpus_per_node):
        violations = validate_layout(candidate, spec, "gpu")
        if violations:
            refused[violations[0].key] += 1
            continue
        layout = layout_of(candidate, spec, crossover)
        crossover = layout.attention_crossover_tokens
        memory = run_memory(candidate, layout, shares, total, limit)
        found = Candidate(
            candidate, layout, memory, train_time(candidate, layout, shares, GPUS[gpu]), memory.peak <= limit
        )
        (fitting if found.fits else too_large).append(found)
    if not fitting and not too_large:
        reasons = ", ".join(f"{key} ({count})" for key, count in refused.most_common())
        raise PlanError(f"no layout on {nodes} x {gpus_per_node} GPUs can run; refused by {reasons}")
    fitting.sort(key=lambda c: (c.seconds, c.memory.peak))
    too_large.sort(key=lambda c: c.memory.peak)
    return Search(fitting, too_large, refused, limit, gpu)


def _configurations(config: Config, spec: ModelSpec, nodes: int, gpus_per_node: int) -> Iterator[Config]:
    world = nodes * gpus_per_node
    cluster = config.cluster.model_copy(
        update={"num_nodes": nodes, "ranks_per_node": gpus_per_node, "gpus_per_node": gpus_per_node}
    )
    tensors = [d for d in divisors(gpus_per_node) if d <= _MOST_TENSOR and spec.num_heads % d == 0]
    pipelines = [d for d in divisors(world) if spec.num_layers % d == 0 or lighter_ends(spec.num_layers, d)]
    contexts = [d for d in divisors(world) if d <= _MOST_CONTEXT]
    experts = [1] if spec.moe is None else [d for d in divisors(world) if spec.moe.num_experts % d == 0]
    for tensor, pipeline, context, expert in product(tensors, pipelines, contexts, experts):
        if world % (tensor * pipeline * context):
            continue
        ends = lighter_ends(spec.num_layers, pipeline) or {"first_stage_layers": None, "last_stage_layers": None}
        layers = stage_layers(spec.num_layers, config.parallel.model_copy(update={"pipeline": pipeline, **ends}))
        common = math.gcd(*(layers or [1]))
        virtuals = [None] if pipeline == 1 else [None, *(d for d in divisors(common) if 1 < d <= _MOST_VIRTUAL)]
        for virtual, granularity in product(virtuals, ("none", "full")):
            sizes = {
                "tensor": tensor,
                "pipeline": pipeline,
                "context": context,
                "expert": expert,
                "virtual_pipeline": virtual,
                **ends,
            }
            yield config.model_copy(
                update={
                    "cluster": cluster,
                    "parallel": config.parallel.model_copy(update=sizes | {"expert_tensor": 1, "sequence": True}),
                    "recompute": config.recompute.model_copy(update={"granularity": granularity, "num_layers": 1}),
                }
            )


def render_search(search: Search) -> str:
    """Return the ranking as text: the best layouts, why the next ones are slower, and why the rest cannot run."""
    limit = search.memory_bytes / GIB
    lines = [
        f"{len(search.fitting)} layouts fit {limit:.0f} GiB ({search.gpu}); seconds of a step's old pass and training,"
        " estimated"
    ]
    best = search.fitting[0] if search.fitting else None
    for candidate in search.fitting[:_SHOWN]:
        lines.append(
            f"  {candidate.name:<42} {candidate.seconds:8.1f} s {candidate.memory.peak / GIB:6.1f} GiB "
            f" {_why_slower(candidate, best)}"
        )
    if search.too_large:
        nearest = search.too_large[0]
        lines.append(f"{len(search.too_large)} do not fit; the smallest of them:")
        part = max(nearest.memory.parts, key=lambda name: nearest.memory.parts[name])
        lines.append(
            f"  {nearest.name:<42} {nearest.memory.peak / GIB:6.1f} GiB in {nearest.memory.peak_phase}, most of it"
            f" {part}"
        )
        faster = [c for c in search.too_large if best is not None and c.seconds < best.seconds]
        if faster:
            first = min(faster, key=lambda c: c.seconds)
            lines.append(
                f"  {first.name:<42} {first.memory.peak / GIB:6.1f} GiB: would be the fastest, {first.seconds:.1f} s"
            )
    if search.refused:
        lines.append("refused: " + ", ".join(f"{key} {count}" for key, count in search.refused.most_common()))
    if best is not None:
        lines += ["", render_block(best.config)]
    return "\n".join(lines)


def _why_slower(candidate: Candidate, best: Candidate | None) -> str:
    if best is None or candidate is best:
        return ""
    ours, theirs = _time_parts(best), _time_parts(candidate)
    part = max(theirs, key=lambda name: theirs[name] - ours[name])
    return f"+{candidate.seconds / best.seconds - 1:.0%}, {part} +{theirs[part] - ours[part]:.1f} s"


def _time_parts(candidate: Candidate) -> dict[str, float]:
    return {"old pass": candidate.time.old_pass, **candidate.time.training}


def render_block(config: Config) -> str:
    """Return the YAML of a layout."""
    cluster, parallel = config.cluster, config.parallel
    lines = [
        "cluster:",
        f"  num_nodes: {cluster.num_nodes}",
        f"  ranks_per_node: {cluster.ranks_per_node}",
        "parallel:",
    ]
    lines += [
        f"  {key}: {getattr(parallel, key)}"
        for key in ("tensor", "pipeline", "context", "expert")
        if getattr(parallel, key) > 1
    ]
    lines += [
        f"  {key}: {getattr(parallel, key)}"
        for key in ("virtual_pipeline", "first_stage_layers", "last_stage_layers")
        if getattr(parallel, key) is not None
    ]
    if lines[-1] == "parallel:":
        lines[-1] = "parallel: {}"
    return "\n".join([*lines, "recompute:", f"  granularity: {config.recompute.granularity}"])
