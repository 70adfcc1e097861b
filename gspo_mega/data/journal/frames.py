"""The journal's file format: records with length and checksum, one after another; records are only appended.

    file    8 bytes `GSPOJRN1`, then frames
    frame   length of the payload (uint32), CRC-32 of the payload (uint32), payload         all little-endian
    payload length of its JSON (uint32), JSON (UTF-8), then the raw bytes of its arrays, in order; the JSON's `arrays`
            has {name: [dtype, shape]}

A killed process, or a full disk, leaves at most one torn frame, the last: it begins as a frame does, and the file ends
before it is whole. A machine that loses power may leave the file's length without its last data: zeros take the place
of what was not flushed, from the end of a frame or of a block on (https://lwn.net/Articles/322823/). A reader stops
there, and says how many bytes it left unread. Everything else that is no frame is
damage, which is an error with its place. A reader that only shows a file may read on past it, at the next place where
a frame's checksum holds.

The second part encodes prompts, episodes and batches as records and decodes them without loss. Token ids, log-probs
(float64, as the server sent them) and weight versions of all nodes are arrays, one node after the other; routed
experts, sampling masks and a teacher's scores are arrays for each node, so that they can be taken out; the other fields
are JSON. What is empty or follows from the prompt is left out. Advantages are not kept, because they follow from the
rewards of the group and the configuration.
Records of format 1, whose episodes are one prompt and one response (`decode_trajectory`), are read and no longer
written.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gspo_mega.base import progress
from gspo_mega.base.episodes import Episode, Node, RolloutBatch, ToolRecord, check_episode, one_turn_episode
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt, float_column, int_column
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.base.served_scores import ServedScores
from gspo_mega.base.untrusted import open_regular

MAGIC = b"GSPOJRN1"
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
# The beginning of a frame's JSON, and below how far into the frame it is.
_JSON_BEGIN = b'{"'
_LARGE_FRAME = 2**30  # larger than any frame of which a crash leaves only a few bytes
_LONGEST_WORD = 12  # longest word of JSON outside of strings, of which the end of the text may cut off a part
_BLOCK_BYTES = 512  # the smallest part that a disk writes; file systems' blocks are multiples of it
_PIECE_BYTES = 2**20
_JSON_PLACE = _FRAME.size + _LENGTH.size
Frame = tuple[dict[str, Any], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Damage:
    """Bytes `offset` to `end` of a file that are no frames. `frame`: the number of the first damaged frame, from 1.
    `what`: what is wrong with it. `follows`: an intact frame begins at `end`.
    """

    offset: int
    end: int
    frame: int
    what: str
    follows: bool

    def __str__(self) -> str:
        then = f"intact records follow at byte {self.end}" if self.follows else "nothing intact follows"
        return f"damaged at byte {self.offset}, in frame {self.frame}: {self.what}; {then}"


class JournalDamage(JournalError):
    """A file of the journal is damaged: not cut short by a crash, but other than it was written."""

    def __init__(self, path: Path, damage: Damage) -> None:
        super().__init__(
            f"{path}: {damage}. Nothing at or after that place is used. `gspo-mega inspect RUN --step N` shows what is"
            " intact. Restore the file from a copy; or move it out of the folder, and a run that goes on samples the"
            " step again"
        )
        self.damage = damage


def encode_frame(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """One frame of JSON values and arrays, which keep any shape and numeric dtype. Raises ValueError for a NaN among
    the values, TypeError for other types.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    layout = {name: [array.dtype.newbyteorder("<").str, list(array.shape)] for name, array in arrays.items()}
    text = json.dumps({**values, "arrays": layout}, allow_nan=False).encode()
    parts = [array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values()]
    payload = b"".join([_LENGTH.pack(len(text)), text, *parts])
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def checksum_of(frame: bytes) -> int:
    """The CRC-32 that a frame carries."""
    return _FRAME.unpack_from(frame)[1]


class FrameFile:
    """Reads one file. `num_torn_bytes`: the number of bytes at its end that are no whole frame, known once `frames()`
    is exhausted. `checksum`: that of the frame that `frames()` yielded last. `damages`: the damage that was passed
    over.
    """

    def __init__(self, path: Path, past_damage: bool = False) -> None:
        """`past_damage`: go on after damage, at the next intact frame, instead of raising."""
        self.path, self._past_damage = path, past_damage
        self.num_torn_bytes = 0
        self.checksum = 0
        self.damages: list[Damage] = []

    def frames(self) -> Iterator[Frame]:
        """(JSON values, arrays) of every whole frame; arrays have the shape and dtype with which they were written, in
        little-endian order. Raises JournalError if the file is no journal's or unreadable, and JournalDamage.
        """
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, 2)
                file.seek(0)
                begin = file.read(len(MAGIC))
                if begin != MAGIC:
                    if size < len(MAGIC) and MAGIC.startswith(begin):
                        self.num_torn_bytes = size
                        return
                    if not self._past_damage:
                        raise JournalError(f"{self.path}: not a file of a rollout journal (byte 0)")
                    end, follows = _next_intact(file, size, 0)
                    self._note(Damage(0, end, 1, "the file does not begin as a journal's", follows))
                    file.seek(end)
                yield from self._all(file, size)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _all(self, file: BinaryIO, size: int) -> Iterator[Frame]:
        number = 0
        while (start := file.tell()) < size:
            number += 1
            found = _read_frame(file, size - start)
            if isinstance(found, bytes):
                try:
                    decoded = _decode(found)
                except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
                    found = f"its checksum holds, and its content is no record ({type(error).__name__}: {error})"
                else:
                    self.checksum = zlib.crc32(found)
                    progress.beat()  # with routed experts, reading a step's file can take minutes
                    yield decoded
                    continue
            end, follows = _next_intact(file, size, start + 1)
            if not follows and (found is None or _is_unwritten(file, start, size)):
                self.num_torn_bytes = size - start
                return
            self._note(Damage(start, end, number, found or "its length points past the frames that follow", follows))
            file.seek(end)

    def _note(self, damage: Damage) -> None:
        if not self._past_damage:
            raise JournalDamage(self.path, damage)
        self.damages.append(damage)


def _read_frame(file: BinaryIO, num_left: int) -> bytes | str | None:
    """Read the frame at the file's position. Returns its payload; or a text that says what is wrong with it; or None if
    it is the beginning of a frame that was cut off. `num_left`: the number of bytes to the file's end.
    """
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(head)
    if length < _LENGTH.size:
        return f"it says that it has {length} bytes"
    num_left -= _FRAME.size
    payload = file.read(min(length, num_left))
    if length <= num_left:
        return payload if zlib.crc32(payload) == checksum else "its checksum does not hold"
    if zlib.crc32(payload) == checksum:
        return f"it says that it has {length} bytes, and has {num_left}"
    return _problem_of_cut_frame(payload, length)


def _is_unwritten(file: BinaryIO, start: int, size: int) -> bool:
    """Whether the file is as a power cut leaves it from byte `start`, a frame's, to its end: nothing but zeros, or the
    blocks that were written, with the beginning of a frame that they cut off, and then zeros.
    """
    end = _end_of_data(file, start, size)
    if end == start:
        return True
    end = -(-end // _BLOCK_BYTES) * _BLOCK_BYTES
    if end >= size:
        return False
    file.seek(start)
    head = file.read(min(_FRAME.size, end - start))
    if len(head) < _FRAME.size:
        return True
    length, _ = _FRAME.unpack(head)
    if start + _FRAME.size + length <= end:
        return False  # all of it was written, and it is damaged
    return _problem_of_cut_frame(file.read(end - start - _FRAME.size), length) is None


def _end_of_data(file: BinaryIO, start: int, size: int) -> int:
    """The place after the last byte from `start` on that is not zero; `start` if there is none."""
    end = size
    while end > start:
        begin = max(start, end - _PIECE_BYTES)
        file.seek(begin)
        if found := len(file.read(end - begin).rstrip(b"\0")):
            return begin + found
        end = begin
    return start


def _problem_of_cut_frame(payload: bytes, length: int) -> str | None:
    """What is wrong with the first bytes of a frame of `length` bytes; None if it only ends early."""
    text = payload[_LENGTH.size :]
    if len(text) < len(_JSON_BEGIN) and length > _LARGE_FRAME:
        return f"it says that it has {length} bytes"
    if len(payload) < _LENGTH.size:
        return None
    (num_text,) = _LENGTH.unpack_from(payload)
    if num_text > length - _LENGTH.size or not _JSON_BEGIN.startswith(text[: len(_JSON_BEGIN)]):
        return "it does not begin as a record"
    if len(text) < num_text:
        return _problem_of_cut_text(text)
    try:
        layout = json.loads(text[:num_text])["arrays"]
        own = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layout.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its JSON is none"
    own += _LENGTH.size + num_text
    return None if own == length else f"it says that it has {length} bytes, and its content needs {own}"


def _problem_of_cut_text(text: bytes) -> str | None:
    """What is wrong with the first bytes of a frame's JSON; None if it only ends early."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_WORD
        return None if is_cut else "its JSON is none"
    except (ValueError, RecursionError):
        return "its JSON is none"
    return "its JSON ends early"


def _next_intact(file: BinaryIO, size: int, start: int) -> tuple[int, bool]:
    """(Place of the first frame from byte `start` on whose checksum holds, True); (`size`, False) if there is none."""
    if start >= size:
        return size, False
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        place = start + _JSON_PLACE
        while (place := data.find(_JSON_BEGIN, place)) >= 0:
            progress.beat()
            frame = place - _JSON_PLACE
            length, checksum = _FRAME.unpack_from(data, frame)
            (num_text,) = _LENGTH.unpack_from(data, frame + _FRAME.size)
            end = frame + _FRAME.size + length
            if num_text + _LENGTH.size <= length and end <= size:
                with memoryview(data) as view, view[frame + _FRAME.size : end] as payload:
                    holds = zlib.crc32(payload) == checksum
                if holds:
                    return frame, True
            place += 1
    return size, False


def _decode(payload: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (length,) = _LENGTH.unpack_from(payload)
    offset = _LENGTH.size + length
    values = json.loads(payload[_LENGTH.size : offset])
    arrays = {}
    for name, (dtype, shape) in values.pop("arrays").items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(payload, np.dtype(dtype), count, offset).reshape(shape).copy()
        offset += arrays[name].nbytes
    return values, arrays


_PROMPT = ("prompt_id", "source", "text", "answer", "metadata")
_ROUTES = "routed_experts."
_MASK_COUNTS, _MASK_CODES = "sampling_mask_counts.", "sampling_mask_codes."
_TAUGHT, _TOP_IDS, _TOP_LOG_PROBS = "teacher_log_probs.", "teacher_top_ids.", "teacher_top_log_probs."
_TOPS = (_TOP_IDS, _TOP_LOG_PROBS)
_IN_ARRAYS = ("node_id", "token_ids", "log_probs", "weight_versions", "routed_experts", "sampling_masks", "teacher")
_OF_EPISODE = ("reward", "reward_parts", "reward_error", "correct", "failure", "info", "counts")

Tools = list[dict[str, Any]]


def encode_prompt(group_id: int, prompt: Prompt, **more: Any) -> bytes:
    """The record of a group's prompt. `more`: further values for the record's reader."""
    values = {name: getattr(prompt, name) for name in _PROMPT}
    tokens = np.array(prompt.token_ids, dtype=np.int32)
    return encode_frame({"kind": "prompt", "group_id": group_id, **values, **more}, {"token_ids": tokens})


def decode_prompt(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Prompt:
    """The prompt of a record. `arrays`: `token_ids`, [prompt tokens] int32."""
    return Prompt(token_ids=tuple(arrays["token_ids"].tolist()), **{name: values[name] for name in _PROMPT})


def tools_id(tools: Tools) -> str:
    """The name under which the schemas of tools are recorded once for many episodes; empty for none."""
    return hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()[:16] if tools else ""


def encode_tools(tools: Tools) -> bytes:
    return encode_frame({"kind": "tools", "tools_id": tools_id(tools), "tools": tools})


def encode_episode(episode: Episode) -> bytes:
    """The record of an episode; its tools, if it has any, have a record of their own. Raises ValueError for a tree that
    no recorder makes, and for a NaN outside the log-probs.
    """
    check_episode(episode)
    turns = episode.turns
    arrays = {
        "num_tokens": np.array([len(node.token_ids) for node in episode.nodes], np.int32),
        "token_ids": _joined([n.token_ids for n in episode.nodes if not _is_prompt(n, episode.prompt)], np.int32),
        "log_probs": _joined([node.log_probs for node in turns], np.float64),
        "weight_versions": _joined([node.weight_versions for node in turns], np.int32),
        **{f"{_ROUTES}{n.node_id}": n.routed_experts for n in episode.nodes if n.routed_experts is not None},
        **{f"{_MASK_COUNTS}{n.node_id}": n.sampling_masks.counts for n in turns if n.sampling_masks is not None},
        **{f"{_MASK_CODES}{n.node_id}": n.sampling_masks.codes for n in turns if n.sampling_masks is not None},
        **{name: part for n in turns if n.teacher is not None for name, part in _teacher_arrays(n.node_id, n.teacher)},
    }
    values: dict[str, Any] = {
        "kind": "episode",
        "episode_id": episode.episode_id,
        "group_id": episode.group_id,
        **{name: value for name in _OF_EPISODE if (value := getattr(episode, name)) not in (None, {})},
        "nodes": [_node_values(node, episode.prompt) for node in episode.nodes],
    }
    if episode.tool_calls:
        values["tool_calls"] = [asdict(call) for call in episode.tool_calls]
    if episode.tools:
        values["tools_id"] = tools_id(episode.tools)
    return encode_frame(values, arrays)


def decode_episode(
    values: dict[str, Any], arrays: dict[str, np.ndarray], prompt: Prompt, tools: Mapping[str, Tools]
) -> Episode:
    """The episode of a record of kind `episode`. `tools`: the recorded schemas, by `tools_id`.

    Raises ValueError, KeyError for a record that `encode_episode` does not make.
    """
    token_ids, log_probs, versions = (
        _ArrayParts(arrays[name]) for name in ("token_ids", "log_probs", "weight_versions")
    )
    nodes = []
    for node_id, (given, count) in enumerate(zip(values["nodes"], arrays["num_tokens"].tolist(), strict=True)):
        is_sampled, is_prompt = given["kind"] == "sampled", given.pop("is_prompt", False)
        messages = [_only_message(is_sampled, given.get("text", ""), prompt)]
        node = Node(node_id, **{"parent": node_id - 1, "messages": messages, **given}, token_ids=[])
        node.token_ids = int_column(prompt.token_ids) if is_prompt else int_column(token_ids.next(count))
        if is_sampled:
            node.log_probs = float_column(log_probs.next(count))
            node.weight_versions = int_column(versions.next(count))
        node.routed_experts = arrays.get(f"{_ROUTES}{node_id}")
        if (counts := arrays.get(f"{_MASK_COUNTS}{node_id}")) is not None:
            node.sampling_masks = SamplingMasks(counts, arrays[f"{_MASK_CODES}{node_id}"])
        if (found := arrays.get(f"{_TAUGHT}{node_id}")) is not None:
            none = np.zeros((count, 0), np.int32), np.zeros((count, 0), np.float32)  # as if only sampled tokens counted
            top = (arrays.get(f"{name}{node_id}", other) for name, other in zip(_TOPS, none, strict=True))
            node.teacher = ServedScores(found, *top)
        nodes.append(node)
    calls = [ToolRecord(**call) for call in values.get("tool_calls", ())]
    schemas = tools[values["tools_id"]] if "tools_id" in values else []
    given = {name: values[name] for name in _OF_EPISODE if name in values}
    episode = Episode(values["episode_id"], values["group_id"], prompt, nodes, list(schemas), calls, **given)
    check_episode(episode)
    return episode


def _teacher_arrays(node_id: int, scores: ServedScores) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{_TAUGHT}{node_id}", scores.log_probs
    if scores.num_top:
        yield f"{_TOP_IDS}{node_id}", scores.top_ids
        yield f"{_TOP_LOG_PROBS}{node_id}", scores.top_log_probs


def drop_routes(arrays: dict[str, np.ndarray]) -> bool:
    """Remove the routed experts, the sampling masks and a teacher's most likely tokens of every node from a record's
    arrays, also of format 1. Returns whether there were any.
    """
    large = (_ROUTES, _MASK_COUNTS, _MASK_CODES, *_TOPS)
    routes = [name for name in arrays if name.startswith(large) or name == "routed_experts"]
    for name in routes:
        del arrays[name]
    return bool(routes)


def encode_batch(batch: RolloutBatch, prompts: dict[str, Any], **more: Any) -> bytes:
    """The record that ends a step: the groups of its batch. `prompts`: the prompt order's state after the batch.
    `more`: further values for the record's reader.
    """
    group_ids = [group.group_id for group in batch.groups]
    values = {
        "group_ids": group_ids,
        "counts": batch.counts,
        "phase_seconds": batch.phase_seconds,
        "sampled": batch.sampled,
        "prompts": prompts,
    }
    return encode_frame({"kind": "batch", **values, **more})


_DEFAULTS = {f.name: f.default for f in fields(Node)}


def _node_values(node: Node, prompt: Prompt) -> dict[str, Any]:
    values = {
        name: value
        for name in _DEFAULTS
        if name not in _IN_ARRAYS and (value := getattr(node, name)) != _DEFAULTS[name]
    }
    if node.parent == node.node_id - 1:
        del values["parent"]
    of_role = (
        {"role": "assistant", "content": node.text} if node.is_sampled else {"role": "user", "content": prompt.text}
    )
    if node.messages == [of_role]:
        del values["messages"]
    if _is_prompt(node, prompt):
        values["is_prompt"] = True
    return values


def _only_message(is_sampled: bool, text: str, prompt: Prompt) -> dict[str, Any]:
    """The message that a node's record leaves out if it is the node's only message."""
    return {"role": "assistant", "content": text} if is_sampled else {"role": "user", "content": prompt.text}


def _is_prompt(node: Node, prompt: Prompt) -> bool:
    return not node.is_sampled and node.parent < 0 and tuple(node.token_ids) == prompt.token_ids


class _ArrayParts:
    """Reads the values of an array, one node after the other. Values that are missing at its end are missing here."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._place = array, 0

    def next(self, count: int) -> np.ndarray:
        self._place += count
        return self._array[self._place - count : self._place]


def _joined(parts: Sequence[Sequence[Any]], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def decode_trajectory(values: dict[str, Any], arrays: dict[str, np.ndarray], prompt: Prompt) -> Episode:
    """The episode of a record of kind `trajectory`. `arrays`: per token of the response, [response tokens], the ids
    (int32), the log-probs (float64 nats) and the weight versions; with routing, `routed_experts`.
    """
    episode = one_turn_episode(
        values["trajectory_id"],
        values["group_id"],
        prompt,
        arrays["response_token_ids"].tolist(),
        arrays["rollout_log_probs"].tolist(),
        arrays["weight_versions"].tolist(),
        values["finish_reason"],
        values["response_text"],
        routed_experts=arrays.get("routed_experts"),
    )
    for name in ("reward", "reward_parts", "reward_error"):
        setattr(episode, name, values[name])
    return episode
