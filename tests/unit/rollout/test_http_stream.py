"""An answer reads the same however HTTP frames it and the network cuts it; what is no HTTP is said, and never believed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.rollout.client import http_stream
from gspo_mega.rollout.client.completion import NonsenseAnswer
from gspo_mega.rollout.client.http_stream import StreamClient

BODY = b"data: one\n\ndata: two\r\n\r\n0\r\n\r\n" * 3
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def chunked(body: bytes, sizes: list[int], trailer: bytes = b"") -> bytes:
    parts, place = [], 0
    for size in [*sizes, len(body)]:
        if part := body[place : place + size]:
            parts.append(b"%X;name=value\r\n%b\r\n" % (len(part), part))
        place += size
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(parts) + b"0\r\n" + trailer + b"\r\n"


def counted(body: bytes) -> bytes:
    return OK + b"content-length: %d\r\n\r\n" % len(body) + body


class Server:
    """Answers each request with the next of `answers`, in pieces; None: it hangs. After `b""` it hangs up."""

    def __init__(self, answers: list[list[bytes] | None], hangs_up: bool = False) -> None:
        self.answers, self.hangs_up, self.requests, self.num_connections, self.num_gone = answers, hangs_up, [], 0, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append((head.decode(), await reader.readexactly(length)))
                if (pieces := self.answers.pop(0)) is None:
                    break
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001 if len(pieces) > 1 else 0)
                if self.hangs_up:
                    break
            else:
                await reader.read()
            if not self.hangs_up:
                await reader.read()
        self.num_gone += 1
        writer.close()


def talk(answers: list[list[bytes] | None], act: Callable[[StreamClient, Server], Any], **more: Any) -> tuple:
    """(what `act` returns, server). `keepalive_seconds`: of the client."""
    keepalive = more.pop("keepalive_seconds", 5.0)

    async def run() -> tuple:
        served = Server(answers, **more)
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = StreamClient(f"http://127.0.0.1:{port}", {"Authorization": "Bearer k"}, keepalive)
        try:
            async with asyncio.timeout(20):
                return await act(client, served), served
        finally:
            client.close()
            server.close()

    return asyncio.run(run())


async def read(client: StreamClient, body: bytes = b"{}") -> tuple[int, str, bytes]:
    async with client.post("/generate", body) as response:
        data = b"".join([bytes(one) async for one in response.content.iter_any()])
        return response.status, response.content_type, data


ANSWER = 200, "text/event-stream", BODY


@given(
    st.lists(st.integers(1, 40), max_size=5), st.lists(st.integers(0, 400), max_size=8), st.booleans(), st.booleans()
)
def test_however_it_is_framed_and_cut(sizes, cuts, is_chunked, continues):
    data = (b"HTTP/1.1 100 Continue\r\n\r\n" if continues else b"") + (
        chunked(BODY, sizes, b"X-Sum: 1\r\n") if is_chunked else counted(BODY)
    )
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})

    async def run():
        connection = http_stream.Connection()
        connection._transport = _Wire()  # pyright: ignore[reportAttributeAccessIssue]: of it, two methods are used
        asking = asyncio.ensure_future(connection.request(b"POST"))
        await asyncio.sleep(0)
        found = bytearray()
        for start, end in itertools.pairwise(places):
            assert not connection.is_reusable
            connection.data_received(data[start:end])
        response = await asking
        async for one in response.content.iter_any():
            found += one
        assert connection.is_reusable
        return response.status, response.content_type, bytes(found)

    assert asyncio.run(run()) == ANSWER


class _Wire:
    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...


def test_one_connection_serves_one_request_after_the_other():
    async def act(client, server):
        return [await read(client, b'{"n": %d}' % number) for number in range(3)]

    found, server = talk([[chunked(BODY, [7, 9])], [counted(BODY)], [chunked(BODY, [])]], act)
    assert found == [ANSWER] * 3 and server.num_connections == 1
    assert [body for _, body in server.requests] == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}']
    head = server.requests[0][0]
    assert head.startswith("POST /generate HTTP/1.1\r\nHost: 127.0.0.1:") and "\r\nAuthorization: Bearer k\r\n" in head


@pytest.mark.parametrize(
    ("answer", "hangs_up"),
    [
        (OK + b"\r\n" + BODY, True),
        (OK + b"Connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY, False),
        (counted(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), False),
    ],
    ids=["to the end of the connection", "connection: close", "HTTP/1.0"],
)
def test_a_connection_that_ends_is_not_used_again(answer, hangs_up):
    async def act(client, server):
        return [await read(client), await read(client)]

    found, server = talk([[answer], [answer]], act, hangs_up=hangs_up)
    assert found == [ANSWER] * 2 and server.num_connections == 2


def test_a_connection_that_was_idle_is_not_used_again():
    async def act(client, server):
        found = [await read(client)]
        await asyncio.sleep(0.2)
        assert server.num_gone == 1, "it was ended meanwhile"
        return [*found, await read(client)]

    found, server = talk([[counted(BODY)], [counted(BODY)]], act, keepalive_seconds=0.05)
    assert found == [ANSWER] * 2 and server.num_connections == 2


@pytest.mark.parametrize("cut", [0, 20, len(OK) + 60, len(chunked(BODY, [])) - 8])
def test_a_connection_that_is_lost_is_a_failure_and_keeps_what_came(cut):
    data, seen = chunked(BODY, []), bytearray()

    async def act(client, server):
        async with client.post("/generate", b"{}") as response:
            async for one in response.content.iter_any():
                seen.extend(one)

    where = "before" if cut < len(OK) else "within"
    with pytest.raises(ConnectionResetError, match=f"the server ended the connection {where} its answer"):
        talk([[data[:cut]]], act, hangs_up=True)
    assert BODY.startswith(bytes(seen)) and (len(seen) > 0) == (where == "within")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"220 mail.example ESMTP\r\n\r\n", "no HTTP: '220 mail.example ESMTP'"),
        (OK + b"no colon\r\n\r\n", "the header 'no colon'"),
        (OK + b"Content-Length: -1\r\n\r\n", "Content-Length '-1'"),
        (OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n", "Content-Length '3, 4'"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "Transfer-Encoding 'gzip, chunked'"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "a chunk of size b'-5'"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n", "b'cd"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, "more than 4096 bytes between two chunks"),
        (OK + b"X: " + b"x" * 70000, "a head of more than 65536 bytes"),
    ],
)
def test_what_is_no_http_is_said(answer, says):
    with pytest.raises(NonsenseAnswer) as error:
        talk([[answer]], lambda client, server: read(client))
    assert says in str(error.value)


def test_bytes_behind_an_answer_belong_to_no_other_request():
    async def act(client, server):
        return [await read(client), await read(client)]

    found, server = talk([[counted(BODY) + counted(b"of whom?")], [counted(BODY)]], act)
    assert found == [ANSWER] * 2 and server.num_connections == 2


def test_leaving_an_answer_tells_the_server():
    async def act(client, server):
        async with client.post("/generate", b"{}") as response:
            await anext(response.content.iter_any())
        while not server.num_gone:
            await asyncio.sleep(0.01)
        asking = asyncio.ensure_future(read(client))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while server.num_gone < 2:
            await asyncio.sleep(0.01)

    talk([[counted(BODY)[:-3]], None], act)


def test_a_closed_client_ends_open_requests_and_refuses_later_ones():
    async def act(client, server):
        asking = asyncio.ensure_future(read(client))
        while not server.requests:
            await asyncio.sleep(0.01)
        client.close()
        with pytest.raises(ConnectionResetError):
            await asking
        with pytest.raises(ConnectionAbortedError, match="the server is gone"):
            await read(client)

    talk([None], act)


def test_a_reader_that_is_slow_makes_the_server_wait(monkeypatch):
    monkeypatch.setattr(http_stream, "_MOST_UNREAD_BYTES", 2**16)
    pieces = [bytes([number % 251]) * 2**16 for number in range(400)]
    whole = b"".join(pieces)

    async def act(client, server):
        async with client.post("/generate", b"{}") as response:
            chunks, most = response.content.iter_any(), 0
            found = bytearray()
            while len(found) < len(whole):
                await asyncio.sleep(0.002)
                most = max(most, len(response._unread))
                found += await anext(chunks)
            return found == whole, most

    (is_whole, most), _ = talk([[OK + b"Content-Length: %d\r\n\r\n" % len(whole), *pieces]], act)
    assert is_whole and most < 2**20
