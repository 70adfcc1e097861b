"""The log-probs that a server gives to tokens it did not sample: the form of the request, and what its answer must be.

Owns SGLang's prompt log-probs, which are at temperature 1 whatever the request says. It chooses no server.

One request while a server works on it: the tokens reported so far, and an early end that loses none of them.

Owns the judgement that a request no longer makes progress. A request that makes progress is never ended for being long:
a deadline on the whole request would cut long responses and keep short ones. To end a request early is to ask the
server for its tokens so far: the answer ends with them, and the response continues on another server.

Async HTTP client of one SGLang server: generation, and the calls that `server_control.py` is made of.

Owns the connection, the form of a generate request, and what counts as a failed answer; every call has a deadline. It
does not choose a server, retry, or know which weights are current (`pool.py`, `sampler.py`). Token ids go in
and token ids come out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import aiohttp
import numpy as np
import orjson

from gspo_mega.base import progress
from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout.client.completion import (
    Completion,
    NonsenseAnswer,
    RefusedAnswer,
    RoutingShape,
    SamplingParams,
    StreamedAnswer,
    decode_routes_of,
    log_prob_of,
    shown,
)
from gspo_mega.rollout.client.http_stream import IDENTITY, StreamClient, answer_bytes, read_body, read_events
from gspo_mega.rollout.registration import Secret

Cause = Literal["stalled", "moved", "drained", "paused"]

GRACE_SECONDS = 5.0
"""Longest time that a server may take to end a request early."""


class LoadMeter(Protocol):
    """Counts tokens as they are reported, as `rollout.load.Load` does."""

    def add_report(self, num_tokens: int, seconds: float, first: bool) -> None:
        """A request reported `num_tokens` new tokens, `seconds` after its last report."""
        ...


def _nothing() -> None: ...


class InFlightRequest:
    """One open request, between `begin` and `close`. Use it on one event loop.

    Attributes:
        prompt: the prompt's name; `is_named`: its silence was told to the user.
        num_tokens: tokens that this request has reported so far.
        cause: why the request is being ended early, or None.
    """

    def __init__(
        self,
        deadline_seconds: float,
        meter: LoadMeter | None = None,
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
        prompt: str = "",
    ) -> None:
        """`deadline_seconds`: longest wait for the first report of new tokens, and from one report to the next.
        `on_tokens` is called with every report's tokens and the number of those before them; it must not raise.
        `prompt`: its name, for messages.
        """
        self._deadline = deadline_seconds
        self._meter = meter
        self._on_tokens = on_tokens
        self._timer: asyncio.TimerHandle | None = None
        self._limit: asyncio.Timeout | None = None
        self._abort: Callable[[], None] = _nothing
        self._answer: StreamedAnswer | None = None
        self._num_at_end = 0
        self.prompt, self.is_named = prompt, False
        self.num_tokens = 0
        self.cause: Cause | None = None
        self.started = self.last_report = asyncio.get_running_loop().time()

    @property
    def grace_seconds(self) -> float:
        return min(GRACE_SECONDS, self._deadline)

    @property
    def made_no_progress(self) -> bool:
        """Whether the request was ended because it stalled, and its last report brought no token either."""
        return self.cause == "stalled" and self.num_tokens == self._num_at_end

    def begin(self, answer: StreamedAnswer, limit: asyncio.Timeout, abort: Callable[[], None]) -> None:
        """The request is being sent. `abort` asks the server to end it early; `limit` ends it if that fails."""
        self._answer, self._limit, self._abort = answer, limit, abort
        self._watch()

    def close(self) -> None:
        """The request is over; there is nothing left to end."""
        self._limit = None
        self._abort = _nothing  # the caller's function knows this flight: its tokens would wait for Python's collector
        if self._timer is not None:
            self._timer.cancel()

    def report(self, num_tokens: int) -> None:
        """The server reported `num_tokens` new tokens."""
        now = asyncio.get_running_loop().time()
        if self._meter is not None:
            self._meter.add_report(num_tokens, now - self.last_report, first=self.num_tokens == 0)
        if self._on_tokens is not None and self._answer is not None:
            self._on_tokens(self.num_tokens, self._answer.tokens_from(self.num_tokens))
        self.num_tokens += num_tokens
        self.last_report = now
        progress.beat()  # rank 0 is not stuck while a long response makes progress

    def end(self, cause: Cause, asks: bool = True) -> None:
        """Ask the server to end the request; its last report has the tokens so far. Without `asks`, the caller does."""
        if self.cause is not None or self._limit is None:
            return
        self.cause = cause
        self._num_at_end = self.num_tokens
        self._limit.reschedule(asyncio.get_running_loop().time() + self.grace_seconds)
        if asks:
            self._abort()

    def so_far(self) -> Completion:
        """All tokens reported so far, as a response that was cut short; no tokens if they make no sense."""
        try:
            return Completion([], [], [], "abort") if self._answer is None else self._answer.so_far()
        except NonsenseAnswer:
            return Completion([], [], [], "abort")

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        due = self.last_report + self._deadline
        if loop.time() >= due:
            self.end("stalled")
        else:
            self._timer = loop.call_at(due, self._watch)


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
        flight: InFlightRequest | None = None,
        cache_key: str | None = None,
        weight_version: int | None = None,
    ) -> Completion:
        """Sample one response to `input_ids`, streamed: the server reports the first token, and then every
        `report_tokens` tokens.

        The time of the whole request is not bounded: the request ends with ServerError when it gets no new token for
        `deadline_seconds`. The answer must name this request's id, which no other request has. `flight` follows the
        request, has the tokens so far if the request fails, and can end it early: finish_reason is then `abort`, as
        when the server cuts it short. Cancelling the call aborts the request on the server. `cache_key`: only cached
        prefixes of requests with the same key are read. `weight_version`: as for `StreamedAnswer`.
        """
        flight = flight or InFlightRequest(deadline_seconds)
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
        answer = StreamedAnswer(
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
        answer: StreamedAnswer,
        flight: InFlightRequest,
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


def _added(answer: StreamedAnswer, report: Any) -> int:
    """`answer.add`. A report that surprises the reader is nonsense, whatever it is, and never ends the batch."""
    try:
        return answer.add(report)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise NonsenseAnswer(f"a report that cannot be read: {type(error).__name__}: {error}") from error


def _silence(flight: InFlightRequest, deadline_seconds: float) -> str:
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


async def score_tokens(
    client: ServerClient, token_ids: Sequence[int], start: int, vocab_size: int, deadline_seconds: float
) -> np.ndarray:
    """Log-probs of the tokens from `start` on, each given those before it, in one pass: [len(token_ids) - start]
    float64, nats, at temperature 1.

    `start` is at least 1, because the first token has no log-prob. The server may take keys and values of the tokens
    before `start` - 1 from its cache; the others it computes anew. Raises ServerError, also for an answer about other
    tokens.
    """
    body = {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    if client.adapter is not None:
        body["lora_path"] = client.adapter
    answer = await client.call_object("/generate", body, deadline_seconds, what="score")
    try:
        return read_scores(answer, token_ids, start, vocab_size)
    except NonsenseAnswer as error:
        raise ServerError(client.server_id, "score", "nonsense", str(error)) from error


def read_scores(answer: Any, token_ids: Sequence[int], start: int, vocab_size: int) -> np.ndarray:
    """The log-probs in SGLang's answer to a request of `score_tokens`: [len(token_ids) - start] float64, nats.

    Its entries are [log-prob, token id, text] from token `start` - 1 on, whose own log-prob is null or of no use.
    Raises NonsenseAnswer.
    """
    # SGLang shows the last token of the vocabulary as 0 here; its log-prob is the token's own.
    named = {vocab_size - 1: (vocab_size - 1, 0)}
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(entries, list):
        raise NonsenseAnswer(f"no input_token_logprobs in {shown(answer)}")
    sent = meta.get("prompt_tokens") if meta is not None else None
    if type(sent) is not int or sent != len(token_ids):
        raise NonsenseAnswer(f"{shown(sent)} prompt tokens; {len(token_ids)} were sent")
    wanted = list(token_ids[start:])
    if len(entries) != len(wanted) + 1:
        raise NonsenseAnswer(f"{len(entries)} log-probs of prompt tokens; {len(wanted) + 1} expected")
    values = np.zeros(len(wanted))
    for place, (entry, token) in enumerate(zip(entries[1:], wanted, strict=True)):
        is_entry = isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int
        if not is_entry or entry[1] not in named.get(token, (token,)):
            raise NonsenseAnswer(f"log-prob entry {shown(entry)} at token {start + place}; token id {token} was sent")
        values[place] = log_prob_of(entry[0], f"of token {token} at place {start + place}")
    return values
