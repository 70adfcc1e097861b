"""The parts of one server over several nodes: what its head asks of them, and what they report.

A server over N nodes is N processes of SGLang. Part 0, on the first node, is its head. The head's `gspo-mega serve`
owns the server: it registers and probes it and counts its restarts. The other parts' commands start and end what the
head's registration says. Both sides talk through files of the attempt, as all servers do.

`ServerParts` is the head's side. `PartSupervisor` keeps one part in step with the head: start, report, end. It decides
nothing: the head's registration says which start of the server should run, and every end is reported to the head, which
restarts the server as a whole. Neither torch nor sglang is imported here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from gspo_mega.base.network import with_port
from gspo_mega.base.run_folder import Attempt, atomic_write_json, read_json
from gspo_mega.config.schema import Server
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.server.process import RunningServer, free_port, log_tail, remove_abandoned
from gspo_mega.rollout.server.spec import ServerSpec

# After this time without a change a part or a head counts as gone. Shared folders show a change late, some by half a
# minute.
SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class StartOrder:
    """What all parts start with in this generation, which is the head's own spec."""

    generation: int
    spec: ServerSpec

    def write(self, attempt: Attempt, index: int) -> None:
        """Raises OSError."""
        attempt.server_parts_dir.mkdir(parents=True, exist_ok=True)
        atomic_write_json(attempt.server_parts_dir / f"server-{index}.json", asdict(self))

    @classmethod
    def read(cls, attempt: Attempt, index: int) -> StartOrder | None:
        """Return None if there is none yet, or if it cannot be read now."""
        found = _read(attempt, f"server-{index}.json")
        try:
            return None if found is None else cls(int(found["generation"]), ServerSpec(**found["spec"]))
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class PartReport:
    """One part's own state. `beat` counts its writes. `error` says how its SGLang ended in this generation, or why it
    did not start.
    """

    part: int
    generation: int
    state: Literal["waiting", "running", "ended"]
    host: str
    beat: int
    error: str | None = None

    def write(self, attempt: Attempt, index: int) -> None:
        """Raises OSError."""
        attempt.server_parts_dir.mkdir(parents=True, exist_ok=True)
        atomic_write_json(attempt.server_parts_dir / f"server-{index}.part-{self.part}.json", asdict(self))

    @classmethod
    def read(cls, attempt: Attempt, index: int, part: int) -> PartReport | None:
        """Return None if there is none yet, or if it cannot be read now."""
        found = _read(attempt, f"server-{index}.part-{part}.json")
        try:
            return None if found is None else cls(**found)
        except TypeError:
            return None


def _read(attempt: Attempt, name: str) -> dict | None:
    try:
        found = read_json(attempt.server_parts_dir / name)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class UnchangedFor:
    """Measures for how long a value has not changed, by this machine's own clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value: object = None
        self._since = clock()

    def seconds(self, value: object) -> float:
        """Return for how many seconds the value has been `value`."""
        if value != self._value:
            self._value, self._since = value, self._clock()
        return self._clock() - self._since


class ServerParts:
    """The other parts of one server, as its head sees them. With one node there are none, and nothing is written."""

    def __init__(
        self, attempt: Attempt, index: int, num_nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._attempt, self._index = attempt, index
        self._silences = {part: UnchangedFor(clock) for part in range(1, num_nodes)}

    def rendezvous(self, host: str, port: int) -> str | None:
        """Return where the parts of a new start find each other: a free port of `host`, above the server's own `port`.
        None if there are no other parts.
        """
        return with_port(host, free_port(host, beyond=port)) if self._silences else None

    def order(self, generation: int, spec: ServerSpec) -> None:
        """Let the parts start, as soon as the registration shows this generation. Raises OSError."""
        if self._silences:
            StartOrder(generation, spec).write(self._attempt, self._index)

    def death(self, generation: int) -> str | None:
        """Say how a part of this start ended; None while all run or have yet to start."""
        for part, silence in self._silences.items():
            report = PartReport.read(self._attempt, self._index, part)
            silent = silence.seconds(None if report is None else report.beat)
            if report is None or report.generation != generation:
                continue  # it has not started yet; the deadline of the start bounds that
            if report.state == "ended":
                return f"its part {part} on {report.host}: {report.error}"
            if silent > SILENCE_SECONDS:
                return f"its part {part} on {report.host} is silent for {silent:.0f} s"
        return None

    def missing(self, generation: int) -> str:
        """Return what to add to the message of a start that was too slow: the parts that did not begin."""
        absent = []
        for part in self._silences:
            report = PartReport.read(self._attempt, self._index, part)
            if report is None or report.generation != generation:
                absent.append(str(part))
        return f"; no `gspo-mega serve` has started its part {', '.join(absent)}" if absent else ""


logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_BEAT_SECONDS = 2.0
# How long a part waits longer than `server.drain_seconds`: the head ends first, and this part with it.
_AFTER_DRAIN_SECONDS = 3.0
_LOG_LINES = 10


class PartSupervisor:
    """Runs part `part` (1 and above) of server `index` of `attempt` on this machine, whose address is `server.host`."""

    def __init__(
        self,
        server: Server,
        attempt: Attempt,
        index: int,
        part: int,
        entry: Sequence[str] = (sys.executable, "-m", "gspo_mega.rollout.server.entry"),
    ) -> None:
        self._server, self._attempt, self._index, self._entry = server, attempt, index, list(entry)
        self._log = attempt.server_part_log(index, part)
        self._running: RunningServer | None = None
        self._report = PartReport(part, 0, "waiting", server.host, 0)
        self._reported_at = 0.0
        self._head = UnchangedFor()
        self._num_signals = 0
        self._parent = os.getppid()

    def run(self) -> int:
        """Block until the head has stopped or failed, or until this command is asked to stop, then return 0. Call it
        from the main thread, which gets the signals.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._note_signal)
        self._attempt.logs_dir.mkdir(parents=True, exist_ok=True)
        remove_abandoned()
        before = self._registration()
        is_known, stop_at = False, None
        try:
            while os.getppid() == self._parent:
                head = self._registration()
                # A registration from before this command began belongs to another head.
                is_known = is_known or (head is not None and head != before)
                if head is not None and is_known and head.state in ("stopped", "failed"):
                    self._end("the server has ended")
                    return 0
                if self._num_signals and stop_at is None:
                    # All parts of a step get a signal. The head drains the server first, and needs all parts for that.
                    stop_at = time.monotonic() + self._server.drain_seconds + _AFTER_DRAIN_SECONDS
                if self._num_signals > 1 or (stop_at is not None and time.monotonic() > stop_at):
                    self._end("it was asked to stop")
                    return 0
                self._follow(head if is_known else None)
                self._beat()
                time.sleep(_POLL_SECONDS)
            return 0
        finally:
            self._end("its `gspo-mega serve` has ended")

    def _note_signal(self, *_: object) -> None:
        self._num_signals += 1

    def _follow(self, head: Registration | None) -> None:
        """Run the start that the head is in, and no other."""
        wanted = self._wanted(head)
        if self._running is not None and wanted != self._report.generation:
            self._end("the head is in another start" if wanted is not None else "the head does not run")
        if self._running is not None and (how := self._running.how_it_ended) is not None:
            logger.warning("part %d of server-%d: %s", self._report.part, self._index, how)
            self._end(f"{how}\n{log_tail(self._log, _LOG_LINES)}")
        elif self._running is None and wanted is not None and wanted != self._report.generation:
            self._start(wanted)

    def _wanted(self, head: Registration | None) -> int | None:
        """Return the generation that should run; None if the head runs none, or is silent."""
        silent = self._head.seconds(None if head is None else (head.generation, head.heartbeat))
        if head is None or head.state not in ("starting", "ready", "draining") or silent > SILENCE_SECONDS:
            return None
        if head.is_preparing:  # it has not started yet, and its number is that of an earlier start
            return None
        return head.generation

    def _start(self, generation: int) -> None:
        order = StartOrder.read(self._attempt, self._index)
        if order is None or order.generation != generation:
            return  # a shared folder may show files in another order than they were written
        host = self._server.host
        own = replace(order.spec, host=host, port=free_port(host), node=self._report.part)
        self._running = RunningServer.start(
            self._entry, self._log, lambda scratch: replace(own, store=str(scratch / "store"))
        )
        self._tell(state="running", generation=generation, error=None)
        logger.info("part %d of server-%d: started, generation %d", self._report.part, self._index, generation)

    def _end(self, why: str) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None
            self._tell(state="ended", error=why)

    def _beat(self) -> None:
        if time.monotonic() - self._reported_at > _BEAT_SECONDS:
            if self._running is not None:
                self._running.note_shared_memory()
            self._tell()

    def _tell(self, **changes) -> None:
        self._reported_at = time.monotonic()
        self._report = replace(self._report, beat=self._report.beat + 1, **changes)
        with contextlib.suppress(OSError):  # the next beat is tried as usual
            self._report.write(self._attempt, self._index)

    def _registration(self) -> Registration | None:
        try:
            found = read_json(self._attempt.server_file(f"server-{self._index}"))
            return Registration.from_json(found) if found is not None else None
        except (OSError, TypeError, ValueError):
            return None
