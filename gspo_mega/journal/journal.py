"""The journal of one run: the sampled trajectories, one file per step, written as trajectories complete.

Every trajectory is handed to the kernel as soon as it is scored, so a killed process loses none. It reaches the disk at
the end of the batch, and every few seconds before, so a machine that loses power loses the last seconds of one step.

A step's file begins with the step, the weight version that sampled it and what else made it (`made_by`); a `batch`
record ends it. Files of another history are moved aside, to `step_N.old-NNNN`, and only `journal.keep_last` deletes
them. A restarted step takes a complete batch as it is, and the complete groups of an incomplete one. (Incomplete groups
are sampled again, which favours short responses slightly: long ones were less likely to be complete.)
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_mega import durable
from gspo_mega.errors import JournalError
from gspo_mega.journal.frames import MAGIC, FrameFile, checksum_of, encode_frame
from gspo_mega.journal.trajectories import (
    decode_prompt,
    decode_trajectory,
    encode_batch,
    encode_prompt,
    encode_trajectory,
)
from gspo_mega.records import Group, RolloutBatch, Trajectory

FORMAT_VERSION = 1
SYNC_SECONDS = 5.0
_NAME = re.compile(r"step_(\d{8})")
_OLD = re.compile(r"step_\d{8}\.old-\d{4,}")


@dataclass
class StepRecord:
    """The content of one step's file. `batch` and `prompts` are None until the step's batch is complete.

    `groups`: every trajectory by group, in sample order, incomplete groups too. `prompts`: the prompt order's state
    behind the batch. `made_by`: fingerprints of what made the trajectories, by kind; none in a record of an earlier
    release. `checksums`: of every trajectory's frame as it was first written, by trajectory id. `routes_pruned`: the
    routed experts were recorded and have been removed.
    """

    step: int
    weight_version: int
    group_size: int
    groups: dict[int, Group] = field(default_factory=dict)
    batch: RolloutBatch | None = None
    prompts: dict[str, Any] | None = None
    num_torn_bytes: int = 0
    made_by: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    routes_pruned: bool = False

    def complete_groups(self) -> dict[int, Group]:
        return {number: group for number, group in self.groups.items() if len(group.trajectories) == self.group_size}


class Journal:
    """The folder of a run's step files. One process writes; others may read meanwhile.

    Every method raises JournalError, with the path and the reason, when reading or writing fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def file(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a file, in order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def read(self, step: int) -> StepRecord | None:
        """The record of a step, without a torn end; None where it has no file, or where even the file's beginning is
        torn.
        """
        path = self.file(step)
        if not path.exists():
            return None
        file = FrameFile(path)
        record: StepRecord | None = None
        for values, arrays in file.frames():
            kind = values["kind"]
            if kind == "begin":
                if values["format_version"] > FORMAT_VERSION:
                    raise JournalError(
                        f"{path}: written by a newer gspo_mega (format {values['format_version']}; this one reads"
                        f" {FORMAT_VERSION})"
                    )
                record = StepRecord(
                    values["step"],
                    values["weight_version"],
                    values["group_size"],
                    made_by=values.get("made_by", {}),
                    routes_pruned=values.get("routes_pruned", False),
                )
            elif record is None:
                raise JournalError(f"{path}: does not begin with a step's first record")
            elif kind == "prompt":
                record.groups[values["group_id"]] = Group(values["group_id"], decode_prompt(values, arrays), [])
            elif kind == "trajectory":
                group = record.groups[values["group_id"]]
                group.trajectories.append(decode_trajectory(values, arrays, group.prompt))
                record.checksums[values["trajectory_id"]] = values.get("checksum", file.checksum)
            elif kind == "batch":
                groups = [record.groups[number] for number in values["group_ids"]]
                record.batch = RolloutBatch(step, groups, values["counts"], values["phase_seconds"])
                record.prompts = values["prompts"]
        if record is not None:
            record.num_torn_bytes = file.num_torn_bytes
            for group in record.groups.values():
                # Trajectories complete in any order; their ids end in the number of the sample.
                group.trajectories.sort(key=lambda trajectory: trajectory.trajectory_id)
        return record

    def has_pruned_routes(self, step: int) -> bool:
        """Have the routed experts of a step been removed? Reads only the beginning of its file."""
        values = next((values for values, _ in FrameFile(self.file(step)).frames()), {})
        return bool(values.get("routes_pruned", False))

    @contextlib.contextmanager
    def write(
        self,
        step: int,
        weight_version: int,
        group_size: int,
        known: Mapping[int, Group],
        made_by: Mapping[str, str] | None = None,
    ) -> Iterator[StepWriter]:
        """Write the file of `step` anew with the groups `known`, and yield a writer that appends to it.

        The files of later steps belong to another history from here on and are moved aside.
        """
        with _disk_errors(self.folder):
            durable.make_folder(self.folder, at="journal.folder")
            for later in self.steps():
                if later > step:
                    self.put_aside(later)
            begin = {
                "format_version": FORMAT_VERSION,
                "step": step,
                "weight_version": weight_version,
                "group_size": group_size,
                "made_by": dict(made_by or {}),
            }
            taken = {t.trajectory_id: encode_trajectory(t) for group in known.values() for t in group.trajectories}
            frames = [MAGIC, encode_frame({"kind": "begin", **begin})]
            for number, group in known.items():
                frames += [encode_prompt(number, group.prompt), *(taken[t.trajectory_id] for t in group.trajectories)]
            durable.write_whole(self.file(step), b"".join(frames), at="journal.create")
            descriptor = durable.open_end(self.file(step), at="journal.open")
        try:
            yield StepWriter(
                self.file(step), descriptor, set(known), {name: checksum_of(frame) for name, frame in taken.items()}
            )
        finally:
            os.close(descriptor)

    def put_aside(self, step: int) -> Path:
        """Rename the file of a step to a name that no step has. Returns the new path."""
        with _disk_errors(self.folder):
            file = self.file(step)
            number = 1 + max((int(old.name.rpartition("-")[2]) for old in self._aside(step)), default=0)
            target = file.with_name(f"{file.name}.old-{number:04d}")
            durable.rename(file, target, at="journal.aside")
            return target

    def prune(self, keep_last: int) -> None:
        """Remove the files of all but the newest `keep_last` steps, and those moved aside of the same steps."""
        with _disk_errors(self.folder):
            steps = self.steps()
            for step in steps[:-keep_last]:
                for file in (*self._aside(step), self.file(step)):
                    durable.remove_file(file, at="journal.drop")

    def prune_routes(self, before_step: int) -> None:
        """Rewrite the files of complete steps before `before_step` without routed experts, otherwise unchanged."""
        for step in self.steps():
            if step < before_step and not self.has_pruned_routes(step):
                self._prune_routes(step)

    def _prune_routes(self, step: int) -> None:
        file, frames = FrameFile(self.file(step)), [MAGIC]
        had_routes = is_complete = False
        for values, arrays in file.frames():  # one at a time: the routes of a step can be larger than the memory
            if values["kind"] == "begin":
                values["routes_pruned"] = True
            elif values["kind"] == "trajectory":
                values.setdefault("checksum", file.checksum)
                had_routes |= arrays.pop("routed_experts", None) is not None
            is_complete |= values["kind"] == "batch"
            frames.append(encode_frame(values, arrays))
        if had_routes and is_complete:
            with _disk_errors(self.file(step)):
                durable.write_whole(self.file(step), b"".join(frames), at="journal.routes")

    def _aside(self, step: int) -> list[Path]:
        return sorted(old for old in self.folder.glob(f"step_{step:08d}.old-*") if _OLD.fullmatch(old.name))


class StepWriter:
    """Appends to the file of one step. Used by one thread at a time. `checksums`: of every trajectory's frame, by
    trajectory id.
    """

    def __init__(self, path: Path, descriptor: int, prompts: set[int], checksums: dict[str, int]) -> None:
        self._path, self._descriptor, self._prompts = path, descriptor, prompts
        self.checksums = checksums
        self._synced = time.monotonic()

    def add(self, trajectory: Trajectory) -> None:
        """Append a scored trajectory. The kernel has it when this returns."""
        with _disk_errors(self._path):
            try:
                data = encode_trajectory(trajectory)
                self.checksums[trajectory.trajectory_id] = checksum_of(data)
                if trajectory.group_id not in self._prompts:
                    data = encode_prompt(trajectory.group_id, trajectory.prompt) + data
                    self._prompts.add(trajectory.group_id)
            except (TypeError, ValueError, RecursionError) as error:
                raise JournalError(
                    f"{self._path}: {trajectory.trajectory_id}, of prompt {trajectory.prompt.prompt_id}, cannot be"
                    f" written: {error}"
                ) from error
            durable.append(self._descriptor, data, at="journal.append")
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()

    def finish(self, batch: RolloutBatch, prompts: dict[str, Any]) -> None:
        """Append the batch that the step trains on, and the order's state after it. On disk when this returns."""
        with _disk_errors(self._path):
            durable.append(self._descriptor, encode_batch(batch, prompts), at="journal.append")
            self._sync()

    def _sync(self) -> None:
        durable.sync_descriptor(self._descriptor, at="journal.sync")
        self._synced = time.monotonic()


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Raise the OSErrors of the block as JournalError."""
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"{path}: the rollout journal cannot be written: {error.strerror}; its records stay as they are"
        ) from error
