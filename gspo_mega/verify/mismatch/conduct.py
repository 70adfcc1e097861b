"""The whole of `gspo-mega budget`: plans the walks, starts servers and ranks for their points, shows what came out.

Owns which points share a start, and that a cause which cannot be changed here is named and left out. A start serves
one variant of the server (rank 0 asks it), or one number of ranks with several variants of the trainer. Imports no
torch.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega.base.errors import ConfigError, GspoMegaError, PlanError, RankError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.layer_library import has_transformer_engine_layers
from gspo_mega.launcher.gpus_and_ports import device_here
from gspo_mega.launcher.launch_local import WORKER_COMMAND, launch
from gspo_mega.launcher.software_versions import commit, versions
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import plan_run
from gspo_mega.verify.mismatch.advice import advise
from gspo_mega.verify.mismatch.budget_findings import Findings, find
from gspo_mega.verify.mismatch.causes import ALTERNATIVES, CAUSES, ONE_RANK, Facts, Nothing, Settings, value_of
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens
from gspo_mega.verify.mismatch.report_budget import as_json, render
from gspo_mega.verify.mismatch.served_folders import make_folder, remove_folders, start_folder
from gspo_mega.verify.mismatch.walks import Plan, Point, make_plan


@dataclass
class Conduct:
    """One budget. `done`: the file of log-probs of each point that was evaluated."""

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
                " budget` runs on one machine. Override cluster.num_nodes=1 and cluster.num_rollout_nodes=0, and give"
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
        """Overrides of every start: nothing is trained, one server serves, experts come with the responses."""
        config = self.loaded.config
        overrides = [
            f"run.name={self.folder.path.name}",
            "cluster.num_rollout_nodes=0",
            "server.num_servers=1",
            "batch.num_mini_batches=1",
            "old_log_probs=trainer",
            "optimizer.moments_dtype=fp32",
            "eval=null",
        ]
        if self.facts.spec.moe is not None:
            overrides.append("rollout.return_routed_experts=true")
            if config.moe.routing_replay == "R2":  # the old pass, which is what is scored, chooses its own experts
                overrides.append("moe.routing_replay=none")
        return [*self.overrides, *overrides]

    def load(self, settings: Settings) -> LoadedConfig:
        """The configuration with these keys in place of the run's."""
        return load_config(self.loaded.path, [*self.base(), *_as_overrides(settings)], "budget")

    def check(self, settings: Settings, side: str) -> str | None:
        """Why a start with these keys is refused; None where it is not."""
        # A folder of weights that is not there yet is that of a model of the same shape.
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
            # With those causes neutral that are, wherever this one is.
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

    def evaluate(self, both_orders: bool) -> tuple[int, Plan]:
        """Every point of the walks; (0, the plan) when all are there, (the exit code, the plan) after a stop."""
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
        """What the points of one start have in common: the server's keys, or the ranks and what they load."""
        if point.side == "server":
            return ("server", json.dumps(point.keys, sort_keys=True))
        config = self.load(point.keys).config
        # On a CPU a process finds Transformer Engine when it starts, or never.
        library = self.facts.device == "cpu" and has_transformer_engine_layers(config, has_gpu=False)
        return ("trainer", config.cluster.ranks_per_node, library)

    def weights(self, settings: Settings) -> Settings:
        """The settings of a server with the folder it starts from, which is made where it is one of the budget's."""
        config = self.loaded.config
        own = start_folder(config)
        if own is not None and "model.path" not in settings:
            settings = {**settings, "model.path": str(own)}
        path = settings.get("model.path")
        if path is not None and path != config.model.path:
            make_folder(config, Path(path))
        return settings

    def start(self, points: list[Point]) -> tuple[RankError | None, int]:
        """Evaluate points of one start; (the failure of its processes, the exit code of a stop)."""
        started = time.monotonic()
        on_server = points[0].side == "server"
        if on_server:
            settings, trainer = {**ONE_RANK, **self.weights(points[0].keys)}, []
        else:
            # A point says what differs from the run; on these ranks it must also undo what another one sets.
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

    def findings(self, plan: Plan) -> Findings:
        """What the evaluated points say."""
        assert self.tokens is not None  # the first start sampled them
        fixed = FixedTokens.load(self.tokens)
        scored = {point: np.load(self.done[point]) for point in plan.points}
        return find(self.facts, plan, fixed, scored, np.load(self.done[plan.trained].with_suffix(".entropies.npy")))

    def origin(self) -> dict[str, Any]:
        """What a reader of the numbers needs to make them again: when, of what, by which software; as it is now."""
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
    """Measure, and show table and verdict. Returns 0; 1 where something is found that is no precision effect; 128 + the
    signal after a stop. `json_file`: where the numbers go as well. `worker_command`: as of `launch`.

    Raises ConfigError or PlanError before anything starts, RankError where the run's own server or ranks fail.
    """
    began = time.monotonic()
    conduct = Conduct(loaded, overrides, say, worker_command)
    made = conduct.origin()
    code, plan = conduct.evaluate(both_orders)
    if code:
        return code
    remove_folders(loaded.config)
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
    """`key=value` with a JSON value, which is a YAML value, too."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if not key.startswith("@")]


def _to_json(point: Point) -> list[Any]:
    return [point.side, [list(pair) for pair in point.settings]]
