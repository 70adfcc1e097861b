"""The way of a generate request through SGLang's HTTP server, on a CPU: without the layers that it does not need.

Between the socket and SGLang's tokenizer manager, FastAPI passes a request through a stack of middleware and checks a
hundred fields that it does not have. With a hundred short answers that end together, this is what the last one waits
for. `GenerateLane` stands before FastAPI. It takes only the requests that `server_client.py` makes: streamed, of one
prompt of token ids, with the server's key and SGLang's own contract for such a body fulfilled. SGLang's function for
admitted requests answers them; FastAPI gets all others, untouched, and refuses what is to be refused.

Only a server process imports this file.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[dict[str, Any], _Receive, _Send], Awaitable[None]]

_FIELDS = frozenset(
    {
        "rid",
        "input_ids",
        "sampling_params",
        "stream",
        "return_logprob",
        "return_routed_experts",
        "return_sampling_mask",
        "extra_key",
        "lora_path",
    }
)
_MOST_TOKEN = 2**31
_MOST_KEPT = 64
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_DONE = b"data: [DONE]\n\n"


class GenerateLane:
    """The ASGI application `app` with a shorter way for generate requests. `server`: SGLang's module `http_server`."""

    def __init__(self, app: _App, server: Any) -> None:
        self._app, self._server = app, server
        self._authorization: bytes | None = None
        self._in_order: set[bytes] = set()  # requests but for their ids that SGLang's contract allows, some of the last

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        """Answer one request, or one event of the server's life."""
        if not self._may_take(scope):
            await self._app(scope, receive, send)
            return
        read = await _read(receive)
        request = self._request(b"".join(message.get("body", b"") for message in read))
        if request is None:
            await self._app(scope, _again(read, receive), send)
            return
        response = await self._server.serve_generate_request(request, None)
        await _stream(response.body_iterator, receive, send)

    def _may_take(self, scope: dict[str, Any]) -> bool:
        """Return whether this is a generate request with the server's key and a plain body."""
        if scope["type"] != "http" or scope["path"] != "/generate" or scope["method"] != "POST":
            return False
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or any(name == b"content-encoding" for name, _ in scope["headers"]):
            return False
        expected = self._authorization or self._find_authorization()
        return expected is not None and secrets.compare_digest(given[0], expected)

    def _find_authorization(self) -> bytes | None:
        """Return what a request has to show, or None where the server has another rule than one key for all."""
        serving = self._server.get_serving()
        overrides = self._server.envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.get()
        if serving.api_key and not serving.admin_api_key and not overrides:
            self._authorization = b"Bearer " + serving.api_key.encode()
        return self._authorization

    def _request(self, body: bytes) -> Any:
        """Return SGLang's object for the body, or None if it is for FastAPI."""
        try:
            fields = orjson.loads(body)
        except ValueError:
            return None
        if not isinstance(fields, dict) or not fields.keys() <= _FIELDS or fields.get("stream") is not True:
            return None
        token_ids = fields.get("input_ids")
        if not isinstance(fields.get("rid"), str) or not isinstance(token_ids, list):
            return None
        if not all(type(token) is int and 0 <= token < _MOST_TOKEN for token in token_ids):
            return None
        rest = orjson.dumps({name: value for name, value in fields.items() if name not in ("rid", "input_ids")})
        if rest not in self._in_order:
            if self._server.generate_contract_error(fields) is not None:
                return None
            if len(self._in_order) >= _MOST_KEPT:
                self._in_order.clear()
            self._in_order.add(rest)
        return self._server.GenerateReqInput(**fields)


async def _read(receive: _Receive) -> list[_Message]:
    """Return the messages of a request up to the end of its body, or to the end of its connection."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _again(messages: list[_Message], receive: _Receive) -> _Receive:
    """Return a `receive` that gives `messages` once more, and then what follows."""
    left = list(messages)

    async def next_message() -> _Message:
        return left.pop(0) if left else await receive()

    return next_message


async def _stream(events: AsyncIterator[bytes], receive: _Receive, send: _Send) -> None:
    """Send the events up to `[DONE]`. If the client leaves before, end the events, which aborts the request."""
    own, is_open = asyncio.current_task(), True
    assert own is not None
    gone = asyncio.ensure_future(_until_gone(receive))

    def stop(done: asyncio.Future[None]) -> None:
        if is_open and not done.cancelled():
            own.cancel()

    gone.add_done_callback(stop)
    try:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for event in events:
            is_open = event != _DONE
            await send({"type": "http.response.body", "body": event, "more_body": is_open})
        if is_open:
            is_open = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    except asyncio.CancelledError:
        if not gone.done() or gone.cancelled():
            raise
        own.uncancel()
    finally:
        is_open = False
        gone.cancel()
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def _until_gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def open_lane(server: Any) -> None:
    """Put the lane before the application of SGLang's module `http_server`."""
    stock = server.app.build_middleware_stack
    server.app.build_middleware_stack = lambda: GenerateLane(stock(), server)
