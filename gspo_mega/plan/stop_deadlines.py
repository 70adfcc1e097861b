"""Compare deadlines with the plan's estimates: a deadline that is too short would end a healthy run.

Owns the relations that need an estimate, and how long before its time limit Slurm signals a job. Relations between keys
are `config/deadlines.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gspo_mega.base.errors import PlanError
from gspo_mega.config.deadlines import COLLECTIVE_SECONDS
from gspo_mega.config.schema import Config
from gspo_mega.plan.timing import StepTime

# Reserved, of the time between Slurm's signal and the limit, to queue the job again whatever the ranks do.
RESERVE_SECONDS = 20.0
LEAST_SIGNAL_SECONDS = 300
# The factor by which the estimates may be too low.
MARGIN = 1.25


def check_deadlines(config: Config, time: StepTime | None, save_seconds: float, where: Callable[[str], str]) -> None:
    """Raises PlanError with a line for each deadline that is shorter than what the plan expects. `time`: None where no
    GPU is named.
    """
    wrong = [f"{where(key)}: {key}: {text}" for key, text in _broken(config, time, save_seconds)]
    if wrong:
        raise PlanError("\n".join(wrong))


def _broken(config: Config, time: StepTime | None, save_seconds: float) -> Iterator[tuple[str, str]]:
    if time is None:
        return
    total = config.rollout.request_deadline_seconds
    if total is not None and total <= time.rollout:
        yield (
            "rollout.request_deadline_seconds",
            (
                f"{total:g} s is shorter than a rollout ({time.rollout:.0f} s by estimate): the run would stop at the"
                f" first response that takes longer. Set it above {time.rollout:.0f}, or leave it out"
            ),
        )
    if config.publish.deadline_seconds <= time.publish and _publishes(config):
        yield (
            "publish.deadline_seconds",
            (
                f"{config.publish.deadline_seconds:g} s is shorter than a publish ({time.publish:.0f} s by estimate)."
                f" Set it above {time.publish:.0f}"
            ),
        )
    bound = config.watchdog.checkpoint_seconds
    if bound is not None and bound <= save_seconds:
        yield (
            "watchdog.checkpoint_seconds",
            (
                f"{bound:g} s is shorter than a save ({save_seconds:.0f} s by estimate). Set it above"
                f" {save_seconds:.0f}, or leave it out"
            ),
        )
    if save_seconds >= COLLECTIVE_SECONDS:
        yield (
            "checkpoint",
            (
                f"a save takes {save_seconds:.0f} s by estimate, and ranks wait at most {COLLECTIVE_SECONDS:g} s for"
                " each other. optimizer.moments_dtype makes checkpoints smaller"
            ),
        )


def _publishes(config: Config) -> bool:
    return config.train is None or config.train.from_rollouts is None


def stop_seconds(time: StepTime | None, save_seconds: float) -> float:
    """Seconds from a stop request to the end of the save, by estimate: the batch in training is finished first."""
    return save_seconds + (0.0 if time is None else time.train.total + time.publish)


def grace_seconds(signal_seconds: float) -> float:
    """Seconds that ranks have, of the time between Slurm's signal and the time limit, to end their step and save."""
    return max(signal_seconds - RESERVE_SECONDS, signal_seconds / 2)


def signal_seconds(stop: float) -> int:
    """Seconds before its time limit at which Slurm signals a job, whole minutes. `stop`: seconds that the job takes to
    stop, by estimate.
    """
    return max(LEAST_SIGNAL_SECONDS, 60 * math.ceil((MARGIN * stop + RESERVE_SECONDS) / 60))
