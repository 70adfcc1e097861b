"""Whether a text is one of a set's prompts, by what it says: the same words, or most of the same runs of words.

Owns the comparison. Which texts are compared is `held_out.py`'s.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

# Of GPT-3's contamination check: texts that share a run of 13 words rarely do so by chance.
NUM_WORDS = 13
# A text with at least this share of a prompt's runs is close to it.
CLOSE_SHARE = 0.5
# A run that more prompts of a set have is an instruction that they share, and says nothing.
_MOST_SHARING = 2

_WORD = re.compile(r"\w+|[^\w\s]")
_MARKS = frozenset(".,;:!?\"'`*_$\u2018\u2019\u201c\u201d")


def words_of(prompt: Any) -> list[str]:
    """The words and signs of a prompt (a text, or messages) without case, white space, quotes and marks of sentences.
    Signs such as + and = count: `1+1` and `1-1` are different prompts.
    """
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content")) for message in prompt if isinstance(message, dict))
    found = _WORD.findall(unicodedata.normalize("NFKC", str(prompt)).casefold())
    return [word for word in found if word not in _MARKS]


class PromptTexts:
    """The prompts of one set, to find texts among them. A prompt is its number."""

    def __init__(self, prompts: Iterable[Sequence[str]]) -> None:
        """`prompts`: the words of each, as `words_of` gives them."""
        self._by_digest: dict[bytes, int] = {}
        having: defaultdict[int, list[int]] = defaultdict(list)
        for number, words in enumerate(prompts):
            self._by_digest.setdefault(_digest(words), number)
            for run in _runs(words):
                having[run].append(number)
        self._having = {run: numbers for run, numbers in having.items() if len(numbers) <= _MOST_SHARING}
        self._num_runs = Counter(number for numbers in self._having.values() for number in numbers)

    def same_as(self, words: Sequence[str]) -> int | None:
        """The prompt with these words, or None."""
        return self._by_digest.get(_digest(words))

    def close_to(self, words: Sequence[str]) -> list[int]:
        """The prompts of which at least half of the runs of 13 words are in the text; shorter ones have none."""
        if not self._having or len(words) < NUM_WORDS:
            return []
        hits = Counter(number for run in _runs(words) for number in self._having.get(run, ()))
        return [number for number, count in hits.items() if count >= CLOSE_SHARE * self._num_runs[number]]


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(words).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _runs(words: Sequence[str]) -> set[int]:
    return {hash(tuple(words[start : start + NUM_WORDS])) for start in range(len(words) - NUM_WORDS + 1)}
