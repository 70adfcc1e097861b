"""An HTTP endpoint for agents, in three protocols. Each session has a path and a key, and answers its own turns.

    GET   /sessions/ID/v1/models                   the policy, under the name that the agent was given
    POST  /sessions/ID/v1/chat/completions         one turn, streamed or whole: OpenAI's chat completions
    POST  /sessions/ID/v1/responses                the same in OpenAI's Responses
    POST  /sessions/ID/v1/messages                 the same in Anthropic's Messages
    POST  /sessions/ID/v1/messages/count_tokens    the number of tokens of a turn's context

`AgentEndpoint` binds the address, checks keys, bounds a body and its time, and sends answers and errors. Which request
is which turn is decided in `endpoint_session.py`; the form of bodies is in the module of each protocol (`wire.py` says
what they share). Which connections are kept is decided in `connection_gate.py`.

All of it runs on the event loop that samples, so it does nothing that takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from gspo_mega.agents import anthropic_wire, openai_wire, responses_wire
from gspo_mega.agents.connection_gate import Gate
from gspo_mega.agents.endpoint_session import MOST_OPEN_REQUESTS, Call, EndpointSession
from gspo_mega.agents.messages import Decode, StreamedContent, opens_thinking
from gspo_mega.agents.session import AgentTurn, EpisodeSession
from gspo_mega.agents.wire import ApiError, Head, Reply, Request
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.network import with_port
from gspo_mega.config.schema import Endpoint as Settings

_CLOSE_SECONDS = 1.0

# How long the rest of a refused body is read and dropped, so that its client gets to read the refusal.
_LINGER_SECONDS = 1.0

Handler = Callable[[web.Request, EndpointSession], Any]


class Writer(Protocol):
    """Writes the answer to one request: `whole`, or as events `begin`, then for each turn any number of `text` and one
    `end`, and `close`. `place` is the turn's among those that were asked for. `id` is the answer's.
    """

    id: str

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]: ...

    def begin(self, num_context_tokens: int) -> bytes: ...

    def text(self, text: str, place: int = 0) -> bytes: ...

    def end(self, reply: Reply, place: int = 0) -> bytes: ...

    def close(self, replies: Sequence[Reply]) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...


class _Wire(NamedTuple):
    """A protocol: how a body is read (`ignore_sampling` is the setting), and what writes answers and errors."""

    read: Callable[[bytes, EndpointSession, bool], Request]
    writer: Callable[[Request, Head], Writer]
    error_body: Callable[[ApiError], dict[str, Any]]


_WIRES: dict[str, _Wire] = {
    "chat/completions": _Wire(
        lambda body, served, ignore: openai_wire.read_request(body, served.sampling, ignore),
        openai_wire.ChatWriter,
        openai_wire.error_body,
    ),
    "responses": _Wire(
        lambda body, served, ignore: responses_wire.read_request(body, served.sampling, ignore, served.history_of),
        responses_wire.ResponsesWriter,
        openai_wire.error_body,
    ),
    "messages": _Wire(
        lambda body, served, ignore: anthropic_wire.read_request(body, served.sampling, ignore),
        anthropic_wire.MessagesWriter,
        anthropic_wire.error_body,
    ),
}

_PATHS = f"POST {', '.join(_WIRES)}, messages/count_tokens and GET models"


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
            client_max_size=self._settings.max_body_bytes, middlewares=[self._gated, _as_written_errors]
        )
        for path, wire in _WIRES.items():
            app.router.add_post(f"/sessions/{{session}}/v1/{path}", self._guarded(self._turns_in(wire)))
        app.router.add_post("/sessions/{session}/v1/messages/count_tokens", self._guarded(self._count))
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
            if not served.admits(request.headers.get("Authorization", ""), request.headers.get("x-api-key", "")):
                raise ApiError(
                    "wrong API key; valid: the session's own (OPENAI_API_KEY, ANTHROPIC_API_KEY), as `Authorization:"
                    " Bearer KEY` or `x-api-key: KEY`",
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
        if _speaks_anthropic(request):
            model = anthropic_wire.model_body(_head(served, ""))
            return _json({"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]})
        return _json({"object": "list", "data": [_model_of(served)]})

    async def _model(self, request: web.Request, served: EndpointSession) -> web.Response:
        if request.match_info["model"] != served.model:
            raise ApiError(f"no such model; valid: {served.model}", status=404, param="model", code="model_not_found")
        is_anthropics = _speaks_anthropic(request)
        return _json(anthropic_wire.model_body(_head(served, "")) if is_anthropics else _model_of(served))

    async def _count(self, request: web.Request, served: EndpointSession) -> web.Response:
        with _open_request(served):
            asked = anthropic_wire.read_count(await self._body(request), served.sampling)
            return _json({"input_tokens": await served.num_context_tokens(asked)})

    def _turns_in(self, wire: _Wire) -> Handler:
        """Return what answers requests for turns in one protocol."""

        async def turns(request: web.Request, served: EndpointSession) -> web.StreamResponse:
            return await self._turns(request, served, wire)

        return turns

    async def _turns(self, request: web.Request, served: EndpointSession, wire: _Wire) -> web.StreamResponse:
        with _open_request(served):
            asked = wire.read(await self._body(request), served, self._settings.ignore_sampling)
            calls = served.calls(
                asked,
                request.headers.get("Idempotency-Key"),
                request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
                lambda: request.transport is not None and not request.transport.is_closing(),
            )
            if asked.stream:
                writer = wire.writer(asked, _head(served, secrets.token_hex(12)))
                return await self._streamed(request, served, asked, calls, writer)
            answers = [await self._answer_of(served, call) for call in calls]
            writer = wire.writer(asked, _head(served, f"{served.session.episode_id}-t{answers[0].number}"))
            body = writer.whole([self._reply(asked, answer) for answer in answers])
            served.remember(writer.id, asked, answers[0])
            return await self._send(request, calls, _json(body))

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

    def _reply(self, asked: Request, answer: AgentTurn, content: StreamedContent | None = None) -> Reply:
        """Return the turn for a writer. `content` is what was streamed of it. Raises ApiError if that is not in it."""
        whole = answer.message.get("content") or ""
        rest = whole if content is None else content.rest(whole)
        if rest is None:
            raise ApiError(
                "the turn was sampled again from an earlier token, because its server failed; ask again for the whole"
                " turn",
                status=503,
                code="stream_taken_back",
            )
        reply = Reply(
            answer.message,
            answer.finish_reason,
            answer.stop_string,
            answer.num_context_tokens,
            len(answer.token_ids),
            rest,
        )
        if not asked.logprobs:
            return reply
        texts = [self._decode([token]) for token in answer.token_ids]
        return replace(reply, token_ids=answer.token_ids, log_probs=answer.log_probs, texts=texts)

    async def _send(self, request: web.Request, calls: Sequence[Call], response: web.Response) -> web.Response:
        """Write the whole answer here, to learn whether the client took it."""
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            await response.write_eof()
            _note_delivered(calls)
        return response

    async def _streamed(
        self, request: web.Request, served: EndpointSession, asked: Request, calls: Sequence[Call], writer: Writer
    ) -> web.StreamResponse:
        """Send the answer as events, one turn after the other. An error before the first event is an HTTP error; a
        later one is an event.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        replies: list[Reply] = []
        try:
            for place, call in enumerate(calls):
                # A stop string may begin where an opener may: nothing after it is sent before the end.
                content = StreamedContent(self._decode, [*self._openers, *asked.stop], self._stop_token_ids)
                async for text in _sure_text(call, content):
                    if not response.prepared:
                        await response.prepare(request)
                        await response.write(writer.begin(call.num_context_tokens))
                    if text:
                        await response.write(writer.text(text, place))
                answer = await self._answer_of(served, call)
                opening = b"" if response.prepared else writer.begin(answer.num_context_tokens)
                await response.prepare(request)
                replies.append(self._reply(asked, answer, content))
                if place == 0:
                    served.remember(writer.id, asked, answer)
                await response.write(opening + writer.end(replies[-1], place))
            await response.write(writer.close(replies))
        except ApiError as error:
            if not response.prepared:
                raise
            served.counts["num_endpoint_errors"] += 1
            with contextlib.suppress(ConnectionError):
                await response.write(writer.failure(error))
                await response.write_eof()
        except ConnectionError:
            pass  # the client has gone; the turn goes on
        else:
            with contextlib.suppress(ConnectionError):
                await response.write_eof()
                _note_delivered(calls)
        return response


def _note_delivered(calls: Sequence[Call]) -> None:
    for call in calls:
        call.delivered = call.delivered or call.is_heard()


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


@contextlib.contextmanager
def _open_request(served: EndpointSession) -> Iterator[None]:
    """Count a request of the session as open inside the block. Raises ApiError if too many are."""
    if served.num_open >= MOST_OPEN_REQUESTS:
        raise ApiError(f"{MOST_OPEN_REQUESTS} requests of the session are open; wait for one", status=429, retry=True)
    served.num_open += 1
    try:
        yield
    finally:
        served.num_open -= 1


async def _nothing_here(request: web.Request, served: EndpointSession) -> web.Response:
    raise ApiError(f"{request.method} {request.path}: no such path; valid: {_PATHS}", status=404, code="unknown_path")


@web.middleware
async def _as_written_errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Answer an error in the form of the request's protocol."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error(request, error)
    except web.HTTPException as error:
        return _error(request, ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status))


def _speaks_anthropic(request: web.Request) -> bool:
    return "anthropic-version" in request.headers or "/v1/messages" in request.path


def _error(request: web.Request, error: ApiError) -> web.Response:
    write = anthropic_wire.error_body if _speaks_anthropic(request) else openai_wire.error_body
    response = _json(write(error), status=error.status)
    response.headers["x-should-retry"] = "true" if error.retry else "false"
    if error.status in (408, 413):
        response.force_close()  # the rest of the body is not read
    return response


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _head(served: EndpointSession, name: str) -> Head:
    return Head(name, served.created, served.model)


def _model_of(served: EndpointSession) -> dict[str, Any]:
    return {"id": served.model, "object": "model", "created": served.created, "owned_by": "gspo_mega"}


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
