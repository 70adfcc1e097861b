"""An OpenAI-compatible HTTP endpoint for agents. Each session has a path and a key, and answers its own turns.

    GET   /sessions/ID/v1/models               the policy, under the name that the agent was given
    POST  /sessions/ID/v1/chat/completions     one turn, streamed or whole

`AgentEndpoint` binds the address, checks keys, bounds a body and its time, and writes answers and errors. Which request
is which turn is decided in `endpoint_session.py`; the form of bodies is in `openai_wire.py`.

`Gate` decides which connections are kept: as many as the process has room for, and none that sends no request. A new
connection may wait `HEAD_SECONDS` for its first request, one that was answered before `IDLE_SECONDS` for the next. If
too many new ones wait, the one that has waited longest is closed. That does not hit an honest client, which sends its
head at once.

All of it runs on the event loop that samples, so it does nothing that takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import secrets
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from gspo_mega.agents import openai_wire as wire
from gspo_mega.agents.endpoint_session import MOST_OPEN_REQUESTS, Call, EndpointSession
from gspo_mega.agents.messages import Decode, StreamedContent, opens_thinking
from gspo_mega.agents.openai_wire import ApiError
from gspo_mega.agents.session import AgentTurn, EpisodeSession
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.network import with_port
from gspo_mega.config.schema import Endpoint as Settings

HEAD_SECONDS = 10.0

GRACE_SECONDS = 1.0

IDLE_SECONDS = 300.0

# How many connections may have sent no request yet, of all peers and of one. Agents on this machine are one peer.
MOST_WAITING, MOST_WAITING_OF_PEER = 512, 256

_MOST_CONNECTIONS = 16_384

_CLOSE_SECONDS = 1.0

# How long the rest of a refused body is read and dropped, so that its client gets to read the refusal.
_LINGER_SECONDS = 1.0


_PATHS = "POST chat/completions and GET models"

Handler = Callable[[web.Request, EndpointSession], Any]


class AgentEndpoint:
    """Serves sessions over HTTP: `await start()`, any number of `open(session)`, `await close()`, on one event loop.

    `model` is the name that is served. `decode` turns token ids into text, special tokens included. `openers` are texts
    at which thinking or a call may begin; after one, a streamed answer waits for the end of the turn. `stop_token_ids`
    are left out of the text.
    """

    def __init__(
        self,
        settings: Settings,
        model: str,
        decode: Decode,
        openers: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._settings = settings
        self._model_name = model
        self._decode = decode
        self._openers = tuple(openers)
        self._stop_token_ids = tuple(stop_token_ids)
        self._sessions: dict[str, EndpointSession] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._gate: Gate | None = None
        self._address = ""

    async def start(self) -> None:
        """Bind the address. Raises RolloutError if it cannot be bound."""
        app = web.Application(
            client_max_size=self._settings.max_body_bytes, middlewares=[self._gated, _as_openai_errors]
        )
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._guarded(self._chat))
        app.router.add_get("/sessions/{session}/v1/models", self._guarded(self._models))
        app.router.add_get("/sessions/{session}/v1/models/{model}", self._guarded(self._model))
        app.router.add_route("*", "/sessions/{session}/v1/{rest:.*}", self._guarded(_nothing_here))
        runner = self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet_logger(),
            shutdown_timeout=_CLOSE_SECONDS,
            lingering_time=_LINGER_SECONDS,
        )
        await runner.setup()
        assert runner.server is not None
        gate = self._gate = Gate(runner.server)
        host = self._settings.host
        try:
            self._listener = await asyncio.get_running_loop().create_server(gate.protocol, host, self._settings.port)
        except OSError as error:
            await self.close()
            raise RolloutError(
                f"episodes.endpoint: {with_port(host, self._settings.port)} cannot be bound: {error.strerror or error};"
                " valid: an address of this machine, and a free port (0 chooses one)"
            ) from error
        self._address = f"http://{with_port(host, self._listener.sockets[0].getsockname()[1])}"

    async def close(self) -> None:
        """Release the address and close open connections."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def open(self, session: EpisodeSession) -> AsyncIterator[EndpointSession]:
        """Inside this block the session can be reached over HTTP.

        Turns that nobody waits for any more are sampled to their end if the block ends normally, and dropped if it
        raises. Raises the error that ends the run (`EndpointSession.failed`).
        """
        name = secrets.token_urlsafe(12)
        served = EndpointSession(session, f"{self._address}/sessions/{name}/v1", self._model_name)
        self._sessions[name] = served
        try:
            yield served
            del self._sessions[name]
            await served.finish()
        finally:
            self._sessions.pop(name, None)
            await served.drop()

    @web.middleware
    async def _gated(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Tell the gate when a connection has a request."""
        assert self._gate is not None
        connection = request.protocol
        self._gate.begun(connection)
        try:
            return await handler(request)
        finally:
            self._gate.ended(connection)

    def _guarded(self, handler: Handler) -> Callable[[web.Request], Any]:
        """Let only requests with the session's own key through. The body has not been read by then."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            served = self._sessions.get(request.match_info["session"])
            if served is None:
                raise ApiError("unknown session, or one that is over", status=404, code="session_not_found")
            if not served.admits(request.headers.get("Authorization", "")):
                raise ApiError(
                    "wrong API key; valid: the session's own (OPENAI_API_KEY), as `Authorization: Bearer KEY`",
                    status=401,
                    code="invalid_api_key",
                )
            try:
                return await handler(request, served)
            except ApiError:
                served.counts["num_endpoint_errors"] += 1
                raise

        return guarded

    async def _models(self, request: web.Request, served: EndpointSession) -> web.Response:
        return _json({"object": "list", "data": [_model_of(served)]})

    async def _model(self, request: web.Request, served: EndpointSession) -> web.Response:
        if request.match_info["model"] != served.model:
            raise ApiError(f"no such model; valid: {served.model}", status=404, param="model", code="model_not_found")
        return _json(_model_of(served))

    async def _chat(self, request: web.Request, served: EndpointSession) -> web.StreamResponse:
        if served.num_open >= MOST_OPEN_REQUESTS:
            raise ApiError(
                f"{MOST_OPEN_REQUESTS} requests of the session are open; wait for one", status=429, retry=True
            )
        served.num_open += 1
        try:
            asked = wire.read_request(await self._body(request), served.sampling, self._settings.ignore_sampling)
            call = served.call(
                asked,
                request.headers.get("Idempotency-Key"),
                request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
                lambda: request.transport is not None and not request.transport.is_closing(),
            )
            if asked.stream:
                return await self._streamed(request, served, asked, call)
            answer = await self._answer_of(served, call)
            return await self._send(request, call, _json(self._completion(served, asked, answer)))
        finally:
            served.num_open -= 1

    async def _body(self, request: web.Request) -> bytes:
        most = self._settings.max_body_bytes
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError("Content-Encoding: valid: none, a body is not compressed", status=415)
        try:
            if (request.content_length or 0) > most:
                raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
            async with asyncio.timeout(self._settings.body_seconds):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise ApiError(
                f"the body has more than {most} bytes (episodes.endpoint.max_body_bytes)", status=413
            ) from None
        except TimeoutError:
            raise ApiError(
                f"the body took longer than {self._settings.body_seconds:g} s (episodes.endpoint.body_seconds)",
                status=408,
            ) from None

    async def _answer_of(self, served: EndpointSession, call: Call) -> AgentTurn:
        """Wait for the turn and return it. If this request ends before, the turn goes on. Raises ApiError."""
        try:
            return await asyncio.shield(call.answer)
        except asyncio.CancelledError:
            if call.answer.cancelled():
                raise ApiError("the episode is over", status=404, code="session_not_found") from None
            raise
        except Exception as error:
            raise served.refusal_of(error) from error

    def _completion(self, served: EndpointSession, asked: wire.ChatRequest, answer: AgentTurn) -> dict[str, Any]:
        return wire.completion(
            _head(served, answer),
            answer.message,
            wire.finish_of(answer.message, answer.finish_reason),
            self._log_probs(answer) if asked.logprobs else None,
            wire.usage_of(answer.num_context_tokens, len(answer.token_ids)),
        )

    def _log_probs(self, answer: AgentTurn) -> dict[str, Any]:
        texts = [self._decode([token]) for token in answer.token_ids]
        return wire.log_probs_of(answer.token_ids, answer.log_probs, texts)

    async def _send(self, request: web.Request, call: Call, response: web.Response) -> web.Response:
        """Write the whole answer here, to learn whether the client took it."""
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            await response.write_eof()
            call.delivered = call.delivered or call.is_heard()
        return response

    async def _streamed(
        self, request: web.Request, served: EndpointSession, asked: wire.ChatRequest, call: Call
    ) -> web.StreamResponse:
        """Send the answer as events. An error before the first event is an HTTP error; a later one is an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        content = StreamedContent(self._decode, self._openers, self._stop_token_ids)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": served.created, "model": served.model}
        try:
            async for text in _sure_text(call, content):
                if not response.prepared:
                    await response.prepare(request)
                    await response.write(wire.chunk(head, {"role": "assistant", "content": ""}))
                if text:
                    await response.write(wire.chunk(head, {"content": text}))
            answer = await self._answer_of(served, call)
            opening = [] if response.prepared else [wire.chunk(head, {"role": "assistant", "content": ""})]
            await response.prepare(request)
            await response.write(b"".join([*opening, *self._end(head, asked, answer, content)]))
        except ApiError as error:
            if not response.prepared:
                raise
            served.counts["num_endpoint_errors"] += 1
            with contextlib.suppress(ConnectionError):
                await response.write(wire.event(error.body()))
                await response.write_eof()
        except ConnectionError:
            pass  # the client has gone; the turn goes on
        else:
            with contextlib.suppress(ConnectionError):
                await response.write_eof()
                call.delivered = call.delivered or call.is_heard()
        return response

    def _end(
        self, head: dict[str, Any], asked: wire.ChatRequest, answer: AgentTurn, content: StreamedContent
    ) -> list[bytes]:
        """Return the rest of a streamed answer: thinking, content, calls, then the reason of its end."""
        message = answer.message
        rest = content.rest(message.get("content") or "")
        if rest is None:
            raise ApiError(
                "the turn was sampled again from an earlier token, because its server failed; ask again for the whole"
                " turn",
                status=503,
                code="stream_taken_back",
            )
        events = []
        if message.get("reasoning_content"):
            events.append(wire.chunk(head, {"reasoning_content": message["reasoning_content"]}))
        if rest:
            events.append(wire.chunk(head, {"content": rest}))
        if message.get("tool_calls"):
            events.append(wire.chunk(head, {"tool_calls": wire.call_deltas(message["tool_calls"])}))
        log_probs = self._log_probs(answer) if asked.logprobs else None
        events.append(wire.chunk(head, {}, wire.finish_of(message, answer.finish_reason), log_probs))
        if asked.include_usage:
            usage = wire.usage_of(answer.num_context_tokens, len(answer.token_ids))
            events.append(wire.usage_chunk(head, usage))
        return [*events, wire.END_OF_STREAM]


async def _sure_text(call: Call, content: StreamedContent) -> AsyncIterator[str]:
    """Yield the content of a turn while it is sampled, as far as it is certain, until the turn is over."""
    seen = 0
    while True:
        if call.opening is not None and opens_thinking(call.opening):
            content.hold()
        while seen < len(call.reports):
            position, token_ids = call.reports[seen]
            seen += 1
            yield content.add(position, token_ids)
        if call.answer.done():
            return
        call.news.clear()
        await call.news.wait()


async def _nothing_here(request: web.Request, served: EndpointSession) -> web.Response:
    raise ApiError(f"{request.method} {request.path}: no such path; valid: {_PATHS}", status=404, code="unknown_path")


@web.middleware
async def _as_openai_errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _error(error)
    except web.HTTPException as error:
        return _error(ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status))


def _error(error: ApiError) -> web.Response:
    response = _json(error.body(), status=error.status)
    response.headers["x-should-retry"] = "true" if error.retry else "false"
    if error.status in (408, 413):
        response.force_close()  # the rest of the body is not read
    return response


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _head(served: EndpointSession, answer: AgentTurn) -> dict[str, Any]:
    number = f"{served.session.episode_id}-t{answer.number}"
    return {"id": f"chatcmpl-{number}", "created": served.created, "model": served.model}


def _model_of(served: EndpointSession) -> dict[str, Any]:
    return {"id": served.model, "object": "model", "created": served.created, "owned_by": "gspo_mega"}


class Gate:
    """Decides which connections of a server are kept. Its method `protocol` is given to `loop.create_server`."""

    def __init__(self, handler: Callable[[], Any], most: int | None = None) -> None:
        """`handler` makes the library's protocol. `most` is the number of connections at the same time; the default is
        half of the file descriptors that this process may have.
        """
        self._handler = handler
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = most if most is not None else min(_MOST_CONNECTIONS, max(64, soft // 2))
        self._open: Counter[Any] = Counter()
        self._by_handler: dict[Any, _Connection] = {}
        self.waiting: dict[_Connection, None] = {}  # for their first request, in the order in which they came

    def protocol(self) -> asyncio.Protocol:
        return _Connection(self, self._handler())

    def begun(self, handler: Any) -> None:
        """Note that a request is being answered. `handler` is the library's protocol of its connection."""
        if (connection := self._by_handler.get(handler)) is not None:
            connection.stop_waiting()

    def ended(self, handler: Any) -> None:
        """Note that the request of this connection has been answered."""
        if (connection := self._by_handler.get(handler)) is not None:
            connection.wait(IDLE_SECONDS)

    # --- a connection's side ----------------------------------------------------------------------------------

    def admits(self, connection: _Connection) -> bool:
        """Whether there is room for one more connection. Makes room by closing one that waits, if it can."""
        peer = connection.peer
        if self._open.total() >= self._most or self._open[peer] >= max(self._most // 2, MOST_WAITING_OF_PEER):
            return False
        self._open[peer] += 1
        self._by_handler[connection.handler] = connection
        late: list[_Connection] = []
        if len(self.waiting) >= MOST_WAITING:
            late = [next(iter(self.waiting))]
        elif len(self.waiting) >= MOST_WAITING_OF_PEER:
            of_peer = [one for one in self.waiting if one.peer == peer]
            late = of_peer[:1] if len(of_peer) >= MOST_WAITING_OF_PEER else []
        for one in late:
            # If many come at once, none of their heads has been read yet; give them time.
            if time.monotonic() - one.since >= GRACE_SECONDS:
                one.end()
        return True

    def left(self, connection: _Connection) -> None:
        if self._by_handler.pop(connection.handler, None) is not None:
            self._open[connection.peer] -= 1
            if self._open[connection.peer] <= 0:
                del self._open[connection.peer]


class _Connection(asyncio.Protocol):
    """The library's protocol of one connection, with a limit on its waiting."""

    def __init__(self, gate: Gate, handler: Any) -> None:
        self._gate, self.handler = gate, handler
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_in = False
        self.peer: Any = None
        self.since = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else None
        self._is_in = self._gate.admits(self)
        if not self._is_in:
            transport.abort()
            return
        self.handler.connection_made(transport)
        self._gate.waiting[self] = None
        self.wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_in:
            self._is_in = False
            self.stop_waiting()
            self._gate.left(self)
            self.handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in:
            self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received() if self._is_in else None

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def wait(self, seconds: float) -> None:
        """Wait at most so many seconds, from now on, for a request."""
        if self._is_in:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def stop_waiting(self) -> None:
        self._gate.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        self.stop_waiting()
        if self._transport is not None:
            self._transport.abort()


def quiet_logger() -> logging.Logger:
    """Return a logger for the HTTP library that hides the text of errors. What the library logs of a malformed request
    has the request's bytes in it, and so the key.
    """
    quiet = logging.getLogger("gspo_mega.agents.endpoint.http")
    if not quiet.filters:
        quiet.addFilter(_without_bytes)
    return quiet


def _without_bytes(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    record.msg, record.args = "a request could not be handled (%s)", (type(error).__name__,)
    if isinstance(record.exc_info, tuple) and not hasattr(error, "code"):
        # Not the library's error about a request: the place in our code helps, but the text may quote the request.
        record.exc_info = None
        frames = traceback.extract_tb(error.__traceback__)[-3:] if error is not None else []
        places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
        record.msg, record.args = "a request could not be handled (%s, at %s)", (type(error).__name__, places)
    record.exc_info = record.exc_text = None
    return True
