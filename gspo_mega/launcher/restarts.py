"""Whether a run that failed is started again by itself, and the record of that; on one machine and under Slurm alike.

Owns the decision and `attempts/NNNN/restart.json`. Starting the next attempt is the caller's:

    restarts = Restarts.begin(folder, config.train.max_restarts)     # one command on one machine: a budget of its own
    restarts = Restarts.carry_on(folder, config.train.max_restarts)  # a job that was queued again: the budget of the
    attempts before ...the attempt fails with `error`, and nobody asked for a stop... decision = restarts.decide(error,
    furthest(folder), time.time()) restarts.record(attempt, decision)                               # whatever was
    decided; `status` shows it if decision.again: a new attempt of the same command, else raise `error`

A restart is a new attempt: it continues from the last checkpoint, or from the start where there is none, and the
journal spares it what was sampled before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gspo_mega.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FolderError,
    GspoMegaError,
    JournalError,
    ModelError,
    NumericsError,
    PlanError,
    RewardError,
)
from gspo_mega.run_folder import Attempt, RunFolder, atomic_write_json, read_json

# Restarts that are older count no more: a run of weeks may fail now and then.
WINDOW_SECONDS = 24 * 3600.0
# What comes back whoever starts the run, until a person changes something. 2 is the code of several.
_PERSONS = (
    ConfigError,
    PlanError,
    ModelError,
    DataError,
    RewardError,
    NumericsError,
    CheckpointError,
    JournalError,
    FolderError,
)
_LASTING_CODES = {error.exit_code for error in _PERSONS}
_CHECKPOINT_NAME = re.compile(r"step_(\d{8})")
_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class Furthest:
    """How far a run ever came. `saved`: step of its last checkpoint; `trained`: its last step with metrics; `sampled`:
    complete steps in its journal. 0: none.
    """

    saved: int = 0
    trained: int = 0
    sampled: int = 0

    def is_beyond(self, other: Furthest) -> bool:
        """Something is there that was not there before."""
        return self.saved > other.saved or self.trained > other.trained or self.sampled > other.sampled

    def joined(self, other: Furthest) -> Furthest:
        """The further of each: a start from an older checkpoint takes lines of metrics back."""
        return Furthest(
            max(self.saved, other.saved), max(self.trained, other.trained), max(self.sampled, other.sampled)
        )


@dataclass(frozen=True)
class Decision:
    """`again`: start a new attempt. `why`: one sentence for the user, either way. `cause`: the failure in one line."""

    again: bool
    why: str
    cause: str


@dataclass(frozen=True)
class RestartRecord:
    """What `restart.json` of a failed attempt holds. `restarted_at`: unix seconds of all automatic restarts of this run
    so far that still count; `furthest`: how far it had ever come by then.
    """

    again: bool
    why: str
    cause: str
    restarted_at: list[float]
    furthest: Furthest


class Restarts:
    """The budget of one run. `max_restarts` within `WINDOW_SECONDS`; none where nothing is there that the start before
    had not.
    """

    def __init__(self, max_restarts: int, furthest: Furthest, restarted_at: Sequence[float] = ()) -> None:
        """`furthest`: how far the run had come when the attempt that runs now was begun."""
        self._max_restarts, self._furthest, self._restarted_at = max_restarts, furthest, list(restarted_at)

    @classmethod
    def begin(cls, folder: RunFolder, max_restarts: int) -> Restarts:
        """A person started the run. To be called before its attempt begins."""
        return cls(max_restarts, furthest(folder))

    @classmethod
    def carry_on(cls, folder: RunFolder, max_restarts: int) -> Restarts:
        """The run was started again by itself, in another process. To be called before its attempt begins."""
        record = last_restart(folder)
        if record is None or not record.again:
            return cls.begin(folder, max_restarts)
        return cls(max_restarts, record.furthest, record.restarted_at)

    @property
    def count(self) -> int:
        """Restarts that count, the one decided last included."""
        return len(self._restarted_at)

    def decide(self, error: GspoMegaError, furthest: Furthest, now: float) -> Decision:
        """Of a failure that nobody asked for. `furthest`: where the run is now; `now`: unix seconds. Counts the restart
        it decides on.
        """
        cause = _one_line(error)
        if self._max_restarts == 0:
            return Decision(False, "not started again by itself: train.max_restarts is 0", cause)
        if error.exit_code in _LASTING_CODES:
            return Decision(
                False, "not started again by itself: the same would come of it until somebody changes something", cause
            )
        if not furthest.is_beyond(self._furthest):
            return Decision(False, "not started again by itself: it came no further than the start before", cause)
        self._restarted_at = [moment for moment in self._restarted_at if now - moment < WINDOW_SECONDS]
        if len(self._restarted_at) >= self._max_restarts:
            return Decision(
                False,
                f"not started again by itself: {self.count} restarts in {WINDOW_SECONDS / 3600:.0f} h"
                " (train.max_restarts)",
                cause,
            )
        self._furthest = furthest.joined(self._furthest)
        self._restarted_at.append(now)
        begin = (
            f"from the checkpoint of step {furthest.saved}"
            if furthest.saved
            else "from its start, for there is no checkpoint"
        )
        return Decision(
            True, f"started again {begin} (restart {self.count} of {self._max_restarts}, train.max_restarts)", cause
        )

    def record(self, attempt: Attempt, decision: Decision) -> bool:
        """Note a decision in the attempt that failed. Returns whether another attempt begins: what cannot be recorded,
        on a full disk, is not done either.
        """
        record = RestartRecord(decision.again, decision.why, decision.cause, self._restarted_at, self._furthest)
        try:
            atomic_write_json(attempt.restart_file, asdict(record))
        except OSError:
            return False
        return decision.again


def furthest(folder: RunFolder) -> Furthest:
    """How far the run in `folder` has come, from its files."""
    last = last_line(folder.metrics_file)
    try:
        named = _CHECKPOINT_NAME.fullmatch(folder.latest_checkpoint_file.read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        named = None
    # Steps count from 0 here: the newest file may be half of its step, those before it are whole.
    files = folder.journal_dir.iterdir() if folder.journal_dir.is_dir() else ()
    steps = [int(match[1]) for file in files if (match := _CHECKPOINT_NAME.fullmatch(file.name))]
    return Furthest(int(named[1]) if named else 0, int(last["step"]) if last else 0, max(steps, default=0))


def last_restart(folder: RunFolder) -> RestartRecord | None:
    """What was decided of the newest attempt that failed and has a record."""
    for attempt in reversed(folder.attempts()):
        value = read_json(attempt.restart_file)
        if value is not None:
            return RestartRecord(**{**value, "furthest": Furthest(**value["furthest"])})
    return None


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a file of JSON lines, read from its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return None
    return json.loads(lines[-1]) if lines else None


def _one_line(error: GspoMegaError) -> str:
    """The line of a failure that says most: the first, and of a traceback the last of it too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0].rstrip(":") if lines else type(error).__name__
    if "Traceback" not in str(error):
        return first
    return f"{first}: {[line for line in lines if not line.startswith('(')][-1]}"
