"""The journal of one run: the sampled episodes, a file for each step, written as groups are admitted and complete.

Every episode is handed to the kernel as soon as it is scored, so a killed process loses none. It reaches the disk at
the end of the batch, and every few seconds before, so a machine that loses power loses the last seconds of one step.

The files follow each other as one log. The file of step N has what happened after the batch of step N - 1 was formed
and until that of step N was: groups admitted, episodes completed, and as its last record the batch that step N
consumes. In a run that samples ahead of its training, a group's records may begin in an earlier file; the record of a
batch says in which. Without sampling ahead, a file has all of its step.

A file begins with the step, the weight version that it begins with, and what else made the episodes (`made_by`). Files
of another history are moved aside, to `step_N.old-NNNN`, and only `journal.keep_last` deletes them. `train/` decides
what a restarted step takes over.

`Journal` is the folder of these files. `RoutePruning` takes routed experts out of the files of old steps in a thread
while the run goes on: rewriting a file reads every byte of it, tens of gigabytes for a large model, and no step waits
for that. The caller knows which routes are no longer needed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gspo_mega.base import atomic_io, processes
from gspo_mega.base.episodes import Group
from gspo_mega.base.errors import JournalError
from gspo_mega.data.journal.frames import MAGIC, FrameFile, drop_routes, encode_frame
from gspo_mega.data.journal.steps import StepRecord, StepWriter, disk_errors, read_file, token_gaps_file, well_formed

_NAME = re.compile(r"step_(\d{8})")
_OLD = re.compile(r"step_\d{8}\.old-\d{4,}")


@contextlib.contextmanager
def _missing_groups(file: Path) -> Iterator[None]:
    """Raise JournalError if the block's KeyError shows that the batch's record names a group that no file has."""
    try:
        yield
    except KeyError as error:
        raise JournalError(f"{file}: its batch names {error}, which no record has") from error


class PartGoneError(JournalError):
    """A part of a step's batch is in an earlier file, which is not there."""


class Journal:
    """The folder of a run's step files. One process writes; others may read at the same time. One thread of the writer
    may take routes out of old files (`prune_routes`) while another does everything else.

    Every method raises JournalError, with the path and the reason, when reading or writing fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()  # guards the next two, and the removal of a file
        self._rewritten: int | None = None
        self._unwanted: set[int] = set()

    def file(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a file, in order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def read(self, step: int, past_damage: bool = False) -> StepRecord | None:
        """The record of a step, without a torn end; None if it has no file, or if even the file's beginning is torn.
        Its groups are those of its file, and those of its batch from earlier files; if one of those files is gone, this
        raises PartGoneError. If a file is damaged, this raises JournalDamage; with `past_damage`, for showing it, the
        record has what is intact, and no batch.
        """
        record = self.read_alone(step, past_damage)
        if record is not None and record.consumed is not None:
            with well_formed(self.file(step)):
                self._add_batch(step, record, past_damage)
        return record

    def _add_batch(self, step: int, record: StepRecord, past_damage: bool) -> None:
        """Add the groups of the record's batch that are in earlier files, and make the batch unless something is
        damaged.
        """
        consumed = record.consumed
        assert consumed is not None
        numbers = set(consumed["group_ids"])
        for earlier in reversed(range(consumed.get("since", step), step)):
            if not self.file(earlier).exists():
                raise PartGoneError(
                    f"{self.file(step)}: a part of its batch is in {self.file(earlier).name}, which is not there"
                )
            if (found := self.read_alone(earlier, past_damage)) is not None:
                record.add_record(found, numbers)
                record.damages += found.damages
                record.lost += found.lost
        if not record.damages:
            with _missing_groups(self.file(step)):
                record.make_batch()

    def read_alone(self, step: int, past_damage: bool = False) -> StepRecord | None:
        """As `read`, but only from the step's own file, and without its batch."""
        return read_file(self.file(step), past_damage) if self.file(step).exists() else None

    def check(self, steps: Iterable[int], most_bytes: int) -> None:
        """Raise JournalDamage for the first damaged file of `steps`. Stops before the files exceed `most_bytes`
        together.
        """
        for step in steps:
            most_bytes -= self.file(step).stat().st_size
            if most_bytes < 0:
                return
            for _ in FrameFile(self.file(step)).frames():
                pass

    def has_pruned_routes(self, step: int) -> bool:
        """Whether the routed experts of a step have been removed. Reads only the beginning of its file."""
        values = next(
            (values for values, _ in FrameFile(self.file(step)).frames()), {}
        )  # `read` finds damage further on
        return bool(values.get("routes_pruned", False))

    def begin(
        self,
        step: int,
        weight_version: int,
        group_size: int,
        known: Mapping[int, Group],
        made_by: Mapping[str, str] | None = None,
        admitted: Mapping[int, int] | None = None,
    ) -> StepWriter:
        """Write the file of `step` anew with the groups `known`. Returns the writer that appends to it, which the
        caller closes. The files of later steps belong to another history from now on and are moved aside.
        """
        with disk_errors(self.folder):
            atomic_io.make_folder(self.folder, at="journal.folder")
        for later in self.steps():
            if later > step:
                self.put_aside(later)
        begin = {
            "step": step,
            "weight_version": weight_version,
            "group_size": group_size,
            "made_by": dict(made_by or {}),
        }
        return StepWriter(self.file(step), begin, known, admitted)

    def put_aside(self, step: int) -> Path:
        """Rename the file of a step to a name that no step has. Returns the new path."""
        with disk_errors(self.folder):
            file = self.file(step)
            number = 1 + max((int(old.name.rpartition("-")[2]) for old in self._aside(step)), default=0)
            target = file.with_name(f"{file.name}.old-{number:04d}")
            atomic_io.rename(file, target, at="journal.aside")
            return target

    def prune(self, before_step: int) -> None:
        """Remove the files of the steps before `before_step`, those that were moved aside included."""
        with disk_errors(self.folder):
            for step in (step for step in self.steps() if step < before_step):
                with self._lock:
                    if step == self._rewritten:
                        self._unwanted.add(step)  # removed after the rewrite, which would bring the file back
                    else:
                        self._remove(step)

    def prune_routes(self, before_step: int) -> None:
        """Rewrite the files of complete steps before `before_step` without routed experts, otherwise unchanged."""
        for step in (step for step in self.steps() if step < before_step):
            with self._rewriting(step):
                if self.file(step).exists() and not self.has_pruned_routes(step):
                    self._prune_routes(step)

    @contextlib.contextmanager
    def _rewriting(self, step: int) -> Iterator[None]:
        """Keep the file from being removed during the block. If it was to be removed, it is removed afterwards."""
        with self._lock:
            self._rewritten = step
        try:
            yield
        finally:
            with self._lock, disk_errors(self.folder):
                self._rewritten = None
                if step in self._unwanted:
                    self._unwanted.remove(step)
                    self._remove(step)

    def _remove(self, step: int) -> None:
        gaps = token_gaps_file(self.folder, step)
        # The step's own file goes last: as long as it exists, the removal of the step is tried again.
        for file in (*([gaps] if gaps.exists() else []), *self._aside(step), self.file(step)):
            atomic_io.remove_file(file, at="journal.drop")

    def _prune_routes(self, step: int) -> None:
        file, frames = FrameFile(self.file(step)), [MAGIC]
        had_routes = is_complete = False
        for values, arrays in file.frames():  # one at a time: the routes of a step can be larger than the memory
            if values["kind"] == "begin":
                values["routes_pruned"] = True
            elif values["kind"] in ("episode", "trajectory"):
                values.setdefault("checksum", file.checksum)
                had_routes |= drop_routes(arrays)
            is_complete |= values["kind"] == "batch"
            frames.append(encode_frame(values, arrays))
        if had_routes and is_complete:
            with disk_errors(self.file(step)):
                atomic_io.write_whole(self.file(step), b"".join(frames), at="journal.routes")

    def _aside(self, step: int) -> list[Path]:
        return sorted(old for old in self.folder.glob(f"step_{step:08d}.old-*") if _OLD.fullmatch(old.name))


class RoutePruning:
    """Takes old routes out of a journal's files in a background thread. One per run; use it from one thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._before = 0
        self._is_running = False
        self._future: concurrent.futures.Future[None] | None = None

    def begin(self, before_step: int) -> None:
        """Begin to remove the routes of the steps before `before_step`. Returns at once. Raises as `check`."""
        self.check()
        with self._lock:
            self._before = max(self._before, before_step)
            if not self._is_running:
                self._is_running = True
                self._future = processes.run_in_thread("journal.prune_routes", self._run)

    def check(self) -> None:
        """Raise JournalError if a file could not be rewritten; that file is unchanged."""
        if self._future is not None and self._future.done():
            future, self._future = self._future, None
            future.result()

    def wait(self) -> None:
        """Return when everything is done. Raises as `check`."""
        if self._future is not None:
            concurrent.futures.wait([self._future])
        self.check()

    def _run(self) -> None:
        done = 0
        try:
            while True:
                with self._lock:
                    before = self._before
                    if before == done:
                        self._is_running = False
                        return
                self._journal.prune_routes(before)
                done = before
        except BaseException:
            self._is_running = False
            raise
