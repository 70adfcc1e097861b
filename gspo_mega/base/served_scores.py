"""What a teacher's server said of sampled tokens (`teacher.url`): plain data, recorded with the episode.

Places that know of it: `rollout/teacher_server.py` asks for it, `base/episodes.py` and `data/journal/frames.py` record
it, `data/packing.py` packs it, and `engine/reference.py` hands it to the loss in place of a model's scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ServedScores:
    """A teacher's scores of tokens. `log_probs` [tokens] float32 nats: of each token itself. `top_ids` [tokens, K]
    int32 and `top_log_probs` [tokens, K] float32 nats: its K most likely tokens at each place; K is 0 if they were not
    asked for.
    """

    log_probs: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray

    @classmethod
    def none(cls, num_tokens: int, num_top: int) -> ServedScores:
        """Return zeros, as tokens have that are not trained."""
        shape = (num_tokens, num_top)
        return cls(np.zeros(num_tokens, np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32))

    @classmethod
    def join(cls, parts: Sequence[ServedScores]) -> ServedScores:
        """Return the scores of all tokens of the parts, one part after the other. There is at least one part."""
        return cls(
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_log_probs for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.log_probs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ServedScores):
            return NotImplemented
        return (
            np.array_equal(self.log_probs, other.log_probs)
            and np.array_equal(self.top_ids, other.top_ids)
            and np.array_equal(self.top_log_probs, other.top_log_probs)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]: arrays have no hash either

    @property
    def num_top(self) -> int:
        return self.top_ids.shape[1]

    def between(self, start: int, end: int) -> ServedScores:
        """Return the scores of the tokens `start` to `end`."""
        return ServedScores(self.log_probs[start:end], self.top_ids[start:end], self.top_log_probs[start:end])
