"""Named moments of a run at which a test can kill the process or make a file operation fail.

Reaching a point does nothing unless `arm` was called. There is a point before and after every file operation of a save,
the rollout journal, a publish through the disk and a copy in memory; `atomic_io.py` reaches these. The moments of a
step between them are points too; `train/phases.py` reaches most of those. `POINTS` is the list. Standard library only.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, fields
from pathlib import Path

# Tests set it in a rank's environment: comma-separated `point=NAME`, `hit=N`, `do=kill|stop|disk_full|denied`,
# `rank=R`, `record=FILE`, `mark=FILE`, `once=1`.
VARIABLE = "GSPO_MEGA_FAULT"

# Each operation has a point before it (`NAME.before`) and one after it (`NAME.after`).
OPERATIONS = {
    "save.clear": "removing the draft that an interrupted save left",
    "save.folder": "making the draft's folders",
    "save.common": "writing what Megatron keeps apart from tensors",
    "save.tensors": "writing weights and optimizer state",
    "save.index": "writing Megatron's metadata of them",
    "save.random": "writing a rank's random state",
    "save.state.write": "writing counters, prompt order and checksums beside state.json",
    "save.state.rename": "renaming that to state.json",
    "save.sync": "having the whole draft reach the disk",
    "save.aside": "renaming the checkpoint of the same step out of the way",
    "save.rename": "renaming the draft to the checkpoint",
    "save.drop": "removing the checkpoint that was in the way",
    "save.latest.write": "writing the new name beside `latest`",
    "save.latest.rename": "renaming that to `latest`",
    "save.prune": "removing a checkpoint that is not kept",
    "journal.folder": "making the journal's folder",
    "journal.create.write": "writing the beginning of a step's file, and what is taken over, beside it",
    "journal.create.rename": "renaming that to the step's file",
    "journal.open": "opening the step's file to append",
    "journal.append": "appending a record",
    "journal.sync": "having the step's file reach the disk",
    "journal.aside": "renaming a step's file of another history out of the way",
    "journal.routes.write": "writing a step's file without its routed experts beside it",
    "journal.routes.rename": "renaming that to the step's file",
    "journal.gaps.write": "writing the mismatch of a step's tokens beside it",
    "journal.gaps.rename": "renaming that to the step's file of them",
    "journal.drop": "removing a step's file that is not kept",
    "publish.clear": "removing what an interrupted publish left",
    "publish.folder": "making the folder that is written",
    "publish.copy": "copying configuration and tokenizer",
    "publish.config.write": "writing config.json beside it",
    "publish.config.rename": "renaming that to config.json",
    "publish.tensors": "writing a file of tensors",
    "publish.name": "giving a file of tensors its final name",
    "publish.index.write": "writing the index of files beside it",
    "publish.index.rename": "renaming that to the index",
    "publish.manifest.write": "writing the manifest beside it",
    "publish.manifest.rename": "renaming that to the manifest",
    "publish.sync": "having files and their names reach the disk",
    "publish.aside": "renaming the folder of the same name out of the way",
    "publish.rename": "renaming the written folder to its name",
    "publish.drop": "removing the folder that was in the way",
    "publish.commit.write": "writing the new version beside current.json",
    "publish.commit.rename": "renaming that to current.json",
    "publish.prune": "removing a version that is not kept",
    "copy.begin": "taking over an older copy's memory, or new memory, for the copy of a step",
    "copy.commit": "giving a whole copy in memory its name",
    "copy.drop": "removing a copy in memory that is not gone on from",
}

MOMENTS = {
    "rollout.admitted": "a group is about to be sampled, and is not in the journal yet",
    "rollout.turn": "a turn of an episode was sampled, and the episode goes on",
    "rollout.trajectory": "a trajectory was sampled and scored, and is not in the journal yet",
    "rollout.batch": "the rollout batch is complete, and nothing of it was trained on",
    "step.old_pass": "the old log-probs of one mini-batch are known",
    "step.optimizer": "one optimizer step was made",
    "step.trained": "all optimizer steps were made, nothing was published",
    "publish.paused": "no request is open or begins, nothing was sent",
    "publish.sent": "the weights were sent, nothing is committed",
    "publish.committed": "the version is committed, no server serves it yet",
    "step.published": "the step's weights are with the servers, its metrics are not written",
    "step.written": "the step's metrics are written, its checkpoint is not",
    "copy.captured": "a rank's state is in its own machine's memory, nothing of it at the neighbour",
    "copy.arrived": "the neighbour's state is here, its checksum is not compared",
    "copy.chosen": "the ranks agree from which copies they go on, nothing is loaded",
}

POINTS: dict[str, str] = {
    **{f"{name}.{side}": f"{side} {what}" for name, what in OPERATIONS.items() for side in ("before", "after")},
    **MOMENTS,
}


@dataclass
class InjectedFault:
    """The action `do` happens when rank `rank` reaches `point` for the `hit`-th time.

    `do` is kill (SIGKILL to this process), stop (SIGSTOP), or disk_full or denied (the operation fails with that
    OSError). `record` is a file to which the name of every reached point is appended. `mark` is a file that is made
    when the action happens. With `once` it does not happen again where that file is, as after a restart.
    """

    point: str = ""
    hit: int = 1
    do: str = "kill"
    rank: int = 0
    record: str = ""
    mark: str = ""
    once: int = 0

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """Read `key=value` pairs, separated by commas. Raises ValueError for an unknown key, point or action."""
        known = {field.name: field.type for field in fields(cls)}
        values: dict[str, str | int] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in known:
                raise ValueError(f"{VARIABLE}: {key!r} is not one of {', '.join(known)}")
            values[key] = int(value) if known[key] == "int" else value
        fault = cls(**values)  # type: ignore[arg-type]
        if fault.point and fault.point not in POINTS:
            raise ValueError(
                f"{VARIABLE}: there is no point {fault.point!r}; OPERATIONS in gspo_mega/base/failpoints.py lists them"
            )
        if fault.do not in ("kill", "stop", "disk_full", "denied"):
            raise ValueError(f"{VARIABLE}: do={fault.do}; valid: kill, stop, disk_full, denied")
        return fault


_armed: list[InjectedFault] = []


def arm(text: str | None, rank: int) -> None:
    """Arm the fault that `text` describes if it is for this rank. None or an empty text disarms.

    Raises ValueError as `InjectedFault.parse` does.
    """
    _armed.clear()
    if text and (fault := InjectedFault.parse(text)).rank == rank:
        _armed.append(fault)


def reached(point: str) -> None:
    """Tell that the process has reached a point of `POINTS`.

    Raises KeyError for any other name, and OSError if a fault that fails the operation is armed there.
    """
    POINTS[point]
    for fault in _armed:
        if fault.record:
            with Path(fault.record).open("a", encoding="ascii") as file:
                file.write(point + "\n")
        if fault.point != point:
            continue
        fault.hit -= 1
        if fault.hit or (fault.once and Path(fault.mark).exists()):
            continue
        if fault.mark:
            Path(fault.mark).touch()
        if fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.do == "stop":  # until a SIGCONT
            os.kill(os.getpid(), signal.SIGSTOP)
            continue
        number = errno.ENOSPC if fault.do == "disk_full" else errno.EACCES
        raise OSError(number, os.strerror(number), point)
