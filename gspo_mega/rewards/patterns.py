"""The built-in reward `regex`, and patterns in linear time.

Owns the engine: RE2, whose matching takes time linear in the text, so that no response makes a pattern slow. Python's
own `re` takes exponential time for some pairs of pattern and text.
"""

from __future__ import annotations

import functools
from typing import Any

from gspo_mega.base.errors import RewardError

ANSWER_GROUP = "answer"


@functools.lru_cache(maxsize=256)
def compiled(pattern: str, ignore_case: bool = False) -> Any:
    """A pattern of RE2. Raises RewardError: it is none, or google-re2 is not installed."""
    try:
        import re2
    except ModuleNotFoundError as error:
        raise RewardError("patterns need the package google-re2: pip install google-re2") from error
    options = re2.Options()
    options.case_sensitive = not ignore_case
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        raise RewardError(
            f"{pattern!r} is no pattern of RE2: {said}. RE2 has no look-around and no back-references; in exchange no"
            " response makes it slow"
        ) from error


def check_regex(pattern: str, full: bool = False, absent: bool = False, ignore_case: bool = False) -> None:
    """Raises RewardError: the options of `regex` are not what it reads."""
    if not isinstance(pattern, str):
        raise RewardError(f"reward 'regex': pattern is {pattern!r}; a text is expected")
    try:
        groups = compiled(pattern, ignore_case).groupindex
    except RewardError as error:
        raise RewardError(f"reward 'regex': {error}") from error
    if absent and ANSWER_GROUP in groups:
        raise RewardError("reward 'regex': absent contradicts the pattern's group `answer`; keep one of them")


def regex(
    *,
    prompt: str,
    response: str,
    answer: Any,
    metadata: dict[str, Any],
    pattern: str,
    full: bool = False,
    absent: bool = False,
    ignore_case: bool = False,
) -> float | dict[str, float | bool]:
    """1 where the pattern is found in the response (`full`: where it is the whole of it; `absent`: where it is not
    found); else 0.

    With a group `(?P<answer>...)` in the pattern: 1 where what the group holds in the first match is the answer, apart
    from white space around both, and this says whether the response is right.
    """
    engine = compiled(pattern, ignore_case)
    found = engine.fullmatch(response) if full else engine.search(response)
    if ANSWER_GROUP not in engine.groupindex:
        return float((found is None) == absent)
    given, expected = (found and found.group(ANSWER_GROUP)) or "", str(answer).strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    right = found is not None and given.strip() == expected
    return {"reward": float(right), "correct": right}
