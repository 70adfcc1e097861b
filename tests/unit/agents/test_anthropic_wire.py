"""Anthropic's Messages as chat completions have them: the messages, what has no such form, the answer and its events."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.agents.anthropic_wire import MessagesWriter, error_body, read_count, read_request
from gspo_mega.agents.wire import ApiError, Head, Reply, Sampling

RUN = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
USER = {"role": "user", "content": "x"}
CACHE = {"cache_control": {"type": "ephemeral"}}
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}
CALL = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": [1, "é"]}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}], "is_error": True}


def text(said, **more):
    return {"type": "text", "text": said} | more


def read(ignore=False, **fields):
    return read_request(json.dumps({"max_tokens": 9, "messages": [USER]} | fields).encode(), RUN, ignore)


def test_a_conversation_has_the_form_of_chat_completions():
    """As in the API reference's examples of tools and of thinking."""
    asked = read(
        model="policy",
        system=[text("You add", **CACHE), text(" numbers.")],
        tools=[ADD | CACHE | {"type": "custom"}],
        tool_choice={"type": "auto"},
        thinking={"type": "adaptive"},
        metadata={"user_id": "me"},
        stop_sequences=["Human:"],
        messages=[
            {"role": "user", "content": [text("2"), text("+3?", **CACHE)]},
            {"role": "assistant", "content": [THOUGHT, text("I add."), CALL]},
            {"role": "user", "content": [RESULT | CACHE, text("Well?")]},
        ],
    )
    assert asked.messages == [
        {"role": "system", "content": "You add numbers."},
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "é"]}'}}
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert asked.tools == [{"type": "function", "function": function}]
    assert list(asked.tools[0]["function"]) == ["name", "description", "parameters"], "a template writes them in order"
    assert (asked.max_new_tokens, asked.stop, asked.ignored, asked.n) == (9, ("Human:",), (), 1)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": []}, "messages", "missing or empty"),
        ({"messages": ["x"]}, "messages[0]", "role and content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "valid: user, assistant, system"),
        ({"messages": [USER | {"name": "me"}]}, "messages[0].name", "valid: role, content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", "reads text"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]", "reads text"),
        ({"messages": [{"role": "user", "content": [text("x"), RESULT]}]}, "messages[0].content[1]", "results first"),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0]",
            "reads text",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "{"}]}, "messages[1]", "end with the user's"),
        (
            {"messages": [{"role": "assistant", "content": [CALL, text("x")]}, USER]},
            "messages[0].content[1]",
            "text after tool_use; valid: in the order thinking, text, tool_use",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, USER]},
            "messages[0].content[0]",
            "valid: thinking, text, tool_use",
        ),
        (
            {"messages": [{"role": "assistant", "content": [CALL | {"input": "x"}]}, USER]},
            "messages[0].content[0].input",
            "an object was expected",
        ),
        ({"system": [{"type": "image"}]}, "system[0]", "reads text"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "a schema of their own"),
        ({"tools": [ADD | {"name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [ADD | {"input_schema": "x"}]}, "tools[0].input_schema", "JSON schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", 'valid: {"type": "auto"}, {"type": "none"}'),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice", "cannot be made to call a tool"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
            "or false",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", 'or {"type": "adaptive"}'),
        ({"output_config": {"effort": "high"}}, "output_config.effort", "leave it out"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format", "not constrained"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management.edits[0]", "no history"),
        ({"temperature": 0.5}, "temperature", "or 1.0"),
        ({"top_k": 40}, "top_k", "or -1"),
        ({"max_tokens": 0}, "max_tokens", "integer >= 1"),
        ({"stop": ["x"]}, "stop", "did you mean 'stop_sequences'?"),
        ({"mcp_servers": []}, "mcp_servers", "not a field"),
        ({"model": "claude"}, "model", "valid: policy (ANTHROPIC_MODEL)"),
    ],
)
def test_what_has_no_such_form_is_refused_by_name(fields, param, said):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert said in str(caught.value)


def test_what_would_change_sampling_is_ignored_where_the_run_says_so():
    fields = dict(temperature=0.2, thinking={"type": "enabled", "budget_tokens": 9}, output_config={"effort": "low"})
    assert read(ignore=True, **fields).ignored == ("temperature", "thinking", "output_config.effort")


def test_edits_that_keep_everything_are_none():
    assert read(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}).messages == [USER]


def test_counting_reads_the_context_alone():
    body = {"model": "policy", "messages": [USER], "tools": [ADD], "thinking": {"type": "enabled"}}
    asked = read_count(json.dumps(body).encode(), RUN)
    assert asked.messages == [USER] and asked.tools == read(tools=[ADD]).tools


def reply(message, finish="stop", stop_string="", rest=None):
    return Reply(
        {"role": "assistant"} | message, finish, stop_string, 7, 5, message["content"] if rest is None else rest
    )


CALLED = {
    "content": "I add.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "é"]}'}}],
    "reasoning_content": "hm",
}


def test_an_answer_has_blocks_in_order():
    body = MessagesWriter(read(), Head("x", 5, "policy")).whole([reply(CALLED)])
    assert body["content"] == [THOUGHT, text("I add."), CALL]
    assert (body["stop_reason"], body["stop_sequence"], body["id"]) == ("tool_use", None, "msg_x")
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (7, 5)


@pytest.mark.parametrize(
    ("message", "finish", "stop_string", "reason"),
    [
        ({"content": "x"}, "stop", "", "end_turn"),
        ({"content": "x"}, "length", "", "max_tokens"),
        ({"content": "x"}, "stop_string", "Human:", "stop_sequence"),
        (CALLED, "length", "", "max_tokens"),
    ],
)
def test_the_reason_of_an_end(message, finish, stop_string, reason):
    body = MessagesWriter(read(), Head("x", 5, "policy")).whole([reply(message, finish, stop_string)])
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop_string or None)


def events_of(stream):
    """[(name, data)] of server-sent events."""
    found = []
    for part in stream.decode().split("\n\n"):
        if part:
            name, _, data = part.partition("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def put_together(events):
    """The message as Anthropic's clients accumulate it."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, opened = events[0]["message"], None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert opened is None and event["index"] == len(message["content"])
            opened = dict(event["content_block"], **({"input": ""} if "input" in event["content_block"] else {}))
            message["content"].append(opened)
            continue
        assert opened is not None and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if "input" in opened:
                opened["input"] = json.loads(opened["input"] or "{}")
            opened = None
            continue
        for name, value in event["delta"].items():
            if name != "type":
                opened[{"partial_json": "input"}.get(name, name)] += value
    assert opened is None
    return message | events[-2]["delta"] | {"usage": message["usage"] | events[-2]["usage"]}


@pytest.mark.parametrize("message", [CALLED, {"content": "I add."}, {"content": ""}, CALLED | {"content": ""}])
@pytest.mark.parametrize("sent", ["", "I ", "I add."])
def test_events_make_the_whole_answer(message, sent):
    """Whatever part of the text was sent before the end."""
    if not message["content"].startswith(sent):
        return
    if sent and message.get("reasoning_content"):  # thinking comes first, so nothing is sent before it
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
    end = reply(message, rest=message["content"][len(sent) :])
    writer = MessagesWriter(read(stream=True), Head("x", 5, "policy"))
    stream = writer.begin(7) + b"".join(writer.text(one) for one in sent) + writer.end(end) + writer.close([end])
    assert put_together(events_of(stream)) == MessagesWriter(read(), Head("x", 5, "policy")).whole([end])


def test_errors_have_anthropics_form():
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    for status, kind in (
        kinds | {400: "invalid_request_error", 503: "overloaded_error", 415: "invalid_request_error"}
    ).items():
        body = error_body(ApiError("no", status=status))
        assert body["type"] == "error" and body["error"] == {"type": kind, "message": "no"}
    too_long = error_body(ApiError("9 tokens", code="context_length_exceeded"))
    assert too_long["error"]["message"] == "prompt is too long: 9 tokens"


# A conversation in the canonical form, written as a client of Anthropic's would: reading it gives it back.
WORDS = st.text(min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(
    WORDS, st.none() | st.booleans() | st.integers() | WORDS | st.lists(WORDS, max_size=2), max_size=3
)


@st.composite
def conversations(draw):
    messages = [{"role": "user", "content": draw(WORDS)}]
    for number in range(draw(st.integers(0, 3))):
        said = {"role": "assistant", "content": draw(st.just("") | WORDS)}
        calls = draw(st.lists(st.tuples(st.sampled_from(["add", "sub"]), ARGUMENTS), max_size=2))
        if calls:
            said["tool_calls"] = [
                {
                    "id": f"c{number}t{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for place, (name, arguments) in enumerate(calls)
            ]
        if thinking := draw(st.none() | WORDS):
            said["reasoning_content"] = thinking
        messages.append(said)
        for call in said.get("tool_calls", ()):
            messages.append({"role": "tool", "content": draw(WORDS), "tool_call_id": call["id"]})
        if not calls or draw(st.booleans()):
            messages.append({"role": "user", "content": draw(WORDS)})
    return messages


def as_anthropics(messages):
    """What a client sends that hands back the answers it was given."""
    sent, results = [], []
    for message in messages:
        if message["role"] == "assistant":
            if results:
                sent.append({"role": "user", "content": results})
                results = []
            blocks = MessagesWriter(read(), Head("x", 5, "policy")).whole([reply(message)])["content"]
            sent.append({"role": "assistant", "content": blocks})
        elif message["role"] == "tool":
            results.append(
                {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            )
        else:
            sent.append({"role": "user", "content": [*results, text(message["content"])]})
            results = []
    return [*sent, *([{"role": "user", "content": results}] if results else [])]


@settings(max_examples=60)
@given(conversations())
def test_a_conversation_comes_back_as_it_was_answered(messages):
    assert read(messages=as_anthropics(messages)).messages == messages


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "input", "name", "id"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
NAMES = (
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "context_management",
    "stream",
    "stop_sequences",
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(NAMES), ANY, max_size=4), st.lists(ANY, max_size=2))
def test_whatever_comes_is_read_or_refused(fields, blocks):
    """Never another error than the one that is written for the client."""
    given_messages = [{"role": role, "content": blocks} for role in ("assistant", "user")]
    try:
        asked = read_request(json.dumps({"messages": given_messages} | fields).encode(), RUN, False)
    except ApiError as error:
        assert error_body(error)["error"]["message"]
    else:
        assert asked.messages and all(isinstance(one["content"], str) for one in asked.messages)
