"""Decide whether a failed run restarts by itself, on one machine and under Slurm.

The decision is recorded in `attempts/NNNN/restart.json`. The caller starts the next attempt:

    restarts = Restarts.begin(folder, max_restarts)     # a command on one machine: a new budget
    restarts = Restarts.carry_on(folder, max_restarts)  # a requeued job: the budget of earlier attempts
    ...                                                 # the attempt fails, and nobody asked for a stop
    decision = restarts.decide_and_record(attempt, error)   # before the attempt's state says `failed`
    if decision.again: ...                              # a new attempt; else raise `error`

Whoever reads an attempt's state as `failed` finds the decision there too. A restart is a new attempt. It continues from
the last checkpoint, or from the start without one, and takes earlier rollouts from the journal.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import (
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
from gspo_mega.base.run_folder import Attempt, DamagedFileError, RunFolder, atomic_write_json, read_json
from gspo_mega.base.untrusted import NoRegularFileError, open_regular, parse_json, read_text
from gspo_mega.config.schema import Train
from gspo_mega.launcher.attempt_state import one_line

# Older restarts do not count, because a run of weeks may fail now and then.
WINDOW_SECONDS = 24 * 3600.0
# Failures that would repeat until a person changes something. Several of them share exit code 2.
_LASTING = (
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
_LASTING_CODES = {error.exit_code for error in _LASTING}
_CHECKPOINT_NAME = re.compile(r"step_(\d{8})")
_TAIL_BYTES = 65_536
_LONG_TAIL_BYTES = 2**22  # hundreds of steps, for a metric that few lines have


@dataclass(frozen=True)
class Furthest:
    """How far a run has ever come. `saved`: step of its last checkpoint; `trained`: its last step with metrics;
    `sampled`: number of complete steps in its journal. 0: none.
    """

    saved: int = 0
    trained: int = 0
    sampled: int = 0

    def is_beyond(self, other: Furthest) -> bool:
        """Whether this run came further than `other` in any respect."""
        return self.saved > other.saved or self.trained > other.trained or self.sampled > other.sampled

    def joined(self, other: Furthest) -> Furthest:
        """The larger of each value. (They may fall: a start from an older checkpoint removes lines of metrics.)"""
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
    """The restart budget of one run: `max_restarts` within `WINDOW_SECONDS`, and no restart after an attempt that came
    no further than the one before it.
    """

    def __init__(
        self, max_restarts: int, furthest: Furthest, restarted_at: Sequence[float] = (), has_copies: bool = False
    ) -> None:
        """`furthest`: how far the run had come when the current attempt began. `has_copies`: ranks keep copies of their
        state in memory.
        """
        self._max_restarts, self._furthest, self._restarted_at = max_restarts, furthest, list(restarted_at)
        self._has_copies = has_copies

    @staticmethod
    def allowed(command: str, train: Train | None) -> int:
        """The `max_restarts` of a command; 0 except for `train`, the only command that restarts by itself."""
        return train.max_restarts if command == "train" and train is not None else 0

    @classmethod
    def begin(cls, folder: RunFolder, max_restarts: int, has_copies: bool = False) -> Restarts:
        """The budget of a run that a person started. Call it before the attempt begins."""
        return cls(max_restarts, furthest(folder), has_copies=has_copies)

    @classmethod
    def carry_on(cls, folder: RunFolder, max_restarts: int, has_copies: bool = False) -> Restarts:
        """The budget of a run that restarts in another process. Call it before the attempt begins."""
        record = last_restart(folder)
        if record is None or not record.again:
            return cls.begin(folder, max_restarts, has_copies)
        return cls(max_restarts, record.furthest, record.restarted_at, has_copies)

    @property
    def count(self) -> int:
        """The number of restarts that count, including the last decision."""
        return len(self._restarted_at)

    def decide_and_record(self, attempt: Attempt, error: GspoMegaError) -> Decision:
        """Decide on the failure of `attempt` and record the decision in its folder. If that is not possible, as on a
        full or lost disk, there is no restart.
        """
        try:
            come = furthest(attempt.run_folder)
        except (OSError, DamagedFileError) as refused:
            why = f"no automatic restart: the run's files cannot be read: {refused}"
            return Decision(False, why, one_line(error))
        decision = self.decide(error, come, time.time())
        record = RestartRecord(decision.again, decision.why, decision.cause, self._restarted_at, self._furthest)
        try:
            atomic_write_json(attempt.restart_file, asdict(record))
        except OSError as refused:
            why = f"no automatic restart: {attempt.restart_file} cannot be written: {refused.strerror}"
            return Decision(False, why, decision.cause)
        return decision

    def decide(self, error: GspoMegaError, furthest: Furthest, now: float) -> Decision:
        """Decide on a failure that nobody asked for, and count the restart. `furthest`: how far the run is now; `now`:
        unix seconds.
        """
        cause = one_line(error)
        if self._max_restarts == 0:
            return Decision(False, "no automatic restart: train.max_restarts is 0", cause)
        if error.exit_code in _LASTING_CODES:
            return Decision(
                False, "no automatic restart: the failure would repeat until somebody changes something", cause
            )
        if not furthest.is_beyond(self._furthest):
            return Decision(False, "no automatic restart: the run came no further than the start before", cause)
        self._restarted_at = [moment for moment in self._restarted_at if now - moment < WINDOW_SECONDS]
        if len(self._restarted_at) >= self._max_restarts:
            return Decision(
                False,
                f"no automatic restart: {self.count} restarts in {WINDOW_SECONDS / 3600:.0f} h (train.max_restarts)",
                cause,
            )
        self._furthest = furthest.joined(self._furthest)
        self._restarted_at.append(now)
        begin = (
            f"from the checkpoint of step {furthest.saved}"
            if furthest.saved
            else "from its start, without a checkpoint"
        )
        if self._has_copies:
            begin = f"from the ranks' copies in memory, or else {begin}"
        return Decision(
            True, f"started again {begin} (restart {self.count} of {self._max_restarts}, train.max_restarts)", cause
        )


def furthest(folder: RunFolder) -> Furthest:
    """How far the run in `folder` has come, from its files."""
    last = last_line(folder.metrics_file)
    try:
        named = _CHECKPOINT_NAME.fullmatch(read_text(folder.latest_checkpoint_file, errors="replace").strip())
    except FileNotFoundError:
        named = None
    # File names count steps from 0. The newest file may hold part of its step; those before it are complete.
    files = folder.journal_dir.iterdir() if folder.journal_dir.is_dir() else ()
    steps = [int(match[1]) for file in files if (match := _CHECKPOINT_NAME.fullmatch(file.name))]
    return Furthest(int(named[1]) if named else 0, int(last["step"]) if last else 0, max(steps, default=0))


def starts_again(attempt: Attempt) -> bool:
    """Whether the supervisor of a failed attempt decided to begin another."""
    record = read_json(attempt.restart_file)
    return isinstance(record, dict) and record.get("again") is True


def last_restart(folder: RunFolder) -> RestartRecord | None:
    """The decision on the newest failed attempt that has a record; None without one. Raises DamagedFileError."""
    for attempt in reversed(folder.attempts()):
        value = read_json(attempt.restart_file)
        if value is not None:
            try:
                return RestartRecord(**{**value, "furthest": Furthest(**value["furthest"])})
            except (TypeError, KeyError) as error:
                raise DamagedFileError(f"{attempt.restart_file}: not the record of a restart: {error!r}") from None
    return None


def last_line(path: Path, key: str | None = None) -> dict[str, Any] | None:
    """The last complete line of a file of metrics, read from its end; None without one. Raises DamagedFileError.

    `key`: of the lines near the end that have this metric, the last.
    """
    wanted = b"" if key is None else f'"{key}":'.encode()
    lines: list[bytes] = []
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            for tail in (_TAIL_BYTES, _LONG_TAIL_BYTES):
                start = max(0, size - tail)
                file.seek(start)
                pieces = file.read(tail).splitlines(keepends=True)[1 if start > 0 else 0 :]  # the first may be half one
                lines = [line for line in pieces if line.endswith(b"\n") and wanted in line]
                if lines or start == 0:
                    break
    except FileNotFoundError:
        return None
    except NoRegularFileError as error:
        raise DamagedFileError(f"{path}: {error.strerror}") from None
    if not lines and start > 0 and key is None:
        raise DamagedFileError(f"{path}: its last {_LONG_TAIL_BYTES // 2**20} MiB have no line of metrics")
    try:
        found = parse_json(lines[-1]) if lines else None
        if found is not None and (not isinstance(found, dict) or type(found.get("step")) is not int):
            raise ValueError('it is no object with a number "step"')
    except ValueError as error:
        raise DamagedFileError(f"{path}: its last line is not a line of metrics: {error}") from None
    return found
