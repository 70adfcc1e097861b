"""Notice ranks that are stuck, and name them and their place in the code; on one machine and under Slurm.

Owns the verdict. The time limits come from `plan/watchdog_bounds.py`, the signs of life from
`train/beat_writer.py`. Reads only the attempt's files, and /proc for ranks on this machine; ends nothing.

    watchdog = Watchdog(attempt, num_ranks, patience(config, figures))
    while ...: if (error := watchdog.look()) is not None: the run failed with `error`
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base import beats
from gspo_mega.base.errors import StuckError
from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.plan.watchdog_bounds import Patience

_STATES = {
    "T": "stopped (T)",
    "t": "stopped by a debugger (t)",
    "D": "waits for a device or a file server (D)",
    "Z": "ended (Z)",
    "R": "runs (R)",
    "S": "sleeps (S)",
}
_STOPPED = ("T", "t")
# A gap between two checks counts as at most this many intervals: a supervisor that was stopped together with its ranks
# saw nothing.
_GAP_INTERVALS = 4
# A rank whose main thread is in one of these files waits for another rank.
_WAITING = (
    "torch/distributed/",
    "gspo_mega/train/exchange.py",
    "gspo_mega/train/fan_out.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
)
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_NEAR_FRAMES = 4
_MOST_SHOWN = 3


@dataclass
class _Rank:
    """The observations of a rank. `still`: seconds of watching since its last progress; `silent`: since its last sign
    of life.
    """

    phase: str = beats.START
    count: int = -1
    tick: int = -1
    pid: int | None = None
    host: str | None = None
    still: float = 0.0
    silent: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.phase == beats.DONE


class Watchdog:
    """The watchdog of all ranks of one attempt. Every working rank sooner or later waits for the others. So the ranks
    are stuck when none makes progress for the longest time that any of their phases allows, or when one shows no sign
    of life.
    """

    def __init__(
        self,
        attempt: Attempt,
        num_ranks: int,
        patience: Patience,
        pids: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pids`: process numbers, by rank, of the ranks on this machine."""
        self._attempt, self._patience, self._clock = attempt, patience, clock
        self._pids = pids or {}
        self._interval = patience.interval(num_ranks)
        self._ranks = {rank: _Rank() for rank in range(num_ranks)}
        self._last = clock()

    def look(self) -> StuckError | None:
        """The error of the run once ranks are stuck, else None. Call it at any rate; most calls return at once."""
        now = self._clock()
        if now - self._last < self._interval:
            return None
        passed, self._last = min(now - self._last, _GAP_INTERVALS * self._interval), now
        for number, rank in self._ranks.items():
            self._see(number, rank, passed)
        at_work = {number: rank for number, rank in self._ranks.items() if not rank.is_done}
        silent = [number for number, rank in at_work.items() if rank.silent > self._patience.silence]
        if silent:
            return StuckError(self._silence_text(silent))
        if at_work and self._are_still(at_work):
            return StuckError(self._still_text(at_work))
        return None

    def _see(self, number: int, rank: _Rank, passed: float) -> None:
        record = self._read(number)
        rank.still += passed
        rank.silent += passed
        state = _state(self._pids[number]) if number in self._pids else None
        if number in self._pids and state in (None, "Z"):
            rank.phase = beats.DONE  # its exit code says the rest
        elif record is None:
            # Python is starting, perhaps from a slow disk; the time limit of the start phase covers that.
            if state not in _STOPPED:
                rank.silent = 0.0
        elif record["tick"] != rank.tick:
            rank.silent = 0.0
            if (record["phase"], record["count"]) != (rank.phase, rank.count):
                rank.still = 0.0
            rank.phase, rank.count, rank.tick = record["phase"], record["count"], record["tick"]
            rank.pid, rank.host = record["pid"], record["host"]

    def _read(self, number: int) -> dict | None:
        try:
            return read_json(self._attempt.beat_file(number))
        except (OSError, ValueError):  # the next call reads it
            return None

    def _are_still(self, at_work: Mapping[int, _Rank]) -> bool:
        busy = [rank for rank in at_work.values() if rank.phase != beats.WAIT]
        bound = max((self._patience.bound(rank.phase) for rank in busy), default=self._patience.longest)
        return min(rank.still for rank in at_work.values()) > bound

    # --- texts ---------------------------------------------------------------------------------------------

    def _silence_text(self, silent: list[int]) -> str:
        lines = [
            f"{self._name(number)} is stuck: no sign of life for {self._ranks[number].silent:.0f} s"
            f" (watchdog.silence_seconds); {self._state_text(number)}, in phase {self._ranks[number].phase}"
            for number in silent[:_MOST_SHOWN]
        ]
        # A stopped rank may have left old stacks. A rank with a blocked interpreter writes them after its last sign of
        # life.
        recent = [
            number
            for number in silent[:_MOST_SHOWN]
            if _written(self._attempt.stacks_file(number)) > _written(self._attempt.beat_file(number))
        ]
        return "\n".join(lines + _and_more(silent) + self._stacks(recent))

    def _still_text(self, at_work: Mapping[int, _Rank]) -> str:
        stacks = {number: _main_stack(self._attempt.stacks_file(number)) for number in at_work}
        working = [number for number, stack in stacks.items() if stack and not _is_waiting(stack)]
        unseen = [number for number, stack in stacks.items() if not stack]
        # If all ranks wait, they wait for the one with the least progress.
        least = min(rank.count for rank in at_work.values())
        blamed = working or unseen or [number for number, rank in at_work.items() if rank.count == least]
        still = min(rank.still for rank in at_work.values())
        lines = []
        for number in blamed[:_MOST_SHOWN]:
            rank, stack = at_work[number], stacks[number]
            place = f" at {stack[0]}" if stack else f", {self._state_text(number)}"
            key = self._patience.key(rank.phase) if rank.phase != beats.WAIT else "watchdog"
            lines.append(
                f"{self._name(number)} is stuck: nothing got done for {still:.0f} s in phase {rank.phase} ({key}); it"
                f" is{place}"
            )
        others = [number for number in at_work if number not in blamed]
        if others:
            lines.append(
                f"{'rank' if len(others) == 1 else 'ranks'}"
                f" {', '.join(map(str, others[:16]))}{' ...' * (len(others) > 16)} wait{'s' * (len(others) == 1)}"
                " for it"
            )
        return "\n".join(lines + _and_more(blamed) + self._stacks(blamed[:_MOST_SHOWN]))

    def _name(self, number: int) -> str:
        rank = self._ranks[number]
        pid = self._pids.get(number, rank.pid)
        return f"rank {number}" + (
            f" (process {pid}{f' on {rank.host}' if rank.host else ''})" if pid is not None else ""
        )

    def _state_text(self, number: int) -> str:
        state = _state(self._pids[number]) if number in self._pids else None
        return (
            "its process is not on this machine, or gone"
            if state is None
            else f"its process {_STATES.get(state, state)}"
        )

    def _stacks(self, numbers: list[int]) -> list[str]:
        lines = []
        for number in numbers:
            stack = _main_stack(self._attempt.stacks_file(number))
            if stack:
                lines += [
                    f"\nstack of rank {number}, most recent call first (all threads:"
                    f" {self._attempt.stacks_file(number)}):"
                ]
                lines += [f"  {frame}" for frame in stack]
        return lines


def _and_more(numbers: list[int]) -> list[str]:
    return [f"and {len(numbers) - _MOST_SHOWN} more ranks"] if len(numbers) > _MOST_SHOWN else []


def _written(file: Path) -> float:
    """When a file was last written, by its file system's clock; 0 for a missing file."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _state(pid: int) -> str | None:
    """The state letter of a process on this machine, or None if it is gone."""
    try:
        return (
            Path("/proc", str(pid), "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
        )
    except OSError:
        return None


def _main_stack(file: Path) -> list[str]:
    """ "file:line in function" of the main thread in the newest dump of `faulthandler`, most recent call first."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The thread that a process began with is the last one of a dump.
    thread = text.rpartition("Timeout (")[2].rpartition("hread 0x")[2]
    return [f"{path}:{line} in {function}" for path, line, function in _FRAME.findall(thread)]


def _is_waiting(stack: list[str]) -> bool:
    return any(place in frame for frame in stack[:_NEAR_FRAMES] for place in _WAITING)
