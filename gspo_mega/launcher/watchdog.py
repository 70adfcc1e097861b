"""Watch the ranks and servers of one attempt, on one machine and under Slurm: stuck ranks, their stacks, failed starts.

`RankWatchdog` notices ranks that are stuck, and names them and their place in the code. The time limits come from
`plan/watchdog_bounds.py`, the signs of life from `train/signals.py`. It reads only the attempt's files, and /proc for
ranks on this machine; it ends nothing.

    watchdog = RankWatchdog(attempt, num_ranks, patience(config, figures))
    while ...: if (error := watchdog.check()) is not None: the run failed with `error`

`StackRequest` asks all ranks of an attempt for their Python stacks: on SIGUSR2 (`StacksOnSignal`), when the watchdog
gives up, and for `gspo-mega status --stacks`. The ranks answer in a thread of `train/signals.py`, so a busy main thread
does not matter. A rank that does not answer is stopped, gone, or in a call that holds the interpreter; SIGUSR2 to that
process itself writes its main thread's stack to its log even then.

`ServerFailures` shows each failed start of a server to the user once, because nobody reads its log while
`gspo-mega serve` starts it again.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base import progress
from gspo_mega.base.errors import RolloutError, StuckError
from gspo_mega.base.run_folder import Attempt, atomic_write_text, read_json
from gspo_mega.base.untrusted import read_text
from gspo_mega.plan.watchdog_bounds import Patience
from gspo_mega.rollout.registration import Registration, read_registrations
from gspo_mega.train.signals import poll_seconds

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_STATES = {
    "T": "stopped (T)",
    "t": "stopped by a debugger (t)",
    "D": "waits for a device or a file server (D)",
    "Z": "ended (Z)",
    "R": "runs (R)",
    "S": "sleeps (S)",
}
_STOPPED = ("T", "t")
# A gap between two checks counts as at most this many intervals, because a supervisor that was stopped together with
# its ranks saw nothing in the meantime.
_GAP_INTERVALS = 4
# A rank whose main thread is in one of these files waits for another rank.
_WAITING = (
    "torch/distributed/",
    "gspo_mega/train/scatter.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
)
_NEAR_FRAMES = 4
_MOST_SHOWN = 3


@dataclass
class _Rank:
    """What was observed of a rank. `still`: seconds of watching since its last progress; `silent`: seconds since its
    last sign of life.
    """

    phase: str = progress.START
    count: int = -1
    tick: int = -1
    pid: int | None = None
    host: str | None = None
    still: float = 0.0
    silent: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.phase == progress.DONE


class RankWatchdog:
    """The watchdog of all ranks of one attempt.

    Every working rank sooner or later waits for the others. So the ranks are stuck if none makes progress for the
    longest time that any of their phases allows, or if one shows no sign of life.
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

    def check(self) -> StuckError | None:
        """The error of the run once ranks are stuck, else None. Call it often; most calls return at once."""
        now = self._clock()
        if now - self._last < self._interval:
            return None
        passed, self._last = min(now - self._last, _GAP_INTERVALS * self._interval), now
        for number, rank in self._ranks.items():
            self._observe(number, rank, passed)
        at_work = {number: rank for number, rank in self._ranks.items() if not rank.is_done}
        silent = [number for number, rank in at_work.items() if rank.silent > self._patience.silence]
        if silent:
            return StuckError(self._silence_text(silent))
        if at_work and self._are_still(at_work):
            return StuckError(self._still_text(at_work))
        return None

    def _observe(self, number: int, rank: _Rank, passed: float) -> None:
        record = self._read(number)
        rank.still += passed
        rank.silent += passed
        state = _state(self._pids[number]) if number in self._pids else None
        if number in self._pids and state in (None, "Z"):
            rank.phase = progress.DONE  # its exit code says how it ended
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
        busy = [rank for rank in at_work.values() if rank.phase != progress.WAIT]
        bound = max((self._patience.bound(rank.phase) for rank in busy), default=self._patience.longest)
        return min(rank.still for rank in at_work.values()) > bound

    # --- texts ---------------------------------------------------------------------------------------------

    def _silence_text(self, silent: list[int]) -> str:
        lines = [
            f"{self._name(number)} is stuck: no sign of life for {self._ranks[number].silent:.0f} s"
            f" (watchdog.silence_seconds); {self._state_text(number)}, in phase {self._ranks[number].phase}"
            for number in silent[:_MOST_SHOWN]
        ]
        # Only stacks that were written after the last sign of life are of the present: a stopped rank may have left old
        # ones, while a rank with a blocked interpreter writes them after that.
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
            key = self._patience.key(rank.phase) if rank.phase != progress.WAIT else "watchdog"
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


# Time to read the stacks and write a file to a shared folder, beyond the time until the ranks see the request.
_MARGIN_SECONDS = 3.0
_MOST_NAMED = 16


class StackRequest:
    """One request for stacks to the `num_ranks` ranks of an attempt. Raises OSError if it cannot be written."""

    def __init__(self, attempt: Attempt, num_ranks: int) -> None:
        number = attempt.last_stacks_request() + 1
        self.folder = attempt.stacks_dir(number)
        self._files = [self.folder / f"rank_{rank}.txt" for rank in range(num_ranks)]
        self._deadline = time.monotonic() + 2 * poll_seconds(num_ranks) + _MARGIN_SECONDS
        atomic_write_text(attempt.stacks_request_file, f"{number}\n")

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank, file in enumerate(self._files) if not file.exists()]

    @property
    def is_over(self) -> bool:
        """Whether all ranks have answered, or have had the time to."""
        return time.monotonic() > self._deadline or not self.missing

    def wait(self) -> None:
        while not self.is_over:
            time.sleep(_POLL_SECONDS)

    def text(self) -> str:
        """One line: how many ranks answered, where their stacks are, and which ranks did not answer."""
        silent, total = self.missing, len(self._files)
        text = f"stacks of {'all ' * (not silent)}{total - len(silent)}{f' of {total}' if silent else ''} ranks:"
        text += f" {self.folder}"
        if silent:
            named = f"{', '.join(map(str, silent[:_MOST_NAMED]))}{' ...' * (len(silent) > _MOST_NAMED)}"
            text += f"; no answer from rank{'s' * (len(silent) > 1)} {named}"
        return text

    def places(self) -> list[str]:
        """A line per rank that answered: its phase, and where its main thread is."""
        return [f"{_title(file)}; at {_innermost(file)}" for file in self._files if file.exists()]


def _title(file: Path) -> str:
    """ "rank 3, phase train" """
    return ",".join(read_text(file).split(",", 2)[:2])


def _innermost(file: Path) -> str:
    """ "file:line in function" of the main thread, whose stack is the last."""
    found = _FRAME.search(read_text(file).rpartition("Thread 0x")[2])
    return "an unknown place" if found is None else f"{found[1]}:{found[2]} in {found[3]}"


class StacksOnSignal:
    """Requests the ranks' stacks when a supervisor receives SIGUSR2. `signals`: the list that `stack_signals` fills;
    `say` shows the user a line.
    """

    def __init__(self, attempt: Attempt, num_ranks: int, signals: list[int], say: Callable[[str], None]) -> None:
        self._attempt, self._num_ranks, self._signals, self._say = attempt, num_ranks, signals, say
        self._open: StackRequest | None = None

    def poll(self) -> None:
        """Begin a request after a signal, and show its outcome once it is over. Call it often; it returns at once."""
        if self._signals and self._open is None:
            self._signals.clear()
            self._open = self._request()
        if self._open is not None and self._open.is_over:
            self._say(f"SIGUSR2: {self._open.text()}")
            self._open = None

    def request_and_wait(self) -> str:
        """Request the stacks of ranks that are about to be ended, and wait a few seconds. Returns the line to show."""
        request = self._request()
        if request is None:
            return "their stacks could not be requested"
        request.wait()
        return request.text()

    def _request(self) -> StackRequest | None:
        try:
            return StackRequest(self._attempt, self._num_ranks)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._attempt.stacks_request_file, error.strerror)
            return None


_READING_SECONDS = 1.0


class ServerFailures:
    """Shows each failed start of a server once: its cause, its log, and how many starts are left. Servers that joined
    are shown like the launcher's own.
    """

    def __init__(self, folders: Iterable[tuple[Attempt, str]], say: Callable[[str], None]) -> None:
        """`folders`: each folder in which servers register, with a suffix for their names, empty for the policy's."""
        self._folders, self._say = list(folders), say
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        self._next_reading = 0.0

    def show_new(self) -> None:
        """Show what has failed since the last call. Call it often; it reads the files once per second."""
        if time.monotonic() < self._next_reading:
            return
        self._next_reading = time.monotonic() + _READING_SECONDS
        for attempt, of in self._folders:
            # A file that cannot be read now is read later, or those who need it say what is wrong with it.
            with contextlib.suppress(RolloutError, OSError):
                for server in read_registrations(attempt.servers_dir, on_error=lambda path, error: None):
                    self._show(server, attempt, of)

    def _show(self, server: Registration, attempt: Attempt, of: str) -> None:
        pid, seen = self._seen.get((of, server.server_id), (server.pid, 0))
        seen = seen if pid == server.pid else 0  # another `serve` process counts from 0
        self._seen[of, server.server_id] = server.pid, server.num_failures
        number = server.server_id.rpartition("-")[2]
        log = attempt.server_log(int(number)) if number.isdecimal() else attempt.logs_dir
        new = min(server.num_failures - seen, len(server.recent_failures))
        for before, cause in zip(range(new - 1, -1, -1), server.recent_failures[len(server.recent_failures) - new :]):
            where = "" if str(log) in cause else f" (log: {log})"
            attempts = f"attempt {max(1, server.failed_starts - before)} of {server.most_starts}"
            text = f"{server.server_id}{of} failed ({attempts}): {cause}; it is started again{where}"
            logger.warning("%s", text)
            self._say(f"warning  {text}")
