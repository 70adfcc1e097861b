"""The built-in rewards, except `math`, `code` and `json_schema`, which have files of their own.

`arithmetic`, `exact_match` and `gsm8k` compare a final answer; `choice` compares the letter of a choice; `format` and
`length` judge how a response is written and not whether it is right; `regex` looks for a pattern; `reasoning_gym` asks
the package's own scorer. They are ordinary reward functions (`functions.py` has the protocol) and run in scoring
processes as users' functions do. No text is evaluated as code.

Patterns are matched by RE2, which takes time linear in the text, so that no response makes a pattern slow; Python's own
`re` takes exponential time for some pairs of pattern and text. The worker process that asks reasoning-gym
(`reasoning_gym_worker.py`) belongs to the scoring process, which is ended with everything that it started.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.base.processes import LineProcess
from gspo_mega.rewards.blame import is_own_end
from gspo_mega.rewards.numerals import final_number, gold_number, last_box


def arithmetic(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """Return 1 if the text after the last `#` of the response is the answer, digit for digit, else 0. For the
    quickstart.
    """
    _, mark, result = response.rpartition("#")
    return float(bool(mark) and result.strip() == str(answer))


def exact_match(
    *, prompt: str, response: str, answer: Any, metadata: dict[str, Any], ignore_case: bool = False
) -> float:
    """Return 1 if the response is the answer, ignoring white space around it (and case, with `ignore_case`), else 0."""
    given, expected = response.strip(), str(answer).strip()
    return float(given.casefold() == expected.casefold() if ignore_case else given == expected)


def gsm8k(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """Return 1 if the response's final number equals the answer as a number (`1,200.0` is `1200`, `3/4` is `0.75`),
    else 0.

    `numerals.final_number` says which number is the final one, and `numerals.gold_number` what the answer may be;
    nothing is evaluated. Raises ValueError if the answer is not exactly one number. The data check refuses such a row
    before a run.
    """
    expected = gold_number(str(answer))
    return float(final_number(response) == expected)


def problem_of_gsm8k_answer(answer: Any) -> str | None:
    """Return why `gsm8k` cannot compare anything with an answer of a data file, or None."""
    try:
        gold_number(str(answer))
    except ValueError as error:
        return str(error)
    return None


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
# A second letter after the first: `B or C`.
_SEVERAL = re.compile(
    r"[)\]\"\u201d]?(?:,?[ ](?:or|and|nor|and/or)[ ]|[ ]?[,/&+][ ]?)(?i:option[ ]|choice[ ])?"
    r"[(\[]?[A-Z](?![A-Za-z0-9'\u2019])"
)
# `A` and `I` are words, not letters of choices, if a word in small letters follows that does not begin a reason.
_PROSE = re.compile(
    r"[ ](?!(?:because|since|as|for|which|that|with|due|not|instead|rather|given|when|where|and|but|so|by|in|is|or|"
    r"here|from|if)\b)[a-z]"
)
_MOST_CHARACTERS = 2000  # longest text, in characters, that is read as a letter or a choice
_LINE = 1000  # a choice's text is looked for in this many characters after `answer is`
# The pattern begins with a word and repeats nothing, so that a search takes time linear in the text.
_NAMED = re.compile(
    _SAID + r"(?i:option[ ]|choice[ ])?[\"'\u201c\u2018]?[(\[]?([A-Z])(?![A-Za-z0-9]|['\u2019][A-Za-z])"
)


def choice(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """Return 1 if the response names the answer's letter, else 0.

    The letter is read from the last `\\boxed{...}`; else from the last `<answer>` tags; else after the last `answer is`
    or `Answer:`; else the response must be only the letter. If the row has a list `choices`, the text of a choice
    counts as its letter in all these places. `answer`: a letter, or a position from 0.

    Raises ValueError if the answer is neither. The data check refuses such a row before a run.
    """
    expected = _gold(answer)
    texts = metadata.get("choices")
    return float(_named(response, texts if isinstance(texts, list) else []) == expected)


def problem_of_choice_answer(answer: Any) -> str | None:
    """Return why `choice` cannot compare anything with an answer of a data file, or None."""
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
    """Return the letter of the longest choice whose text `segment` begins with; None if it begins with none."""
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
    """Return the letter that a short text names: the letter itself, a letter before the choice's text, or only that
    text.
    """
    plain = unicodedata.normalize("NFKC", _bare(segment)) if len(segment) <= _MOST_CHARACTERS else segment
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


def format(
    *,
    prompt: str,
    response: str,
    answer: Any,
    metadata: dict[str, Any],
    tags: Sequence[str] = ("think", "answer"),
    opened: bool = False,
) -> float:
    """Return 1 if the response is `<think>...</think><answer>...</answer>`, each tag once and in this order, with
    something in each and only white space around them, else 0.

    `opened`: the prompt ends with the opening of the first tag, as many chat templates do, so the response begins after
    it.
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


def check_format(tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> None:
    """Raise RewardError if the options of `format` are not valid."""
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag.isidentifier() for tag in tags):
        raise RewardError(f"reward 'format': tags is {tags!r}; a list of names is expected, such as [think, answer]")
    if len(set(tags)) < len(tags):
        raise RewardError(f"reward 'format': tags names one twice: {', '.join(tags)}")


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
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to `longest - soft` tokens, -1 from
    `longest` on, and a straight line between.
    """
    over = num_response_tokens - (longest - soft)
    return -min(over / soft, 1.0) if over > 0 else 0.0


def check_length(longest: int, soft: int) -> None:
    """Raise RewardError if the options of `length` are not valid."""
    for name, value in (("longest", longest), ("soft", soft)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RewardError(f"reward 'length': {name} is {value!r}; a number of tokens is expected")
    if soft > longest:
        raise RewardError(f"reward 'length': soft is {soft}; at most longest, {longest}")


ANSWER_GROUP = "answer"


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
    """Return 1 if the pattern is found in the response (`full`: if it matches the whole response; `absent`: if it is
    not found), else 0.

    If the pattern has a group `(?P<answer>...)`: 1 if the group's text in the first match is the answer, apart from
    white space around both. The response then counts as right or wrong accordingly.
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


def check_regex(pattern: str, full: bool = False, absent: bool = False, ignore_case: bool = False) -> None:
    """Raise RewardError if the options of `regex` are not valid."""
    if not isinstance(pattern, str):
        raise RewardError(f"reward 'regex': pattern is {pattern!r}; a text is expected")
    try:
        groups = compiled(pattern, ignore_case).groupindex
    except RewardError as error:
        raise RewardError(f"reward 'regex': {error}") from error
    if absent and ANSWER_GROUP in groups:
        raise RewardError("reward 'regex': absent contradicts the pattern's group `answer`; keep one of them")


@functools.lru_cache(maxsize=256)
def compiled(pattern: str, ignore_case: bool = False) -> Any:
    """Return a compiled pattern of RE2. Raises RewardError if it is no pattern, or if google-re2 is not installed."""
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


_WORKER = Path(__file__).with_name("reasoning_gym_worker.py")
_ANSWERS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SCORERS: dict[str, Scorer] = {}


def reasoning_gym(
    *, prompt: str, response: str, answer: Any, metadata: dict[str, Any], python: str | None = None
) -> dict[str, float | bool]:
    """Return the score of reasoning-gym's own scorer, from 0 to 1. The response is right if it is 1.

    The answer is the text in the last <answer> tags of the response, or else the whole response, without white space
    around it. `metadata` names the item, as rows of `data.reasoning_gym` do. `python`: the Python that has the package,
    by default this one.

    Raises ValueError if the row is not from `data.reasoning_gym` or the package's scorer failed, RuntimeError if its
    process ended for another reason.
    """
    place = metadata.get("reasoning_gym")
    if not isinstance(place, dict):
        raise ValueError("the row has no `reasoning_gym`; the reward of that name is for prompts of data.reasoning_gym")
    start(python)
    tagged = _ANSWERS.findall(response)
    score = _SCORERS[python or sys.executable].score(place, (tagged[-1] if tagged else response).strip())
    return {"reward": score, "correct": score == 1.0}


def start(python: str | None = None, **options: Any) -> None:
    """Start the worker of a Python before the first scoring has a deadline. Raises RewardError."""
    python = python or sys.executable
    if python not in _SCORERS:
        _SCORERS[python] = Scorer(python)


class Scorer:
    """The running worker process of one Python."""

    def __init__(self, python: str) -> None:
        """Raises RewardError if the Python cannot be started or lacks the package."""
        self._python = python
        try:
            self.process = LineProcess([python, "-P", str(_WORKER)])
        except OSError as error:
            raise RewardError(f"reward reasoning_gym: {python} cannot be started: {error}") from error
        if "ready" not in self.process.greeting:
            raise RewardError(
                f"reward reasoning_gym: {python}: {self.process.greeting['error']}; make a venv with it (pip install"
                " reasoning-gym) and name its Python in reward.functions' option `python`"
            )

    def score(self, place: dict[str, Any], answer: str) -> float:
        """Return the package's score of an answer to the item `place`. If the process has ended, the next call starts
        another.

        Raises ValueError if the package's scorer failed or made its process crash, RuntimeError if the process ended
        for another reason.
        """
        reply = self.process.ask({"score": place, "answer": answer})
        code = self.process.exit_code
        if code is not None:
            _SCORERS.pop(self._python, None)
        if "score" not in reply:
            raise (
                RuntimeError(reply["error"])
                if code is not None and not is_own_end(code)
                else ValueError(reply["error"])
            )
        return reply["score"]
