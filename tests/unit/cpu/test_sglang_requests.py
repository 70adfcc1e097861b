"""The short way of generate requests: what it takes, what it leaves to FastAPI, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import types

import pytest

from gspo_mega.cpu.sglang_requests import GenerateLane, open_lane

PLAIN = {"rid": "a", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "stream": True}
KEY = (b"authorization", b"Bearer secret")


class Server:
    """Stands in for SGLang's module. Its answers are two events and the end; `waiting`: what they wait for."""

    def __init__(self, waiting: asyncio.Event | None = None):
        self.waiting, self.was_ended, self.problem = waiting, False, None
        self.serving = types.SimpleNamespace(api_key="secret", admin_api_key=None)
        overrides = types.SimpleNamespace(get=lambda: False)
        self.envs = types.SimpleNamespace(SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=overrides)

    def get_serving(self):
        return self.serving

    def generate_contract_error(self, fields):
        return self.problem

    def GenerateReqInput(self, **fields):
        return fields

    async def serve_generate_request(self, request, http_request):
        assert http_request is None

        async def events():
            try:
                yield f"data: {request['rid']}\n\n".encode()
                if self.waiting is not None:
                    await self.waiting.wait()
                yield b"data: [DONE]\n\n"
            except BaseException:
                self.was_ended = True
                raise

        return types.SimpleNamespace(body_iterator=events())


class Fallback:
    """Stands in for FastAPI, and reads the whole body."""

    def __init__(self):
        self.bodies: list[bytes] = []

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)


def ask(server, body, headers=(KEY,), path="/generate", method="POST", leaves=None, sending=0.0):
    """Return (what was sent, the bodies that FastAPI got) for one request, whose body comes in two parts. The client
    leaves after so many seconds, if at all; `sending`: seconds that the last part of an answer takes.
    """
    sent, fallback = [], Fallback()

    async def whole():
        parts = [body[:5], body[5:]]

        async def receive():
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            if leaves is None:
                await asyncio.Event().wait()
            await asyncio.sleep(leaves)
            return {"type": "http.disconnect"}

        async def send(message):
            if sending and message.get("more_body") is False:
                await asyncio.sleep(sending)
            sent.append(message)

        scope = {"type": "http", "path": path, "method": method, "headers": list(headers)}
        async with asyncio.timeout(10):
            await GenerateLane(fallback, server)(scope, receive, send)
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "no watcher is left"

    asyncio.run(whole())
    return sent, fallback.bodies


def test_a_plain_request_is_answered_and_ended_with_its_last_event():
    sent, others = ask(Server(), json.dumps(PLAIN).encode())
    assert [(m.get("body"), m.get("more_body")) for m in sent[1:]] == [
        (b"data: a\n\n", True),
        (b"data: [DONE]\n\n", False),
    ]
    assert sent[0]["status"] == 200 and dict(sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert not others


@pytest.mark.parametrize(
    "change",
    [
        {"stream": False},
        {"stream": 1},
        {"rid": ["a"]},
        {"input_ids": [[1, 2]]},
        {"input_ids": [1, True]},
        {"input_ids": [1, 2.0]},
        {"input_ids": [1, -1]},
        {"input_ids": [1, 2**63]},
        {"input_ids": None, "text": "what"},
        {"return_hidden_states": True},
    ],
)
def test_any_other_body_is_left_to_fastapi_as_it_came(change):
    body = json.dumps(PLAIN | change).encode()
    assert ask(Server(), body) == ([], [body])


def test_what_is_no_json_or_breaks_the_contract_is_left_too():
    assert ask(Server(), b"{no json")[1] == [b"{no json"]
    server = Server()
    server.problem = "sampling_params: expected an object"
    assert len(ask(server, json.dumps(PLAIN).encode())[1]) == 1


def test_the_contract_is_asked_once_for_all_that_differ_in_their_ids_only():
    server, asked = Server(), []
    server.generate_contract_error = lambda fields: asked.append(fields["sampling_params"]) or server.problem
    lane = GenerateLane(Fallback(), server)
    for index, most in enumerate([3, 3, 4, 3]):
        body = PLAIN | {"rid": str(index), "input_ids": [index], "sampling_params": {"max_new_tokens": most}}
        assert lane._request(json.dumps(body).encode()) == body
    assert asked == [{"max_new_tokens": 3}, {"max_new_tokens": 4}]
    server.problem = "no"
    refused = json.dumps(PLAIN | {"sampling_params": {"max_new_tokens": "x"}}).encode()
    assert lane._request(refused) is None and lane._request(refused) is None
    assert len(asked) == 4


@pytest.mark.parametrize(
    "how",
    [
        {"headers": ()},
        {"headers": ((b"authorization", b"Bearer wrong"),)},
        {"headers": (KEY, KEY)},
        {"headers": (KEY, (b"content-encoding", b"gzip"))},
        {"path": "/abort_request"},
        {"method": "PUT"},
    ],
)
def test_without_the_key_or_elsewhere_fastapi_decides(how):
    body = json.dumps(PLAIN).encode()
    assert ask(Server(), body, **how) == ([], [body])


@pytest.mark.parametrize("keys", [{"api_key": None}, {"admin_api_key": "other"}])
def test_a_server_without_a_key_or_with_two_has_no_lane(keys):
    server = Server()
    vars(server.serving).update(keys)
    assert len(ask(server, json.dumps(PLAIN).encode())[1]) == 1


def test_a_client_that_leaves_ends_the_request():
    server = Server(waiting=asyncio.Event())
    sent, _ = ask(server, json.dumps(PLAIN).encode(), leaves=0.01)
    assert server.was_ended
    assert [m.get("body") for m in sent[1:]] == [b"data: a\n\n"]


def test_a_client_that_leaves_during_the_last_part_changes_nothing():
    server = Server()
    sent, _ = ask(server, json.dumps(PLAIN).encode(), leaves=0.001, sending=0.05)
    assert sent[-1] == {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
    assert not server.was_ended


def test_the_lane_is_outermost():
    inner = object()
    app = types.SimpleNamespace(build_middleware_stack=lambda: inner)
    open_lane(types.SimpleNamespace(app=app))
    assert isinstance(app.build_middleware_stack(), GenerateLane)
