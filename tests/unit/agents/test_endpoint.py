"""The endpoint over real sockets, as OpenAI's own client meets it: answers, streams, tools, errors, bounds."""

import socket
import threading
import time
import urllib.parse

import openai
import pytest
from endpoint_support import STOP, Served, client_of, post_body, raw, wait_until

from gspo_mega.agents.protocol import ContextFull, TooManyTurns
from gspo_mega.base.errors import DataError, RolloutError

ASK = [{"role": "user", "content": "two and three?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def served():
    made = Served()
    yield made
    made.close()


def called(text):
    """A message as it is parsed: thinking, content, one call."""
    message = {"role": "assistant", "content": text.partition("<tool_call>")[0].rstrip()}
    if "<tool_call>" in text:
        function = {"name": "add", "arguments": text.partition("<tool_call>")[2]}
        message["tool_calls"] = [{"id": "call_0_0", "type": "function", "function": function}]
    return message


def test_a_turn_is_answered_with_its_usage_and_reason(served):
    with served.visit(["five"]) as (session, visit):
        answer = client_of(visit).chat.completions.create(model=visit.model, messages=ASK)
    assert answer.choices[0].message.content == "five"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id == "chatcmpl-step000001-g00002-s003-t0"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 5, 12)
    assert session.asked == [{"messages": ASK, "tools": [], "max_new_tokens": None}]


def test_log_probs_have_token_ids(served):
    with served.visit(["a"]) as (_, visit):
        answer = client_of(visit).chat.completions.create(model="policy", messages=ASK, logprobs=True)
    entries = [(entry.token, entry.token_id, entry.logprob) for entry in answer.choices[0].logprobs.content]
    assert entries == [("a", ord("a"), -0.5), ("", STOP, -1.5)]


def test_a_call_of_a_tool_and_what_comes_back(served):
    """The history that the client makes of its own objects reaches the session as it was answered."""
    with served.visit(['I add.\n<tool_call>{"a": 2}', "five"], message_of=called) as (session, visit):
        client = client_of(visit)
        first = client.chat.completions.create(model="policy", messages=ASK, tools=[ADD], max_tokens=40)
        assert first.choices[0].finish_reason == "tool_calls"
        call = first.choices[0].message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 2}')
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "5"}]}
        history = [*ASK, first.choices[0].message, result]
        assert client.chat.completions.create(model="policy", messages=history, tools=[ADD]).choices[0].message
    assert session.asked[0] == {"messages": ASK, "tools": [ADD], "max_new_tokens": 40}
    assert session.asked[1]["messages"] == [
        *ASK,
        called('I add.\n<tool_call>{"a": 2}'),
        {"role": "tool", "tool_call_id": "call_0_0", "content": "5"},
    ]


def test_a_forbidden_call_hides_the_tools(served):
    with served.visit(["five"]) as (session, visit):
        client_of(visit).chat.completions.create(model="policy", messages=ASK, tools=[ADD], tool_choice="none")
    assert session.asked[0]["tools"] == []


def read_stream(stream):
    """The stream's message as a client puts it together, and the pieces of its content."""
    pieces, reasoning, calls, finish, usage = [], "", {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                calls[call.index] = (call.id, call.function.name, call.function.arguments)
            finish = choice.finish_reason or finish
    return pieces, reasoning, calls, finish, usage


def test_a_stream_comes_in_pieces_while_the_turn_is_sampled(served):
    with served.visit(["five and six"]) as (session, visit):
        session.gate.clear()
        session.free = 4
        stream = client_of(visit).chat.completions.create(
            model="policy", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        pieces = []
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                if "".join(pieces) == "five":
                    assert session.finished == []  # the turn waits for the gate
                    served.set(session)
    assert "".join(pieces) == "five and six"
    assert len(pieces) > 4


def test_a_streamed_call_has_what_a_whole_answer_has(served):
    text = 'I add. <tool_call>{"a": 2}'
    with served.visit([text], message_of=called) as (_, visit):
        stream = client_of(visit).chat.completions.create(
            model="policy", messages=ASK, tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        pieces, _, calls, finish, usage = read_stream(stream)
    assert "".join(pieces) == "I add."
    assert calls == {0: ("call_0_0", "add", '{"a": 2}')}
    assert finish == "tool_calls"
    assert usage.completion_tokens == len(text) + 1


def test_thinking_that_the_template_opened_is_never_streamed_as_content(served):
    def thought(text):
        thinking, _, content = text.partition("</think>")
        return {"role": "assistant", "reasoning_content": thinking, "content": content}

    with served.visit(["hm</think>five"], opening="<assistant><think>\n", message_of=thought) as (_, visit):
        stream = client_of(visit).chat.completions.create(model="policy", messages=ASK, stream=True)
        pieces, reasoning, _, finish, _ = read_stream(stream)
    assert ("".join(pieces), reasoning, finish) == ("five", "hm", "stop")


def test_a_tag_in_what_a_user_said_opens_no_thinking(served):
    with served.visit(["five and more"], opening="<user>what is <think>?<assistant>\n") as (_, visit):
        stream = client_of(visit).chat.completions.create(model="policy", messages=ASK, stream=True)
        pieces, *_ = read_stream(stream)
    assert "".join(pieces) == "five and more" and len([piece for piece in pieces if piece]) > 1, "as it came"


def test_a_stream_whose_tokens_were_taken_back_ends_with_an_error_and_the_retry_with_the_turn(served):
    with served.visit(["five"]) as (session, visit):
        session.take_back = (2, "fifty")
        client = client_of(visit)
        with pytest.raises(openai.APIError, match="sampled again from an earlier token"):
            read_stream(client.chat.completions.create(model="policy", messages=ASK, stream=True))
        again = client.chat.completions.create(
            model="policy", messages=ASK, extra_headers={"x-stainless-retry-count": "1"}
        )
    assert again.choices[0].message.content == "fifty"
    assert len(session.asked) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextFull("episodes.max_tokens 64: the context has 70"), 400, "context_length_exceeded"),
        (TooManyTurns("episodes.max_turns 8 are over"), 400, "too_many_turns"),
        (DataError("the template refuses two system messages"), 400, "refused_messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_cannot_be_taken_is_an_error_that_says_why(served, error, status, code, stream):
    with served.visit([error]) as (_, visit):
        with pytest.raises(openai.APIStatusError, match=str(error)) as caught:
            client_of(visit).chat.completions.create(model="policy", messages=ASK, stream=stream)
        assert (caught.value.status_code, caught.value.body["code"]) == (status, code)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert (visit.refused is None) == isinstance(error, DataError)


def test_a_run_that_cannot_sample_ends_the_block_with_its_error(served):
    with pytest.raises(RolloutError, match="no server"), served.visit([RolloutError("no server")]) as (_, visit):
        status, _, body = raw(visit, post_body())
        assert (status, body["error"]["code"]) == (503, "run_ends")
        assert "no server" not in body["error"]["message"]


def test_keys_sessions_and_paths(served):
    with served.visit(["one"]) as (session, visit), served.visit(["two"]) as (_, other):
        assert visit.api_key != other.api_key and visit.base_url != other.base_url
        assert raw(visit, post_body(), key=other.api_key)[0] == 401
        assert raw(visit, post_body(), key="")[0] == 401
        assert raw(visit, post_body(), key="\xff")[0] == 401
        status, _, body = raw(visit, None, path="models", method="GET", key="wrong")
        assert status == 401 and "OPENAI_API_KEY" in body["error"]["message"]
        assert [model.id for model in client_of(visit).models.list()] == ["policy"]
        assert client_of(visit).models.retrieve("policy").id == "policy"
        assert raw(visit, None, path="models/gpt-4o", method="GET")[0] == 404
        status, _, body = raw(visit, post_body(), path="completions")
        assert status == 404 and "chat/completions" in body["error"]["message"]
        assert raw(visit, None, method="GET")[0] == 404
        assert session.asked == []
    status, _, body = raw(visit, post_body())
    assert (status, body["error"]["code"]) == (404, "session_not_found")


def test_a_body_that_is_too_large_is_not_read(served):
    small = Served(max_body_bytes=1024)
    try:
        with small.visit(["one"]) as (session, visit):
            status, _, body = raw(visit, post_body(user="x" * 1024))
            assert status == 413 and "episodes.endpoint.max_body_bytes" in body["error"]["message"]
            # Its length is not announced: chunk by chunk.
            status, _, body = raw(visit, iter([post_body(), b" " * 2048]))
            assert status == 413
            status, _, body = raw(visit, post_body(), {"Content-Encoding": "gzip"})
            assert status == 415
            assert session.asked == []
    finally:
        small.close()


def test_a_body_that_does_not_come_is_given_up():
    hasty = Served(body_seconds=0.2)
    try:
        with hasty.visit(["one"]) as (session, visit):
            place = urllib.parse.urlsplit(visit.base_url)
            with socket.create_connection((place.hostname, place.port), timeout=120) as connection:
                head = f"POST {place.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n"
                connection.sendall(f"{head}Authorization: Bearer {visit.api_key}\r\n\r\n{{".encode())
                answer = connection.makefile("rb").read()  # up to its end: the connection is closed
            assert answer.startswith(b"HTTP/1.1 408") and b"episodes.endpoint.body_seconds" in answer
            assert session.asked == []
    finally:
        hasty.close()


def test_too_many_open_requests_are_refused(served, monkeypatch):
    monkeypatch.setattr("gspo_mega.agents.endpoint.MOST_OPEN_REQUESTS", 1)
    with served.visit(["one"]) as (session, visit):
        session.gate.clear()
        first = threading.Thread(target=raw, args=(visit, post_body()))
        first.start()
        wait_until(lambda: session.asked)
        status, headers, _ = raw(visit, post_body())
        assert (status, headers["x-should-retry"]) == (429, "true")
        served.set(session)
        first.join()


def test_own_time_stands_still_while_a_turn_is_sampled(served):
    with served.visit(["one"]) as (session, visit):
        session.gate.clear()
        first = threading.Thread(target=raw, args=(visit, post_body()))
        first.start()
        wait_until(lambda: session.asked)
        before = visit.own_seconds
        time.sleep(0.2)
        assert visit.own_seconds == before
        served.set(session)
        first.join()
        time.sleep(0.05)
        assert visit.own_seconds >= before + 0.05


def test_ignored_sampling_is_counted(served):
    loose = Served(ignore_sampling=True)
    try:
        with loose.visit(["one", "two"]) as (_, visit):
            client_of(visit).chat.completions.create(model="policy", messages=ASK, temperature=0.0, seed=3)
            client_of(visit).chat.completions.create(model="policy", messages=ASK, temperature=1.0)
        assert visit.counts["num_ignored_sampling"] == 1
    finally:
        loose.close()


def test_a_port_that_is_taken_is_named(served):
    taken = int(urllib.parse.urlsplit(served.endpoint._address).port)
    with pytest.raises(RolloutError, match=f"127.0.0.1:{taken} cannot be bound"):
        Served(port=taken)
