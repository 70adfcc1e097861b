"""The built-in rewards: is the final answer right?

Owns comparing a final answer; `numerals.py` finds numbers in a text. The rewards are ordinary reward functions
(`functions.py` has the protocol) and run in scoring processes as users' functions do. No text is evaluated as code.
"""

from __future__ import annotations

from typing import Any

from gspo_mega.rewards.numerals import final_number, gold_number


def arithmetic(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """1 where what follows the last `#` of the response is the answer, digit for digit; else 0. The quickstart's."""
    _, mark, result = response.rpartition("#")
    return float(bool(mark) and result.strip() == str(answer))


def exact_match(
    *, prompt: str, response: str, answer: Any, metadata: dict[str, Any], ignore_case: bool = False
) -> float:
    """1 where the response is the answer, apart from white space around it (and case, with `ignore_case`); else 0."""
    given, expected = response.strip(), str(answer).strip()
    return float(given.casefold() == expected.casefold() if ignore_case else given == expected)


def gsm8k(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """1 where the response's final number equals the answer's as a number (`1,200.0` is `1200`, `3/4` is `0.75`); else
    0.

    `numerals.final_number` says which number is the final one, `numerals.gold_number` what the answer may be; nothing
    is evaluated. Raises ValueError: the answer is not exactly one number. The data check refuses such a row before a
    run.
    """
    expected = gold_number(str(answer))
    return float(final_number(response) == expected)


def problem_of_gsm8k_answer(answer: Any) -> str | None:
    """Why `gsm8k` cannot compare anything with an answer of a data file, or None."""
    try:
        gold_number(str(answer))
    except ValueError as error:
        return str(error)
    return None
