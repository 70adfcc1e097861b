"""Where the final answer stands in a response in mathematics, and how its LaTeX is cleaned before it is read.

Owns finding and cleaning. Every search takes time linear in the text. Reading is `mathematics.py`'s.
"""

from __future__ import annotations

import re
from fractions import Fraction

from gspo_mega.rewards.characters import latex_of
from gspo_mega.rewards.latex_reading import plain
from gspo_mega.rewards.numerals import MARK, final_number, last_box

_ANSWER = re.compile(r"\b(?i:answer)\b[ ]?(?i:is[ ]?:?|:)[ *]*")
_FIRST = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_LINE = 4000  # characters of one line that are looked at
# The end of what is said to be the answer: a sentence's, or a reason.
_END = re.compile(r"[.;](?=\s|$)|,?\s(?:because|since|as|so|which|where|when)\s")
_MOST_CLEANED = 100_000
_MATHS_SIGNS = re.compile(r"(?<!\\)\$|(?<!\\)\\[()\[\]]|^\s*\*\*|\*\*(?=\s*$|[.,;:]|\s+[A-Za-z]{2})")
_LEADING = re.compile(r"(?:=|\\(?:approx|therefore)(?![A-Za-z]))\s*")
# Bold type; `2**3` is a power.
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*([^*]+)\*\*(?![\w({\\*])")


def final_answer(response: str) -> str | Fraction | None:
    """The final answer of a response: LaTeX, a number, or None.

    It is in the last `\\boxed{...}`; else behind the last `####`; else in the last `<answer>` tags; else behind the
    last `answer is` or `Answer:`; else it is the last formula of the last line; else the last number.
    """
    for found in (last_box(response), _marked(response), _tagged(response), _said(response)):
        if found is not None:
            return found
    *_, last = response.rstrip().rsplit("\n", 1)
    formulas = [next(filter(None, groups)) for groups in _FIRST.findall(last[-_LINE:])]
    return formulas[-1] if formulas else final_number(response)


def gold_answer(text: str) -> str:
    """The answer in the text of a row: in its last box, behind its last `####`, or the whole of it."""
    for found in (last_box(text), _marked(text)):
        if found is not None:
            return found
    return text


def cleaned(latex: str) -> str:
    """The same in ASCII and with one name for each thing, without signs of mathematics mode."""
    text = latex_of(latex[:_MOST_CLEANED])
    text = plain(_MATHS_SIGNS.sub("", _BOLD.sub(r"\1", text.strip())).strip())
    text = text[leading.end() :] if (leading := _LEADING.match(text)) is not None else text
    while True:
        shorter = text.rstrip(".,;: ").removesuffix("\\").strip()
        if shorter == text:
            return text
        text = shorter


def _marked(text: str) -> str | None:
    _, mark, tail = text.rpartition(MARK)
    return tail.strip().partition("\n")[0] if mark else None


def _tagged(text: str) -> str | None:
    _, tag, tail = text.rpartition("<answer>")
    return tail.partition("</answer>")[0] if tag else None


def _said(text: str) -> str | None:
    found = None
    for found in _ANSWER.finditer(text):  # noqa: B007  the last one
        pass
    if found is None:
        return None
    line = text[found.end() :].lstrip().partition("\n")[0][:_LINE]
    formula = _FIRST.match(line)
    if formula is not None:
        end = _END.search(line, formula.end())
        # `$5$ or $6$` is one answer, `$5$ apples` is that of the formula.
        more = line[formula.end() : end.start() if end else len(line)]
        return line[: end.start() if end else len(line)] if "$" in more else next(filter(None, formula.groups()))
    end = _END.search(line)
    return line[: end.start()] if end else line
