"""OpenAI's Responses as chat completions have them: the items, what has no such form, the response and its events."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_anthropic_wire import ANY, CALLED, conversations, events_of, reply

from gspo_mega.agents.openai_wire import error_body
from gspo_mega.agents.responses_wire import ResponsesWriter, read_request
from gspo_mega.agents.wire import ApiError, Head, Sampling

RUN = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
USER = {"role": "user", "content": "x"}
ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
EARLIER = {"resp_a": [USER, {"role": "assistant", "content": "y"}]}
EVENT = TypeAdapter(ResponseStreamEvent)
HEAD = Head("0" * 24, 5, "policy")


def read(ignore=False, **fields):
    return read_request(json.dumps({"input": "x"} | fields).encode(), RUN, ignore, EARLIER.get)


def test_items_have_the_form_of_chat_completions():
    asked = read(
        model="policy",
        instructions="You add.",
        tools=[ADD],
        max_output_tokens=9,
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": None, "summary": "auto"},
        text={"format": {"type": "text"}},
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Only "}, {"type": "input_text", "text": "sums."}]},
            {"type": "message", "role": "user", "content": "2+3?"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "x", "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "6"}]},
        ],
    )  # fmt: skip
    calls = [("c1", "{}"), ("c2", '{"a": 1}')]
    assert asked.messages == [
        {"role": "system", "content": "You add."},
        {"role": "system", "content": "Only sums."},
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "add", "arguments": written}}
                for name, written in calls
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "tool", "content": "6", "tool_call_id": "c2"},
    ]
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert asked.tools == [{"type": "function", "function": function}]
    assert (asked.max_new_tokens, asked.ignored, asked.n, asked.stop) == (9, (), 1, ())


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "missing or empty"),
        ({"input": 5}, "input", "a list was expected"),
        ({"input": [5]}, "input[0]", "an object was expected"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "valid: message, reasoning"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "function_call_output"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "valid: system"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "reads text"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "a text"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id", "a text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "only functions"),
        ({"tools": [ADD | {"name": "a b"}]}, "tools[0].name", "letters"),
        ({"tool_choice": "required"}, "tool_choice", "valid: auto, none"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "cannot be made to call a tool"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "not constrained"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "leave it out"),
        ({"previous_response_id": "resp_b"}, "previous_response_id", "no such response"),
        ({"background": True}, "background", "valid: false"),
        ({"truncation": "auto"}, "truncation", "valid: disabled"),
        ({"include": ["file_search_call.results"]}, "include[0]", "is not there"),
        ({"top_logprobs": 2}, "top_logprobs", "valid: 0"),
        ({"temperature": 0.5}, "temperature", "or 1.0"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "or true"),
        ({"max_tokens": 5}, "max_tokens", "did you mean 'max_output_tokens'?"),
        ({"conversation": "c"}, "conversation", "did you mean 'previous_response_id'?"),
        ({"model": "gpt"}, "model", "valid: policy"),
    ],
)
def test_what_has_no_such_form_is_refused_by_name(fields, param, said):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert said in str(caught.value)


def test_a_response_goes_on_without_its_instructions():
    asked = read(instructions="New.", previous_response_id="resp_a", input="z")
    expected = [{"role": "system", "content": "New."}, *EARLIER["resp_a"], {"role": "user", "content": "z"}]
    assert asked.messages == expected


def test_turns_without_a_users_word_between_them_stay_two():
    """The ids of items name their responses. Without ids, what cannot be one turn is two."""
    first, second = (
        ResponsesWriter(read(), Head("1" * 24, 5, "policy")),
        ResponsesWriter(read(), Head("e-t1", 5, "policy")),
    )
    said = first.whole([reply({"content": "a"})])["output"]
    called = second.whole([reply({"content": "", "tool_calls": CALLED["tool_calls"]})])["output"]
    assert [len(read(input=[USER, *items]).messages) for items in ([*said, *called], called, said)] == [3, 2, 2]
    plain = [{"role": "assistant", "content": text} for text in "ab"]
    assert read(input=[USER, *plain]).messages[1:] == plain


def streamed(message, sent, finish="stop"):
    end = reply(message, finish, rest=message["content"][len(sent) :])
    writer = ResponsesWriter(read(stream=True), HEAD)
    stream = writer.begin(7) + b"".join(writer.text(one) for one in sent) + writer.end(end) + writer.close([end])
    return events_of(stream)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("message", [CALLED, {"content": "I add."}, {"content": ""}, CALLED | {"content": ""}])
@pytest.mark.parametrize("sent", ["", "I ", "I add."])
def test_events_make_the_whole_answer(message, sent, finish):
    """Events and responses are those of OpenAI's client; its items are put together from the events alone, too."""
    if not message["content"].startswith(sent):
        return
    if sent and message.get("reasoning_content"):  # thinking comes first, so nothing is sent before it
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
    events = streamed(message, sent, finish)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        read_back = EVENT.validate_python(event)
        assert read_back.to_dict().items() <= event.items() and type(read_back).__name__.startswith("Response")
    whole = ResponsesWriter(read(), HEAD).whole([reply(message, finish)])
    Response.model_validate(whole, strict=True)
    assert events[-1]["type"] == ("response.completed" if finish == "stop" else "response.incomplete")
    assert events[-1]["response"] == whole
    items = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(dict(event["part"]))
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            assert items[event["output_index"]] | {"status": "completed"} == event["item"]
    assert [item | {"status": "completed"} for item in items] == whole["output"]


def test_an_error_in_a_stream_ends_the_response():
    events = events_of(ResponsesWriter(read(), HEAD).failure(ApiError("late", code="stream_taken_back")))
    assert [event["type"] for event in events] == ["error", "response.failed"]
    assert [EVENT.validate_python(event).type for event in events] == ["error", "response.failed"]


def as_items(messages):
    """What a client sends that hands back the items that it was given."""
    items = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            items += ResponsesWriter(read(), Head(f"e-t{number}", 5, "policy")).whole([reply(message)])["output"]
        elif message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
        else:
            items.append(message)
    return items


@settings(max_examples=60)
@given(conversations())
def test_a_conversation_comes_back_as_it_was_answered(messages):
    assert read(input=as_items(messages)).messages == messages


NAMES = (
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "include",
    "stream",
    "previous_response_id",
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(NAMES), ANY, max_size=4), st.lists(ANY, min_size=1, max_size=3))
def test_whatever_comes_is_read_or_refused(fields, items):
    """Never another error than the one that is written for the client."""
    try:
        asked = read(**({"input": items} | fields))
    except ApiError as error:
        assert error_body(error)["error"]["message"]
    else:
        assert all(isinstance(one["content"], str) for one in asked.messages)
