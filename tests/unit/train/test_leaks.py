"""Held-out prompts that are trained on, or in two sets, are found by what they say."""

from __future__ import annotations

from gspo_mega.train.held_out import PromptTexts, words_of

PROBLEM = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did she sell altogether in April and May?"
)


def texts(*prompts):
    return PromptTexts(map(words_of, prompts))


def test_case_white_space_and_marks_do_not_count_and_signs_do():
    held_out = texts("What is  2 + 2?", "3-1=")
    assert held_out.same_as(words_of("what is 2+2")) == 0
    assert held_out.same_as(words_of([{"role": "user", "content": "What is 2+2 ?"}])) == 0
    assert held_out.same_as(words_of("What is 2 - 2?")) is None and held_out.same_as(words_of("3+1=")) is None


def test_a_prompt_inside_another_text_is_close_to_it():
    held_out = texts("1+1=", PROBLEM)
    assert held_out.close_to(words_of(f"Solve this. {PROBLEM.upper()} Think first.")) == [1]
    assert held_out.close_to(words_of(PROBLEM.replace("altogether in April", "together, in April"))) == [1]
    assert held_out.close_to(words_of(" ".join(reversed(PROBLEM.split())))) == []
    assert held_out.close_to(words_of("1+1=")) == [], "too short: compared as a whole only"


def test_an_instruction_that_a_set_shares_says_nothing():
    rule = "Solve the problem step by step and put the final answer of it at the very end in a box. "
    held_out = texts(*(rule + f"{k}+{k}=" for k in range(4)))
    assert held_out.close_to(words_of(rule + "7+9=")) == []
