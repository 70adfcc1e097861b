import time
from decimal import Decimal

import pytest

from gspo_mega.data.arithmetic import problems, row_of
from gspo_mega.reward.builtin import arithmetic, exact_match, final_number, gsm8k


def call(function, response, answer, **options):
    return function(prompt="", response=response, answer=answer, metadata={}, **options)


def test_arithmetic_accepts_the_tasks_own_solutions():
    for a, b in problems("train", 50, seed=1):
        row = row_of(a, b)
        assert call(arithmetic, row["response"], row["answer"]) == 1.0
        assert call(arithmetic, row["response"], str(a + b + 1)) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("9+6=15#7105", 1.0),
        ("#1#7105", 1.0),
        ("# 7105 \n", 1.0),
        ("7105", 0.0),
        ("#7105#", 0.0),
        ("#7105.", 0.0),
        ("#07105", 0.0),
        ("#7105#8", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_looks_behind_the_last_mark(response, reward):
    assert call(arithmetic, response, "7105") == reward
    assert call(arithmetic, response, 7105) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3*6=18 eggs.\n#### 18", "18"),
        ("#### 18 dollars, not 20", "18"),
        ("#### 5\n#### $1,234.50", "1234.50"),
        ("####-7", "-7"),
        ("#### \u22127", "-7"),
        ("#### 70,000", "70000"),
        ("#### .5", "0.5"),
        ("####", None),
        ("#### none", None),
        (r"so \boxed{12} and \boxed{\$1{,}200} in all 7", "1200"),
        (r"\boxed{\frac{1}{2}} 3", "2"),
        (r"\boxed{1\!000", "1000"),
        (r"\boxed{} 4", None),
        ("The answer is 42.", "42"),
        ("It costs $3.50.", "3.50"),
        ("10-3", "3"),
        ("x=-3", "-3"),
        ("(10)-3", "3"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("12,345,678", "12345678"),
        ("50%", "50"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_compares_numbers():
    gold = "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 1,018"
    for right in ("#### 1018", "#### 1,018.00", "so 1018.", r"\boxed{1018}", gold):
        assert call(gsm8k, right, gold) == 1.0
    for wrong in ("#### 1019", "1018 of 5", "", "#### 1.018"):
        assert call(gsm8k, wrong, gold) == 0.0
    assert call(gsm8k, "it is 7.50", 7.5) == 1.0
    with pytest.raises(ValueError, match="no number in the answer 'none'"):
        call(gsm8k, "7", "none")


def test_exact_match():
    assert call(exact_match, " Paris\n", "Paris") == 1.0
    assert call(exact_match, "paris", "Paris") == 0.0
    assert call(exact_match, "paris", "Paris", ignore_case=True) == 1.0
    assert call(exact_match, "7", 7) == 1.0


@pytest.mark.parametrize("piece", ["1", "1,", "111,", "111,111,", "-", "$", ".", "1.", r"\boxed{", "{", "#### ", "####", "\u2212"])
def test_hostile_input_takes_no_time(piece):
    text = (piece * (64 * 1024))[: 64 * 1024]
    start = time.process_time()
    final_number(text)
    call(arithmetic, text, "1")
    assert time.process_time() - start < 0.5
