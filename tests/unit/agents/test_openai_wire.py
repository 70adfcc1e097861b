"""What a request may say, and what is answered where it says something else: the field, and what would be valid."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.agents.openai_wire import error_body, finish_of, log_probs_of, read_request, sent_message
from gspo_mega.agents.wire import ApiError, Reply, Sampling

RUN = Sampling(temperature=1.0, top_p=0.9, top_k=-1)
USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def read(ignore=False, **fields):
    return read_request(json.dumps({"messages": [USER]} | fields).encode(), RUN, ignore)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": []}, "messages", "missing or empty"),
        ({"messages": "hello"}, "messages", "a list was expected"),
        ({"messages": ["hello"]}, "messages[0]", "role and content"),
        ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role", "valid: system, developer, user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [USER, {"role": "tool", "content": "5"}]}, "messages[1].tool_call_id", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "reads text"),
        ({"messages": [{"role": "user", "content": "x", "cache": 1}]}, "messages[0].cache", "valid: content, name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0]", "JSON text"),
        ({"temperature": 0.7}, "temperature", "0.7 is not what the run samples the session with"),
        ({"temperature": True}, "temperature", "valid: leave it out, or 1.0"),
        ({"top_p": 0.5}, "top_p", "or 0.9"),
        ({"top_k": 5}, "top_k", "or -1"),
        ({"min_p": 0.1}, "min_p", "or 0"),
        ({"seed": 1}, "seed", "valid: leave it out."),
        ({"logit_bias": {"5": 1}}, "logit_bias", "or {}"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "or true"),
        ({"presence_penalty": 0.1}, "presence_penalty", "or 0"),
        ({"model": "gpt-4o"}, "model", "valid: policy"),
        ({"n": 0}, "n", "integer >= 1"),
        ({"n": True}, "n", "integer >= 1"),
        ({"stop": [1]}, "stop", "a list of texts"),
        ({"stop": [""]}, "stop", "1 to 1024 characters"),
        ({"stop": ["x"] * 33}, "stop", "at most 32 texts"),
        ({"top_logprobs": 3}, "top_logprobs", "valid: 0"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not constrained"),
        ({"modalities": ["audio"]}, "modalities", 'valid: ["text"]'),
        ({"tools": [{"name": "add"}]}, "tools[0]", "is not a tool"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tool_choice": "required"}, "tool_choice", "valid: auto, none"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "valid: auto, none"),
        ({"max_tokens": 0}, "max_tokens", "integer >= 1"),
        ({"max_tokens": True}, "max_tokens", "integer >= 1"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": 1}, "stream_options", "an object"),
        ({"functions": []}, "functions", "did you mean 'tools'?"),
        ({"temprature": 1.0}, "temprature", "did you mean 'temperature'?"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, param, text):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert text in str(caught.value)
    assert str(caught.value).startswith((f"{param}: ", "the model"))
    assert caught.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"temperature": NaN}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ApiError, match="the body is") as caught:
        read_request(body, RUN, False)
    assert caught.value.code == "invalid_json"


def test_what_says_nothing_new_is_accepted():
    asked = read(
        model="policy", temperature=1, top_p=0.9, top_k=-1, n=1, stop=None, seed=None, logit_bias={}, user="me",
        presence_penalty=0.0, parallel_tool_calls=True, metadata={"a": 1}, response_format={"type": "text"}, tools=None,
        stream=None, top_logprobs=0, service_tier="auto", store=False, unknown=None,
    )  # fmt: skip
    assert (asked.messages, asked.tools, asked.ignored) == ([USER], [], ())
    assert (asked.stream, asked.logprobs, asked.max_new_tokens) == (False, False, None)


def test_the_smaller_limit_holds():
    assert read(max_tokens=5, max_completion_tokens=3).max_new_tokens == 3


def test_ignored_fields_are_named():
    assert read(ignore=True, temperature=0.2, seed=4, top_p=0.9).ignored == ("temperature", "seed")
    with pytest.raises(ApiError, match="response_format"):
        read(ignore=True, response_format={"type": "json_object"})


def test_texts_that_end_a_turn():
    assert read(stop="Observation:").stop == ("Observation:",)
    assert read(stop=["a", "b", "a"]).stop == ("a", "b")
    assert read(stop=[]).stop == read(stop=None).stop == ()


def test_strict_is_no_part_of_a_schema():
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {}}}
    assert read(tools=[tool]).tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_a_message_that_comes_back_is_the_message_that_was_sent():
    """Whatever null and empty fields a client adds to it."""
    recorded = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    back = sent_message(recorded) | {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert back["content"] is None
    back["tool_calls"] = [{"index": 0, **CALL}]
    assert read(messages=[USER, back]).messages[1] == recorded
    assert read(messages=[{"role": "developer", "content": "x"}]).messages == [{"role": "system", "content": "x"}]


@given(st.booleans(), st.booleans())
def test_equal_requests_have_equal_fingerprints(stream, logprobs):
    """How an answer is written is no part of what was asked; what the policy is shown is."""
    assert read(stream=stream, logprobs=logprobs).fingerprint == read(user="me").fingerprint
    different = [read(max_tokens=4), read(messages=[USER, USER]), read(messages=[{"role": "user", "content": "y"}])]
    assert len({one.fingerprint for one in [*different, read(n=2), read(stop="x"), read()]}) == 6


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "messages",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "n",
        "stop",
        "seed",
        "temperature",
        "logit_bias",
        "model",
        "max_tokens",
        "logprobs",
        "response_format",
        "modalities",
        "top_logprobs",
        "role",
    ]
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON | st.just("user")), max_size=3
)


@settings(max_examples=100)
@given(st.dictionaries(NAMES, JSON, max_size=4), MESSAGES)
def test_whatever_comes_is_read_or_refused(fields, messages):
    """Never another error than the one that is written for the client."""
    body = json.dumps({"messages": messages} | fields).encode()
    try:
        asked = read_request(body, RUN, False)
    except ApiError as error:
        assert error_body(error)["error"]["message"]
        assert error.status in (400, 404)
    else:
        assert asked.messages and all(isinstance(one["content"], str) for one in asked.messages)


def test_the_reason_of_an_end():
    reasons = ("stop", "length", "stop_string")
    said = [Reply({"content": "x"}, reason, "", 1, 1, "") for reason in reasons]
    called = [Reply({"content": "", "tool_calls": [CALL]}, reason, "", 1, 1, "") for reason in reasons]
    assert [finish_of(reply) for reply in said] == ["stop", "length", "stop"]
    assert [finish_of(reply) for reply in called] == ["tool_calls", "length", "tool_calls"]


def test_a_part_of_a_character_has_no_bytes():
    entries = log_probs_of([1, 2], [-1.0, 0.0], ["é", "�"])["content"]
    assert [entry["bytes"] for entry in entries] == [[195, 169], None]
