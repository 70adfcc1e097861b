"""The built-in reward `choice`: which of several lettered choices a response names.

Owns reading a letter out of a response and out of a row.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from gspo_mega.rewards.numerals import last_box

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# What people and models put around a letter: (B)  B.  **B**  $B$  \\text{B}  B) Paris
_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox|mbox|textrm)\s?\{|[*_$`{}]|\\[()\[\]]")
_SPACES = re.compile(r"\\[ ,;:!]|~|\u00a0")
_ALONE = re.compile(r"\s*[(\[]?([A-Za-z])[)\]]?[.:]?\s*")
_BEFORE_TEXT = re.compile(r"\s*(?:[(\[]([A-Z])[)\]][.:]?|([A-Z])(?:[.:)]|\s[-\u2013\u2014]))\s")
# Words before a letter: `Option C`, `the correct answer is (C)`.
_LABEL = re.compile(
    r"\s*(?:the\s)?(?:correct\s|right\s|final\s)?(?:answer|option|choice)(?:\sis)?\s?:?\s?(?:option\s|choice\s)?", re.I
)
_SAID = (
    r"\b(?i:answer|choice|option)\b[ ]?(?:(?i:(?:is|must be|should be)[ ]?(?:therefore|thus|hence|clearly)?[ ]?:?|:)"
    r"|\n)\s{0,3}"
)
_MARK = re.compile(_SAID)
# A second letter beside the first: `B or C`.
_SEVERAL = re.compile(
    r"[)\]\"\u201d]?(?:,?[ ](?:or|and|nor|and/or)[ ]|[ ]?[,/&+][ ]?)(?i:option[ ]|choice[ ])?"
    r"[(\[]?[A-Z](?![A-Za-z0-9'\u2019])"
)
# `A` and `I` are words where one in small letters follows that begins no reason.
_PROSE = re.compile(
    r"[ ](?!(?:because|since|as|for|which|that|with|due|not|instead|rather|given|when|where|and|but|so|by|in|is|or|"
    r"here|from|if)\b)[a-z]"
)
_MOST = 2000  # characters of what is a letter or a choice
_LINE = 1000  # characters after `answer is` in which a choice's text is looked for
# It begins with a word and repeats nothing, so that a search takes time linear in the text.
_NAMED = re.compile(
    _SAID + r"(?i:option[ ]|choice[ ])?[\"'\u201c\u2018]?[(\[]?([A-Z])(?![A-Za-z0-9]|['\u2019][A-Za-z])"
)


def choice(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """1 where the response names the answer's letter; else 0.

    The letter is in the last `\\boxed{...}`; else in the last `<answer>` tags; else behind the last `answer is` or
    `Answer:`; else the response is nothing but the letter. With a list `choices` in the row, the text of a choice is
    read as its letter there, too. `answer`: a letter, or a position from 0.

    Raises ValueError: the answer is neither. The data check refuses such a row before a run.
    """
    expected = _gold(answer)
    texts = metadata.get("choices")
    return float(_named(response, texts if isinstance(texts, list) else []) == expected)


def problem_of_choice_answer(answer: Any) -> str | None:
    """Why `choice` cannot compare anything with an answer of a data file, or None."""
    try:
        _gold(answer)
    except ValueError as error:
        return str(error)
    return None


def _gold(answer: Any) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(_LETTERS):
        return _LETTERS[answer]
    if isinstance(answer, str):
        text = answer.strip()
        if text.isascii() and text.isdecimal() and int(text[:3]) < len(_LETTERS):
            return _LETTERS[int(text)]
        if (letter := _letter(text, [])) is not None:
            return letter
    raise ValueError(f"the answer {str(answer)[:60]!r} is neither a letter, such as B or (B), nor a position from 0")


def _named(response: str, texts: list[Any]) -> str | None:
    box = last_box(response)
    if box is not None:
        return _letter(box, texts)
    _, opening, tail = response.rpartition("<answer>")
    if opening:
        return _letter(tail.partition("</answer>")[0], texts)
    plain = _bare(response)
    named = marked = None
    for found in _NAMED.finditer(plain):
        if found[1] not in "AI" or _PROSE.match(plain, found.end()) is None:
            named = found
    for marked in _MARK.finditer(plain):  # noqa: B007  the last one
        pass
    if marked is not None and (letter := _begins(plain[marked.end() :][:_LINE], texts)) is not None:
        return letter
    if named is None:
        return _letter(response, texts)
    return None if _SEVERAL.match(plain, named.end()) else named[1]


def _bare(text: str) -> str:
    return _DECORATION.sub("", _SPACES.sub(" ", text))


def _begins(segment: str, texts: list[Any]) -> str | None:
    """The letter of the longest choice's text with which a text begins; None where it begins with none."""
    words = _plain(segment)
    found = [
        (len(wanted), letter)
        for letter, text in zip(_LETTERS, texts)
        if len(wanted := _plain(str(text)).removesuffix(".")) > 1
        and words.startswith(wanted)
        and not words[len(wanted) : len(wanted) + 1].isalnum()
    ]
    return max(found)[1] if found else None


def _plain(text: str) -> str:
    return " ".join(_bare(text).split()).casefold()


def _letter(segment: str, texts: list[Any]) -> str | None:
    """The letter that a short text is: alone, before the choice's text, or as the choice's text."""
    plain = unicodedata.normalize("NFKC", _bare(segment)) if len(segment) <= _MOST else segment
    if (label := _LABEL.match(plain)) is not None and label.end() < len(plain):
        plain = plain[label.end() :]
    if (found := _ALONE.fullmatch(plain)) is not None:
        return found[1].upper()
    if (found := _BEFORE_TEXT.match(plain)) is not None:
        return found[1] or found[2]
    wanted = _plain(plain).removesuffix(".")
    for letter, text in zip(_LETTERS, texts):
        if wanted and _plain(str(text)).removesuffix(".") == wanted:
            return letter
    return None
