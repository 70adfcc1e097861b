"""Numbers of several samples per prompt: avg@k, pass@k, the majority's, each with the spread between prompts.

Owns the mathematics. What is correct, and which responses agree, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over prompts and its standard error, from the spread between prompts (0 for one prompt)."""

    mean: float
    standard_error: float


def over_prompts(values: Iterable[float]) -> Estimate:
    """The mean of one value per prompt. Raises ValueError without any."""
    kept = list(values)
    if not kept:
        raise ValueError("no prompt to take a mean over")
    mean = math.fsum(kept) / len(kept)
    spread = math.fsum((value - mean) ** 2 for value in kept) / max(len(kept) - 1, 1)
    return Estimate(mean, math.sqrt(spread / len(kept)))


def pass_at(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate, from n samples of a prompt with c correct ones, of the probability that at least one of k
    is correct: 1 - C(n - c, k) / C(n, k). Raises ValueError for k above n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples; k must be from 1 to that")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks_of(num_samples: int) -> list[int]:
    """The k that pass@k is given for: powers of two, and the number of samples itself."""
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return [*powers, num_samples]


def majority_correct(votes: Sequence[tuple[Hashable | None, bool]]) -> float:
    """Whether the answer that most samples of a prompt gave is correct: 1 or 0, and with a tie the correct share of the
    tied answers. `votes`: (answer, or None for no vote; whether it is correct) of each sample. 0 where nobody votes.
    """
    # All correct samples gave one answer, however they wrote it.
    counts: dict[tuple[bool, Hashable], int] = {}
    for answer, is_correct in votes:
        if answer is not None:
            key = (True, None) if is_correct else (False, answer)
            counts[key] = counts.get(key, 0) + 1
    most = [key for key, count in counts.items() if count == max(counts.values())]
    return sum(is_correct for is_correct, _ in most) / len(most) if most else 0.0
