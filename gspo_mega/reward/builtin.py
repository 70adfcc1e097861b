"""The built-in rewards: is the final answer right?

Owns finding a final answer in a response and comparing it. They are ordinary reward functions (`functions.py` has
the protocol) and run in the scoring processes like anyone's. Nothing here evaluates text, and every pattern takes
time linear in its input.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

# A number as people write it: sign, dollar, thousands separators, decimals. A minus behind a word, a digit or a
# closing bracket is a subtraction and no sign.
_NUMBER = re.compile(r"((?<![\w.)\]}])-)?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_MARK = "####"
_BOX = "\\boxed{"


def arithmetic(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """1 where what follows the last `#` of the response is the answer, digit for digit; else 0. The quickstart's."""
    _, mark, result = response.rpartition("#")
    return float(bool(mark) and result.strip() == str(answer))


def exact_match(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any], ignore_case: bool = False) -> float:
    """1 where the response is the answer, apart from white space around it (and case, with `ignore_case`); else 0."""
    given, expected = response.strip(), str(answer).strip()
    return float(given.casefold() == expected.casefold() if ignore_case else given == expected)


def gsm8k(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """1 where the response's final number equals the answer's as a number (`1,200.0` is `1200`); else 0.

    The final number is the first one behind the last `####`; without such a mark the last one in the last
    `\\boxed{...}`; without a box the last one of all. The answer is a number, or text whose final number counts.

    Raises ValueError: there is no number in the answer.
    """
    expected = final_number(str(answer))
    if expected is None:
        raise ValueError(f"no number in the answer {str(answer)[-100:]!r}")
    return float(final_number(response) == expected)


def final_number(text: str) -> Decimal | None:
    """The number that a text ends up with, as `gsm8k` looks for it, or None."""
    # Unicode's minus, and the two ways in which LaTeX spaces thousands.
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "")
    _, mark, tail = text.rpartition(_MARK)
    if mark:
        found = _NUMBER.search(tail)
    else:
        box = _last_box(text)
        found = None
        for found in _NUMBER.finditer(text if box is None else box):
            pass
    if found is None:
        return None
    sign, digits = found.groups()
    return Decimal((sign or "") + digits.replace(",", ""))


def _last_box(text: str) -> str | None:
    """What is inside the last `\\boxed{...}`, up to its closing brace or the end of the text."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]
