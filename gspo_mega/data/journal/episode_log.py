"""The journal of a run that samples, as one log: which file is open, and where the records of each open group begin.

A group has three marks: it is admitted, its episodes complete, a step consumes it. The first two come from the thread
that samples, at any time; the third comes from the thread that trains. `EpisodeLog` keeps their order in the files: a
file's last record is the batch, and no later file exists before that is written. Marks that come while it is written
wait in memory; a kill loses them, as it would if their thread waited. What may be taken over from files of an earlier
start is decided in `train/`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import StepWriter


@dataclass(frozen=True)
class FileBegin:
    """The beginning of the file of `step`: the weight version, and what makes its episodes."""

    step: int
    weight_version: int
    made_by: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """The end of a step's file, which `write` makes. `since`: the step of the first file with a part of the batch."""

    log: EpisodeLog
    writer: StepWriter
    step: int
    since: int

    def write(self, batch: RolloutBatch, prompts: dict[str, Any]) -> None:
        """Append the batch of the step and the prompt order's state after it, and have all of the file reach the disk.
        The thread that samples does not wait for that. Raises JournalError.
        """
        more = {"since": self.since} if self.since < self.step else {}
        with self.writer:
            self.writer.finish(batch, prompts, **more)
            self.log.go_on()
            self.writer.settle()


class EpisodeLog:
    """Appends to the files of one run, from any thread. Every method raises JournalError as `Journal`.

    Attributes:
        lock: while a thread holds it, no other thread can add a mark.
        checksums: by episode id, the checksum of the frame of every episode that is not consumed.
    """

    def __init__(self, journal: Journal, group_size: int) -> None:
        self._journal, self._group_size = journal, group_size
        self.lock = threading.RLock()
        self._writer: StepWriter | None = None
        self._next: FileBegin | None = None
        self._step = 0
        self._since: dict[int, int] = {}
        self._episodes: dict[int, set[str]] = {}
        self.checksums: dict[str, int] = {}
        self._waiting: list[Callable[[], None]] | None = None  # marks that come while the end of a file is written

    def begin(self, begin: FileBegin, known: Mapping[int, Group], admitted: Mapping[int, int]) -> None:
        """Write the file of a step anew with the groups `known`, whose records begin in this file from now on."""
        with self.lock:
            self.close()
            self._since = dict.fromkeys(known, begin.step)
            self._episodes = {number: {one.episode_id for one in group.episodes} for number, group in known.items()}
            self.checksums = {}
            self._next = begin
            self._open(known, admitted)

    def ready(self, begin: FileBegin) -> None:
        """Open the file of this step, whose batch is wanted now, unless a file is open."""
        with self.lock:
            if self._writer is None:
                self._next = begin
                self._open({}, {})

    def admit(self, number: int, prompt: Prompt, weight_version: int) -> None:
        """Record that the sampling of group `number` begins under `weight_version`."""
        with self.lock:
            if self._waiting is not None:
                self._waiting.append(partial(self.admit, number, prompt, weight_version))
                return
            self._file().admit(number, prompt, weight_version)
            self._since.setdefault(number, self._step)

    def complete(self, episode: Episode) -> None:
        """Record an episode that is scored or has failed."""
        with self.lock:
            if self._waiting is not None:
                self._waiting.append(partial(self.complete, episode))
                return
            writer, name = self._file(), episode.episode_id
            writer.add(episode)
            self._since.setdefault(episode.group_id, self._step)
            self._episodes.setdefault(episode.group_id, set()).add(name)
            self.checksums[name] = writer.checksums[name]

    def consume(self, batch: RolloutBatch, still_open: set[int], then: FileBegin) -> Ended:
        """Record that a step trains on `batch`, whose groups may lie in earlier files. Returns the end of this file,
        which the caller writes without holding `lock`; later marks then go to the file `then`. `still_open`: the
        numbers of the groups that later steps may consume.
        """
        with self.lock:
            writer = self._file()
            since = min((self._since[group.group_id] for group in batch.groups), default=self._step)
            self._writer, self._next, self._waiting = None, then, []
            for number in self._since.keys() - still_open:
                del self._since[number]
                for name in self._episodes.pop(number, ()):
                    del self.checksums[name]
            return Ended(self, writer, self._step, since)

    def go_on(self) -> None:
        """After the end of the last file is written, write the marks that came in the meantime to the next file."""
        with self.lock:
            begin = self._next if self._waiting else None
        # A new file reaches the disk at once, which nobody waits for either.
        writer = None if begin is None else self._new_file(begin, {}, {})
        with self.lock:
            waiting, self._waiting = self._waiting, None
            if writer is not None and begin is not None:
                self._take_file(writer, begin)
            for write in waiting or ():
                write()

    def numbers(self) -> set[int]:
        """The numbers of the groups that have a record and were not consumed."""
        with self.lock:
            return set(self._since)

    def oldest_open(self, still_open: set[int], otherwise: int) -> int:
        """The step of the first file that has a record of one of the groups `still_open`; `otherwise` if none has."""
        with self.lock:
            return min((since for number, since in self._since.items() if number in still_open), default=otherwise)

    def close(self) -> None:
        """Close the file. Nothing can be written until `begin`."""
        with self.lock:
            if self._writer is not None:
                self._writer.close()
            self._writer = self._next = self._waiting = None

    def _file(self) -> StepWriter:
        if self._writer is None:
            self._open({}, {})
        assert self._writer is not None
        return self._writer

    def _open(self, known: Mapping[int, Group], admitted: Mapping[int, int]) -> None:
        begin = self._next
        if begin is None:
            raise JournalError(f"{self._journal.folder}: a sample came after the journal was closed")
        self._take_file(self._new_file(begin, known, admitted), begin)

    def _new_file(self, begin: FileBegin, known: Mapping[int, Group], admitted: Mapping[int, int]) -> StepWriter:
        return self._journal.begin(begin.step, begin.weight_version, self._group_size, known, begin.made_by, admitted)

    def _take_file(self, writer: StepWriter, begin: FileBegin) -> None:
        self._writer, self._step = writer, begin.step
        self.checksums |= writer.checksums
