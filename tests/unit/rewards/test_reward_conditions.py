"""Several functions in one reward: conditions of `only_if`, names, what counts, what is asked, what fails."""

import pytest
from scoring_support import score, settings, trajectory

from gspo_mega.config.schema import RewardFunction
from gspo_mega.config.validate_rewards import parse_condition
from gspo_mega.rewards.weighted_sum import WeightedFunction, sum_of, tally

SHAPE = RewardFunction(function="regex", name="shape", weight=0.25, options={"pattern": r"^<a>"})
RIGHT = RewardFunction(function="regex", name="right", options={"pattern": r"<a>(?P<answer>.*)"}, only_if="shape")
BRIEF = RewardFunction(
    function="length", weight=0.5, options={"longest": 4, "soft": 4}, only_if=["right >= 1", "shape"]
)


def scored(reward, response, tokens=1, answer="7"):
    episode = trajectory(response, answer=answer)
    episode.turns[0].token_ids = [1] * tokens
    [found], pool = score(reward, episode)
    return found, pool


def test_weights_and_conditions():
    reward = settings(SHAPE, RIGHT, BRIEF)
    found, _ = scored(reward, "<a>7", tokens=2)
    assert found.reward == 0.25 + 1 - 0.25 and found.correct is True
    assert found.reward_parts == {"shape": 1, "right": 1, "right/counted": 1, "length": -0.5, "length/counted": 1}
    found, _ = scored(reward, "<a>8", tokens=9)
    assert found.reward == 0.25 and found.correct is False
    assert found.reward_parts == {"shape": 1, "right": 0, "right/counted": 1, "length/counted": 0}
    found, _ = scored(reward, "7", tokens=9)
    assert found.reward == 0 and found.correct is False and found.reward_error is None
    assert found.reward_parts == {"shape": 0, "right/counted": 0, "length/counted": 0}


def test_what_does_not_count_is_not_asked_and_what_fails_is_no_zero(folder):
    boom = RewardFunction(function="user_rewards:behave", name="boom", only_if="shape")
    found, pool = scored(settings(SHAPE, boom), "raise_('x')")
    assert found.reward == 0 and pool.failure_counts["exception"] == 0
    failing = RewardFunction(function="user_rewards:behave", name="first")
    after = RewardFunction(function="user_rewards:behave", name="after", only_if="first < 5")
    found, pool = scored(settings(failing, after), "raise_('x')")
    assert found.reward is None and found.correct is None and found.reward_error.startswith("first: ValueError: x")
    assert pool.failure_counts["exception"] == 1
    found, _ = scored(settings(failing, after), "4")
    assert found.reward == 8 and found.reward_parts == {"first": 4, "after": 4, "after/counted": 1}


def test_a_users_function_is_told_the_tokens_if_it_asks(folder):
    (folder / "user_rewards.py").write_text(
        "def tokens(*, num_response_tokens, **_): return num_response_tokens\ndef rest(**all): return len(all)\n"
    )
    found, _ = scored(settings("user_rewards:tokens", "user_rewards:rest"), "x", tokens=11)
    assert found.reward_parts == {"user_rewards:tokens": 11, "user_rewards:rest": 4}


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("math", ("math", ">=", 1)),
        (" my_rewards:score ", ("my_rewards:score", ">=", 1)),
        ("code>=0.5", ("code", ">=", 0.5)),
        ("length > -1", ("length", ">", -1)),
        ("a < .5", ("a", "<", 0.5)),
        ("a <= 1e-3", ("a", "<=", 0.001)),
        ("a == 0", ("a", "==", 0)),
        ("", None),
        ("a b", None),
        ("a >= b", None),
        ("a = 1", None),
        ("0.5 <= a", None),
        ("a >= 1 and b", None),
    ],
)
def test_conditions_are_read(text, condition):
    found = parse_condition(text)
    assert (found and (found.name, found.sign, found.bound)) == condition


def test_a_verdict_where_something_was_not_asked():
    def correct(**replies):
        return tally(tuple(WeightedFunction(name, 1.0, name in "mc") for name in replies), replies).correct

    one, zero, silent = ({"value": v, "parts": {}, "correct": None} for v in (1.0, 0.0, 0.5))
    assert correct(m=one, c=one) is True and correct(m=one, c=zero) is False
    assert correct(m=one, c=None) is True and correct(m=None, f=one) is False and correct(f=silent) is None


def test_a_sum_that_is_not_finite_stays_so():
    assert sum_of([1e308, 1e308]) == float("inf") and sum_of([]) == 0
