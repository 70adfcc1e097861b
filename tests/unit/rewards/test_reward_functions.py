import sys

import pytest

from gspo_mega.base.errors import RewardError
from gspo_mega.rewards.builtin import gsm8k
from gspo_mega.rewards.functions import load_function


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(name, source) makes an importable module, forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)

    yield write
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_built_ins_and_user_functions(module):
    assert load_function("gsm8k", {}) is gsm8k
    module(
        "my_rewards_1",
        "class Scorer:\n    @staticmethod\n    def f(*, prompt, response, answer, metadata, bonus=0): return bonus\ndef"
        " g(**all): return 1",
    )
    assert (
        load_function("my_rewards_1:Scorer.f", {"bonus": 2})(prompt="", response="", answer=1, metadata={}, bonus=2)
        == 2
    )
    assert load_function("my_rewards_1:g", {"anything": 1})() == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "gsm8",
            "did you mean 'gsm8k'. valid: arithmetic, choice, code, exact_match, .*, regex, or package.module:function",
        ),
        ("whatever", "valid: arithmetic"),
        ("a b:c", "not of the form package.module:function"),
        (":f", "not of the form"),
        ("m:", "not of the form"),
        ("my_rewards_none:f", "there is no module 'my_rewards_none' in /"),
        ("json.nothing:f", "there is no module 'json.nothing'"),
        ("my_rewards_2:scor", "has no function 'scor'; did you mean 'score'. it defines score"),
        ("my_rewards_2:NUMBER", "NUMBER is a int, not a function"),
        (
            "my_rewards_2:score",
            (
                "cannot be called with prompt, response, answer, metadata as keywords: missing a required argument:"
                " 'solution'"
            ),
        ),
        ("my_rewards_2:slow", "async function"),
        (
            "my_rewards_broken:f",
            (
                r"importing my_rewards_broken fails: ModuleNotFoundError: No module named 'no_such_library'"
                r" .my_rewards_broken.py:2"
            ),
        ),
        ("my_rewards_syntax:f", "importing my_rewards_syntax fails: SyntaxError"),
        ("my_rewards_exit:f", "importing my_rewards_exit fails: SystemExit"),
        ("my_rewards_empty:f", "my_rewards_empty.py defines none"),
    ],
)
def test_what_is_missing_is_named(module, name, text):
    module(
        "my_rewards_2",
        "NUMBER = 1\ndef score(prompt, response, solution, **_): return 0\nasync def slow(**_): return 0",
    )
    module("my_rewards_broken", "\nimport no_such_library")
    module("my_rewards_syntax", "def f(:")
    module("my_rewards_exit", "raise SystemExit(3)")
    module("my_rewards_empty", "")
    with pytest.raises(RewardError, match=text):
        load_function(name, {})


def test_options_are_checked():
    with pytest.raises(RewardError, match="unexpected keyword argument 'ignore'"):
        load_function("exact_match", {"ignore": True})
    with pytest.raises(RewardError, match="option 'answer' is an argument that every reward gets"):
        load_function("exact_match", {"answer": 1})
