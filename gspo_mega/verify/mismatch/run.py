"""Run `gspo-mega mismatch`: plan the walks, start servers and ranks for their points, show the result.

One start covers one variant of the server (rank 0 asks it), or one number of ranks with several variants of the
trainer. A cause that cannot be changed here is named and left out. The result is a table with a verdict and recommended
keys for people, and one JSON object for programs. Imports no torch.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega.base.errors import ConfigError, GspoMegaError, PlanError, RankError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.clip_range import Band
from gspo_mega.config.precision import has_transformer_engine_layers
from gspo_mega.launcher.local import WORKER_COMMAND, launch
from gspo_mega.launcher.prepare import commit, device_here, versions
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import plan_run
from gspo_mega.verify.mismatch.attribution import AttributionRow, PromptEstimate
from gspo_mega.verify.mismatch.causes import ALTERNATIVES, CAUSES, ONE_RANK, Facts, Nothing, Settings, value_of
from gspo_mega.verify.mismatch.findings import Advice, Findings, advise, find
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens
from gspo_mega.verify.mismatch.served_folders import ServedFolders
from gspo_mega.verify.mismatch.walks import Point, WalkPlan, make_plan

_LEGEND = (
    "k3: mean(e^x - 1 - x) per token, nats, of the difference x that the cause adds to d = trainer - rollout;",
    "band: mean |log s| in widths of the clip range, log s being the mean of x over a sequence (or over its first so",
    "many tokens), and where tokens are clipped the mean size of x of a token; below, above: share of all responses",
    "(tokens) below, above the clip range, had only this cause acted; - where the algorithm clips nothing;",
    "A<0: of the responses with A < 0 the share that is clipped, below it; A>0: of those with A > 0, above it: with no",
    "update at all, were the servers' log-probs used directly as old;",
    "bound: a token's difference that the row's rounding may reach, nats; what is smaller is not seen to be a fault;",
    "forward, backward: share of the squared mismatch in each order of changing the causes, 100 % together.",
    "(+-): one standard error, from the spread between prompts; of shares of responses: half the way to the farther",
    "end of Wilson's interval at two standard errors, each prompt counted as one trial.",
)


def render(findings: Findings, advice: Advice) -> str:
    """Return the whole report: table by cause, what was not measured, verdict, recommendation."""
    return "\n".join([*_table(findings), "", *_LEGEND, *_not_measured(findings), "", *_verdict(advice)])


def as_json(findings: Findings, advice: Advice, made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same as one JSON object; infinite standard errors are null. `made`: date, duration, software."""
    value = {
        "made": made,
        "sentences": advice.sentences,
        "recommended": {key: value for key, (value, _) in advice.keys.items()},
        **asdict(findings),
    }
    return _finite(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(findings: Findings) -> list[str]:
    orders = list(findings.parts)
    first = findings.parts[orders[0]]
    shares = {name: [_of_squares(findings.parts[order][name].share) for order in orders] for name in first}
    rows = {name: part.row for name, part in first.items()} | {"all together": findings.total}
    shares["all together"] = ["100.0%"] * len(orders)
    for name, other in findings.alternatives.items():
        settings = ", ".join(f"{key}={value}" for key, value in other.settings.items())
        rows[f"change by {name}" if other.is_change else f"with {settings}"] = other.row
    width = max(map(len, rows))
    headings = "  ".join(f"{order:>11}" for order in orders)
    lines = [
        f"{findings.num_sequences} sequences of {findings.num_prompts} prompts, {findings.num_tokens} response tokens;"
        f" {_range(findings.band)}",
        f"A<0 and A>0 are those of all responses: {findings.unsigned}"
        if findings.unsigned is not None
        else f"{findings.num_negative} sequences have A < 0, {findings.num_positive} have A > 0",
        "",
        f"{'cause':<{width}}  {'k3 per token':>17}  {'band':>15}  {'A<0':>8}  {'A>0':>8}  {'max |x|':>7}"
        f"  {'bound':>7}  {headings}",
    ]
    for name, row in rows.items():
        by_order = "  ".join(f"{share:>11}" for share in shares.get(name, ["-"] * len(orders)))
        lines.append(f"{name:<{width}}  {_numbers(row)}  {_bound(findings, name)}  {by_order}")
    for order in orders[1:]:
        lines += [f"  {order}: {name} k3 {part.row.k3.value:.1e}" for name, part in _other(findings, order)]
    lengths = "  ".join(f"{f'log s at {length}':>26}" for length in findings.lengths)
    lines += ["", f"{'':<{width}}  {'below':>8}  {'above':>8}  {lengths}"]
    for name, row in rows.items():
        log_s = "  ".join(
            f"{f'{at.mean.value:+.1e} (+-{_short(at.mean.error)}) sd {at.sd:.1e}':>26}" for at in row.at_length
        )
        lines.append(f"{name:<{width}}  {_percent(row.below):>8}  {_percent(row.above):>8}  {log_s}")
    return lines


def _other(findings: Findings, order: str):
    """Yield the causes whose k3 differs between the orders by more than two of its standard errors."""
    first = next(iter(findings.parts.values()))
    for name, part in findings.parts[order].items():
        if abs(part.row.k3.value - first[name].row.k3.value) > 2 * first[name].row.k3.error:
            yield name, part


def _range(band: Band | None) -> str:
    if band is None:
        return "no clip range"
    if not band.per_token:
        return f"clip range of log s {band.low:.1e} to {band.high:+.1e}"
    of = "of a token's probability" if band.of_probability else "of log s"
    low = "none below" if not math.isfinite(band.low) else f"{band.low:.1e}"
    return f"clip range {of} {low} to {band.high:+.1e} per token"


def _numbers(row: AttributionRow) -> str:
    return (
        f"{f'{row.k3.value:.1e} (+-{_short(row.k3.error)})':>17}  {_share(row.band_share):>15}"
        f"  {_percent(row.negative):>8}  {_percent(row.positive):>8}  {row.maximum:7.1e}"
    )


def _bound(findings: Findings, name: str) -> str:
    return f"{findings.bounds[name]:7.1e}" if name in findings.bounds else f"{'-':>7}"


def _of_squares(share: PromptEstimate) -> str:
    error = f"{100 * share.error:.0f}" if math.isfinite(share.error) else "?"
    return f"{share.value:.1%}+-{error}"


def _short(value: float) -> str:
    return f"{value:.0e}" if math.isfinite(value) else "?"


def _share(estimate: PromptEstimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.value < 1e-2:
        return f"{estimate.value:.0e} (+-{_short(estimate.error)})"
    return f"{estimate.value:.2f} (+-{estimate.error:.2f})"


def _percent(estimate: PromptEstimate | None) -> str:
    if estimate is None:
        return "-"
    error = f"{100 * estimate.error:.0f}" if math.isfinite(estimate.error) else "?"
    return f"{100 * estimate.value:.0f}%+-{error}"


def _not_measured(findings: Findings) -> list[str]:
    zero = [f"{name} ({why.why})" for name, why in findings.nothing.items() if why.is_zero]
    hidden = [f"  {name}: {why.why}" for name, why in findings.nothing.items() if not why.is_zero]
    lines = ["", f"nothing to change: {'; '.join(zero)}"] if zero else []
    return [*lines, "not changed here, so in the rows beside it:", *hidden] if hidden else lines


def _verdict(advice: Advice) -> list[str]:
    lines = ["verdict", *(f"  {sentence}" for sentence in advice.sentences)]
    return [*lines, "", "recommended", *(f"  {line}" for line in advice.yaml.splitlines())] if advice.keys else lines


@dataclass
class Conduct:
    """Conducts one measurement. `done`: the file of log-probs of each evaluated point. `refused`: causes that cannot be
    changed here, and why. `tokens`: the folder of the fixed tokens, None before they are sampled.
    """

    loaded: LoadedConfig
    overrides: Sequence[str]
    say: Callable[[str], None]
    worker_command: Sequence[str]
    done: dict[Point, Path] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    tokens: Path | None = None

    def __post_init__(self) -> None:
        config = self.loaded.config
        if config.cluster.num_nodes != 1:
            raise PlanError(
                f"{self.loaded.where('cluster.num_nodes')}: cluster.num_nodes: {config.cluster.num_nodes}: `gspo-mega"
                " mismatch` runs on one machine. Override cluster.num_nodes=1 and cluster.num_rollout_nodes=0, and give"
                " `parallel` a layout that fits it"
            )
        known = sorted({cause.name for cause in CAUSES})
        if unknown := [name for name in config.budget.causes if name not in known]:
            raise ConfigError(
                f"{self.loaded.where('budget.causes')}: budget.causes: {unknown[0]!r} is no cause; valid:"
                f" {', '.join(known)}"
            )
        self.facts = Facts(config, read_model_spec(config.model.path), device_here())
        self.folder = RunFolder(Path(config.run.dir) / f"{config.run.name}-budget")

    def base(self) -> list[str]:
        """Return the overrides of every start: no training, one server, and experts returned with the responses."""
        config = self.loaded.config
        overrides = [
            f"run.name={self.folder.path.name}",
            "cluster.num_rollout_nodes=0",
            "server.num_servers=1",
            "batch.num_mini_batches=1",
            "old_log_probs=trainer",
            # Both engines compare whole distributions, and a server scores given tokens over the whole vocabulary.
            "rollout.top_p=1",
            "rollout.top_k=-1",
            "rollout.min_p=0",
            "optimizer.moments_dtype=fp32",
            "eval=null",
        ]
        if self.facts.spec.moe is not None:
            overrides.append("rollout.return_routed_experts=true")
            if config.moe.routing_replay == "R2":  # the old pass, which is scored, chooses its own experts
                overrides.append("moe.routing_replay=none")
        return [*self.overrides, *overrides]

    def load(self, settings: Settings) -> LoadedConfig:
        """Return the configuration with these keys in place of the run's."""
        return load_config(self.loaded.path, [*self.base(), *_as_overrides(settings)], "budget")

    def check(self, settings: Settings, side: str) -> str | None:
        """Return why a start with these keys is refused; None if it is not."""
        # A folder of weights that does not exist yet will hold a model of the same shape.
        keys = {key: value for key, value in settings.items() if not key.startswith("@") and key != "model.path"}
        try:
            plan_run(self.load({**ONE_RANK, **keys} if side == "server" else keys), self.facts.device)
        except GspoMegaError as error:
            return str(error).splitlines()[0]
        return None

    def refuse_impossible(self) -> None:
        """Note the causes whose neutral setting the plan refuses. Raises PlanError for the run's own settings."""
        plan_run(self.load({}), self.facts.device)
        for cause in CAUSES:
            settings = cause.neutral(self.facts)
            if isinstance(settings, Nothing):
                continue
            # Also make the causes neutral that are neutral whenever this one is.
            for other in reversed(CAUSES):
                theirs = other.neutral(self.facts)
                with_it = other.name in cause.after if cause.side == "server" else cause.name in other.after
                if with_it and not isinstance(theirs, Nothing):
                    settings = {**theirs, **settings}
            if (why := self.check(settings, cause.side)) is not None:
                self.refused[cause.name] = why
        for alternative in ALTERNATIVES:
            settings = alternative.settings(self.facts)
            if not isinstance(settings, Nothing) and (why := self.check(settings, "trainer")) is not None:
                self.refused[alternative.name] = why

    def evaluate(self, both_orders: bool) -> tuple[int, WalkPlan]:
        """Evaluate every point of the walks. Returns (0, the plan), or (the exit code, the plan) after a stop."""
        self.refuse_impossible()
        plan = make_plan(self.facts, both_orders, self.refused)
        starts = len({self.start_of(point) for point in plan.points})
        self.say(
            f"budget   {len(plan.points)} evaluations of the same tokens on {starts} starts of servers or ranks; run"
            f" folder {self.folder.path}"
        )
        while missing := [point for point in plan.points if point not in self.done]:
            first = self.start_of(missing[0])
            together = [point for point in missing if self.start_of(point) == first]
            failure, code = self.start(together)
            if code:
                return code, plan
            if failure is not None:
                cause = plan.origin(together)
                if cause is None or cause in self.refused:
                    raise failure
                self.refused[cause] = f"its start failed: {str(failure).strip().splitlines()[0]}"
                self.say(f"  {cause} cannot be changed here: {self.refused[cause]}")
                plan = make_plan(self.facts, both_orders, self.refused)
        return 0, plan

    def start_of(self, point: Point) -> tuple[Any, ...]:
        """Return what the points of one start have in common: the server's keys, or the ranks and what they load."""
        if point.side == "server":
            return ("server", json.dumps(point.keys, sort_keys=True))
        config = self.load(point.keys).config
        # On a CPU a process decides when it starts whether it uses Transformer Engine.
        library = self.facts.device == "cpu" and has_transformer_engine_layers(
            config.precision, config.engine, has_gpu=False
        )
        return ("trainer", config.cluster.ranks_per_node, library)

    def weights(self, settings: Settings) -> Settings:
        """Return a server's settings with the folder that it starts from; make the folder unless it is model.path."""
        config = self.loaded.config
        folders = ServedFolders(config)
        own = folders.start()
        if own is not None and "model.path" not in settings:
            settings = {**settings, "model.path": str(own)}
        path = settings.get("model.path")
        if path is not None and path != config.model.path:
            folders.make(Path(path))
        return settings

    def start(self, points: list[Point]) -> tuple[RankError | None, int]:
        """Evaluate the points of one start. Returns (failure of its processes or None, exit code of a stop or 0)."""
        started = time.monotonic()
        on_server = points[0].side == "server"
        if on_server:
            settings, trainer = {**ONE_RANK, **self.weights(points[0].keys)}, []
        else:
            # A point lists what differs from the run; on these ranks it must also undo what other points set.
            touched = sorted({key for point in points for key in point.keys})
            own = {key: value_of(self.loaded.config, key) for key in touched}
            trainer = [[_to_json(point), [*_as_overrides({**own, **point.keys})]] for point in points]
            settings = points[0].keys
        work = {
            "tokens": None if self.tokens is None else str(self.tokens),
            "server": [_to_json(point) for point in points] if on_server else [],
            "trainer": trainer,
        }
        before = self.folder.latest_attempt()
        failure = None
        try:
            code = launch(
                self.load(settings),
                "budget",
                lambda line: None,
                worker_command=self.worker_command,
                work=work,
                with_servers=on_server,
            )
        except RankError as error:
            code, failure = 0, error
        attempt = self.folder.latest_attempt()
        assert attempt is not None and (before is None or attempt.number > before.number)  # the launch made it
        if failure is None and code == 0:
            self.done |= {point: attempt.path / f"{point.name}.npy" for point in points}
            self.tokens = self.tokens or attempt.path
            self.say(f"  {_describe(points, self.start_of(points[0])):<60} {time.monotonic() - started:5.1f} s")
        return failure, code

    def findings(self, plan: WalkPlan) -> Findings:
        """Return the findings of the evaluated points."""
        assert self.tokens is not None  # the first start sampled them
        fixed = FixedTokens.load(self.tokens)
        scored = {point: np.load(self.done[point]) for point in plan.points}
        return find(self.facts, plan, fixed, scored, np.load(self.done[plan.trained].with_suffix(".entropies.npy")))

    def origin(self) -> dict[str, Any]:
        """Return what a reader needs to reproduce the numbers: date, configuration and software, as of now."""
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "config": str(self.loaded.path),
            "overrides": list(self.overrides),
            "device": self.facts.device,
            "commit": commit() or "not known: these sources are in no git repository",
            "versions": versions(),
        }


def budget(
    loaded: LoadedConfig,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    both_orders: bool = True,
    json_file: Path | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Measure, and show the table and the verdict. Returns 0; 1 if something is found that is not an effect of
    precision; 128 + the signal after a stop. `json_file`: the numbers are also written there. `worker_command`: as for
    `launch`.

    Raises ConfigError or PlanError before anything starts, RankError if the run's own server or ranks fail.
    """
    began = time.monotonic()
    conduct = Conduct(loaded, overrides, say, worker_command)
    made = conduct.origin()
    code, plan = conduct.evaluate(both_orders)
    if code:
        return code
    ServedFolders(loaded.config).remove()
    findings = conduct.findings(plan)
    advice = advise(conduct.facts, findings)
    seconds = time.monotonic() - began
    say("\n" + render(findings, advice))
    say(f"\nmeasured in {seconds:.0f} s")
    if json_file is not None:
        atomic_write_json(json_file, as_json(findings, advice, {**made, "seconds": round(seconds, 1)}))
        say(f"numbers  {json_file}")
    return 1 if findings.faults else 0


def _describe(points: list[Point], start: tuple[Any, ...]) -> str:
    count = f"{len(points)} evaluation{'s' if len(points) > 1 else ''}"
    if points[0].side == "server":
        keys = {key: Path(value).name if key == "model.path" else value for key, value in points[0].keys.items()}
        what = ", ".join(f"{key}={value}" for key, value in keys.items()) or "as in the run"
        return f"server {what}: {count}"
    library = " with Transformer Engine" if start[2] else ""
    return f"trainer on {start[1]} rank{'s' if start[1] > 1 else ''}{library}: {count}"


def _as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as `key=value` overrides. JSON values are valid YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if not key.startswith("@")]


def _to_json(point: Point) -> list[Any]:
    return [point.side, [list(pair) for pair in point.settings]]
