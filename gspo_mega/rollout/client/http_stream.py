"""Requests to one server over kept connections, whose answers are read as they arrive: HTTP/1.1 as a sampler needs it.

A step has tens of thousands of such requests, and a short response takes tens of microseconds of work. aiohttp's
client, which the control calls use, spends ten times that on a request.

`StreamClient` decides which connection a request takes, and ends connections. `Connection` does the framing of an
answer, which its caller reads as a `StreamedResponse`. `read_events` reads server-sent events of JSON objects, and
`read_body` a whole body. Both bound what they read, because a server must not be able to fill the collector's memory.
Compressed bodies are refused: a few kilobytes of them can expand to gigabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlsplit

import aiohttp
import orjson

from gspo_mega.rollout.client.completion import NonsenseAnswer, RoutingShape, cut_routes

# The most bytes per token: its id, its log-prob with 17 digits, commas and brackets, with a margin.
_TOKEN_BYTES = 160

# The most bytes of a report without its tokens.
_REPORT_BYTES = 8 * 1024

_ROUTE_BYTES = 4 * 4 / 3  # int32 in base64

# An event of more bytes has routes in it.
_LARGE_EVENT_BYTES = 64 * 1024


_STATUS = re.compile(r"HTTP/1\.([01]) (\d{3})(?: |$)")

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")

_MOST_HEAD_BYTES = 64 * 1024

_MOST_LINE_BYTES = 4096

# If more bytes of an answer wait for their reader, the server has to wait.
_MOST_UNREAD_BYTES = 1024 * 1024

IDENTITY = {"Accept-Encoding": "identity"}
"""A header of every request: the server must not compress its answer."""


class StreamClient:
    """Sends requests to the server at `address` (http://host:port), each with `headers`. Use it in one event loop.

    A connection that was idle for `keepalive_seconds` is not used again: a server closes idle ones as well, and a
    request on one that it is closing fails exactly as if the server had died.
    """

    def __init__(self, address: str, headers: Mapping[str, str], keepalive_seconds: float) -> None:
        parts = urlsplit(address)
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._is_secure else 80)
        given = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._path = parts.path.rstrip("/")
        self._keepalive_seconds = keepalive_seconds
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._cleaning: asyncio.TimerHandle | None = None
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[StreamedResponse]:
        """Post a JSON body; the block gets the answer. Leaving the block before the end of the answer ends the
        connection, which tells the server. Raises OSError, and NonsenseAnswer if the server does not speak HTTP.
        """
        if self._is_closed:
            raise ConnectionAbortedError("the server is gone")
        connection = self._kept() or await self._connect()
        self._busy.add(connection)
        try:
            head = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
            yield await connection.request(head.encode("latin-1") + body)
        finally:
            self._busy.discard(connection)
            if connection.is_reusable and not self._is_closed:
                self._keep(connection)
            else:
                connection.abort()

    def close(self) -> None:
        """End the connections. Open requests fail, and so do later ones."""
        self._is_closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()
        if self._cleaning is not None:
            self._cleaning.cancel()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._host, self._port, ssl=True if self._is_secure else None
        )
        if self._is_closed:
            connection.abort()
            raise ConnectionAbortedError("the server is gone")
        return connection

    def _kept(self) -> Connection | None:
        oldest = time.monotonic() - self._keepalive_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _keep(self, connection: Connection) -> None:
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._cleaning is None:
            loop = asyncio.get_running_loop()
            self._cleaning = loop.call_later(self._keepalive_seconds, self._clean)

    def _clean(self) -> None:
        """End connections that were idle for too long."""
        self._cleaning = None
        oldest = time.monotonic() - self._keepalive_seconds
        idle, self._idle = self._idle, []
        for connection in idle:
            if connection.is_reusable and connection.idle_since > oldest:
                self._idle.append(connection)
            else:
                connection.abort()
        if self._idle:
            loop = asyncio.get_running_loop()
            self._cleaning = loop.call_later(self._keepalive_seconds, self._clean)


_Part = Literal["head", "size", "chunk", "chunk end", "trailer", "counted", "to the end", "done"]


class Connection(asyncio.Protocol):
    """A connection, with one request at a time. `idle_since` is for its owner."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._part: _Part = "done"
        self._left = 0
        self._head: asyncio.Future[StreamedResponse] | None = None
        self._response: StreamedResponse | None = None
        self._is_kept = self._is_paused = False
        self.is_open = True
        self.idle_since = 0.0

    async def request(self, data: bytes) -> StreamedResponse:
        """Send a request, and return when the head of its answer has arrived. Raises as `StreamedResponse.iter_any`."""
        assert self._transport is not None and self._part == "done"
        self._head, self._response, self._part = asyncio.get_running_loop().create_future(), None, "head"
        self._transport.write(data)
        try:
            return await self._head
        finally:
            self._head = None  # as in `iter_any`, to leave no reference cycle

    @property
    def is_reusable(self) -> bool:
        """Whether the last answer was read to its end, and another request may follow."""
        return self.is_open and self._is_kept and self._part == "done" and not self._received

    def abort(self) -> None:
        """End the connection. Readers get an error."""
        if self._transport is not None:
            self._transport.abort()
        self.is_open = False

    def resume_reading(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # --- what the event loop calls ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (own := transport.get_extra_info("socket")) is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            self._read()
        except NonsenseAnswer as error:
            self._fail(error)
            self.abort()
        if self._response is not None:
            self._response.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._part == "to the end" and exc is None:
            self._end()
            assert self._response is not None
            self._response.wake()
        elif self._part != "done":
            where = "before" if self._part == "head" else "within"
            reason = f": {exc}" if exc is not None else ""
            self._fail(ConnectionResetError(f"the server ended the connection {where} its answer{reason}"))

    # --- framing ---------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        self._part = "done"
        self._is_kept = False
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        elif self._response is not None:
            self._response.fail(error)

    def _end(self) -> None:
        self._part = "done"
        if self._response is not None:
            self._response.has_ended = True

    def _read(self) -> None:
        """Handle all that is complete in what was received."""
        place, received = 0, self._received
        if self._part == "done":
            raise NonsenseAnswer(f"bytes that no request asked for: {bytes(received[:100])!r}")
        with memoryview(received) as view:
            while self._part != "done":
                before, part = place, self._part
                if part in ("chunk", "counted", "to the end"):
                    place = self._take_body(view, place)
                elif part == "head":
                    place = self._take_head(received, place)
                else:
                    place = self._take_line(received, place)
                if place == before and part == self._part:
                    break
        del received[:place]

    def _take_body(self, view: memoryview, place: int) -> int:
        end = len(view) if self._part == "to the end" else min(len(view), place + self._left)
        assert self._response is not None
        if end > place and self._response.add(view[place:end]) > _MOST_UNREAD_BYTES and not self._is_paused:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        self._left -= end - place
        if self._part == "chunk" and not self._left:
            self._part = "chunk end"
        elif self._part == "counted" and not self._left:
            self._end()
        return end

    def _take_line(self, received: bytearray, place: int) -> int:
        end = received.find(b"\r\n", place, place + _MOST_LINE_BYTES)
        if end < 0:
            if len(received) - place >= _MOST_LINE_BYTES:
                raise NonsenseAnswer(f"no HTTP: a line of more than {_MOST_LINE_BYTES} bytes between two chunks")
            return place
        if self._part == "size":
            size = _SIZE.fullmatch(received, place, end)
            if size is None:
                raise NonsenseAnswer(f"no HTTP: a chunk of size {bytes(received[place : min(end, place + 50)])!r}")
            self._left = int(size[1], 16)
            self._part = "chunk" if self._left else "trailer"
        elif self._part == "chunk end":
            if end != place:
                raise NonsenseAnswer(f"no HTTP: {bytes(received[place : place + 50])!r} after a chunk")
            self._part = "size"
        elif end == place:  # the end of the trailers, which are ignored
            self._end()
        return end + 2

    def _take_head(self, received: bytearray, place: int) -> int:
        end = received.find(b"\r\n\r\n", place, place + _MOST_HEAD_BYTES)
        if end < 0:
            if len(received) - place >= _MOST_HEAD_BYTES:
                raise NonsenseAnswer(f"no HTTP: a head of more than {_MOST_HEAD_BYTES} bytes")
            return place
        lines = received[place:end].decode("latin-1").split("\r\n")
        found = _STATUS.match(lines[0])
        if found is None:
            raise NonsenseAnswer(f"no HTTP: {lines[0][:100]!r}")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise NonsenseAnswer(f"no HTTP: the header {line[:100]!r}")
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if found[2].startswith("1"):  # the answer itself follows
            return end + 4
        self._response = StreamedResponse(int(found[2]), headers, self)
        self._is_kept = found[1] == "1" and headers.get("connection", "").lower() != "close"
        self._begin_body(headers)
        if self._head is not None and not self._head.done():  # nobody waits for a request that was given up
            self._head.set_result(self._response)
        return end + 4

    def _begin_body(self, headers: Mapping[str, str]) -> None:
        coding, length = headers.get("transfer-encoding", "").lower(), headers.get("content-length")
        if coding not in ("", "chunked", "identity"):
            raise NonsenseAnswer(f"a body in Transfer-Encoding {coding[:40]!r}")
        if coding == "chunked":
            self._part = "size"
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) <= 15):
                raise NonsenseAnswer(f"no HTTP: Content-Length {length[:40]!r}")
            self._left, self._part = int(length), "counted"
            if not self._left:
                self._end()
        else:
            self._part, self._is_kept = "to the end", False


class StreamedResponse:
    """An answer whose head has arrived. `headers` are by name in lower case."""

    def __init__(self, status: int, headers: dict[str, str], connection: Connection) -> None:
        self.status, self.headers, self._connection = status, headers, connection
        self._unread = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.has_ended = False

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()

    @property
    def content(self) -> StreamedResponse:
        """The object that has `iter_any`, as aiohttp's response has it."""
        return self

    async def iter_any(self) -> AsyncIterator[bytearray]:
        """Yield the body as it arrives. Raises OSError if the connection ends before the body does, and NonsenseAnswer
        if the answer is not HTTP; what arrived before that is yielded first.
        """
        while True:
            if self._unread:
                data, self._unread = self._unread, bytearray()
                self._connection.resume_reading()
                yield data
            elif self.has_ended:
                return
            elif self._error is not None:
                try:
                    raise self._error
                finally:
                    self._error = None  # or the answer, the error and its traceback would hold each other
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None

    # --- the connection's side -------------------------------------------------------------------------------

    def add(self, data: memoryview) -> int:
        """Add received bytes, and return how many wait for the reader."""
        self._unread += data
        return len(self._unread)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamContent(Protocol):
    def iter_any(self) -> AsyncIterable[bytes | bytearray]: ...


class StreamResponse(Protocol):
    """An answer that can be read here: `StreamedResponse`, or aiohttp's response."""

    @property
    def headers(self) -> Any: ...  # by name in any case; aiohttp has a type of its own
    @property
    def content_type(self) -> str: ...
    @property
    def content(self) -> StreamContent: ...


def answer_bytes(num_prompt_tokens: int, max_new_tokens: int, report_tokens: int, routing: RoutingShape | None) -> int:
    """Return the most bytes that a well-formed answer to a generate request can have."""
    reports = max_new_tokens // report_tokens + 4
    routes = 0.0
    if routing is not None:
        routes = (num_prompt_tokens + max_new_tokens) * routing.num_layers * routing.experts_per_token * _ROUTE_BYTES
    return int(max_new_tokens * _TOKEN_BYTES + reports * _REPORT_BYTES + routes)


def mask_bytes(top_k: int, vocab_size: int) -> int:
    """Return the most bytes that a token's sampling mask can have in a well-formed answer. Ties at the cutoff may keep
    more than `top_k` tokens; as many again are allowed for.
    """
    return 64 + 2 * top_k * (len(str(vocab_size)) + 1)


def check_plain(response: StreamResponse) -> None:
    """Raise NonsenseAnswer for a compressed body."""
    coding = response.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise NonsenseAnswer(f"a body in Content-Encoding {coding[:40]!r}, which was not asked for")


async def _chunks(response: StreamResponse) -> AsyncIterator[bytes | bytearray]:
    """Yield the body as it arrives. Raises aiohttp.ClientError and OSError."""
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except RuntimeError as error:  # aiohttp raises it if the connection ended between two reads
        raise aiohttp.ClientConnectionError(str(error)) from error


async def read_body(response: StreamResponse, limit_bytes: int) -> bytes:
    """Return the whole body. Raises NonsenseAnswer as soon as it has more than `limit_bytes`."""
    check_plain(response)
    body = bytearray()
    async for chunk in _chunks(response):
        body += chunk
        if len(body) > limit_bytes:
            raise NonsenseAnswer(f"the body has more than {limit_bytes} bytes")
    return bytes(body)


def _end_of_event(body: bytearray, start: int) -> int:
    """Return where the first empty line from `start` on begins; -1 if there is none. It searches for a single byte,
    which is twenty times as fast as for two; JSON has no newline.
    """
    while (end := body.find(b"\n", start)) >= 0 and body[end + 1 : end + 2] != b"\n":
        start = end + 1
    return end


async def read_events(response: StreamResponse, limit_bytes: int) -> AsyncIterator[Any]:
    """Yield the JSON values of a `text/event-stream` up to its `[DONE]`, after which nothing may follow. Routed experts
    stay base64 (`EncodedRoutes`).

    Raises NonsenseAnswer if the body is not an event stream, is compressed, has more than `limit_bytes`, is not JSON,
    or ends without `[DONE]`.
    """
    check_plain(response)
    if response.content_type != "text/event-stream":
        text = (await read_body(response, limit_bytes))[:200]
        raise NonsenseAnswer(f"no event stream but {response.content_type}: {text!r}")
    waiting = bytearray()
    num_bytes, start, scanned, done = 0, 0, 0, False
    async for chunk in _chunks(response):
        num_bytes += len(chunk)
        if num_bytes > limit_bytes:
            raise NonsenseAnswer(f"the answer has more than {limit_bytes} bytes, which is more than it can need")
        waiting += chunk
        while (end := _end_of_event(waiting, max(start, scanned - 1))) >= 0:
            if start == 0 and end > _LARGE_EVENT_BYTES:  # nearly all that was read: avoid another copy
                event, waiting = waiting, waiting[end + 2 :]
                del event[end:]
                scanned = 0
            else:
                event = waiting[start:end]
                start = scanned = end + 2
            if done:
                raise NonsenseAnswer(f"an event after the end of the stream: {bytes(event[:200])!r}")
            if event.startswith(b":"):  # a comment, as the format defines it
                continue
            if not event.startswith(b"data: "):
                raise NonsenseAnswer(f"not an event: {bytes(event[:200])!r}")
            if event == b"data: [DONE]":
                done = True
                continue
            text, routes = cut_routes(event)
            try:
                report = orjson.loads(memoryview(text)[6:])
            except ValueError as error:
                raise NonsenseAnswer(f"not JSON: {bytes(event[:200])!r}") from error
            if routes is not None:
                routes.put_into(report)
            yield report
        del waiting[:start]
        start, scanned = 0, len(waiting)
    if not done or waiting:
        raise NonsenseAnswer(f"the stream ended without its [DONE]: {bytes(waiting[:200])!r}")
