"""The calculator's problems are right and split for good, its demonstrations say so, and its tool evaluates sums only."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.data.calculator import (
    CHAT_TEMPLATE,
    LONGEST_EXPRESSION,
    Problem,
    calculator,
    demonstrate,
    problems,
    row_of,
    split_of,
)
from gspo_mega.data.quickstart import write_tokenizer

TWO_DIGITS = st.integers(10, 99)
PROBLEMS = st.tuples(TWO_DIGITS, TWO_DIGITS).map(lambda parts: Problem(*parts)) | st.tuples(
    TWO_DIGITS, TWO_DIGITS, st.sampled_from("+-"), TWO_DIGITS
).map(lambda parts: Problem(*parts))


def test_the_written_form():
    row = row_of(Problem(47, 86, "+", 39))
    assert (row["prompt"], row["answer"]) == ("47*86+39=", "4081")
    assert [(message["role"], message["content"]) for message in row["response"]] == [
        ("assistant", "[47*86]"),
        ("tool", "4042"),
        ("assistant", "[4042+39]"),
        ("tool", "4081"),
        ("assistant", "#4081"),
    ]
    assert row_of(Problem(47, 86))["prompt"] == "47*86="
    assert [message["content"] for message in demonstrate(Problem(47, 86))] == ["[47*86]", "4042", "#4042"]


@given(PROBLEMS)
def test_every_call_is_true_and_the_last_turn_is_the_answer(problem):
    expected = eval(problem.text.rstrip("="))  # Python's own arithmetic, on what the strategy made
    messages = demonstrate(problem)
    assert messages[-1] == {"role": "assistant", "content": f"#{expected}"} and problem.answer == expected
    for call, result in zip(messages[:-1:2], messages[1:-1:2], strict=True):
        expression = call["content"].removeprefix("[").removesuffix("]")
        assert len(expression) <= LONGEST_EXPRESSION and int(result["content"]) == eval(expression)


@given(st.from_regex(r"[0-9]{1,3}([-+*][0-9]{1,2}){0,3}", fullmatch=True).filter(lambda s: len(s) <= 12))
def test_the_tool_agrees_with_python(expression):
    assert int(calculator(expression)) == eval(re.sub(r"\b0+(?=\d)", "", expression))


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "*2",
        "2**9",
        "1/0",
        "1 + 2",
        "a",
        "x=1",
        "()",
        "1,2",
        "1.5+1",
        "१+१",
        "\0",
        "__import__('os')",
        "1" * 13,
    ],
)
def test_what_is_no_sum_is_refused(expression):
    with pytest.raises(ValueError, match=r"^(13|16) characters; at most 12$|^not whole numbers"):
        calculator(expression)


@given(PROBLEMS)
def test_a_problem_is_in_one_split_whichever_way_round(problem):
    assert split_of(problem) == split_of(problem._replace(a=problem.b, b=problem.a))


def test_train_and_heldout_are_disjoint_for_any_seeds():
    heldout = {*problems("heldout", 400, 1), *problems("heldout", 400, 2)}
    train = {*problems("train", 2000, 1), *problems("train", 2000, 2)}
    assert heldout.isdisjoint(train) and heldout.isdisjoint({p._replace(a=p.b, b=p.a) for p in train})
    # A split by prompts alone would put 47*86 and 86*47 apart: the test above would fail.
    assert {p for p in train if p._replace(a=p.b, b=p.a) in train and p.a != p.b}


def test_problems_follow_from_the_seed_and_a_third_has_one_call():
    first = list(problems("train", 3000, 7))
    assert first == list(problems("train", 3000, 7)) != list(problems("train", 3000, 8))
    assert first[:1000] == list(problems("train", 1000, 7)) and len(set(first)) == 3000
    assert sum(problem.sign == "" for problem in first) == 1000
    with pytest.raises(ValueError, match="at most 765 can be drawn"):
        list(problems("heldout", 766, 1))


def test_the_template_names_the_tools_in_a_turn_of_their_own(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]
    messages = [{"role": "user", "content": "1*2="}, *demonstrate(Problem(11, 22))]
    text = tokenizer.apply_chat_template(messages[:2], tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\ntools: calculator(expression)<|im_end|>\n<|im_start|>user\n1*2=<|im_end|>\n"
        "<|im_start|>assistant\n[11*22]<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\n1*2=<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads(json.dumps(row_of(Problem(11, 22)))) == row_of(Problem(11, 22))
