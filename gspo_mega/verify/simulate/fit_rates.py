"""Two rates from a run that was measured: how many times the cost model's seconds its servers and its trainer take.

Owns reading the measured steps and the two factors. What is measured and known is no longer estimated: the publish.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.guarded_files import MOST_BYTES, parse_json, read_text
from gspo_mega.verify.simulate.job import Job
from gspo_mega.verify.simulate.run_events import RunEvents

# The first steps of a run include what happens once.
_SKIPPED = 2
_SIMULATED = 30


@dataclass(frozen=True)
class Measured:
    """Mean seconds of a step of a run without sampling ahead."""

    rollout: float
    training: float
    publish: float


@dataclass(frozen=True)
class Fit:
    """Factors on the cost model's seconds."""

    decode: float
    train: float


def read_measured(path: Path) -> Measured:
    """Of a run's folder, or its metrics.jsonl. Raises ConfigError."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--fit {path}: no such file; valid: the folder of a run, or its metrics.jsonl")
    rows = []
    for number, line in enumerate(read_text(file, MOST_BYTES).splitlines(), 1):
        try:
            row = parse_json(line)
        except ValueError:
            raise ConfigError(f"{file}:{number}: not a line of metrics.jsonl") from None
        if isinstance(row, dict) and "time/step_seconds" in row and "time/rollout_seconds" in row:
            rows.append(row)
    rows = rows[_SKIPPED:] or rows
    if not rows:
        raise ConfigError(f"--fit {file}: no step with time/step_seconds and time/rollout_seconds")
    if max(row.get("rollout/staleness_max", 0) for row in rows) > 0:
        raise ConfigError(
            f"--fit {file}: the run sampled ahead, so that its rollouts' seconds are not measured; valid: a run with"
            " rollout.max_staleness: 0"
        )

    def mean(name: str) -> float:
        return sum(float(row.get(name, 0.0)) for row in rows) / len(rows)

    rollout, publish = mean("time/rollout_seconds"), mean("time/publish_seconds")
    # Saves and evaluations are no part of a step's training.
    rest = mean("time/checkpoint_seconds") + mean("time/eval_seconds")
    return Measured(rollout, max(1e-9, mean("time/step_seconds") - rollout - publish - rest), publish)


def fit(job: Job, measured: Measured, seed: int = 1) -> tuple[Job, Fit]:
    """The job with its servers and its trainer as fast as measured."""
    alone = replace(job, max_staleness=0, publish=0.0, save_every=0, shared=False)
    record = RunEvents(alone, seed).run(num_steps=_SIMULATED)
    found = Fit(
        decode=measured.rollout * _SIMULATED / record.waiting, train=measured.training * _SIMULATED / record.training
    )
    return replace(job.scaled(found.decode, found.train), publish=measured.publish), found
