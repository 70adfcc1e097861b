"""The built-in rewards `format` and `length`: how a response is written, whatever it says.

Owns both rules. Neither says whether a response is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo_mega.base.errors import RewardError


def check_format(tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> None:
    """Raises RewardError: the options of `format` are not what it reads."""
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag.isidentifier() for tag in tags):
        raise RewardError(f"reward 'format': tags is {tags!r}; a list of names is expected, such as [think, answer]")
    if len(set(tags)) < len(tags):
        raise RewardError(f"reward 'format': tags names one twice: {', '.join(tags)}")


def format(
    *,
    prompt: str,
    response: str,
    answer: Any,
    metadata: dict[str, Any],
    tags: Sequence[str] = ("think", "answer"),
    opened: bool = False,
) -> float:
    """1 where the response is `<think>...</think><answer>...</answer>`, each tag once and in this order, with something
    in each and nothing but white space around them; else 0.

    `opened`: the prompt ends with the first tag's opening, as many chat templates do, so the response begins behind it.
    """
    text = f"<{tags[0]}>{response}" if opened else response
    place = 0
    for tag in tags:
        first, last = f"<{tag}>", f"</{tag}>"
        if text.count(first) != 1 or text.count(last) != 1:
            return 0.0
        start, end = text.index(first), text.index(last)
        if start < place or text[place:start].strip() or not text[start + len(first) : end].strip():
            return 0.0
        place = end + len(last)
    return float(not text[place:].strip())


def check_length(longest: int, soft: int) -> None:
    """Raises RewardError: the options of `length` are not what it reads."""
    for name, value in (("longest", longest), ("soft", soft)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RewardError(f"reward 'length': {name} is {value!r}; a number of tokens is expected")
    if soft > longest:
        raise RewardError(f"reward 'length': soft is {soft}; at most longest, {longest}")


def length(
    *,
    prompt: str,
    response: str,
    answer: Any,
    metadata: dict[str, Any],
    num_response_tokens: int,
    longest: int,
    soft: int,
) -> float:
    """DAPO's soft over-long punishment (arXiv 2503.14476, equation 13): 0 up to `longest - soft` tokens, -1 from
    `longest` on, and a straight line between.
    """
    over = num_response_tokens - (longest - soft)
    return -min(over / soft, 1.0) if over > 0 else 0.0
