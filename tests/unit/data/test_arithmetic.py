import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.data.quickstart import HELDOUT_EVERY, mixed_problems, problems, row_of, solve, split_of

numbers = st.integers(0, 10**9)


def test_the_written_form():
    assert solve(4719, 2386) == "9+6=15,1+8+1=10,7+3+1=11,4+2+1=7#7105"
    assert solve(1000, 1000) == "0+0=0,0+0=0,0+0=0,1+1=2#2000"
    assert solve(9999, 9999) == "9+9=18,9+9+1=19,9+9+1=19,9+9+1=19#19998"
    assert solve(0, 0) == "0+0=0#0" and solve(5, 1234).endswith("#1239")
    assert row_of(12, 34) == {"prompt": "12+34=", "answer": "46", "response": "2+4=6,1+3=4#46"}


@given(numbers, numbers)
def test_every_step_is_true_and_gives_the_result(a, b):
    steps, result = solve(a, b).split("#")
    assert int(result) == a + b
    carry, digits = 0, ""
    for step in steps.split(","):
        left, right = step.split("=")
        terms = [int(term) for term in left.split("+")]
        assert sum(terms) == int(right) and terms[2:] == [1] * carry
        carry, digits = int(right) // 10, right[-1] + digits
    assert int(("1" if carry else "") + digits) == a + b


@given(numbers, numbers)
def test_a_problem_is_in_one_split_whichever_way_round(a, b):
    assert split_of(a, b) == split_of(b, a)


def test_train_and_heldout_are_disjoint_for_any_seeds():
    def pairs(split, seed):
        return {frozenset(problem) for problem in problems(split, 1500, seed, num_digits=3)}

    heldout = pairs("heldout", 1) | pairs("heldout", 2)
    train = pairs("train", 1) | pairs("train", 2) | pairs("train", 3)
    assert heldout.isdisjoint(train)
    assert all(split_of(min(pair), max(pair)) == "heldout" for pair in heldout)


def test_the_heldout_share():
    num_heldout = sum(split_of(a, b) == "heldout" for a in range(1000, 1100) for b in range(1200, 1300))
    # 10 000 draws with probability 1/16: mean 625, standard deviation 24.
    assert abs(num_heldout - 10_000 / HELDOUT_EVERY) < 120


def test_problems_are_different_and_follow_from_the_seed():
    first = list(problems("train", 2000, 7))
    assert first == list(problems("train", 2000, 7)) != list(problems("train", 2000, 8))
    assert len({frozenset(problem) for problem in first}) == 2000
    assert all(re.fullmatch(r"\d{4}", str(number)) for problem in first for number in problem)
    # A larger set begins with the smaller one.
    assert list(islice(problems("train", 5000, 7), 2000)) == first


def test_too_many_problems_are_refused():
    with pytest.raises(ValueError, match="at most 127 can be drawn"):
        list(problems("heldout", 4000, 1, num_digits=2))


def test_problems_of_several_lengths_come_in_turn_and_are_those_of_their_length():
    mixed = list(mixed_problems("train", 10, 7))
    assert [len(str(a)) for a, _ in mixed] == [len(str(b)) for _, b in mixed] == [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    assert mixed[1::4] == list(problems("train", 3, 7))[: len(mixed[1::4])]
    assert mixed == list(mixed_problems("train", 1000, 7))[:10]
    with pytest.raises(ValueError, match="held-?out problems of 3 digits"):
        list(mixed_problems("heldout", 4 * 405_450 // 16, 7))
