"""Deadlines against the plan's own estimates: what would end a run that is in order.

Owns the relations that need an estimate, and how long before its time limit a job is to be told. Those between keys are
`config/deadlines.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gspo_mega.config.deadlines import COLLECTIVE_SECONDS
from gspo_mega.config.schema import Config
from gspo_mega.errors import PlanError
from gspo_mega.plan.timing import StepTime

# Kept of the time that Slurm leaves after its signal, to queue the job again whatever the ranks do.
RESERVE_SECONDS = 20.0
LEAST_SIGNAL_SECONDS = 300
# By how much the estimates may fall short.
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
                f"{total:g} s, and a rollout takes {time.rollout:.0f} s by estimate: the run would stop at the first"
                f" response that takes longer; above {time.rollout:.0f}, or leave it out"
            ),
        )
    if config.publish.deadline_seconds <= time.publish and _publishes(config):
        yield (
            "publish.deadline_seconds",
            (
                f"{config.publish.deadline_seconds:g} s, and a publish takes {time.publish:.0f} s by estimate; above"
                f" {time.publish:.0f}"
            ),
        )
    bound = config.watchdog.checkpoint_seconds
    if bound is not None and bound <= save_seconds:
        yield (
            "watchdog.checkpoint_seconds",
            (
                f"{bound:g} s, and a save takes {save_seconds:.0f} s by estimate; above {save_seconds:.0f}, or leave"
                " it out"
            ),
        )
    if save_seconds >= COLLECTIVE_SECONDS:
        yield (
            "checkpoint",
            (
                f"a save takes {save_seconds:.0f} s by estimate, and ranks wait {COLLECTIVE_SECONDS:g} s at most for"
                " each other; a smaller checkpoint: optimizer.moments_dtype"
            ),
        )


def _publishes(config: Config) -> bool:
    return config.train is None or config.train.from_rollouts is None


def stop_seconds(time: StepTime | None, save_seconds: float) -> float:
    """From a stop request to the end of the save, by estimate: training on a batch is not broken off. Seconds."""
    return save_seconds + (0.0 if time is None else time.train.total + time.publish)


def grace_seconds(signal_seconds: float) -> float:
    """What ranks have of the time between Slurm's signal and the time limit, to end their step and save."""
    return max(signal_seconds - RESERVE_SECONDS, signal_seconds / 2)


def signal_seconds(stop: float) -> int:
    """How long before its time limit a job is to be told, whole minutes, where it takes `stop` seconds by estimate to
    stop.
    """
    return max(LEAST_SIGNAL_SECONDS, 60 * math.ceil((MARGIN * stop + RESERVE_SECONDS) / 60))
