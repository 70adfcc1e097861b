"""Beside the journal's file of a step, what the trainer's log-prob of each of its tokens was before any update.

Owns the file and how ranks' parts become an array per response. A row for a person to look at: nothing is trained on
it, and a run without it continues. Values are trainer - server, nats, float16; NaN where nobody measured.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from gspo_mega.base import durable
from gspo_mega.base.episode_records import Episode
from gspo_mega.base.errors import JournalError
from gspo_mega.base.rollout_batch import RolloutBatch
from gspo_mega.data.journal.frames import MAGIC, FrameFile, encode_frame


def token_gaps_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.gaps"


def write_token_gaps(folder: Path, batch: RolloutBatch, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Write what the ranks measured of a step's batch, counted from 0. `parts`: of every rank and mini-batch, of n
    tokens: `rows` [n] in the batch's trajectories, `places` [n] in the row's prompt and response, `gaps` [n] nats.
    Raises JournalError.
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
        durable.write_whole(file, MAGIC + frame, at="journal.gaps")
    except OSError as error:
        raise JournalError(f"{file}: cannot be written: {error.strerror}") from error


class TokenGaps:
    """Of one step; empty where none are recorded. Raises JournalError for a file that cannot be read."""

    def __init__(self, folder: Path, step: int) -> None:
        self._found: dict[str, tuple[int, np.ndarray]] = {}
        file = token_gaps_file(folder, step)
        if not file.exists():
            return
        for values, arrays in FrameFile(file).frames():
            parts = np.split(arrays["gaps"], np.cumsum(arrays["num_tokens"])[:-1])
            self._found = dict(zip(values["episode_ids"], zip(arrays["checksums"].tolist(), parts), strict=True))

    def of(self, episode: Episode) -> dict[int, np.ndarray]:
        """By sampled node, [tokens] float16 nats, NaN where not measured; {} for an episode that is not there, or whose
        tokens were others: a step may have been sampled again.
        """
        checksum, values = self._found.get(episode.episode_id, (None, np.zeros(0, np.float16)))
        if checksum is None or checksum != _checksum(episode):
            return {}
        ends = np.cumsum([len(node.token_ids) for node in episode.turns])
        return {node.node_id: part for node, part in zip(episode.turns, np.split(values, ends[:-1]), strict=True)}


def _checksum(episode: Episode) -> int:
    """Of the sampled tokens."""
    checksum = 0
    for node in episode.turns:
        checksum = zlib.crc32(np.asarray(node.token_ids, "<i4").tobytes(), checksum)
    return checksum
