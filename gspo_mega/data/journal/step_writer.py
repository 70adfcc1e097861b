"""Appends to one file of the journal: groups as they are admitted, episodes as they complete, the batch of the step.

Owns what is in the kernel and on the disk when. Which file is open is `episode_log.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_mega.base import durable
from gspo_mega.base.episode_records import Episode
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.base.rollout_batch import Group, RolloutBatch
from gspo_mega.data.journal.episode_frames import encode_batch, encode_episode, encode_prompt, encode_tools, tools_id
from gspo_mega.data.journal.frames import MAGIC, checksum_of, encode_frame
from gspo_mega.data.journal.step_record import FORMAT_VERSION

SYNC_SECONDS = 5.0


class StepWriter:
    """Writes a file anew, with `known` in it, and appends to it. Used by one thread at a time. A context manager that
    closes it. `checksums`: of every episode's frame, by episode id.
    """

    def __init__(
        self,
        path: Path,
        begin: Mapping[str, Any],
        known: Mapping[int, Group],
        admitted: Mapping[int, int] | None = None,
    ) -> None:
        """`begin`: what the file begins with. `admitted`: the weight versions that known groups were admitted under."""
        self._path, self._prompts, self._tools = path, set(known), set[str]()
        self.checksums: dict[str, int] = {}
        self._synced = time.monotonic()
        frames = [MAGIC, encode_frame({"kind": "begin", "format_version": FORMAT_VERSION, **begin})]
        for number, group in known.items():
            frames.append(encode_prompt(number, group.prompt, **_version((admitted or {}).get(number))))
            frames += [self._encoded(episode) for episode in group.episodes]
        with disk_errors(path):
            durable.write_whole(path, b"".join(frames), at="journal.create")
            self._descriptor = durable.open_end(path, at="journal.open")

    def admit(self, group_id: int, prompt: Prompt, weight_version: int) -> None:
        """Append that the sampling of a group begins."""
        if group_id not in self._prompts:
            self._append(self._named(prompt.prompt_id, prompt, group_id, _version(weight_version)))
            self._prompts.add(group_id)

    def add(self, episode: Episode) -> None:
        """Append an episode that is scored or has failed. The kernel has it when this returns."""
        data = self._encoded(episode)
        if episode.group_id not in self._prompts:
            data = self._named(episode.episode_id, episode.prompt, episode.group_id, {}) + data
            self._prompts.add(episode.group_id)
        self._append(data)

    def finish(self, batch: RolloutBatch, prompts: dict[str, Any], **more: Any) -> None:
        """Append the batch that the step trains on, and the order's state after it; `settle` is next. `more`: further
        values for the record's reader.
        """
        with disk_errors(self._path):
            durable.append(self._descriptor, encode_batch(batch, prompts, **more), at="journal.append")

    def settle(self) -> None:
        """The end of the file: all of it is on disk when this returns, and closed in any case."""
        with self, disk_errors(self._path):
            self._sync()

    def close(self) -> None:
        """Nothing more is written."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        with disk_errors(self._path):
            durable.append(self._descriptor, data, at="journal.append")
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()

    def _sync(self) -> None:
        durable.sync_descriptor(self._descriptor, at="journal.sync")
        self._synced = time.monotonic()

    def _encoded(self, episode: Episode) -> bytes:
        """The frames of an episode: of its tools, where the file has not got them, and its own."""
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
        """Raise what a record cannot hold as JournalError."""
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
