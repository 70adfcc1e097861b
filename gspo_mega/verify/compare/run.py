"""Run `gspo-mega compare`: find the step and the weights, start ranks without servers, show the table.

The run's own algorithm, and the other form of the same objective (GSPO and GSPO-token), use the run's own settings;
every other algorithm uses the defaults of its recipe. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ConfigError, JournalError
from gspo_mega.base.near_paths import missing_run_hint
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.base.untrusted import read_text
from gspo_mega.config import load_config
from gspo_mega.config.algorithms import RECIPES, AlgorithmName
from gspo_mega.config.schema import Advantage, Config, Kl, Model, Objective
from gspo_mega.config.validate_learning import resolve_defaults
from gspo_mega.data.journal.journal import Journal
from gspo_mega.launcher.local import WORKER_COMMAND, launch


def check_algorithms(algorithm: AlgorithmName, names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` without repetition. Raises ConfigError for a name that is no recipe, for an algorithm with a
    critic, because no journal has its values, and for `custom` in a run of another algorithm, because it has no
    defaults.
    """
    for name in names:
        if name not in RECIPES:
            near = difflib.get_close_matches(name, RECIPES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(RECIPES)}"
            raise ConfigError(f"--algorithms: {name!r} is no algorithm; {hint}")
        if RECIPES[name].has_critic:
            raise ConfigError(
                f"--algorithms: the gradient of {name} is made of a critic's values, which a run does not record;"
                f" valid: {', '.join(other for other, recipe in RECIPES.items() if not recipe.has_critic)}"
            )
        if name == "custom" and algorithm != "custom":
            raise ConfigError(
                "--algorithms: custom has no defaults of its own, and the run's algorithm is"
                f" {algorithm}; name a recipe"
            )
    return tuple(dict.fromkeys(names))


def config_of(config: Config, name: str) -> Config:
    """Return the run's configuration with the objective and advantages of algorithm `name`. The run's own algorithm
    keeps the run's settings, and so does the other form of the same objective, so that GSPO-token equals GSPO in any
    range if advantages are equal; every other algorithm has its paper's defaults, whatever the run says. To compare
    nothing but the objective, there is one mini-batch, no KL term, no teacher and no router loss.
    """
    changes = {
        "batch": config.batch.model_copy(update={"num_mini_batches": 1}),
        "kl": Kl(),
        "teacher": None,
        "moe": config.moe.model_copy(
            update={"load_balancing": "none", "load_balancing_coefficient": 0.0, "z_loss_coefficient": 0.0}
        ),
    }
    if name != config.algorithm and _is_other_form(config.algorithm, name):
        advantage = config.advantage
        if RECIPES[name].has_one_advantage:
            advantage = advantage.model_copy(update={"turns": "episode", "turn_discount": 1.0})
        changes |= {"algorithm": name, "advantage": advantage}
    elif name != config.algorithm:
        changes |= {"algorithm": name, "objective": Objective(scope=config.objective.scope), "advantage": Advantage()}
    changed = config.model_copy(update=changes)
    # Ignore what a recipe sets outside of these sections: all algorithms see the same old policy.
    resolved = resolve_defaults(changed)
    return changed.model_copy(update={"objective": resolved.objective, "advantage": resolved.advantage})


def range_of(config: Config, name: str) -> dict[str, Any]:
    """Return the clip range that algorithm `name` is compared with, as keys of `objective`, and its source, `run` or
    `paper`. The values are None if the algorithm clips nothing.
    """
    if not RECIPES[name].is_clipped:
        return {"clip_low": None, "clip_high": None, "range_of": None}
    objective = config_of(config, name).objective
    is_runs = name == config.algorithm or _is_other_form(config.algorithm, name)
    return {
        "clip_low": objective.clip_low,
        "clip_high": objective.clip_high,
        "range_of": "run" if is_runs else "paper",
    }


def _is_other_form(own: str, name: str) -> bool:
    """Return whether two algorithms are the same objective, one with sequence ratios and one with token ratios."""
    one, other = RECIPES[own], RECIPES[name]
    of_response = {one.ratio, other.ratio} == {"sequence", "sequence_token"}
    return of_response and one.objective_defaults == other.objective_defaults


@dataclass(frozen=True)
class Request:
    """What to compare. `run`: a run folder. `weights`, `old`: `latest`, `start` or a folder; `old` may also be
    `recorded`. `step`: counted from 1; None for the last step that the weights were trained on.
    """

    run: Path
    algorithms: Sequence[str]
    weights: str = "latest"
    old: str = "recorded"
    step: int | None = None
    overrides: Sequence[str] = ()


def compare(
    request: Request, say: Callable[[str], None], worker_command: Sequence[str] = WORKER_COMMAND
) -> tuple[int, dict[str, Any] | None]:
    """Compare the algorithms. Returns (exit code, the numbers of all algorithms, or None after a stop).

    Raises ConfigError, JournalError or CheckpointError for what is missing, before anything starts.
    """
    folder = RunFolder(request.run)
    if not folder.config_file.exists():
        raise ConfigError(f"{folder.path}: is no run folder: it has no {folder.config_file.name}")
    run = load_config(folder.config_file).config
    names = check_algorithms(run.algorithm, request.algorithms)
    policy = weights_folder(folder, run.model, run.lora is not None, request.weights, "--weights")
    old = None
    if request.old != "recorded":
        old = weights_folder(folder, run.model, run.lora is not None, request.old, "--old")
    step = find_step(folder, request)
    here = f"{folder.path.name}-compare"
    base = [*request.overrides, f"run.name={here}", f"run.dir={folder.path.resolve().parent}"]
    # The gradient is that of all weights, even if the run trains adapters.
    base += ["cluster.num_nodes=1", "cluster.num_rollout_nodes=0", "cluster.colocated=false", "lora=null"]
    loaded = load_config(folder.config_file, base, "compare")
    work = {
        "run": str(folder.path.resolve()),
        "step": step,
        "algorithms": list(names),
        "policy": str(policy.resolve()),
        "old": None if old is None else str(old.resolve()),
    }
    code = launch(loaded, "compare", say, worker_command=worker_command, work=work, with_servers=False)
    if code:
        return code, None
    attempt = RunFolder(Path(loaded.config.run.dir) / here).latest_attempt()
    assert attempt is not None  # the launch made it
    result = read_json(attempt.result_file)
    assert result is not None  # rank 0 wrote it
    for name, row in result["algorithms"].items():
        row |= range_of(loaded.config, name)
    return 0, {
        "run": str(folder.path),
        "step": step + 1,
        "weights": str(policy),
        "old": "recorded" if old is None else str(old),
        **result,
    }


def weights_folder(folder: RunFolder, model: Model, trains_adapters: bool, wanted: str, option: str) -> Path:
    """Return the weights folder that `latest` (the newest checkpoint), `start` or a path names. `model`: the run's.
    Raises ConfigError.
    """
    if wanted == "latest":
        if trains_adapters:
            raise ConfigError(
                f"{option} latest: {folder.path} trains adapters (`lora`), and its checkpoints hold them alone; valid:"
                " start, or a folder of merged weights"
            )
        if not folder.latest_checkpoint_file.exists():
            raise ConfigError(
                f"{option} latest: {folder.path} has no checkpoint; valid: start (the run's first weights), or a folder"
            )
        return folder.checkpoints_dir / read_text(folder.latest_checkpoint_file).strip()
    path = Path(model.weights or model.path) if wanted == "start" else Path(wanted)
    if not (path / "config.json").exists() and not (path / "megatron").is_dir():
        raise ConfigError(
            f"{option} {wanted}: {path} has neither config.json (a Hugging Face folder) nor megatron/ (a checkpoint, or"
            " what gspo-mega convert wrote)"
        )
    return path


def find_step(folder: RunFolder, request: Request) -> int:
    """Return the step whose rollouts are compared, counted from 0. Raises JournalError if it has no complete batch."""
    journal = Journal(folder.journal_dir)
    steps = journal.steps()
    if not steps:
        raise JournalError(f"{folder.path}: no rollouts are recorded{missing_run_hint(folder.path)}")
    if request.step is not None:
        if request.step - 1 not in steps:
            raise JournalError(
                f"{folder.path}: step {request.step} is not recorded; recorded are steps {steps[0] + 1} to"
                f" {steps[-1] + 1}"
            )
        candidates = [request.step - 1]
    else:
        most = steps[-1]
        if request.weights == "latest":
            name = read_text(folder.latest_checkpoint_file).strip()
            most = int(name.rpartition("_")[2]) - 1
        candidates = [step for step in reversed(steps) if step <= most]
    for step in candidates:
        record = journal.read(step)
        if record is not None and record.batch is not None:
            return step
    named = f"step {request.step}" if request.step is not None else "no step up to the weights'"
    has = "no" if request.step is not None else "a"
    raise JournalError(f"{folder.path}: {named} has {has} complete rollout batch to compare on")


def render(found: Mapping[str, Any]) -> str:
    """Return the table of a comparison and the cosines of every pair, as text."""
    rows: Mapping[str, Mapping[str, Any]] = found["algorithms"]
    names = list(rows)
    width = max(9, *map(len, names))
    old = "as the servers recorded them" if found["old"] == "recorded" else found["old"]
    lines = [
        f"rollouts  step {found['step']} of {found['run']}: {found['num_responses']} responses of"
        f" {found['num_groups']} groups, {found['num_tokens']} tokens",
        f"weights   {found['weights']}",
        f"old       {old}; mean log ratio {found['mean_log_ratio']:+.2e} nats per token",
        "",
        f"{'algorithm':<{width}}  {'range':<17}  |gradient|  clipped   A > 0   A < 0  tokens  dropped  weakened"
        "  effective",
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:<{width}}  {_range(row):<17}  {row['gradient_norm']:10.3e}  {row['clip_fraction']:7.4f}"
            f" {_share(row['clip_fraction_positive'])} {_share(row['clip_fraction_negative'])}"
            f" {row['token_clip_fraction']:7.4f}  {len(row['dropped']):7d}  {len(row['weakened']):8d}"
            f"  {row['num_effective']:5.1f} of {row['num_with_advantage']}"
        )
    if len(names) > 1:
        cell = max(7, *map(len, names))
        lines += ["", "cosine    " + " ".join(f"{name:>{cell}}" for name in names)]
        for name in names:
            values = (found["cosines"][name][other] for other in names)
            lines.append(f"{name:<{width}} " + " ".join(f"{_cosine(value):>{cell}}" for value in values))
    lines += [
        "",
        "range: clip_low / clip_high, of the run where marked *, else of the algorithm's paper",
        "clipped: share of responses (tokens: of tokens); dropped: responses with A != 0 and no gradient; weakened:"
        " with some tokens without; effective: (sum g)^2 / sum g^2, g a response's |dJ / d log pi|",
    ]
    dropped = {name: row["dropped"] for name, row in rows.items() if row["dropped"]}
    lines += [f"dropped by {name}: {_few(ids)}" for name, ids in dropped.items()]
    return "\n".join(lines)


def _range(row: Mapping[str, Any]) -> str:
    if row["range_of"] is None:
        return "-"
    return f"{row['clip_low']:g} / {row['clip_high']:g}" + (" *" if row["range_of"] == "run" else "")


def _share(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.4f}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _few(ids: Sequence[str], most: int = 8) -> str:
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more (--json has all)" if len(ids) > most else "")
