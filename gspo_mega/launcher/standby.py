"""Standby processes (`train.standby_processes`): prepared while a run trains, and made its ranks when it restarts.

A restart of all ranks is mostly imports. `Standbys` has one process per rank (under Slurm one step of all ranks) that
has done them (`gspo_mega/train/standby.py`):

    with Standbys(say) as standbys:
        ...                                         # for each attempt:
        ranks = standbys.start(family, attempt, specs)    # in standbys where that is possible
        standbys.watch(family, attempt, specs)            # often: prepares others once the attempt has made a step

A standby is used if it lives, is ready, has the environment that the rank would have, and answers within
`ANSWER_SECONDS`; the user is told why another is not. It ends with this process, however that ends: the kernel sends it
SIGKILL, and its input ends.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from gspo_mega.base.run_folder import Attempt, DamagedFileError, read_json
from gspo_mega.config import Config
from gspo_mega.launcher.children import Child, ChildSpec, ProcessFamily, StandbySpec
from gspo_mega.launcher.restarts import last_line

logger = logging.getLogger(__name__)
# A standby that is woken answers in milliseconds, and srun passes the line on at once. A shared folder may be slower.
ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.01
_LOOK_AGAIN_SECONDS = 1.0
_END_SECONDS = 2.0
# Differ from one attempt to the next, and nothing that a standby has imported reads them.
_OF_ONE_ATTEMPT = {"MASTER_ADDR", "MASTER_PORT"}


@dataclass
class _Standby:
    """The process `child`, which was prepared during `attempt` to become that of `stands_for` in a later one."""

    child: Child
    spec: StandbySpec
    stands_for: ChildSpec
    attempt: Attempt

    def ready_files(self) -> list[Path]:
        return [self.attempt.standby_ready_file(rank) for rank in self.spec.ranks]

    def wake(self, spec: ChildSpec, arguments: Sequence[str]) -> str | None:
        """Tell the process to become `spec`'s. Returns why that is not possible, in words; None if it is."""
        if self.child.exit_code is not None:
            return self._ended()
        if not all(path.exists() for path in self.ready_files()):
            return "its standby process was not ready yet"
        if _lasting(spec.environment) != _lasting(self.stands_for.environment):
            return "its environment has changed"
        order = {"arguments": list(arguments), "environment": dict(spec.environment)}
        try:
            self.child.hand_over(json.dumps(order).encode() + b"\n")
        except OSError as error:
            return f"its standby process cannot be reached: {error.strerror}"
        return None

    def answers(self, attempt: Attempt, deadline: float) -> list[dict[str, Any]] | str:
        """What each of its ranks says that it does in `attempt`; or, in words, why one says nothing by `deadline`
        (monotonic).
        """
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self.spec.ranks):
            for rank in set(self.spec.ranks) - found.keys():
                try:
                    record = read_json(attempt.standby_start_file(rank))
                except (OSError, DamagedFileError):
                    continue
                if record is not None:
                    found[rank] = record
            if self.child.exit_code is not None:
                return self._ended()
            if time.monotonic() > deadline:
                return f"its standby process did not answer within {ANSWER_SECONDS:g} s"
            time.sleep(_POLL_SECONDS)
        return [found[rank] for rank in self.spec.ranks]

    def become(self, spec: ChildSpec) -> None:
        """Name the process after what it now does. Under Slurm srun's own lines go on in the standby's log."""
        self.child.spec = spec if spec.kind == "rank" else replace(spec, log=self.child.spec.log)

    def end(self) -> None:
        """End the process. srun first sees the end of its input, of which the tasks end, then SIGTERM."""
        self.child.close_input()
        if self.stands_for.kind != "rank" and not self.child.wait(_END_SECONDS):
            self.child.send_signal(signal.SIGTERM)
            self.child.wait(_END_SECONDS)
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(_END_SECONDS)

    def _ended(self) -> str:
        return f"its standby process {self.child.end_described} (log: {self.child.spec.log})"


def has_standbys(config: Config, command: str) -> bool:
    """Whether the ranks of `command` get standbys: only `gspo-mega train` restarts by itself."""
    return command == "train" and config.train is not None and config.train.standby_processes


class Standbys:
    """The standbys of one command. A context manager, which ends them. `say` shows a line to the user."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._standing: list[_Standby] = []
        self._told_of: set[int] = set()  # processes whose end the user was told of
        self._began_at = 0.0  # the current attempt, unix seconds; 0: there was none
        self._has_prepared = self._is_ready = False
        self._next_look = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._standing:
            one.end()
        self._standing.clear()

    def start(self, family: ProcessFamily, attempt: Attempt, specs: Sequence[ChildSpec]) -> list[Child]:
        """Start the processes of `specs` in `family`, in standbys where that is possible. Standbys that are not used
        end. Call from the main thread. Raises OSError.
        """
        is_first, self._began_at = self._began_at == 0.0, time.time()
        standing = {one.stands_for.index: one for one in self._standing}
        refused: dict[int, str] = {}
        for spec in specs:
            if spec.standby is not None and not is_first:
                one = standing.get(spec.index)
                none = "no standby process was prepared yet"
                why = none if one is None else one.wake(spec, spec.standby.arguments)
                if why is not None:
                    refused[spec.index] = why
        deadline = time.monotonic() + ANSWER_SECONDS
        used: dict[int, _Standby] = {}
        for index in standing.keys() - refused.keys():
            answers = standing[index].answers(attempt, deadline)
            if isinstance(answers, str):
                refused[index] = answers
                continue
            used[index] = standing[index]
            if (why := next((one["why"] for one in answers if not one["used"]), None)) is not None:
                refused[index] = why
        for index in standing.keys() - used.keys():
            standing[index].end()
            self._standing.remove(standing[index])
        children = []
        for spec in specs:
            if (one := used.get(spec.index)) is None:
                children.append(family.start(spec))
                continue
            one.become(spec)
            family.take_in(one.child)
            self._standing.remove(one)
            children.append(one.child)
        self._has_prepared = self._is_ready = False
        self._tell_start(specs, refused, used.keys() - refused.keys())
        return children

    def _tell_start(self, specs: Sequence[ChildSpec], refused: Mapping[int, str], used: Collection[int]) -> None:
        ranks = {spec.index: [] if spec.standby is None else list(spec.standby.ranks) for spec in specs}
        if used:
            named = _named([rank for index in used for rank in ranks[index]])
            self._say(f"standby  {named} started in processes that had imported everything")
        for why in dict.fromkeys(refused.values()):
            named = _named([rank for index, given in refused.items() if given == why for rank in ranks[index]])
            self._say(f"notice   {named} started in new processes: {why}")

    def watch(self, family: ProcessFamily, attempt: Attempt, specs: Sequence[ChildSpec]) -> None:
        """Start standbys once the attempt has made a step, and tell the user when they are ready, and of each that
        ends. Looks once per second, so every poll may call it. Call from the main thread.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_AGAIN_SECONDS
        if not self._has_prepared:
            if any(spec.standby for spec in specs) and _has_gone_on(attempt, self._began_at):
                self._has_prepared = True
                self._prepare(family, attempt, specs)
            return
        for one in self._standing:
            if one.child.exit_code is not None and one.child.pid not in self._told_of:
                self._told_of.add(one.child.pid)
                text = f"{one.child.name} {one.child.end_described}; a restart does without it"
                logger.warning("%s", text)
                self._say(f"warning  {text} (log: {one.child.spec.log})")
        if (
            not self._is_ready
            and self._standing
            and all(path.exists() for one in self._standing for path in one.ready_files())
        ):
            self._is_ready = True
            self._tell_ready()

    def _prepare(self, family: ProcessFamily, attempt: Attempt, specs: Sequence[ChildSpec]) -> None:
        """Start standbys. They are no part of the attempt's `family`, because they outlive the attempt."""
        for spec in specs:
            if (standby := spec.standby) is None:
                continue
            try:
                child = Child(ChildSpec("standby", spec.index, standby.command, standby.log, spec.environment))
            except OSError as error:  # a full disk or too little memory must not end a run that trains
                self._say(f"warning  {_named(standby.ranks)}: no standby process can be started: {error}")
                return
            family.leave_out(child)
            logger.info("%s started as process %d: %s", child.name, child.pid, " ".join(standby.command))
            self._standing.append(_Standby(child, standby, spec, attempt))

    def _tell_ready(self) -> None:
        try:
            records: list[dict[str, Any]] = [read_json(p) or {} for one in self._standing for p in one.ready_files()]
            size = sum(record["resident_bytes"] for record in records) / 2**30
            seconds = max(record["seconds"] for record in records)
        except (OSError, DamagedFileError, LookupError, TypeError) as error:
            logger.warning("the records of the standby processes cannot be read: %r", error)
            return
        self._say(
            f"standby  {len(records)} processes are ready to become the ranks of a restart: imports took"
            f" {seconds:.0f} s in the background, {size:.1f} GiB of host memory"
        )


def _has_gone_on(attempt: Attempt, began_at: float) -> bool:
    """Whether the attempt, which began at `began_at` (unix seconds), has made a step. Rank 0 runs on this machine."""
    try:
        line = last_line(attempt.run_folder.metrics_file)
    except (OSError, DamagedFileError):
        return False
    return line is not None and isinstance(line.get("time"), float) and line["time"] > began_at


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _OF_ONE_ATTEMPT}


def _named(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0 to 3", "ranks 0, 2"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered == [*range(ordered[0], ordered[-1] + 1)]:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered))}"
