import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gspo_mega.data.quickstart import problems, row_of
from gspo_mega.rewards.builtin import arithmetic, exact_match, gsm8k, problem_of_gsm8k_answer
from gspo_mega.rewards.numerals import final_number


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
        (r"\boxed{\frac{1}{2}} 3", "0.5"),
        (r"\boxed{1\!000", "1000"),
        (r"\boxed{} 4", None),
        ("The answer is 42.", "42"),
        ("It costs $3.50.", "3.50"),
        ("10-3", None),
        ("10 -3", None),
        ("10 - 3", None),
        ("so the answer is: 3", "3"),
        ("it is -3", "-3"),
        ("In 2020, 18 people", "18"),
        ("x=-3", "-3"),
        ("(10)-3", None),
        ("1, 2, 3", "3"),
        ("1,2,3", None),
        ("1,2345", None),
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


TRUE_PAIRS = [
    ("3/4", "#### 3/4"),
    ("3/4", "0.75"),
    ("3/4", r"\boxed{\frac{3}{4}}"),
    ("3/4", r"\boxed{\dfrac{6}{8}}"),
    ("3/4", "#### \u00be"),
    ("1.5", "#### 1 1/2"),
    ("1.5", "#### 1\u00bd"),
    ("0.6", "#### \u2157"),
    ("1.625", "#### 1\u215d"),
    ("3.5", "#### \u0663\u066b\u0665"),
    ("12", "#### \u0967\u0968"),
    ("1.5", r"\boxed{1\frac{1}{2}}"),
    ("-1.5", "#### -1 1/2"),
    ("1000", "#### 1e3"),
    ("1000", "#### 1E+3"),
    ("0.0015", "1.5e-3"),
    ("1e3", "#### 1,000"),
    ("-5", "#### - 5"),
    ("-5", "#### \u20135"),
    ("-5", "#### \u22125"),
    ("-5", "#### -$5"),
    ("-5", "#### $-5"),
    ("-5", "x = -5"),
    ("5", "#### +5"),
    ("1234", "#### 1 234"),
    ("1234", "#### 1\u00a0234"),
    ("1234", "1\u2009234"),
    ("1234", "1\u202f234"),
    ("1234567", r"\boxed{1\,234\,567}"),
    ("1234", "#### \uff11\uff12\uff13\uff14"),
    ("1234.5", "\uff11,\uff12\uff13\uff14\uff0e\uff15"),
    ("-12", "#### \uff0d\uff11\uff12"),
    ("18", "#### **18**"),
    ("18", "**18**"),
    ("18", "#### $18$"),
    ("18", r"#### \boxed{18}"),
    ("18", r"\boxed{x = 18}"),
    ("18", "#### 18."),
    ("12", r"\boxed{3 \times 4 = 12}"),
    ("12", r"\boxed{12\text{ cm}^2}"),
    ("50", r"\boxed{50\%}"),
    ("90", r"\boxed{90^\circ}"),
    ("5", "#### 5kg"),
    ("60", "#### 60 miles/hour"),
    ("2,125", "#### 2125"),
    (7.5, "7.50"),
    (1e-07, "#### 0.0000001"),
    (7, "7.0"),
]
FALSE_PAIRS = [
    ("3/4", "#### 4"),
    ("4", "#### 3/4"),
    ("3", "#### 3/4"),
    ("3/4", r"\boxed{\frac{4}{3}}"),
    ("2", r"\boxed{\frac{1}{2}}"),
    ("2024", "1/2/2024"),
    ("10", r"\boxed{2^{10}}"),
    ("2", r"\boxed{2^{10}}"),
    ("1024", r"\boxed{2^{10}}"),
    ("10", "2^10"),
    ("10", "#### 2**10"),
    ("2", "#### 2**10"),
    ("2", r"\boxed{x^2}"),
    ("2", r"\boxed{\sqrt{2}}"),
    ("2", r"\boxed{2\pi}"),
    ("2", r"\boxed{2x}"),
    ("5", r"\boxed{5 \text{ or } 6}"),
    ("10", "10\u00b2"),
    ("1", "#### 1e3"),
    ("3", "#### 1e3"),
    ("5", "#### - 5"),
    ("-5", "#### 10-5"),
    ("5", "#### 10-5"),
    ("10", "#### 10-5"),
    ("5", "10 - 5"),
    ("-5", "10 -5"),
    ("1", "#### 1 234"),
    ("234", "1\u2009234"),
    ("1", "#### 1,2345"),
    ("3", "#### 3,5"),
    ("5", "3,5"),
    ("1", "#### 1.234.567"),
    ("1", "#### 1'234"),
    ("3", "#### 3:45"),
    ("45", "3:45"),
    ("12", "3*4"),
    ("4", "3*4"),
    ("4", "3 x 4"),
    ("3", "#### 3 x 4"),
    ("0", "#### 1/0"),
    ("18", "#### eighteen"),
    ("18", "#### 19\n18"),
    ("20", "#### 18 dollars, not 20"),
    ("1" * 30, "#### " + "1" * 29 + "2"),
    ("5", "#### 1e99999999999"),
]


@pytest.mark.parametrize(("answer", "response"), TRUE_PAIRS)
def test_gsm8k_accepts(answer, response):
    assert call(gsm8k, response, answer) == 1.0


@pytest.mark.parametrize(("answer", "response"), FALSE_PAIRS)
def test_gsm8k_does_not_accept(answer, response):
    assert call(gsm8k, response, answer) == 0.0


NUMBERS = st.one_of(
    st.integers(-(10**9), 10**9).map(Fraction),
    st.decimals(-(10**6), 10**6, places=3).map(Fraction),
    st.fractions(-1000, 1000, max_denominator=60),
)


def plain_styles(number):
    """What one number may be written as; `{}` of a frame takes it."""
    size, sign = abs(number), "-" if number < 0 else ""
    top, bottom = size.numerator, size.denominator
    styles = [
        f"{top}/{bottom}",
        f"{top * 3}/{bottom * 3}",
        rf"\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{top}}}{{{bottom}}}",
    ]
    if top > bottom > 1:
        styles += [f"{top // bottom} {top % bottom}/{bottom}", rf"{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}"]
    if 1000 % bottom == 0:
        digits = f"{Decimal(top) / Decimal(bottom):.3f}"
        short = digits.rstrip("0").rstrip(".")
        grouped = f"{Decimal(short):,}"
        styles += [
            digits,
            short,
            grouped,
            f"${grouped}",
            f"{short}%",
            f"{int(Decimal(digits) * 1000)}e-3",
            f"**{grouped}**",
            rf"\${grouped}",
        ]
        styles += [grouped.replace(",", space) for space in ("\u00a0", "\u2009", "\u202f", r"\,", "{,}", r"\!")]
        styles += [short.translate({ord("0") + k: 0xFF10 + k for k in range(10)})]
    signs = [sign] if not sign else [sign, "\u2212", "\u2013", "\uff0d"]
    return [one + style if not style.startswith("**") else f"**{one}{style[2:]}" for one in signs for style in styles]


FRAMES = [
    "#### {}",
    "First 12.\n#### {}",
    "#### {} dollars\n",
    r"so \boxed{{{}}}",
    r"\boxed{{x = {}}}",
    "It is {}",
    "The answer: {}.",
    "x = {}",
]


@given(number=NUMBERS, other=NUMBERS, data=st.data())
@settings(max_examples=400, deadline=None)
def test_a_number_in_any_style_is_itself_and_no_other(number, other, data):
    assume(number != other)
    written = data.draw(st.sampled_from(FRAMES)).format(data.draw(st.sampled_from(plain_styles(number))))
    gold = data.draw(st.sampled_from(["{}", "It takes 2 steps.\n#### {}"])).format(
        data.draw(st.sampled_from(plain_styles(number)))
    )
    assert final_number(written) == number
    assert problem_of_gsm8k_answer(gold) is None and call(gsm8k, written, gold) == 1.0
    assert call(gsm8k, written, str(other)) == 0.0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("none", "no number in the answer 'none'"),
        (None, "no number in the answer 'None'"),
        ("#### 3 or 4", "several numbers in the answer '3 or 4'; one is expected"),
        ("3 * 4 is 12", "several numbers"),
        ("2^10", "several numbers"),
        ("10^x", "more than a number in the answer '10^x'"),
        ("1,2345", "several numbers"),
        ("3,5", "several numbers"),
        ("3:45", "several numbers"),
        ("1/0", "more than a number"),
        (r"so \boxed{2\pi}", "more than a number"),
    ],
)
def test_an_answer_that_is_not_one_number_is_no_gold(answer, problem):
    assert problem in problem_of_gsm8k_answer(answer)
    with pytest.raises(ValueError, match="in the answer"):
        call(gsm8k, "7", answer)


def test_exact_match():
    assert call(exact_match, " Paris\n", "Paris") == 1.0
    assert call(exact_match, "paris", "Paris") == 0.0
    assert call(exact_match, "paris", "Paris", ignore_case=True) == 1.0
    assert call(exact_match, "7", 7) == 1.0


@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1,",
        "111,",
        "111,111,",
        "-",
        "$",
        ".",
        "1.",
        r"\boxed{",
        "{",
        "#### ",
        "####",
        "\u2212",
        "1 ",
        "1/",
        "1 1/",
        "\u00a0",
        "1e",
        r"\frac{1",
        "*1",
        "**",
        "**a",
        "1\u00a0111",
        "1 111 ",
        r"\text{",
        "^{",
        "=",
        "\u00bd",
    ],
)
def test_hostile_input_takes_no_time(piece):
    text = (piece * (64 * 1024))[: 64 * 1024]
    start = time.process_time()
    final_number(text)
    call(arithmetic, text, "1")
    assert time.process_time() - start < 0.5
