"""Layouts of a run on fewer nodes than it asks for (`train.on_lost_node: shrink`).

What is learned from a step stays: batch, algorithm and precision. The sizes of the model's parts stay if they divide
the ranks that are left, so that only the data-parallel size is smaller; otherwise the layouts are searched.
"""

from __future__ import annotations

from dataclasses import replace

from gspo_mega.base.errors import PlanError
from gspo_mega.config.loader import LoadedConfig
from gspo_mega.config.schema import Config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan.estimate import estimate, refuse_what_does_not_fit
from gspo_mega.plan.gpus import Device
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.resolve import plan_run
from gspo_mega.plan.search import search_layouts

# How many of the layouts of a search are tried, fastest first.
_MOST_TRIED = 20


def shrinks(config: Config) -> bool:
    """Whether the run goes on with fewer nodes when some are lost."""
    return config.train is not None and config.train.on_lost_node == "shrink"


def fit_to_nodes(loaded: LoadedConfig, nodes: int, device: Device | None) -> LoadedConfig:
    """Return the configuration on as many trainer nodes as can be used of `nodes`: at most `cluster.num_nodes`, at
    least `train.min_nodes`.

    Raises PlanError, with the reason for each number of nodes, if there is no layout.
    """
    config = loaded.config
    assert config.train is not None
    least, most = config.train.min_nodes, min(nodes, config.cluster.num_nodes)
    reasons = [] if most >= least else [f"{nodes} nodes are fewer than {least}"]
    for number in range(most, least - 1, -1):
        try:
            return _on(loaded, number, device)
        except PlanError as error:
            reasons.append(f"on {number}: {str(error).splitlines()[0]}")
    raise PlanError(
        "\n".join([f"{loaded.where('train.min_nodes')}: train.min_nodes: no layout on {nodes} nodes:", *reasons])
    )


def _on(loaded: LoadedConfig, number: int, device: Device | None) -> LoadedConfig:
    """Return the configuration on `number` nodes. Raises PlanError, of the layout with the same sizes, if there
    is none.
    """
    config = loaded.config
    if number == config.cluster.num_nodes:
        return loaded
    same = replace(loaded, config=_with_nodes(config, number))
    try:
        _check(same, device)
        return same
    except PlanError as error:
        first = error
    try:
        found = search_layouts(
            same.config, read_model_spec(config.model.path), number, config.cluster.ranks_per_node
        ).fitting
    except PlanError:
        raise first from None
    for candidate in found[:_MOST_TRIED]:
        parallel = candidate.config.parallel
        update = {"parallel": parallel, "recompute": candidate.config.recompute}
        other = replace(same, config=same.config.model_copy(update=update))
        try:
            _check(other, device)
        except PlanError:
            continue
        return other
    raise first


def _with_nodes(config: Config, number: int) -> Config:
    """Return the configuration with `number` trainer nodes, for one start, in which nothing shrinks further. Servers on
    these nodes become fewer with them.
    """
    cluster, server, train = config.cluster, config.server, config.train
    if cluster.num_rollout_nodes == 0:
        fewer = max(1, server.num_servers * number // cluster.num_nodes)
        server = server.model_copy(update={"num_servers": fewer})
    return config.model_copy(
        update={
            "cluster": cluster.model_copy(update={"num_nodes": number}),
            "server": server,
            "train": None if train is None else train.model_copy(update={"on_lost_node": "wait"}),
        }
    )


def _check(loaded: LoadedConfig, device: Device | None) -> None:
    plan = plan_run(loaded, device)
    refuse_what_does_not_fit(plan, estimate(plan, loaded.where), loaded.where)


def nodes_to_grow(loaded: LoadedConfig, nodes: int, device: Device | None) -> int:
    """Return how many nodes more than `nodes` let the run use more of them; 0 if it has all that it asks for, or if no
    number would.
    """
    wanted = loaded.config.cluster.num_nodes
    if nodes >= wanted:
        return 0
    used = fit_to_nodes(loaded, nodes, device).config.cluster.num_nodes
    larger = (number for number in range(nodes + 1, wanted + 1) if _uses_more(loaded, number, used, device))
    return next(larger, nodes) - nodes


def _uses_more(loaded: LoadedConfig, number: int, used: int, device: Device | None) -> bool:
    return fit_to_nodes(loaded, number, device).config.cluster.num_nodes > used


def layout_name(layout: Layout) -> str:
    """Return a layout in one line of sizes, those of 1 left out but for data."""
    sizes = {"TP": layout.tensor, "CP": layout.context, "PP": layout.pipeline, "EP": layout.expert}
    return " ".join([*(f"{name}{size}" for name, size in sizes.items() if size > 1), f"DP{layout.data}"])


def fewer_nodes_lines(loaded: LoadedConfig, device: Device | None) -> list[str]:
    """Return, for a run that shrinks, a line for each number of nodes with which it would go on. Raises PlanError if it
    could not go on with `train.min_nodes`.
    """
    config = loaded.config
    if not shrinks(config) or config.train is None:
        return []
    lines = []
    for number in range(config.cluster.num_nodes - 1, config.train.min_nodes - 1, -1):
        found = fit_to_nodes(loaded, number, device)
        used = found.config.cluster.num_nodes
        recompute = ", recomputes" if found.config.recompute != config.recompute else ""
        idle = f", {number - used} of them unused" if used < number else ""
        lines.append(f"with {number} nodes: {layout_name(plan_run(found, device).layout)}{recompute}{idle}")
    return lines
