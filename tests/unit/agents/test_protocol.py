"""What a user may name as an episode, what is refused and where, and what an episode may return."""

import math
import sys

import numpy as np
import pytest

from gspo_mega.agents.protocol import (
    MAX_INFO_CHARACTERS,
    ContextFull,
    Outcome,
    TooManyTurns,
    TurnRefused,
    load_episode,
    outcome_of,
    runs_in_worker,
)
from gspo_mega.base.errors import EpisodeError
from gspo_mega.rewards.user_code import BadResult

SOURCE = """
import functools

async def play(task, model, tools, rounds=1): return 1.0
def plain(task, model, tools): return 1.0
async def narrow(task, model): return 1.0
async def endless(task, model, tools):
    yield 1.0
class Player:
    async def __call__(self, task, model, tools, *, bonus): return bonus
    async def method(self, task, model, tools): return 0.0
player = Player()
three = functools.partial(play, rounds=3)
NUMBER = 1
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_episodes.py").write_text(SOURCE)
    yield
    sys.modules.pop("my_episodes", None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("my_episodes:play", {}),
        ("my_episodes:play", {"rounds": 2}),
        ("my_episodes:player", {"bonus": 1}),
        ("my_episodes:player.method", {}),
        ("my_episodes:three", {}),
    ],
)
def test_async_callables_are_episodes(module, name, options):
    assert callable(load_episode(name, options))


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "one_tern",
            {},
            "episode 'one_tern': did you mean 'one_turn'. valid: one_turn, tool_loop, foreign, gym_text, openenv, or",
        ),
        ("my episodes:play", {}, "not of the form package.module:function"),
        ("my_episodes_none:play", {}, "there is no module 'my_episodes_none'"),
        ("my_episodes:pley", {}, "has no function 'pley'; did you mean 'play'"),
        ("my_episodes:NUMBER", {}, "NUMBER is a int, not a function"),
        ("my_episodes:plain", {}, r"my_episodes.py:5\): it is a plain function; `async def episode"),
        ("my_episodes:endless", {}, r"my_episodes.py:7\): it is an async generator"),
        ("my_episodes:Player", {"bonus": 1}, "it is a class"),
        (
            "my_episodes:narrow",
            {},
            r"my_episodes.py:6\): cannot be called as \(task, model, tools\): too many positional",
        ),
        ("my_episodes:player", {}, r"my_episodes.py:10\): cannot be .*missing a required .*'bonus'"),
        (
            "my_episodes:play",
            {"round": 2},
            r"\(task, model, tools, round=...\): got an unexpected keyword argument 'round'",
        ),
        ("my_episodes:play", {"task": 2}, "multiple values for argument 'task'"),
    ],
)
def test_everything_else_is_refused_with_its_place(module, name, options, text):
    with pytest.raises(EpisodeError, match=text):
        load_episode(name, options)


def test_users_code_runs_in_a_worker():
    assert runs_in_worker("my_episodes:play") and runs_in_worker("gym_text") and runs_in_worker("openenv")
    assert not runs_in_worker("one_turn") and not runs_in_worker("foreign")


def test_refusals_of_a_turn_can_be_caught_as_one():
    assert issubclass(ContextFull, TurnRefused) and issubclass(TooManyTurns, TurnRefused)
    assert {ContextFull.kind, TooManyTurns.kind} == {"context_full", "too_many_turns"}


def test_a_number_is_short_for_an_outcome():
    assert outcome_of(1) == outcome_of(np.float32(1)) == outcome_of(True) == Outcome(1.0)
    full = outcome_of(Outcome(None, (1, None, np.float64(0.5)), np.bool_(True), {"steps": np.int64(3)}, {"log": ["a"]}))
    assert full == Outcome(None, [1.0, None, 0.5], True, {"steps": 3.0}, {"log": ["a"]})
    assert all(type(value) is float for value in (*full.parts.values(), full.turn_rewards[0]))
    assert type(full.correct) is bool


@pytest.mark.parametrize(
    ("returned", "kind", "text"),
    [
        (None, "wrong_type", "returned nothing; a number or an Outcome was expected"),
        ("1", "wrong_type", "the result is '1'"),
        ({"reward": 1}, "wrong_type", "the result is {'reward'"),
        (math.nan, "not_finite", "the result is nan"),
        (10**400, "not_finite", "too large"),
        (Outcome(math.inf), "not_finite", "Outcome.reward is inf"),
        (Outcome("1"), "wrong_type", "Outcome.reward is '1'"),
        (Outcome(1, [0, math.nan]), "not_finite", r"Outcome.turn_rewards\[1\] is nan"),
        (Outcome(1, 0.5), "wrong_type", "Outcome.turn_rewards is 0.5; a list"),
        (Outcome(1, "12"), "wrong_type", "Outcome.turn_rewards is '12'; a list"),
        (Outcome(1, correct="yes"), "wrong_type", "Outcome.correct is 'yes'"),
        (Outcome(1, parts=[1]), "wrong_type", "Outcome.parts"),
        (Outcome(1, parts={"a": "b"}), "wrong_type", r"Outcome.parts\['a'\] is 'b'"),
        (Outcome(1, info={"a": object()}), "wrong_type", "Outcome.info is not JSON"),
        (Outcome(1, info={"a": "x" * MAX_INFO_CHARACTERS}), "wrong_type", "Outcome.info has 16393 characters"),
    ],
)
def test_what_is_no_outcome_is_named(returned, kind, text):
    with pytest.raises(BadResult, match=text) as caught:
        outcome_of(returned)
    assert caught.value.kind == kind


def test_the_earlier_name_of_the_module_works_in_users_files():
    import gspo_mega.agents.protocol as protocol

    code = "from gspo_mega.episodes.protocol import Outcome, Unreachable"
    found: dict = {}
    exec(code, found)
    assert found["Outcome"] is protocol.Outcome and found["Unreachable"] is protocol.Unreachable
