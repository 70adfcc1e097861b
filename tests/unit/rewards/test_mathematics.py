"""The reward `math`: a table of answers by hand, which answers of a data file are refused, and hostile responses."""

import math_kinds
import pytest
from math_pairs import pairs
from scoring_support import score, settings, trajectory

from gspo_mega.rewards.functions import load_function, problem_of_answer
from gspo_mega.rewards.mathematics import final_answer


def test_the_table():
    math = load_function("math", {})
    rows = list(pairs())
    assert len(rows) > 150 and 60 < sum(value for *_, value in rows) < len(rows) - 60
    wrong = [
        f"{gold!r} {response[:80]!r} gives {given}, not {value}"
        for gold, response, value in rows
        if (given := math(prompt="", response=response, answer=gold, metadata={})) != value
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", math_kinds.KINDS)
def test_each_kind(kind):
    """What one answer of a kind shows is true of the others: other characters, other sizes, other units."""
    math = load_function("math", {})
    rows = [row[1:] for row in math_kinds.pairs() if row[0] == kind]
    values = [value for *_, value in rows]
    assert 0 in values and 1 in values
    wrong = [
        f"{gold!r} {response!r} gives {given}, not {value}"
        for gold, response, value in rows
        if (given := math(prompt="", response=response, answer=gold, metadata={})) != value
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "answer", ["5", 5, 0.5, ["\\frac{1}{2}"], "so \\boxed{x^2}", "work\n#### 7", "\\text{red, green and blue}"]
)
def test_answers_that_can_be_read(answer):
    assert problem_of_answer(answer, ["math"]) is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "neither a text nor a number"),
        (True, "neither a text nor a number"),
        (["1", "2"], "neither a text nor a number"),
        ("", "the answer is empty"),
        ("\\boxed{}", "the answer is empty"),
        ("\\frac{1}{", "'\\\\frac{1}{' cannot be read as LaTeX"),
        ("\\foo{x}", "cannot be read as LaTeX"),
        ("x =", "cannot be read as LaTeX"),
        ("it follows from the lemma", "is prose; LaTeX is expected, alone, in \\boxed{...} or behind ####"),
        ("9^{9^{9}}", "is too large to be computed out"),
        ("x+" * 400 + "1", "has 801 characters; at most 600"),
    ],
)
def test_answers_that_cannot_be_read_are_refused(answer, said):
    assert said in (problem_of_answer(answer, ["gsm8k"]) or "") or said in (problem_of_answer(answer, ["math"]) or "")
    assert problem_of_answer(answer, ["math"]).endswith("(reward math)")
    with pytest.raises(ValueError):
        load_function("math", {})(prompt="", response="1", answer=answer, metadata={})


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 9000, "answer is " * 6000, "$" * 60_000, "\\(" * 30_000, "#### " * 12_000, "<answer>" * 8000]
)
def test_finding_an_answer_is_quick_in_any_text(text):
    found = final_answer(text)
    assert found is None or isinstance(found, str)


def test_the_pools_deadline_ends_a_comparison_which_is_the_responses_doing():
    """The package's own deadlines are off. SymPy looks for this integral for minutes."""
    [slow_one, quick], pool = score(
        settings("math", deadline_seconds=3.0),
        trajectory("\\boxed{\\int_0^1 \\frac{\\sin(x^2) e^{x^3}}{1+x^5} dx}", answer="\\frac{x}{3}+\\sqrt{2}"),
        trajectory("\\boxed{\\frac{1}{2}}", answer="0.5"),
    )
    assert quick.reward == 1 and quick.correct is True
    assert (slow_one.reward, slow_one.reward_error, slow_one.correct) == (0, None, False)
    assert slow_one.counts == {"num_response_faults": 1, "num_response_faults_time": 1}
    assert pool.fault_counts["time"] == 1 and not any(pool.failure_counts.values())
