"""The sets of token ids that the sampler kept, one set for each sampled token.

With a finite `rollout.top_k` a server samples each token from the few ids that top-k, top-p and min-p leave, and
returns them (SGLang's `output_token_sampling_mask`). What was sampled is then the softmax over that set, so the trainer
normalises its log-probs over the same set. That set cannot be computed again later: other weights, and even another
order of summation, would keep other ids.

A set is stored as its ids in ascending order, each as the difference from the one before it, in LEB128: seven bits per
byte, lowest first, and the top bit says that more follow. With 20 ids of a vocabulary of 150 000 that is about 40
bytes, where a bitset would take 19 kB. Each set begins anew, so sets are cut out and joined as bytes.

Places that know of the sets: `rollout/client/completion.py` reads and checks them, `base/episodes.py` and
`data/journal/frames.py` record them, `data/packing.py` packs them, `engine/device_batch.py` hands them to
`engine/log_probs.py`, and `config/derived.py` says which runs have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

_MORE = 0x80


@dataclass(frozen=True, eq=False)
class SamplingMasks:
    """One set of token ids per token. `counts` [tokens] int32: the size of each set, 0 where there is none. `codes`
    [bytes] uint8: the sets, one after the other, as the module says.
    """

    counts: np.ndarray
    codes: np.ndarray

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> SamplingMasks:
        """Return the masks with these sets, whose ids may have any order. Raises ValueError as `of_ids`."""
        counts = np.fromiter(map(len, sets), np.int32, len(sets))
        return cls.of_ids(counts, np.fromiter(chain.from_iterable(sets), np.int64, int(counts.sum())))

    @classmethod
    def of_ids(cls, counts: np.ndarray, ids: np.ndarray) -> SamplingMasks:
        """Return the masks with sets of `counts` [tokens] ids; `ids` [sum of counts] has one set after the other, each
        in any order. Raises ValueError for a negative id, or one that is twice in a set.
        """
        if ids.size == 0:
            return cls(counts.astype(np.int32), np.zeros(0, np.uint8))
        owner = np.repeat(np.arange(len(counts)), counts)
        ids = ids.astype(np.int64)
        ids = ids[np.lexsort((ids, owner))]
        steps = np.diff(ids, prepend=0)
        is_first = np.diff(owner, prepend=-1) != 0
        steps[is_first] = ids[is_first]
        if ids.min() < 0 or (steps[~is_first] == 0).any():
            raise ValueError("a set of token ids has a negative id, or one id twice")
        return cls(counts.astype(np.int32), _encoded(steps))

    @classmethod
    def none(cls, num_tokens: int) -> SamplingMasks:
        """Return empty sets, as tokens have that are not trained."""
        return cls(np.zeros(num_tokens, np.int32), np.zeros(0, np.uint8))

    @classmethod
    def join(cls, parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """Return the masks of all tokens of the parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(part.counts for part in parts)]),
            np.concatenate([np.zeros(0, np.uint8), *(part.codes for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMasks):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.codes, other.codes)

    __hash__ = None  # pyright: ignore[reportAssignmentType]: arrays have no hash either

    @property
    def num_bytes(self) -> int:
        return self.counts.nbytes + self.codes.nbytes

    def between(self, start: int, end: int) -> SamplingMasks:
        """Return the masks of the tokens `start` to `end`."""
        offsets = self._byte_offsets()
        counts = self.counts[start:end]
        return SamplingMasks(counts, self.codes[offsets[start] : offsets[start + len(counts)]])

    def where(self, kept: np.ndarray) -> SamplingMasks:
        """Return these masks with empty sets at the tokens where `kept`, [tokens] bool, is False."""
        if kept.all():
            return self
        sizes = np.diff(self._byte_offsets())
        return SamplingMasks(np.where(kept, self.counts, 0).astype(np.int32), self.codes[np.repeat(kept, sizes)])

    def ids(self) -> np.ndarray:
        """Return the ids of all sets, [sum of counts] int64, one set after the other and ascending in each."""
        steps = _decoded(self.codes)
        if len(steps) != int(self.counts.sum(dtype=np.int64)):
            raise ValueError(f"{len(steps)} coded token ids; the sets have {int(self.counts.sum())}")
        if not len(steps):
            return steps
        sums = np.cumsum(steps)
        starts = _offsets(self.counts)[:-1][self.counts > 0]
        before = np.zeros(len(starts), np.int64)
        before[1:] = sums[starts[1:] - 1]
        return sums - np.repeat(before, self.counts[self.counts > 0])

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sets of these tokens: (counts [n] int32, ids [sum of counts] int64), in the order of `places`, [n]
        integers.
        """
        counts, starts = self.counts[places], _offsets(self.counts)[:-1][places]
        within = np.arange(int(counts.sum(dtype=np.int64))) - np.repeat(_offsets(counts)[:-1], counts)
        return counts, self.ids()[np.repeat(starts, counts) + within]

    def _byte_offsets(self) -> np.ndarray:
        """Where each token's set begins in `codes`, and the end: [tokens + 1] int64."""
        ends = np.concatenate([[0], np.flatnonzero(self.codes < _MORE) + 1])
        return ends[_offsets(self.counts)]


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _encoded(values: np.ndarray) -> np.ndarray:
    """LEB128 of int64 values from 0 on, [bytes] uint8."""
    num_bytes = np.ones(len(values), np.int64)
    rest = values >> 7
    while rest.any():
        num_bytes += rest > 0
        rest >>= 7
    starts = _offsets(num_bytes)
    codes = np.empty(int(starts[-1]), np.uint8)
    for place in range(int(num_bytes.max(initial=1))):
        has = num_bytes > place
        more = np.where(num_bytes[has] > place + 1, _MORE, 0)
        codes[starts[:-1][has] + place] = ((values[has] >> (7 * place)) & 0x7F) | more
    return codes


def _decoded(codes: np.ndarray) -> np.ndarray:
    """The values of `_encoded`, [values] int64. Raises ValueError for bytes that end within a value."""
    if not len(codes):
        return np.zeros(0, np.int64)
    is_end = codes < _MORE
    if not is_end[-1]:
        raise ValueError("the coded token ids end within an id")
    starts = np.concatenate([[0], np.flatnonzero(is_end)[:-1] + 1])
    places = np.arange(len(codes)) - np.repeat(starts, np.diff(np.append(starts, len(codes))))
    if places.max() > 8:
        raise ValueError("a coded token id has more than nine bytes")
    return np.add.reduceat((codes & 0x7F).astype(np.int64) << (7 * places), starts)
