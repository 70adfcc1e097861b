"""What one file of the journal says: read frame by frame, with groups and episodes put together.

Owns the meaning of the records and their order in a file. Which files belong to a step is `journal.py`'s.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_mega.base.episode_records import Episode
from gspo_mega.base.errors import GspoMegaError, JournalError
from gspo_mega.base.rollout_batch import Group, RolloutBatch
from gspo_mega.data.journal.episode_frames import Tools, decode_episode, decode_prompt
from gspo_mega.data.journal.first_format import decode_trajectory
from gspo_mega.data.journal.frames import Damage, FrameFile, JournalDamage

FORMAT_VERSION = 2
_SAMPLE = re.compile(r"-s(\d+)$")


@dataclass
class StepRecord:
    """The content of one step's file. `batch` and `prompts` are None until the step's batch is complete.

    `groups`: every episode of the file by group, in sample order, incomplete groups too; the group that got an episode
    last is last. `admitted`: the weight version that a group was admitted under, where the file says so. `prompts`: the
    prompt order's state behind the batch. `made_by`: fingerprints of what made the episodes, by kind; none in a record
    of an earlier release. `checksums`: of every episode's frame as it was first written, by episode id.
    `routes_pruned`: the routed experts were recorded and have been removed. `consumed`: what the record of the batch
    says, without its episodes. `damages`, `lost`: only of a file that was read past its damage; what is damaged, and
    the episodes that are intact and whose prompt, tools or group is not.
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
    admitted: dict[int, int] = field(default_factory=dict)
    consumed: dict[str, Any] | None = None
    damages: list[Damage] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add_episode(self, episode: Episode, checksum: int) -> None:
        """A sample that was made once more takes the place of its first record."""
        group = self.groups.pop(episode.group_id)
        self.groups[episode.group_id] = group
        _add(group, episode)
        self.checksums[episode.episode_id] = checksum

    def add_record(self, earlier: StepRecord, numbers: set[int]) -> None:
        """Put what an earlier file has of the groups `numbers` before what this one has."""
        before: dict[int, Group] = {}
        for number, group in earlier.groups.items():
            if number not in numbers:
                continue
            own = self.groups.get(number)
            merged = Group(number, group.prompt, list(group.episodes))
            for episode in own.episodes if own is not None else ():
                _add(merged, episode)
            if own is not None and own.episodes:
                self.groups[number] = merged
            else:
                self.groups.pop(number, None)
                before[number] = merged
            for episode in group.episodes:
                self.checksums.setdefault(episode.episode_id, earlier.checksums[episode.episode_id])
            if number in earlier.admitted:
                self.admitted[number] = earlier.admitted[number]
            self.routes_pruned |= earlier.routes_pruned
        self.groups = {**before, **self.groups}

    def make_batch(self) -> None:
        """The batch that the record says was trained on, from the groups that are here."""
        if (consumed := self.consumed) is not None:
            groups = [self.groups[number] for number in consumed["group_ids"]]
            sampled = consumed.get("sampled", {})  # older records have none
            self.batch = RolloutBatch(self.step, groups, consumed["counts"], consumed["phase_seconds"], sampled)
            self.prompts = consumed["prompts"]


def _add(group: Group, episode: Episode) -> None:
    group.episodes = [one for one in group.episodes if not _is_same_sample(one, episode)]
    group.episodes.append(episode)
    group.episodes.sort(key=_sample_of)


def _sample_of(episode: Episode) -> tuple[int, str]:
    """The number of the sample in its group, which ends the id. Episodes complete in any order."""
    found = _SAMPLE.search(episode.episode_id)
    return (int(found.group(1)) if found else -1, episode.episode_id)


def _is_same_sample(one: Episode, other: Episode) -> bool:
    """Of a run that samples ahead, a second attempt at a sample may bear the number of a later step in its id."""
    return one.episode_id == other.episode_id or _sample_of(one)[0] == _sample_of(other)[0] >= 0


def read_file(path: Path, past_damage: bool = False) -> StepRecord | None:
    """The record of one file, without a torn end and without its batch; None where even its beginning is torn.

    Raises JournalDamage for a damaged file, and JournalError for one of a newer release. `past_damage`: what is intact
    of a damaged file; only to be shown.
    """
    with well_formed(path):
        return _read_file(FrameFile(path, past_damage), past_damage)


@contextlib.contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Raises JournalError where the block fails because a record of the file holds other values than were written."""
    try:
        yield
    except GspoMegaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise JournalError(f"{path}: a record has not the form of one: {type(error).__name__}: {error}") from error


def _read_file(file: FrameFile, past_damage: bool) -> StepRecord | None:
    path = file.path
    record: StepRecord | None = None
    tools: dict[str, Tools] = {}
    for values, arrays in file.frames():
        kind = values.get("kind")
        if past_damage and record is None and kind != "begin" and file.damages:
            step = int(path.name.rpartition("_")[2]) if path.name.rpartition("_")[2].isdecimal() else 0
            record = StepRecord(step, -1, 0)  # what its first record said is not known
        if kind == "begin":
            if record is not None:
                raise JournalError(f"{path}: a second first record, where byte for byte one was written")
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
            number = values["group_id"]
            record.groups.setdefault(number, Group(number, decode_prompt(values, arrays), []))
            if "weight_version" in values:
                record.admitted[number] = values["weight_version"]
        elif kind == "tools":
            tools[values["tools_id"]] = values["tools"]
        elif kind in ("episode", "trajectory"):
            if past_damage and not _is_whole(values, record, tools):
                record.lost.append(str(values.get("episode_id", values.get("trajectory_id"))))
                continue
            with _damage(path, values):
                prompt = record.groups[values["group_id"]].prompt
                episode = (
                    decode_episode(values, arrays, prompt, tools)
                    if kind == "episode"
                    else decode_trajectory(values, arrays, prompt)
                )
            record.add_episode(episode, values.get("checksum", file.checksum))
        elif kind == "batch":
            record.consumed = values
    if record is not None:
        record.num_torn_bytes, record.damages = file.num_torn_bytes, file.damages
    elif file.damages:
        raise JournalDamage(path, file.damages[0])
    return record


def _is_whole(values: dict[str, Any], record: StepRecord, tools: dict[str, Tools]) -> bool:
    """Whether the records that an episode's refers to are there."""
    name = values.get("tools_id")
    return values.get("group_id") in record.groups and (name is None or name in tools)


@contextlib.contextmanager
def _damage(path: Path, values: dict[str, Any]) -> Iterator[None]:
    """Raise what is wrong with one record, whose checksum is right, as JournalError."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        name = values.get("episode_id", values.get("trajectory_id"))
        raise JournalError(f"{path}: the record of {name} is no episode: {type(error).__name__}: {error}") from error
