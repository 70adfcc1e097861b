"""What the plan says of a configuration, and what the engine does with it: in a living pool of ranks, restarted as
needed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing.connection
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
from rank_pool import JOBS_A_POOL, RankPool
from verdict_case import Case, plan_says

from gspo_mega.config.schema import Config, Parallel, Recompute
from gspo_mega.config.validate import resolve_defaults
from gspo_mega.verify.certify.program import make_random_folder

# From the first rank's error on, how long the others may take to fail too; then they wait for it, and for ever.
GRACE_SECONDS = 1.0
DIED = "the rank's process died"
# Of each tensor's whole gradient in fp32 against one rank's: in a layout that trains wrong one is off by a tenth or
# more.
GRADIENT_TOLERANCE = 1e-5


@dataclass
class Outcome:
    """What the engine did. `text`: of the first error, empty where it ran. `phase`: what it was at. `gradient`: as of
    `verdict_jobs.attempt`."""

    text: str = ""
    phase: str = ""
    gradient: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return not self.text


class Engine:
    """Tries configurations on pools of ranks."""

    def __init__(self, patience_seconds: float = 300.0) -> None:
        self._patience = patience_seconds
        self._pools: dict[int, RankPool] = {}

    def tries(self, config: Config, ranks: int, only_gradient: bool = False) -> Outcome:
        """Once more where a rank's process died: another process may have taken the port that its pool was to meet
        at.
        """
        outcome = self._tries(config, ranks, only_gradient)
        return self._tries(config, ranks, only_gradient) if DIED in outcome.text else outcome

    def _tries(self, config: Config, ranks: int, only_gradient: bool) -> Outcome:
        pool = self._pools.get(ranks)
        if pool is None or pool.num_jobs >= JOBS_A_POOL:
            self._end(ranks)
            pool = self._pools[ranks] = RankPool(ranks)
        pool.num_jobs += 2
        for pipe in pool._pipes:
            with suppress(BrokenPipeError):
                pipe.send(("verdict_jobs:attempt", dict(config=config.model_dump_json(), only_gradient=only_gradient)))
        answers = self._collect(pool)
        errors = [answer for answer in answers if answer is None or answer["error"]]
        if not errors:
            pool.run("verdict_jobs:tidy")
            return Outcome(gradient=answers[0]["gradient"])
        alike = None not in answers and len({(a["place"], a["phase"]) for a in answers}) == 1
        if alike and answers[0]["phase"] in (
            "groups",
            "build",
            "pack",
        ):  # before anything was exchanged that others may still wait for
            pool.run("verdict_jobs:tidy")
        else:
            self._end(ranks)
        told = next((a for a in answers if a is not None and a["error"]), None)
        return (
            Outcome(f"{told['error']} ({told['place']})", told["phase"])
            if told
            else Outcome("no rank came back", "train")
        )

    def _collect(self, pool: RankPool) -> list[dict | None]:
        """Each rank's answer, None for one that gave none in time."""
        answers: list[dict | None] = [None] * pool.size
        waiting, deadline = set(range(pool.size)), time.monotonic() + self._patience
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait([pool._pipes[rank] for rank in waiting], timeout=left):
                rank = pool._pipes.index(pipe)
                waiting.discard(rank)
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    kind, value = "error", DIED
                answers[rank] = value if kind == "ok" else dict(error=value, place="", phase="train", gradient={})
                if answers[rank]["error"]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _end(self, ranks: int) -> None:
        pool = self._pools.pop(ranks, None)
        if pool is not None:
            pool.kill()

    def close(self) -> None:
        for ranks in list(self._pools):
            self._end(ranks)


@dataclass
class Verdict:
    """`plan`: its refusal, None where there is none. `wrong`: how far the gradient is from one rank's, None where it is
    not.
    """

    case: Case
    plan: str | None
    engine: Outcome
    wrong: float | None
    deliberate: str | None

    @property
    def agree(self) -> bool:
        return (self.plan is None) == (self.engine.runs and self.wrong is None) or self.deliberate is not None

    @property
    def described(self) -> str:
        engine = (
            f"dies in {self.engine.phase}: {self.engine.text}"
            if not self.engine.runs
            else "runs"
            if self.wrong is None
            else f"trains wrong, by {self.wrong:.1%}"
        )
        return f"{self.case.described}\n    plan: {self.plan or 'ok'}\n    engine: {engine}"


# Refused although the engine runs it on CPU: (pattern of the refusal, why). Nothing else may be.
# The plan refuses what either of the two versions that are tried cannot do.
IS_019 = metadata.version("megatron-core") >= "0.19"
DELIBERATE: tuple[tuple[str, str], ...] = (
    (r": [a-z_.]+: .*, but the model \(\w+\) has no experts", "a setting without effect"),
    (r": moe\.expert_bias_update_rate: .* have no expert bias", "a setting without effect"),
    (r": moe\.routing_replay: R2 replays .* has not moved since", "a setting without effect"),
    (r": kl\.coefficient: .* contradicts `algorithm: gspo`", "another objective than its name says"),
    (
        r": batch\.num_mini_batches: .* (leave some empty|fewer than the \d+ data-parallel ranks)",
        "ranks or optimizer steps with nothing to do",
    ),
    (
        r": rollout\.max_new_tokens: .* is more than the model's \d+ positions",
        "positions that the model has not learnt, and servers refuse",
    ),
    *(
        [
            (r": recompute\.num_layers: \d+ does not divide", "what only Megatron-Core 0.16 cannot run"),
            (r": parallel\.expert: tensor .* trains wrong", "what only Megatron-Core 0.16 trains wrong"),
        ]
        if IS_019
        else []
    ),
)


def verdicts(cases: Iterator[Case], folder: Path, engine: Engine) -> Iterator[Verdict]:
    """Both verdicts of every case; `folder` takes models and configurations."""
    single: dict[str, dict[str, np.ndarray]] = {}
    for case in cases:
        model = _model_folder(case.model, folder)
        config = case.config(model, _model_folder(case.reference, folder) if case.reference else None)
        refusal = plan_says(config, folder)
        config = resolve_defaults(config)
        outcome, wrong = engine.tries(config, case.ranks), None
        if outcome.runs and case.ranks > 1:
            exact, alone = _comparable(config)
            there = outcome if exact == config else engine.tries(exact, case.ranks, only_gradient=True)
            key = alone.model_dump_json()
            if key not in single:
                single[key] = engine.tries(alone, 1, only_gradient=True).gradient
            wrong = _difference(there.gradient, single[key])
        lines = refusal.splitlines() if refusal else []
        reasons = [next((why for text, why in DELIBERATE if re.search(text, line)), None) for line in lines]
        deliberate = reasons[0] if reasons and None not in reasons and outcome.runs and wrong is None else None
        yield Verdict(case, refusal, outcome, wrong, deliberate)


def _comparable(config: Config) -> tuple[Config, Config]:
    """The configuration where its numbers are those of one rank, in fp32 and without router losses (which are a
    pack's), and the same on one rank.
    """
    quiet = {"load_balancing": "none", "load_balancing_coefficient": 0.0, "z_loss_coefficient": 0.0}
    exact = config.model_copy(update={"precision": "fp32", "moe": config.moe.model_copy(update=quiet)})
    alone = exact.model_copy(
        update={
            "parallel": Parallel(),
            "cluster": config.cluster.model_copy(update={"ranks_per_node": 1}),
            "recompute": Recompute(),
            "optimizer": config.optimizer.model_copy(update={"distributed": False, "overlap": False}),
            "batch": config.batch.model_copy(update={"micro_batch_tokens": 512, "log_prob_chunk_tokens": 64}),
        }
    )
    return exact, alone


def _difference(gradient: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float | None:
    """The largest relative L2 difference of a tensor's gradient, of the tensor's norm or of a hundredth of the largest
    one; None where all are within the tolerance.
    """
    if gradient.keys() != reference.keys():
        return float("inf")
    norms = {name: float(np.linalg.norm(value.astype(np.float64))) for name, value in reference.items()}
    least = max(norms.values()) / 100
    assert least > 0, "a gradient of zero: the comparison would prove nothing"
    worst = max(
        float(np.linalg.norm(gradient[name].astype(np.float64) - value)) / max(norms[name], least)
        for name, value in reference.items()
    )
    return worst if worst > GRADIENT_TOLERANCE else None


def _model_folder(model: dict, folder: Path) -> Path:
    name = hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:12]
    target = folder / "models" / name
    if not target.exists():
        shape = folder / f"{name}.json"
        shape.write_text(json.dumps(model))
        make_random_folder(shape, target, seed=1)
        shape.unlink()
    return target


def figures(found: list[Verdict]) -> str:
    """One line: how many of which kind."""
    refused = [v for v in found if v.plan is not None]
    deliberate = Counter(v.deliberate for v in refused if v.deliberate)
    wrong = sum(v.wrong is not None for v in found)
    return (
        f"{len(found)} configurations: {len(found) - len(refused)} planned and trained, {len(refused)} refused (of"
        f" these {sum(not v.engine.runs for v in refused)} died in the engine, {wrong} trained wrong,"
        f" {sum(deliberate.values())} deliberate: {dict(deliberate)}), {sum(not v.agree for v in found)} disagreements"
    )
