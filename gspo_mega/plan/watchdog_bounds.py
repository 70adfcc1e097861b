"""How long a phase of a run may go without progress before its ranks count as stuck.

The bounds are those of `watchdog` in the configuration. Those that are absent follow from the phase's own deadlines
and, if there is one, the plan's estimate. A bound limits the time between two signs of progress (a micro-batch, a
trajectory), not the whole phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_mega.config.derived import is_one_turn
from gspo_mega.config.schema import Config
from gspo_mega.config.validate_rewards import MOST_ATTEMPTS, MOST_DEADLINES, total_service_seconds
from gspo_mega.plan.estimate import Estimate

# The kind of each phase; a phase that is not named here is "other".
_KIND = {
    "start": "start",
    "rollout": "rollout",
    "eval": "eval",
    "publish": "publish",
    "checkpoint": "checkpoint",
    "train": "train",
    "critic": "train",
    "old_log_probs": "train",
    "reference_log_probs": "train",
    "teacher": "train",
}
# Bounds of phases without deadlines, which cover weights read from a slow disk, a first step's compilers, a save, and
# packing a batch.
_START_SECONDS, _TRAIN_SECONDS, _CHECKPOINT_SECONDS, _OTHER_SECONDS = 3600.0, 900.0, 1800.0, 900.0
# Added to a phase's own deadlines, which must expire first.
_MARGIN_SECONDS = 300.0
# The factor by which an estimate may be too low.
_ESTIMATE_FACTOR = 10.0


@dataclass(frozen=True)
class Patience:
    """`bounds`: seconds by kind of phase; `silence`: seconds without a sign of life from a rank's process."""

    bounds: dict[str, float]
    silence: float

    def bound(self, phase: str) -> float:
        """Return the bound of a phase in seconds. Any name is valid."""
        return self.bounds[_KIND.get(phase, "other")]

    @property
    def longest(self) -> float:
        """Seconds: the bound if every rank waits for another and no rank's phase is known."""
        return max(self.bounds.values())

    def key(self, phase: str) -> str:
        """Return the configuration's key of a phase's bound."""
        return f"watchdog.{_KIND.get(phase, 'other')}_seconds"

    def interval(self, num_ranks: int) -> float:
        """Return the seconds between two checks, and between two beats of a rank: at most about 50 beats per second
        over all ranks.
        """
        return max(0.05, min(5.0, self.silence / 10, min(self.bounds.values()) / 10), num_ranks / 50)


def patience(config: Config, figures: Estimate | None = None) -> Patience | None:
    """Return the bounds of a run; None if the watchdog is off. `figures`: the plan's, if it has any."""
    watchdog, rollout = config.watchdog, config.rollout
    if not watchdog.enabled:
        return None
    time = figures.time if figures is not None else None
    # New tokens are progress. A sample that gets none is tried again on another server, and finally the run stops by
    # itself.
    stalled = rollout.max_attempts * rollout.progress_deadline_seconds
    sampling = stalled + rollout.no_server_deadline_seconds
    sampling += MOST_ATTEMPTS * MOST_DEADLINES * config.reward.deadline_seconds
    sampling += total_service_seconds(config.reward)
    if not is_one_turn(config.rollout):
        sampling += config.episodes.turn_deadline_seconds  # the agent's own time, in which nothing is sampled
    derived: dict[str, float] = {
        "start": _START_SECONDS,
        "rollout": sampling + _MARGIN_SECONDS,
        "eval": sampling + _MARGIN_SECONDS,
        "train": max(_TRAIN_SECONDS, time.train.total if time is not None else 0.0),
        "publish": max(
            2 * config.publish.deadline_seconds + rollout.no_server_deadline_seconds + _MARGIN_SECONDS,
            _ESTIMATE_FACTOR * time.publish if time is not None else 0.0,
        ),
        "checkpoint": max(_CHECKPOINT_SECONDS, _ESTIMATE_FACTOR * figures.save_seconds if figures is not None else 0.0),
        "other": _OTHER_SECONDS,
    }
    chosen: dict[str, Any] = {kind: getattr(watchdog, f"{kind}_seconds") for kind in derived}
    return Patience({kind: chosen[kind] or seconds for kind, seconds in derived.items()}, watchdog.silence_seconds)
