"""A sampled turn as a message: what is a call, what is thinking, what stays content and is counted, and that nothing
that a policy can write raises.
"""

from __future__ import annotations

import json

import chat_templates as families
import pytest
from chat_templates import TOOLS
from hypothesis import example, given
from hypothesis import strategies as st

from gspo_mega.agents.messages import FORMATS, format_of, parts_of
from gspo_mega.base.errors import DataError
from gspo_mega.data.calculator import CHAT_TEMPLATE

HERMES, BRACKETS, NONE = (FORMATS[name].format for name in ("hermes", "brackets", "none"))
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'


def calls_in(parts):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in parts.message.get("tool_calls", [])
    ]


def test_a_call_in_tags_beside_content_by_hand():
    parts = parts_of(f"I ask.\n{CALL}", HERMES, turn=3)
    assert parts.num_broken_calls == 0
    assert parts.message == {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {
                "id": "c0003t000",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "2+2"}'},
            }
        ],
    }


@pytest.mark.parametrize(
    ("text", "calls", "content", "broken"),
    [
        (CALL + "\n" + CALL, 2, "", 0),
        (f"a {CALL} b", 1, "a  b", 0),
        ("<tool_call>{}</tool_call>", 0, "<tool_call>{}</tool_call>", 1),
        ("<tool_call>not json</tool_call>", 0, "<tool_call>not json</tool_call>", 1),
        (f"<tool_call>oops {CALL}", 1, "<tool_call>oops", 1),
        (CALL[:-1], 0, CALL[:-1], 1),
        (f"{CALL}<tool_call>", 1, "<tool_call>", 1),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', 0, None, 1),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 0, None, 1),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', 0, None, 1),
        ('<tool_call>{"name": "f"}</tool_call>', 1, "", 0),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', 1, "", 0),
        ('<tool_call>{"name": "f", "arguments": "{} x"}</tool_call>', 0, None, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', 0, None, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', 0, None, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', 0, None, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', 1, "", 0),
        ('<tool_call>{"name": "f", "arguments": {}} </tool_call', 0, None, 1),
        ("<tool_call>" + "[" * 100_000, 0, None, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}</tool_call>", 0, None, 1),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", 0, None, 1),
        ("</tool_call> no call", 0, "</tool_call> no call", 0),
    ],
)
def test_calls_in_tags(text, calls, content, broken):
    parts = parts_of(text, HERMES, turn=0)
    assert len(calls_in(parts)) == calls and parts.num_broken_calls == broken
    assert parts.message["content"] == (text if content is None else content)


@pytest.mark.parametrize(
    ("text", "expressions", "content", "broken"),
    [
        ("[47*86]", ["47*86"], "", 0),
        ("so [1+1] and [2+2].", ["1+1", "2+2"], "so  and .", 0),
        ("[]", [], "[]", 1),
        ("[1", [], "[1", 1),
        ("1]", [], "1]", 0),
        ("[a[b]", ["b"], "[a", 1),
        ("#4081", [], "#4081", 0),
    ],
)
def test_calls_in_brackets(text, expressions, content, broken):
    parts = parts_of(text, BRACKETS, turn=0, tools=TOOLS)
    assert calls_in(parts) == [("calculator", {"expression": one}) for one in expressions]
    assert (parts.message["content"], parts.num_broken_calls) == (content, broken)


@pytest.mark.parametrize(
    ("text", "gap", "thinking", "content"),
    [
        ("<think>\nlet me\n</think>\n\n4", "", "let me", "4"),
        ("let me\n</think>\n\n4", "<|im_start|>assistant\n<think>\n", "let me", "4"),
        ("4", "<think>\n\n</think>\n\n", None, "4"),
        ("<think>\n\n</think>\n\n4", "", None, "4"),
        ("let me", "<think>\n", "let me", ""),
        ("<think>for ever", "", "for ever", ""),
        ("4 <think>no</think>", "", None, "4 <think>no</think>"),
        ("a</think>b</think>c", "<think>", "a", "b</think>c"),
        (f"<think>{CALL}", "", CALL, ""),
        ("  4 \n", "", None, "  4 \n"),
    ],
)
@pytest.mark.parametrize("tool_format", [HERMES, NONE])
def test_thinking(tool_format, text, gap, thinking, content):
    parts = parts_of(text, tool_format, turn=0, gap=gap)
    assert parts.message.get("reasoning_content") == thinking
    assert parts.message["content"] == content and "tool_calls" not in parts.message


def test_a_call_behind_thinking_is_one():
    parts = parts_of(f"<think>\n{CALL}\n</think>\n{CALL}", HERMES, turn=0)
    assert len(calls_in(parts)) == 1 and parts.message["reasoning_content"] == CALL


words = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "[", "]", "{", "}", '"', "\\", "\n", " ", ","),
            *('{"name": "f", "arguments": {"a": 1}}', '"name":', '"arguments":', "NaN", "\\ud800", "\U0001f600", CALL),
        ]
    )
    | st.text(max_size=4),
    max_size=24,
).map("".join)


@given(words, st.sampled_from([HERMES, BRACKETS, NONE]), st.sampled_from(["", "<think>\n", "x"]))
@example("<tool_call>" * 20, HERMES, "")
def test_no_text_raises_and_none_of_it_is_lost_or_invented(text, tool_format, gap):
    parts = parts_of(text, tool_format, turn=0, tools=TOOLS, gap=gap)
    message = parts.message
    json.dumps(message).encode()
    for call in message.get("tool_calls", []):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    for said in (message["content"], message.get("reasoning_content", "")):
        letters = iter(text)
        assert all(letter in letters for letter in said), "letters of the text, in their order"
    if not calls and "<think>" not in text + gap:
        assert message["content"] == text
    first = min((at for opener in tool_format.openers if (at := text.find(opener)) >= 0), default=len(text))
    if gap != "<think>\n":  # what is streamed before an opener stays the beginning of the content
        assert message["content"].startswith(text[:first].rstrip()) or not text[:first].strip()


def test_the_template_shows_the_format():
    assert format_of("auto", families.THINKING, TOOLS) == HERMES
    assert format_of("auto", families.THINKING, None) == NONE
    assert format_of("auto", families.QUICKSTART, []) == NONE
    assert format_of("brackets", CHAT_TEMPLATE, TOOLS) == BRACKETS
    assert format_of("none", families.THINKING, TOOLS) == NONE
    for template in (families.QUICKSTART, families.SHARED_END, families.TOOLS_LAST):
        with pytest.raises(DataError, match=r"cannot tell .* set one of 'hermes', 'brackets', 'none'"):
            format_of("auto", template, TOOLS)


def test_brackets_are_for_one_tool_with_one_text():
    two = [*TOOLS, {"type": "function", "function": {"name": "other", "parameters": {}}}]
    with pytest.raises(DataError, match="there are 2 tools: calculator, other"):
        format_of("brackets", "", two)
    number = {"type": "object", "properties": {"x": {"type": "integer"}}}
    with pytest.raises(DataError, match=r"add takes x \(integer\)"):
        format_of("brackets", "", [{"type": "function", "function": {"name": "add", "parameters": number}}])
    with pytest.raises(DataError, match="now takes none"):
        format_of("brackets", "", [{"type": "function", "function": {"name": "now"}}])


def test_white_space_that_was_streamed_before_a_call_stays_in_its_content():
    text = ' 0<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
    parts = parts_of(text, format_of("hermes", "", TOOLS), turn=0, tools=TOOLS)
    assert parts.message["content"] == " 0" and len(parts.message["tool_calls"]) == 1
