"""One file of the journal: reading it into a record, appending to it, and the trainer's log-prob differences next to
it.

`read_file` reads a file frame by frame and puts groups and episodes together as a `StepRecord`. `StepWriter` appends
groups as they are admitted, episodes as they complete, and the batch of the step, and decides what is in the kernel and
what on the disk at which time. Which files belong to a step is decided in `journal.py`, which file is open in
`episode_log.py`.

`write_token_gaps` and `TokenGaps` keep another file per step: for each sampled token, the trainer's log-prob before any
update minus the server's, in nats, float16, NaN if nobody measured it. It is for people to look at: nothing is trained
on it, and a run without it continues.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega.base import atomic_io
from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.errors import GspoMegaError, JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.frames import (
    MAGIC,
    Damage,
    FrameFile,
    JournalDamage,
    Tools,
    checksum_of,
    decode_episode,
    decode_prompt,
    decode_trajectory,
    encode_batch,
    encode_episode,
    encode_frame,
    encode_prompt,
    encode_tools,
    tools_id,
)

FORMAT_VERSION = 2
_SAMPLE = re.compile(r"-s(\d+)$")


@dataclass
class StepRecord:
    """The content of one step's file. `batch` and `prompts` are None until the step's batch is complete.

    `groups`: every episode of the file by group, in sample order, incomplete groups too; the group that got an episode
    last is last. `admitted`: the weight version under which a group was admitted, if the file says so. `prompts`: the
    prompt order's state after the batch. `made_by`: fingerprints of what made the episodes, by kind; empty in a record
    of an earlier release. `checksums`: by episode id, the checksum of the episode's frame as it was first written.
    `routes_pruned`: the routed experts were recorded and have been removed. `consumed`: the content of the batch's
    record, without its episodes. `damages`, `lost`: only of a file that was read past its damage: what is damaged, and
    the episodes that are intact although their prompt, tools or group is not.
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
        """Add an episode. If the same sample was recorded before, the new record replaces the first."""
        group = self.groups.pop(episode.group_id)
        self.groups[episode.group_id] = group
        _add(group, episode)
        self.checksums[episode.episode_id] = checksum

    def add_record(self, earlier: StepRecord, numbers: set[int]) -> None:
        """Put the episodes that an earlier file has of the groups `numbers` before those of this one."""
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
        """Make the batch that was trained on, as the record says, from the groups that are here."""
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
    """Whether two episodes are the same sample of their group. In a run that samples ahead, the id of a second attempt
    at a sample may have the number of a later step.
    """
    return one.episode_id == other.episode_id or _sample_of(one)[0] == _sample_of(other)[0] >= 0


def read_file(path: Path, past_damage: bool = False) -> StepRecord | None:
    """The record of one file, without a torn end and without its batch; None if even its beginning is torn.

    Raises JournalDamage for a damaged file, and JournalError for one of a newer release. With `past_damage`, returns
    what is intact of a damaged file, only for showing it.
    """
    with well_formed(path):
        return _read_file(FrameFile(path, past_damage), past_damage)


@contextlib.contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Raises JournalError if the block fails because a record of the file has other values than were written."""
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
            record = StepRecord(step, -1, 0)  # the content of its first record is not known
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
    """Whether the records to which an episode's record refers are there."""
    name = values.get("tools_id")
    return values.get("group_id") in record.groups and (name is None or name in tools)


@contextlib.contextmanager
def _damage(path: Path, values: dict[str, Any]) -> Iterator[None]:
    """Raise JournalError if the block finds something wrong with one record, although its checksum is right."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        name = values.get("episode_id", values.get("trajectory_id"))
        raise JournalError(f"{path}: the record of {name} is no episode: {type(error).__name__}: {error}") from error


SYNC_SECONDS = 5.0


class StepWriter:
    """Writes a file anew, with the groups `known`, and appends to it. Used by one thread at a time; a context manager
    that closes the file. `checksums`: by episode id, the checksum of the episode's frame.
    """

    def __init__(
        self,
        path: Path,
        begin: Mapping[str, Any],
        known: Mapping[int, Group],
        admitted: Mapping[int, int] | None = None,
    ) -> None:
        """`begin`: the values of the first record. `admitted`: the weight versions under which known groups were
        admitted.
        """
        self._path, self._prompts, self._tools = path, set(known), set[str]()
        self.checksums: dict[str, int] = {}
        self._synced = time.monotonic()
        frames = [MAGIC, encode_frame({"kind": "begin", "format_version": FORMAT_VERSION, **begin})]
        for number, group in known.items():
            frames.append(encode_prompt(number, group.prompt, **_version((admitted or {}).get(number))))
            frames += [self._encoded(episode) for episode in group.episodes]
        with disk_errors(path):
            atomic_io.write_whole(path, b"".join(frames), at="journal.create")
            self._descriptor = atomic_io.open_end(path, at="journal.open")

    def admit(self, group_id: int, prompt: Prompt, weight_version: int) -> None:
        """Append that the sampling of a group begins."""
        if group_id not in self._prompts:
            self._append(self._named(prompt.prompt_id, prompt, group_id, _version(weight_version)))
            self._prompts.add(group_id)

    def add(self, episode: Episode) -> None:
        """Append an episode that is scored or has failed. When this returns, the kernel has it."""
        data = self._encoded(episode)
        if episode.group_id not in self._prompts:
            data = self._named(episode.episode_id, episode.prompt, episode.group_id, {}) + data
            self._prompts.add(episode.group_id)
        self._append(data)

    def finish(self, batch: RolloutBatch, prompts: dict[str, Any], **more: Any) -> None:
        """Append the batch that the step trains on, and the prompt order's state after it; call `settle` next. `more`:
        further values for the record's reader.
        """
        with disk_errors(self._path):
            atomic_io.append(self._descriptor, encode_batch(batch, prompts, **more), at="journal.append")

    def settle(self) -> None:
        """End the file: when this returns, all of it is on the disk. The file is closed in any case."""
        with self, disk_errors(self._path):
            self._sync()

    def close(self) -> None:
        """Close the file; nothing more can be written."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        with disk_errors(self._path):
            atomic_io.append(self._descriptor, data, at="journal.append")
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()

    def _sync(self) -> None:
        atomic_io.sync_descriptor(self._descriptor, at="journal.sync")
        self._synced = time.monotonic()

    def _encoded(self, episode: Episode) -> bytes:
        """The frames of an episode: one for its tools, unless the file has them, and its own."""
        with self._refusal(f"{episode.episode_id}, of prompt {episode.prompt.prompt_id},"):
            frame = encode_episode(episode)
            before = b""
            if episode.tools and (name := tools_id(episode.tools)) not in self._tools:
                before = encode_tools(episode.tools)
                self._tools.add(name)
        self.checksums[episode.episode_id] = checksum_of(frame)
        return before + frame

    def _named(self, name: str, prompt: Prompt, group_id: int, more: dict[str, int]) -> bytes:
        with self._refusal(f"{name}, of prompt {prompt.prompt_id},"):
            return encode_prompt(group_id, prompt, **more)

    @contextlib.contextmanager
    def _refusal(self, name: str) -> Iterator[None]:
        """Raise JournalError if the block meets a value that a record cannot hold."""
        try:
            yield
        except (TypeError, ValueError, RecursionError) as error:
            raise JournalError(f"{self._path}: {name} cannot be written: {error}") from error


def _version(weight_version: int | None) -> dict[str, int]:
    return {} if weight_version is None else {"weight_version": weight_version}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise the OSErrors of the block as JournalError."""
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"{path}: the rollout journal cannot be written: {error.strerror}; its records stay as they are"
        ) from error


def token_gaps_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.gaps"


def write_token_gaps(folder: Path, batch: RolloutBatch, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Write what the ranks measured of a step's batch. `parts`: for every rank and mini-batch, arrays over its n
    tokens: `rows` [n], indices of the batch's trajectories; `places` [n], positions in the row's prompt and response,
    from 0; `gaps` [n], nats. Raises JournalError.
    """
    trajectories = batch.trajectories
    ends = np.cumsum([len(row.response_token_ids) for row in trajectories], dtype=np.int64)
    # Where the first token of a row's prompt would be in the array of all responses.
    begins = ends - [len(row.prompt.token_ids) + len(row.response_token_ids) for row in trajectories]
    values = np.full(int(ends[-1]) if len(ends) else 0, np.nan, np.float16)
    for part in parts:
        values[begins[part["rows"]] + part["places"]] = part["gaps"]
    firsts = iter(begins)
    gaps: list[np.ndarray] = []
    for episode in batch.episodes:
        of_node = {node.node_id: np.full(len(node.token_ids), np.nan, np.float16) for node in episode.turns}
        for row in episode.rows():
            first = next(firsts) + len(row.prompt.token_ids)
            for node, (start, end) in zip(row.turn_nodes, row.turns, strict=True):
                of_node[node] = values[first + start : first + end]
        gaps += of_node.values()
    arrays = {
        "gaps": np.concatenate([np.zeros(0, np.float16), *gaps]),
        "num_tokens": np.array([episode.num_sampled_tokens for episode in batch.episodes], np.int32),
        "checksums": np.array([_checksum(episode) for episode in batch.episodes], np.uint32),
    }
    names = [episode.episode_id for episode in batch.episodes]
    frame = encode_frame({"kind": "token_gaps", "step": batch.step, "episode_ids": names}, arrays)
    file = token_gaps_file(folder, batch.step)
    try:
        atomic_io.write_whole(file, MAGIC + frame, at="journal.gaps")
    except OSError as error:
        raise JournalError(f"{file}: cannot be written: {error.strerror}") from error


class TokenGaps:
    """The differences of one step; empty if none are recorded. Raises JournalError if the file cannot be read."""

    def __init__(self, folder: Path, step: int) -> None:
        self._found: dict[str, tuple[int, np.ndarray]] = {}
        file = token_gaps_file(folder, step)
        if not file.exists():
            return
        for values, arrays in FrameFile(file).frames():
            parts = np.split(arrays["gaps"], np.cumsum(arrays["num_tokens"])[:-1])
            self._found = dict(zip(values["episode_ids"], zip(arrays["checksums"].tolist(), parts), strict=True))

    def of(self, episode: Episode) -> dict[int, np.ndarray]:
        """By sampled node, [tokens] float16 nats, NaN for tokens that were not measured. Empty if the episode is not
        there, or had other tokens because the step was sampled again.
        """
        checksum, values = self._found.get(episode.episode_id, (None, np.zeros(0, np.float16)))
        if checksum is None or checksum != _checksum(episode):
            return {}
        ends = np.cumsum([len(node.token_ids) for node in episode.turns])
        return {node.node_id: part for node, part in zip(episode.turns, np.split(values, ends[:-1]), strict=True)}


def _checksum(episode: Episode) -> int:
    """The CRC-32 of an episode's sampled tokens."""
    checksum = 0
    for node in episode.turns:
        checksum = zlib.crc32(np.asarray(node.token_ids, "<i4").tobytes(), checksum)
    return checksum
