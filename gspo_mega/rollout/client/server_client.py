"""Async HTTP client of one SGLang server: generation, and the calls that `server_control.py` is made of.

`ServerClient` has the connections, the form of a generate request, and the judgement of what counts as a failed answer.
Every call has a deadline. It does not choose a server, retry, or know which weights are current (`pool.py`,
`sampler.py`). Token ids go in and token ids come out.

`InFlightRequest` follows one request while a server works on it, and can end it early without losing its tokens. It
judges whether a request makes progress. A request that does is never ended for being long: a deadline on the whole
request would cut long responses and keep short ones. To end a request early, it asks the server for the tokens so far:
the answer ends with them, and the response continues on another server.

`score_tokens` asks for the log-probs that a server gives to tokens that it did not sample. SGLang's log-probs of prompt
tokens are at temperature 1, no matter what the request says.
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
from gspo_mega.base.served_scores import ServedScores
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
from gspo_mega.rollout.client.http_stream import (
    IDENTITY,
    StreamClient,
    answer_bytes,
    mask_bytes,
    read_body,
    read_events,
)
from gspo_mega.rollout.registration import Secret

logger = logging.getLogger(__name__)

Cause = Literal["stalled", "moved", "drained", "paused", "ended"]

GRACE_SECONDS = 5.0
"""The longest time that a server may take to end a request early."""

# The server closes a connection that was idle for 5 s. The client closes it well before that, because a request on a
# connection that the server is closing fails exactly as if the server had died.
_KEEPALIVE_SECONDS = 2.0

# The longest answers of control calls are the checksums of all tensors of all ranks of one server.
_MOST_CONTROL_BYTES = 64 * 1024**2

# The longest time from the last report of an answer to the end of its stream.
_TAIL_SECONDS = 1.0


class ServerError(RolloutError):
    """One call of one server failed. `kind` says how; it is counted, and decides what is done about the failure."""

    def __init__(
        self,
        server_id: str,
        request: str,
        kind: Literal["connection", "deadline", "status", "nonsense"],
        why: str,
        status: int | None = None,
    ):
        """`status`: the answer's HTTP status, if that is the failure."""
        super().__init__(f"{server_id}: {request}: {why}")
        self.server_id = server_id
        self.kind = kind
        self.status = status


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
        """`adapter` is the server's name of the adapters with which every response is sampled; None for no adapters."""
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
        """End the connections. Open requests fail, and so do later ones."""
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
        """Sample one response to `input_ids`, and return it. It is streamed: the server reports the first token, and
        then every `report_tokens` tokens.

        The time of the whole request is not bounded. The request ends with ServerError if it gets no new token for
        `deadline_seconds`. The answer must name this request's id, which no other request has. `flight` follows the
        request, has the tokens so far if the request fails, and can end it early: finish_reason is then `abort`, as if
        the server had cut it short. Cancelling the call aborts the request on the server. With a `cache_key`, the
        server reads only cached prefixes of requests with the same key. `weight_version` is that of `StreamedAnswer`.
        """
        flight = flight or InFlightRequest(deadline_seconds)
        # The random part has a fixed length, so that no id is a prefix of another. SGLang aborts every request whose id
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
        if params.has_masks:
            body["return_sampling_mask"] = True
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
        if params.has_masks:
            limit_bytes += params.max_new_tokens * mask_bytes(params.top_k, self._vocab_size)
        try:
            async with asyncio.timeout(None) as limit:
                flight.begin(answer, limit, lambda: self._abort(unique_id, flight.grace_seconds))
                await self._stream("/generate", body, answer, flight, limit, limit_bytes, what)
        except TimeoutError as error:
            if answer.completion is None:
                raise ServerError(self.server_id, what, "deadline", _why_ended(flight, deadline_seconds)) from error
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
            raise ServerError(self.server_id, what, "deadline", _why_ended(flight, deadline_seconds))
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
                if (count := _add_report(answer, report)) > 0:
                    flight.report(count)
                if answer.completion is not None:
                    # Read on to the end of the stream, so that the connection can be used again.
                    limit.reschedule(asyncio.get_running_loop().time() + _TAIL_SECONDS)

    def _abort(self, unique_id: str, deadline_seconds: float) -> None:
        """Ask the server to end this request, whose answer then ends with its tokens so far. Do not wait for the
        reply.
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
        """Make a call whose answer is {success, message, ...}, and return the answer. `what` names the call in errors;
        the default is `path`. Raises ServerError if the server does not report success.
        """
        answer = await self.call_object(path, body, deadline_seconds, what=what)
        if answer.get("success") is not True:
            raise ServerError(self.server_id, what or path, "status", _bounded_text(answer.get("message", answer)))
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
        """Make a call whose answer is a JSON object, and return the answer."""
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
        """Send one request and return its whole answer as text. `what` names the call in errors; the default is
        `path`.
        """
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
            raise ServerError(self.server_id, what, "status", f"HTTP {status}: {_message(text)}", status)
        return text

    def _request(self, method: str, path: str, body: dict | None):
        """Return the request, to be entered with `async with`. Only the caller bounds its time."""
        if self._is_closed:  # aiohttp would raise a plain RuntimeError
            raise aiohttp.ClientConnectionError("the server is gone")
        if self._session is None:
            # The pool bounds the open requests. A second bound here would only hide requests in a queue.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                headers=self._headers,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            )
        return self._session.request(method, self.address + path, json=body)


def _add_report(answer: StreamedAnswer, report: Any) -> int:
    """Add a report to the answer. A report that cannot be read is nonsense; no error of the reader ends the batch."""
    try:
        return answer.add(report)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise NonsenseAnswer(f"a report that cannot be read: {type(error).__name__}: {error}") from error


def _why_ended(flight: InFlightRequest, deadline_seconds: float) -> str:
    return (
        f"no new token within {deadline_seconds:g} s, after {flight.num_tokens}"
        if flight.cause in (None, "stalled")
        else f"did not give up a request within {flight.grace_seconds:g} s"
    )


def _message(text: str) -> str:
    """Return SGLang's error message, which its error answers have in several forms."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text[:500]
    if isinstance(answer, dict):
        error = answer.get("error")
        answer = answer.get("message") or (error.get("message") if isinstance(error, dict) else error) or answer
    return _bounded_text(answer)


def _bounded_text(message: Any) -> str:
    return message[:2000] if isinstance(message, str) else shown(message)


class LoadMeter(Protocol):
    """Counts tokens as they are reported. `Load` in `rollout/pooled_server.py` implements it."""

    def add_report(self, num_tokens: int, seconds: float, first: bool) -> None:
        """A request reported `num_tokens` new tokens, `seconds` after its last report."""
        ...


def _nothing() -> None: ...


class InFlightRequest:
    """One open request, between `begin` and `close`. Use it on one event loop.

    Attributes:
        prompt: the prompt's name.
        is_named: the user was told that the request is silent.
        num_tokens: how many tokens this request has reported so far.
        cause: why the request is being ended early, or None.
        started, last_report: times of the loop's clock, in seconds.
    """

    def __init__(
        self,
        deadline_seconds: float,
        meter: LoadMeter | None = None,
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
        prompt: str = "",
    ) -> None:
        """`deadline_seconds` is the longest wait for the first report of new tokens, and from one report to the next.
        `on_tokens` is called with the number of tokens before a report and the report's tokens; it must not raise.
        `prompt` is the prompt's name, for messages.
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
        """Note that the request is being sent. `abort` asks the server to end it early; `limit` ends it if that
        fails.
        """
        self._answer, self._limit, self._abort = answer, limit, abort
        self._watch()

    def close(self) -> None:
        """Note that the request is over, and nothing is left to end."""
        self._limit = None
        self._abort = _nothing  # the caller's function refers to this request: a cycle would keep its tokens in memory
        if self._timer is not None:
            self._timer.cancel()

    def report(self, num_tokens: int) -> None:
        """Note that the server reported `num_tokens` new tokens."""
        now = asyncio.get_running_loop().time()
        if self._meter is not None:
            self._meter.add_report(num_tokens, now - self.last_report, first=self.num_tokens == 0)
        if self._on_tokens is not None and self._answer is not None:
            self._on_tokens(self.num_tokens, self._answer.tokens_from(self.num_tokens))
        self.num_tokens += num_tokens
        self.last_report = now
        progress.beat()  # rank 0 is not stuck while a long response makes progress

    def end(self, cause: Cause, asks: bool = True) -> None:
        """End the request early; its last report has the tokens so far. With `asks` the server is asked to end it;
        otherwise the caller sees to that.
        """
        if self.cause is not None or self._limit is None:
            return
        self.cause = cause
        self._num_at_end = self.num_tokens
        self._limit.reschedule(asyncio.get_running_loop().time() + self.grace_seconds)
        if asks:
            self._abort()

    def so_far(self) -> Completion:
        """Return all tokens reported so far as a response that was cut short; no tokens if they make no sense."""
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


async def score_tokens(
    client: ServerClient, token_ids: Sequence[int], start: int, vocab_size: int, deadline_seconds: float
) -> np.ndarray:
    """Return the log-probs of the tokens from `start` on, each given those before it: [len(token_ids) - start] float64,
    in nats, at temperature 1. The server computes them in one pass.

    `start` is at least 1, because the first token has no log-prob. The server may take keys and values of the tokens
    before `start` - 1 from its cache; it computes the others anew. Raises ServerError, also for an answer about other
    tokens.
    """
    body = _score_request(client, token_ids, start)
    answer = await client.call_object("/generate", body, deadline_seconds, what="score")
    try:
        return read_scores(answer, token_ids, start, vocab_size)
    except NonsenseAnswer as error:
        raise ServerError(client.server_id, "score", "nonsense", str(error)) from error


def _score_request(client: ServerClient, token_ids: Sequence[int], start: int) -> dict[str, Any]:
    body = {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    return body if client.adapter is None else body | {"lora_path": client.adapter}


async def score_with_top(
    client: ServerClient, token_ids: Sequence[int], start: int, vocab_size: int, num_top: int, deadline_seconds: float
) -> ServedScores:
    """As `score_tokens`, with the server's `num_top` most likely tokens at each place, none if it is 0."""
    body = _score_request(client, token_ids, start)
    if num_top:
        body["top_logprobs_num"] = num_top

    def read(text: str) -> ServedScores:
        answer = orjson.loads(text)
        log_probs = read_scores(answer, token_ids, start, vocab_size).astype(np.float32)
        return ServedScores(log_probs, *read_top(answer, len(log_probs), num_top, vocab_size))

    text = await client.call("/generate", body, deadline_seconds, what="score")
    try:  # in a thread: with many most likely tokens an answer has megabytes
        return await asyncio.to_thread(read, text)
    except (NonsenseAnswer, ValueError) as error:
        raise ServerError(client.server_id, "score", "nonsense", str(error)) from error


def read_top(answer: Any, num_tokens: int, num_top: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely tokens in SGLang's answer to a request of `score_with_top`: ids [num_tokens, num_top]
    int32 and log-probs [num_tokens, num_top] float32 nats, the most likely first. Raises NonsenseAnswer.
    """
    ids, log_probs = np.zeros((num_tokens, num_top), np.int32), np.zeros((num_tokens, num_top), np.float32)
    if not num_top:
        return ids, log_probs
    places = answer["meta_info"].get("input_top_logprobs")
    if not isinstance(places, list) or len(places) != num_tokens + 1:
        count = len(places) if isinstance(places, list) else "no"
        raise NonsenseAnswer(f"{count} places with most likely tokens; {num_tokens + 1} expected")
    for place, entries in enumerate(places[1:]):
        if not isinstance(entries, list) or len(entries) != num_top:
            count = len(entries) if isinstance(entries, list) else "no"
            raise NonsenseAnswer(f"{count} most likely tokens at scored place {place}; {num_top} were asked for")
        for rank, entry in enumerate(entries):
            is_entry = isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int
            if not is_entry or not 0 <= entry[1] < vocab_size:
                raise NonsenseAnswer(
                    f"most likely token {shown(entry)} at scored place {place}; ids from 0 to {vocab_size - 1} expected"
                )
            ids[place, rank] = entry[1]
            log_probs[place, rank] = log_prob_of(entry[0], f"of a most likely token at scored place {place}")
        if len(set(ids[place].tolist())) != num_top:
            raise NonsenseAnswer(f"a most likely token is there twice at scored place {place}")
    if (np.diff(log_probs, axis=1) > 0).any():
        raise NonsenseAnswer("most likely tokens that are not sorted")
    return ids, log_probs


def read_scores(answer: Any, token_ids: Sequence[int], start: int, vocab_size: int) -> np.ndarray:
    """Return the log-probs in SGLang's answer to a request of `score_tokens`: [len(token_ids) - start] float64, in
    nats.

    The answer's entries are [log-prob, token id, text] from token `start` - 1 on, whose own log-prob is null or of no
    use. Raises NonsenseAnswer.
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
