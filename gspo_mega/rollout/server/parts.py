"""The parts of one server over several nodes: what its head asks of them, and what they report.

A server over N nodes is N processes of SGLang; part 0, on the first node, is its head. The head's `gspo-mega serve`
owns the server: it registers and probes it and counts its restarts. The other parts' commands start and end what the
head's registration says (`supervise_part.py`). Both sides talk through files of the attempt, as all servers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from gspo_mega.base.addresses import with_port
from gspo_mega.base.run_folder import Attempt, atomic_write_json, read_json
from gspo_mega.rollout.server.listening_port import free_port
from gspo_mega.rollout.server.server_spec import ServerSpec

# Shared folders show a change late, some by half a minute.
SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Order:
    """What all parts start with in this generation: the head's own spec."""

    generation: int
    spec: ServerSpec

    def write(self, attempt: Attempt, index: int) -> None:
        """Raises OSError."""
        attempt.server_parts_dir.mkdir(parents=True, exist_ok=True)
        atomic_write_json(attempt.server_parts_dir / f"server-{index}.json", asdict(self))

    @classmethod
    def read(cls, attempt: Attempt, index: int) -> Order | None:
        """None where there is none yet, or it cannot be read now."""
        found = _read(attempt, f"server-{index}.json")
        try:
            return None if found is None else cls(int(found["generation"]), ServerSpec(**found["spec"]))
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class PartReport:
    """One part's own state. `beat` counts its writes. `error`: how its SGLang ended in this generation, or why it did
    not start.
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
        """None where there is none yet, or it cannot be read now."""
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


class Silence:
    """How long a value has not changed, by this machine's own clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value: object = None
        self._since = clock()

    def seconds(self, value: object) -> float:
        if value != self._value:
            self._value, self._since = value, self._clock()
        return self._clock() - self._since


class Parts:
    """The other parts of one server, as its head sees them. With one node there are none, and nothing is written."""

    def __init__(
        self, attempt: Attempt, index: int, num_nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._attempt, self._index = attempt, index
        self._silences = {part: Silence(clock) for part in range(1, num_nodes)}

    def rendezvous(self, host: str, port: int) -> str | None:
        """Where the parts of a new start find each other: a free port of `host`, beyond the server's own `port`."""
        return with_port(host, free_port(host, beyond=port)) if self._silences else None

    def order(self, generation: int, spec: ServerSpec) -> None:
        """Have the parts start, as soon as the registration shows this generation. Raises OSError."""
        if self._silences:
            Order(generation, spec).write(self._attempt, self._index)

    def death(self, generation: int) -> str | None:
        """How a part of this start ended; None while all run, or are still to start."""
        for part, silence in self._silences.items():
            report = PartReport.read(self._attempt, self._index, part)
            silent = silence.seconds(None if report is None else report.beat)
            if report is None or report.generation != generation:
                continue  # it has not started; the start's deadline bounds that
            if report.state == "ended":
                return f"its part {part} on {report.host}: {report.error}"
            if silent > SILENCE_SECONDS:
                return f"its part {part} on {report.host} is silent for {silent:.0f} s"
        return None

    def missing(self, generation: int) -> str:
        """What to add to the message of a start that was too slow: the parts that did not begin."""
        absent = []
        for part in self._silences:
            report = PartReport.read(self._attempt, self._index, part)
            if report is None or report.generation != generation:
                absent.append(str(part))
        return f"; no `gspo-mega serve` has started its part {', '.join(absent)}" if absent else ""
