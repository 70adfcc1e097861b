"""Tools: the schema of a typed function, arguments from a policy's JSON, results as text, and what is refused."""

import json
import sys

import pytest

from gspo_mega.agents.tools import MAX_RESULT_CHARACTERS, ToolError, load_tool, load_tools, text_of
from gspo_mega.base.errors import EpisodeError

SOURCE = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional
from gspo_mega.agents.protocol import Task

@dataclass
class Place:
    town: str
    zip: int = 0

    def __post_init__(self):
        if self.zip < 0:
            raise ValueError("a zip is not negative")

@dataclass
class Loop:
    inner: Loop | None = None

async def search(
    query: str,
    limit: int = 5,
    *,
    kind: Literal["all", "news"] = "all",
    weights: dict[str, float] | None = None,
    near: Optional[Place] = None,
    tags: Annotated[list[str], "Words that must occur."] = (),
    exact: bool = False,
    task: Task,
):
    """Find pages
    by their words.

    Args:
        query: What to look for,
            in any language.
        limit (int): Most results.
        task: Not for the policy.

    Returns:
        tags: of the pages
    """
    return query

def ping():
    """Say something."""

def level(x: Literal[1, 7], sure: Literal[True] = True):
    """Set the level."""

def with_task(task, x: int):
    """Has the task."""

class Elsewhere:
    @staticmethod
    def ping():
        """Another."""

def no_text(x: int): return x
def untyped(x):
    "T."
def anything(x: Any):
    "T."
def bare(x: list):
    "T."
def either(x: int | str):
    "T."
def keys(x: dict[int, str]):
    "T."
def mixed(x: Literal["a", 1]):
    "T."
def spread(*x: int):
    "T."
def only(x: int, /):
    "T."
def endless(x: Loop):
    "T."
def nowhere(x: Missing):
    "T."
def other(x: int):
    """T.

    Args:
        y: Wrong name.
    """
def drip(x: int):
    "T."
    yield 1
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_tools.py").write_text(SOURCE)
    yield
    sys.modules.pop("my_tools", None)


def test_the_schema_says_what_the_function_says():
    tool = load_tool("my_tools:search")
    assert (tool.name, tool.is_async, tool.task_parameter) == ("search", True, "task")
    function = tool.schema["function"]
    assert tool.schema["type"] == "function" and function["description"] == "Find pages\nby their words."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in any language."},
            "limit": {"type": "integer", "description": "Most results.", "default": 5},
            "kind": {"type": "string", "enum": ["all", "news"], "default": "all"},
            "weights": {"type": "object", "additionalProperties": {"type": "number"}, "nullable": True},
            "near": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "zip": {"type": "integer"}},
                "required": ["town"],
                "nullable": True,
            },
            "tags": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Words that must occur.",
                "default": [],
            },
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
    }
    json.dumps(tool.schema)
    assert load_tool("my_tools:with_task").schema["function"]["parameters"]["required"] == ["x"]


def test_arguments_are_checked_and_converted():
    tool = load_tool("my_tools:search")
    Place = sys.modules["my_tools"].Place
    given = '{"query": 7, "limit": "3", "near": {"town": "Ulm", "zip": 89073.0}, "exact": "True", "weights": {"a": 1}}'
    assert tool.arguments_of(given) == {
        "query": "7",
        "limit": 3,
        "near": Place("Ulm", 89073),
        "exact": True,
        "weights": {"a": 1.0},
    }
    assert tool.arguments_of({"query": "x", "tags": '["a", "b"]', "near": None, "kind": "news"}) == {
        "query": "x",
        "tags": ["a", "b"],
        "near": None,
        "kind": "news",
    }
    assert load_tool("my_tools:ping").arguments_of("") == {}


def test_a_choice_of_numbers_is_given_as_a_number_or_as_text():
    tool = load_tool("my_tools:level")
    assert tool.schema["function"]["parameters"]["properties"]["x"] == {"type": "integer", "enum": [1, 7]}
    for given in ({"x": 7, "sure": True}, {"x": "7", "sure": "True"}):
        assert tool.arguments_of(given) == {"x": 7, "sure": True}
    for wrong in ({"x": 2}, {"x": True}, {"x": 7.0}, {"x": 1, "sure": 1}):
        with pytest.raises(ToolError, match="valid: "):
            tool.arguments_of(wrong)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{", "the arguments of search are not JSON"),
        ("[" * 100_000, "the arguments of search are not JSON"),
        ("[1]", r"the arguments of search are \[1\]; an object was expected"),
        ({}, "search lacks its argument 'query'"),
        ({"query": "x", "qery": 1}, "search has no argument 'qery'; it takes query, limit"),
        ({"query": None}, "argument 'query' of search is null; a text was expected"),
        ({"query": ["x"]}, r"argument 'query' of search is \[\"x\"\]; a text"),
        ({"query": "x", "limit": 1.5}, "argument 'limit' of search is 1.5; an integer was expected"),
        ({"query": "x", "limit": True}, "argument 'limit' of search is true; an integer"),
        ({"query": "x", "limit": float("inf")}, "argument 'limit' of search is Infinity; an integer"),
        ({"query": "x", "limit": "9" * 5000}, r"argument 'limit' of search is \"9999.*\.\.\.; an integer"),
        ({"query": "x", "limit": None}, "argument 'limit' of search is null"),
        ({"query": "x", "kind": "old"}, 'argument \'kind\' of search is "old"; valid: "all", "news"'),
        ({"query": "x", "exact": 1}, "argument 'exact' of search is 1; true or false"),
        ({"query": "x", "tags": "a b"}, "argument 'tags' of search is the text \"a b\"; a JSON array"),
        ({"query": "x", "tags": {"a": 1}}, "argument 'tags' of search is .*; a JSON array"),
        ({"query": "x", "tags": ["a", {}]}, "argument 'tags' of search element 1 is {}; a text"),
        ({"query": "x", "weights": {"a": "nan"}}, "argument 'weights' of search entry 'a' is \"nan\"; a number"),
        ({"query": "x", "near": {}}, "argument 'near' of search lacks its entry 'town'"),
        ({"query": "x", "near": {"town": "U", "street": 1}}, "has an entry 'street'; it takes town, zip"),
        (
            {"query": "x", "near": {"town": "U", "zip": -1}},
            "argument 'near' of search is refused: a zip is not negative",
        ),
        ({"query": "x", "task": {}}, "search has no argument 'task'"),
    ],
)
def test_wrong_arguments_are_an_answer_to_the_policy(arguments, text):
    with pytest.raises(ToolError, match=text):
        load_tool("my_tools:search").arguments_of(arguments)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_text", r"my_tools.py:\d+\): it has no docstring"),
        ("untyped", "parameter 'x' has no type; supported are str, int"),
        ("anything", "parameter 'x' has the type (typing.)?Any; supported are"),
        ("bare", "parameter 'x' has the type list; supported are"),
        ("either", r"parameter 'x' has the type int \| str; supported are"),
        ("keys", r"parameter 'x' has the type dict\[int, str\]; supported are"),
        ("mixed", r"Literal\['a', 1\]; its values must be all texts or all integers"),
        ("spread", r"parameter \*x: .*int.* has no name"),
        ("only", "has no name that a call could use"),
        ("endless", "the type of parameter 'x' contains itself"),
        ("nowhere", "its annotations cannot be read: name 'Missing' is not defined"),
        ("other", "its docstring describes 'y', which is none of its parameters"),
        ("drip", "not a class or a generator"),
        ("Place", "not a class or a generator"),
        ("serch", "has no function 'serch'; did you mean 'search'"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_with_its_place(name, text):
    with pytest.raises(EpisodeError, match=text):
        load_tool(f"my_tools:{name}")


def test_two_tools_of_one_name_are_refused():
    assert list(load_tools(["my_tools:ping", "my_tools:search"])) == ["ping", "search"]
    with pytest.raises(EpisodeError, match="tool 'my_tools:Elsewhere.ping': 'my_tools:ping' is called ping too"):
        load_tools(["my_tools:ping", "my_tools:Elsewhere.ping"])


def test_results_become_text():
    load_tool("my_tools:ping")
    place = sys.modules["my_tools"].Place("Ülm", 1)
    assert [text_of(value)[0] for value in ("as it is", 4042, None, [1, "ä"], {"a": 1.5}, place)] == [
        "as it is",
        "4042",
        "null",
        '[1, "ä"]',
        '{"a": 1.5}',
        '{"town": "Ülm", "zip": 1}',
    ]
    assert text_of("a\ud800b") == ("a?b", False)
    with pytest.raises(ToolError, match="returned set, which is not JSON"):
        text_of({1})


def test_a_long_result_is_cut_and_says_so():
    whole, was_cut = text_of("x" * MAX_RESULT_CHARACTERS)
    assert len(whole) == MAX_RESULT_CHARACTERS and not was_cut
    text, was_cut = text_of("x" * (MAX_RESULT_CHARACTERS + 1))
    assert was_cut and text == "x" * MAX_RESULT_CHARACTERS + f"\n[cut after {MAX_RESULT_CHARACTERS} characters]"
