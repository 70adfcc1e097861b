"""Async HTTP client of one SGLang server: generation, and the calls that `server_control.py` is made of.

Owns the connection, the form of a generate request, and what counts as a failed answer; every call has a deadline. It
does not choose a server, retry, or know which weights are current (`server_pool.py`, `sampling.py`). Token ids go in
and token ids come out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import aiohttp
import orjson

from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout.client.answer_fields import shown
from gspo_mega.rollout.client.completion import (
    Answer,
    Completion,
    NonsenseAnswer,
    RefusedAnswer,
    RoutingShape,
    SamplingParams,
)
from gspo_mega.rollout.client.event_stream import IDENTITY, answer_bytes, read_body, read_events
from gspo_mega.rollout.client.flight import Flight
from gspo_mega.rollout.client.routes import decode_routes_of
from gspo_mega.rollout.client.stream_client import StreamClient
from gspo_mega.rollout.secret import Secret

logger = logging.getLogger(__name__)

# The server closes a connection that was idle for 5 s. The client closes it well before: a request on a connection that
# the server is closing fails exactly as if the server had died.
_KEEPALIVE_SECONDS = 2.0

# The longest answers of control calls are the checksums of all tensors of all ranks of one server.
_MOST_CONTROL_BYTES = 64 * 1024**2
# Longest time from the last report of an answer to the end of its stream.
_TAIL_SECONDS = 1.0


class ServerError(RolloutError):
    """One call of one server failed. `kind` says how: it is counted, and decides what is done about it."""

    def __init__(
        self, server_id: str, request: str, kind: Literal["connection", "deadline", "status", "nonsense"], why: str
    ):
        super().__init__(f"{server_id}: {request}: {why}")
        self.server_id = server_id
        self.kind = kind


class ServerClient:
    """Client of the server at `address` (http://host:port). Use it in one event loop, and call `close()` in the end.

    Every method raises ServerError, naming server and request, if the server cannot be reached, does not answer within
    `deadline_seconds`, refuses, or answers nonsense.
    """

    def __init__(
        self,
        server_id: str,
        address: str,
        api_key: str,
        *,
        vocab_size: int,
        routing: RoutingShape | None = None,
        adapter: str | None = None,
    ):
        """`adapter`: the server's name of the adapters that every response is sampled with; none when absent."""
        self.server_id = server_id
        self.address = address
        self._vocab_size = vocab_size
        self._routing = routing
        self.adapter = adapter
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Authorization": f"Bearer {Secret(api_key)}", **IDENTITY}
        self._streams = StreamClient(address, self._headers, _KEEPALIVE_SECONDS)
        self._is_closed = False
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End the connections; open requests fail, and later ones."""
        self._is_closed = True
        self._streams.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        deadline_seconds: float,
        report_tokens: int = 32,
        flight: Flight | None = None,
        cache_key: str | None = None,
        weight_version: int | None = None,
    ) -> Completion:
        """Sample one response to `input_ids`, streamed: the server reports the first token, and then every
        `report_tokens` tokens.

        The time of the whole request is not bounded: the request ends with ServerError when it gets no new token for
        `deadline_seconds`. The answer must name this request's id, which no other request has. `flight` follows the
        request, has the tokens so far if the request fails, and can end it early: finish_reason is then `abort`, as
        when the server cuts it short. Cancelling the call aborts the request on the server. `cache_key`: only cached
        prefixes of requests with the same key are read. `weight_version`: as for `Answer`.
        """
        flight = flight or Flight(deadline_seconds)
        # The random part has a fixed length, so that no id is a prefix of another: SGLang aborts every request whose id
        # begins with the given one.
        unique_id = f"{request_id}.{secrets.token_hex(8)}"
        body = {
            "rid": unique_id,
            "input_ids": list(input_ids),
            "sampling_params": params.as_json() | {"stream_interval": report_tokens},
            "return_logprob": True,
            "return_routed_experts": self._routing is not None,
            "stream": True,
        }
        if cache_key is not None:
            body["extra_key"] = cache_key
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        what = f"generate {request_id}"
        answer = Answer(
            request_id=unique_id,
            num_prompt_tokens=len(input_ids),
            params=params,
            vocab_size=self._vocab_size,
            routing=self._routing,
            weight_version=weight_version,
        )
        limit_bytes = answer_bytes(len(input_ids), params.max_new_tokens, report_tokens, self._routing)
        try:
            async with asyncio.timeout(None) as limit:
                flight.begin(answer, limit, lambda: self._abort(unique_id, flight.grace_seconds))
                await self._stream("/generate", body, answer, flight, limit, limit_bytes, what)
        except TimeoutError as error:
            if answer.completion is None:
                raise ServerError(self.server_id, what, "deadline", _silence(flight, deadline_seconds)) from error
        except (NonsenseAnswer, RefusedAnswer) as error:
            raise ServerError(
                self.server_id, what, "status" if isinstance(error, RefusedAnswer) else "nonsense", str(error)
            ) from error
        except OSError as error:
            if answer.completion is None:
                raise ServerError(self.server_id, what, "connection", f"{type(error).__name__}: {error}") from error
        finally:
            flight.close()
        if answer.completion is None:
            raise ServerError(self.server_id, what, "nonsense", "the answer has no end")
        if flight.made_no_progress and answer.completion.finish_reason == "abort":
            raise ServerError(self.server_id, what, "deadline", _silence(flight, deadline_seconds))
        return answer.completion

    async def _stream(
        self,
        path: str,
        body: dict[str, Any],
        answer: Answer,
        flight: Flight,
        limit: asyncio.Timeout,
        limit_bytes: int,
        what: str,
    ) -> None:
        async with self._streams.post(path, orjson.dumps(body)) as response:
            if response.status != 200:
                text = (await read_body(response, _MOST_CONTROL_BYTES)).decode(errors="replace")
                raise ServerError(self.server_id, what, "status", f"HTTP {response.status}: {_message(text)}")
            async for report in read_events(response, limit_bytes):
                if self._routing is not None:
                    try:
                        await decode_routes_of(report, self._routing.num_experts)
                    except ValueError as error:
                        raise NonsenseAnswer(str(error)) from error
                if (count := _added(answer, report)) > 0:
                    flight.report(count)
                if answer.completion is not None:
                    # Read on to the end of the stream, so that the connection can be used again.
                    limit.reschedule(asyncio.get_running_loop().time() + _TAIL_SECONDS)

    def _abort(self, unique_id: str, deadline_seconds: float) -> None:
        """Ask the server to end this request, whose answer then ends with its tokens so far. Nobody waits for the
        answer to this call.
        """

        async def ask() -> None:
            try:
                await self.call("/abort_request", {"rid": unique_id}, deadline_seconds)
            except ServerError as error:
                logger.info("%s", error)

        task = asyncio.ensure_future(ask())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def update(
        self, path: str, body: dict[str, Any], deadline_seconds: float, what: str | None = None
    ) -> dict[str, Any]:
        """A call whose answer is {success, message, ...}; `what` names it in errors, by default `path`. Raises
        ServerError where the server does not report success.
        """
        answer = await self.call_object(path, body, deadline_seconds, what=what)
        if answer.get("success") is not True:
            raise ServerError(self.server_id, what or path, "status", _said(answer.get("message", answer)))
        return answer

    async def call_object(
        self,
        path: str,
        body: dict[str, Any] | None,
        deadline_seconds: float,
        *,
        what: str | None = None,
        method: str = "POST",
    ) -> dict[str, Any]:
        """A call whose answer is a JSON object."""
        text = await self.call(path, body, deadline_seconds, what=what, method=method)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServerError(self.server_id, what or path, "nonsense", f"not JSON: {text[:200]!r}") from error
        if not isinstance(answer, dict):
            raise ServerError(self.server_id, what or path, "nonsense", f"an object expected, not {shown(answer)}")
        return answer

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None,
        deadline_seconds: float,
        *,
        what: str | None = None,
        method: str = "POST",
    ) -> str:
        """One request and its whole answer, as text. `what` names the call in errors, by default `path`."""
        what = what or path
        try:
            async with asyncio.timeout(deadline_seconds):
                async with self._request(method, path, body) as response:
                    text = (await read_body(response, _MOST_CONTROL_BYTES)).decode()
                    status = response.status
        except TimeoutError as error:
            raise ServerError(self.server_id, what, "deadline", f"no answer within {deadline_seconds:g} s") from error
        except NonsenseAnswer as error:
            raise ServerError(self.server_id, what, "nonsense", str(error)) from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise ServerError(self.server_id, what, "connection", f"{type(error).__name__}: {error}") from error
        if status != 200:
            raise ServerError(self.server_id, what, "status", f"HTTP {status}: {_message(text)}")
        return text

    def _request(self, method: str, path: str, body: dict | None):
        """The request, to be entered with `async with`. Its time is bounded by the caller alone."""
        if self._is_closed:  # aiohttp would raise a plain RuntimeError
            raise aiohttp.ClientConnectionError("the server is gone")
        if self._session is None:
            # The pool bounds the open requests; a second bound here would only hide requests in a queue.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                headers=self._headers,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            )
        return self._session.request(method, self.address + path, json=body)


def _added(answer: Answer, report: Any) -> int:
    """`answer.add`. A report that surprises the reader is nonsense, whatever it is, and never ends the batch."""
    try:
        return answer.add(report)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise NonsenseAnswer(f"a report that cannot be read: {type(error).__name__}: {error}") from error


def _silence(flight: Flight, deadline_seconds: float) -> str:
    return (
        f"no new token within {deadline_seconds:g} s, after {flight.num_tokens}"
        if flight.cause in (None, "stalled")
        else f"did not give up a request within {flight.grace_seconds:g} s"
    )


def _message(text: str) -> str:
    """SGLang's error message, out of the several forms of its error answers."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text[:500]
    if isinstance(answer, dict):
        error = answer.get("error")
        answer = answer.get("message") or (error.get("message") if isinstance(error, dict) else error) or answer
    return _said(answer)


def _said(message: Any) -> str:
    return message[:2000] if isinstance(message, str) else shown(message)
