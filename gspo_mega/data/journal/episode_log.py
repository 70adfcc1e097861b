"""The journal of a run that samples, as one log: which file is open, and where the records of each open group begin.

A group has three marks: admitted, its episodes completed, consumed by a step. The first two come from the thread that
samples, at any time; the third from the one that trains. Owns the order of the three in the files: a file's last record
is the batch, and no later file is there before it. Marks that come while it is written wait in memory, and so are lost
by a kill as they would be if their thread waited. What may be taken over from files of an earlier start is
`batches.journalled`'s.
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
    """What the file of `step` begins with: the weight version, and what makes its episodes."""

    step: int
    weight_version: int
    made_by: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """The end of a step's file, which `write` makes. `since`: the first file with a part of the step's batch."""

    log: EpisodeLog
    writer: StepWriter
    step: int
    since: int

    def write(self, batch: RolloutBatch, prompts: dict[str, Any]) -> None:
        """Append what the step trains on, and the order's state behind it; have all of it reach the disk. Whoever
        samples does not wait for that. Raises JournalError.
        """
        more = {"since": self.since} if self.since < self.step else {}
        with self.writer:
            self.writer.finish(batch, prompts, **more)
            self.log.go_on()
            self.writer.settle()


class EpisodeLog:
    """Appends to the files of one run. Any thread. Every method raises JournalError as `Journal`.

    Attributes:
        lock: whoever holds it sees no mark come from another thread.
        checksums: of the frame of every episode that is not consumed, by episode id.
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
        """Write the file of a step anew with the groups `known`, which is where their records begin from here on."""
        with self.lock:
            self.close()
            self._since = dict.fromkeys(known, begin.step)
            self._episodes = {number: {one.episode_id for one in group.episodes} for number, group in known.items()}
            self.checksums = {}
            self._next = begin
            self._open(known, admitted)

    def ready(self, begin: FileBegin) -> None:
        """Have the file of this step open: its batch is asked for."""
        with self.lock:
            if self._writer is None:
                self._next = begin
                self._open({}, {})

    def admit(self, number: int, prompt: Prompt, weight_version: int) -> None:
        """The sampling of group `number` begins under `weight_version`."""
        with self.lock:
            if self._waiting is not None:
                self._waiting.append(partial(self.admit, number, prompt, weight_version))
                return
            self._file().admit(number, prompt, weight_version)
            self._since.setdefault(number, self._step)

    def complete(self, episode: Episode) -> None:
        """An episode is scored, or has failed."""
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
        """A step trains on `batch`: its groups may lie in earlier files. What follows goes to the file `then`, once the
        caller has written the end of this one, without `lock`. `still_open`: the numbers of the groups that later steps
        may consume.
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
        """The end of the last file is written: write what came meanwhile to the next one."""
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
        """The numbers of the groups that have a record and are not consumed."""
        with self.lock:
            return set(self._since)

    def oldest_open(self, still_open: set[int], otherwise: int) -> int:
        """The first file that has a record of the groups `still_open`."""
        with self.lock:
            return min((since for number, since in self._since.items() if number in still_open), default=otherwise)

    def close(self) -> None:
        """Nothing more is written, until `begin`."""
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
