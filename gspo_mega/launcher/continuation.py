"""What it takes to continue a run with other values of its keys (`gspo-mega plan --continue RUN key=value ...`).

`plan_continuation` compares the run's configuration with the new one, and its newest checkpoint with the new layout. It
reads a few small files, changes nothing, and imports no torch. `render_continuation` is the text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import CheckpointError, ConfigError, GspoMegaError, PlanError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import read_text
from gspo_mega.checkpoint import folders
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.derived import critic_of
from gspo_mega.launcher.attempt_state import read_state
from gspo_mega.launcher.prepare import changed_keys, configuration_of, continuation_problems, last_command
from gspo_mega.plan import Estimate, Plan, estimate, plan_run, refuse_what_does_not_fit
from gspo_mega.plan.gpus import Device
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.state import WEIGHT_BYTES

# A checkpoint has three fp32 numbers for each parameter: its own copy and both moments.
_STATE_BYTES = 12
_SIZES = ("world", "tensor", "pipeline", "context", "data", "expert", "expert_tensor")
_MOST_NODES_TRIED = 64


@dataclass(frozen=True)
class SavedState:
    """The checkpoint that a run continues from. `layout`: sizes of the groups that wrote it. `folder_bytes`: bytes of
    each of its folders.
    """

    name: str
    step: int
    num_optimizer_steps: int
    layout: dict[str, int]
    folder_bytes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.folder_bytes.values())


@dataclass(frozen=True)
class Continuation:
    """`changed`: from a key to (before, now). `problems`: why the run cannot be continued so, empty if it can.
    `before`, `now`: plan and figures; None where there is no plan. `steps_done`: steps that the run completed.
    `command`: what continues it.
    """

    folder: RunFolder
    saved: SavedState
    changed: dict[str, tuple[Any, Any]]
    problems: tuple[str, ...]
    before: tuple[Plan, Estimate] | None
    now: tuple[Plan, Estimate] | None
    steps_done: int
    command: str

    @property
    def is_other_layout(self) -> bool:
        return self.now is not None and _sizes(self.now[0]) != self.saved.layout


def plan_continuation(target: str, overrides: Sequence[str], device: Device | None) -> Continuation:
    """Return what it takes to continue the run of the folder `target` with these `key=value`.

    Raises ConfigError for anything but the folder of a run, and for values that are no configuration; CheckpointError
    if the run has no checkpoint, or if it cannot be read.
    """
    if not Path(target).is_dir():
        raise ConfigError(f"gspo-mega plan --continue: {target} is not the folder of a run (<run.dir>/<run.name>)")
    folder = RunFolder(Path(target).resolve())
    command = last_command(folder) or "train"
    if command not in ("train", "sft"):
        raise ConfigError(f"gspo-mega plan --continue: {target} is a run of {command}; only train and sft continue")
    saved = _saved_state(folder)
    attempt = folder.latest_attempt()
    started = attempt.started_in_file if attempt is not None else None
    started_in = read_text(started).strip() if started is not None and started.is_file() else None
    file, place = configuration_of(target, command, overrides)  # moves to the folder that relative paths refer to
    before = load_config(file, place, command)
    now = load_config(file, [*place, *overrides], command)
    problems = continuation_problems(before.config, now.config)
    planned = _planned(now, device, problems)
    state = None if attempt is None else read_state(attempt)
    in_slurm = state is not None and state.slurm_job is not None
    start = f"launch/slurm/train.sbatch {shlex.quote(str(file))}" if in_slurm else f"gspo-mega {command} {folder.path}"
    line = shlex.join(overrides)
    at = f"cd {shlex.quote(started_in)} && " if in_slurm and started_in else ""
    return Continuation(
        folder,
        saved,
        changed_keys(before.config, now.config),
        tuple(problems),
        _planned(before, device, []),
        planned,
        _steps_done(folder, saved.step),
        f"{at}{start} {line}".rstrip(),
    )


def _planned(loaded: LoadedConfig, device: Device | None, problems: list[str]) -> tuple[Plan, Estimate] | None:
    """Return the plan and its figures; None if there is no plan, whose reasons are added to `problems`."""
    try:
        plan = plan_run(loaded, device)
        figures = estimate(plan, loaded.where)
    except GspoMegaError as error:
        problems += [*str(error).splitlines(), *_other_numbers(loaded, device)]
        return None
    try:
        refuse_what_does_not_fit(plan, figures, loaded.where)
    except PlanError as error:
        problems += str(error).splitlines()
    return plan, figures


def _other_numbers(loaded: LoadedConfig, device: Device | None) -> list[str]:
    """Return a line with the numbers of nodes that the other keys allow; none if no number does."""
    wanted, cluster = loaded.config.cluster.num_nodes, loaded.config.cluster
    valid = []
    for number in range(1, min(2 * wanted, _MOST_NODES_TRIED) + 1):
        config = loaded.config.model_copy(update={"cluster": cluster.model_copy(update={"num_nodes": number})})
        try:
            plan_run(LoadedConfig(config, loaded.path, loaded.text, (), loaded.origins), device)
        except GspoMegaError:
            continue
        valid.append(str(number))
    return [f"cluster.num_nodes: with the other keys as they are, valid: {', '.join(valid)}"] if valid else []


def _saved_state(folder: RunFolder) -> SavedState:
    for checkpoint in folders.candidates(folder):
        try:
            record = folders.read_record(checkpoint)
        except (OSError, ValueError):
            continue  # the start passes it over, too
        sizes: dict[str, int] = {}
        for name, (size, _) in record.get("files", {}).items():
            part = name.partition("/")[0]
            sizes[part] = sizes.get(part, 0) + size
        state = record["state"]
        return SavedState(checkpoint.name, state["step"], state["num_optimizer_steps"], record["layout"], sizes)
    raise CheckpointError(
        f"{folder.path} has no checkpoint to continue: its run would start over, with any configuration"
    )


def _steps_done(folder: RunFolder, saved: int) -> int:
    """Return the last step in the run's metrics, at least the saved one."""
    if not folder.metrics_file.is_file():
        return saved
    lines = read_text(folder.metrics_file, errors="replace").splitlines()
    for line in reversed(lines):
        try:
            return max(saved, int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError):
            continue
    return saved


def _sizes(plan: Plan) -> dict[str, int]:
    layout = plan.layout
    values = (layout.world_size, *(getattr(layout, name) for name in _SIZES[1:]))
    return dict(zip(_SIZES, values, strict=True))


def render_continuation(found: Continuation) -> str:
    """Return the text: what changes, what is read again and by whom, memory, what is lost, and the command."""
    sections = {
        "run": [f"{found.folder.path}, {found.saved.name} of {_size(found.saved.num_bytes)}"],
        "keys": [f"{key}: {before} -> {now}" for key, (before, now) in found.changed.items()] or ["nothing changes"],
        "layout": _layout_lines(found),
        "read": _read_lines(found),
        "memory": _memory_lines(found),
        "lost": _lost_lines(found),
        "refused": list(found.problems),
        "command": [] if found.problems else [found.command],
    }
    return "\n".join(
        f"{title if index == 0 else '':<8} {line}".rstrip()
        for title, lines in sections.items()
        for index, line in enumerate(lines)
    )


def _layout_lines(found: Continuation) -> list[str]:
    was = " ".join(f"{name} {size}" for name, size in found.saved.layout.items() if size > 1) or "one rank"
    if found.now is None:
        return [f"saved by {was}; no layout now"]
    plan = found.now[0]
    sizes = _sizes(plan)
    now = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    share = f"{plan.layout.mini_batch_sequences[-1] / plan.layout.data:g} trajectories per mini-batch and data rank"
    kept = "the batch, and so each step's data and order, stay"
    return [f"{was} -> {now}" if sizes != found.saved.layout else f"{now}, as it was saved", f"{kept}; {share}"]


def _read_lines(found: Continuation) -> list[str]:
    if found.now is None:
        return []
    plan, figures = found.now
    world, per_node = plan.layout.world_size, plan.config.cluster.ranks_per_node
    lines = [
        f"checksums: all {world} ranks read the {_size(found.saved.num_bytes)} once together,"
        f" {_size(found.saved.num_bytes / world)} each"
    ]
    weight = WEIGHT_BYTES[plan.config.precision]
    of_models = {"policy": figures.states, "critic": figures.critic_states}
    for name, states in of_models.items():
        for stage in sorted({0, len(states) - 1}) if states else ():
            state = states[stage][0]
            trained = state.parameters - state.frozen
            where = f" of stage {stage}" if len(states) > 1 else ""
            both = trained * weight + state.optimized * _STATE_BYTES
            lines.append(
                f"{name}, the fullest rank{where}: weights {_size(trained * weight)}, its part of the optimizer"
                f" {_size(state.optimized * _STATE_BYTES)}; a node of {per_node} ranks up to {_size(both * per_node)}"
            )
    if plan.config.lora is not None:
        lines.append(f"the weights below the adapters come from {plan.config.model.weights or plan.config.model.path}")
    return lines


def _memory_lines(found: Continuation) -> list[str]:
    if found.now is None:
        return []

    def state(pair: tuple[Plan, Estimate] | None) -> str:
        if pair is None:
            return "not known"
        figures = pair[1]
        held = max(size.on_device for _, size in figures.states)
        held += max((size.on_device for _, size in figures.critic_states), default=0)
        if figures.memory is None or figures.limit is None:
            return f"{_size(held)} of state"
        return f"{_size(held)} of state, peak {_size(figures.memory.peak)} of {_size(figures.limit)}"

    return [f"fullest rank: {state(found.before)} -> {state(found.now)}"]


def _lost_lines(found: Continuation) -> list[str]:
    lines = []
    steps = found.steps_done - found.saved.step
    if steps > 0:
        lines.append(f"training of the {steps} steps since {found.saved.name}: done again, on their recorded rollouts")
    plan = None if found.now is None else found.now[0]
    if plan is None:
        return lines
    config = plan.config
    lines.append(
        "rollouts in flight: complete episodes are in the journal and stay; unfinished ones are sampled again"
        + (f", of up to {config.rollout.max_staleness + 1} batches" if config.rollout.max_staleness else "")
    )
    if found.is_other_layout:
        dropout = config.lora is not None and config.lora.dropout > 0
        lines.append(
            "random states of ranks: a fresh start's. "
            + (
                f"lora.dropout {config.lora.dropout:g} draws from them"
                if dropout and config.lora
                else "Nothing draws from them"
            )
        )
        lines.append("bits: sums are in another order, so numbers differ by rounding; nothing of the state is lost")
        if critic_of(config.algorithm, config.critic) is not None:
            lines.append("the critic moves with the policy, in the same layout")
    return lines


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB" if num_bytes >= GIB / 100 else f"{num_bytes / 2**20:.3g} MiB"
