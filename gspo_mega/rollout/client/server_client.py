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

from gspo_mega.errors import RolloutError
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
from gspo_mega.rollout.secret import Secret

logger = logging.getLogger(__name__)

# The server closes a connection that was idle for 5 s. Giving it up well before is what keeps a request from being
# written to one that is just going away, which cannot be told from a server that dies.
_KEEPALIVE_SECONDS = 2.0

# Answers of control calls; the longest are the checksums of all tensors of all ranks of one server.
_MOST_CONTROL_BYTES = 64 * 1024**2
# Between the end of an answer and the end of its connection's use.
_TAIL_SECONDS = 1.0


class ServerError(RolloutError):
    """One call of one server failed. `kind` is how, for counting and for deciding what to do about it."""

    def __init__(
        self, server_id: str, request: str, kind: Literal["connection", "deadline", "status", "nonsense"], why: str
    ):
        super().__init__(f"{server_id}: {request}: {why}")
        self.server_id = server_id
        self.kind = kind


class ServerClient:
    """Client of the server at `address` (http://host:port). Use it in one event loop; `close()` it in the end.

    Every method raises ServerError, naming server and request, if the server cannot be reached, does not answer within
    `deadline_seconds`, refuses, or answers nonsense.
    """

    def __init__(
        self, server_id: str, address: str, api_key: str, *, vocab_size: int, routing: RoutingShape | None = None
    ):
        self.server_id = server_id
        self.address = address
        self._api_key = Secret(api_key)
        self._vocab_size = vocab_size
        self._routing = routing
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
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
    ) -> Completion:
        """Sample one response to `input_ids`, streamed: the server reports the first token, and then every
        `report_tokens`.

        There is no bound on the whole: a request is ended, and ServerError raised, where for `deadline_seconds` it got
        no new token. The answer is bound to this very request: it must name an id that no other request has. `flight`
        is kept up to date, has what was reported where the request fails, and ends it early: finish_reason is then
        `abort`, as it is where the server cuts it short. Cancelling the call aborts the request on the server.
        """
        flight = flight or Flight(deadline_seconds)
        # Of one length behind the name, so that none begins with another: SGLang aborts what begins with the id it is
        # given.
        unique_id = f"{request_id}.{secrets.token_hex(8)}"
        body = {
            "rid": unique_id,
            "input_ids": list(input_ids),
            "sampling_params": params.as_json() | {"stream_interval": report_tokens},
            "return_logprob": True,
            "return_routed_experts": self._routing is not None,
            "stream": True,
        }
        what = f"generate {request_id}"
        answer = Answer(
            request_id=unique_id,
            num_prompt_tokens=len(input_ids),
            params=params,
            vocab_size=self._vocab_size,
            routing=self._routing,
        )
        limit_bytes = answer_bytes(len(input_ids), params.max_new_tokens, report_tokens, self._routing)
        try:
            async with asyncio.timeout(None) as limit:
                flight.begin(answer, limit, lambda: self._abort(unique_id, flight.grace_seconds))
                await self._stream("/generate", body, answer, flight, limit, limit_bytes)
        except TimeoutError as error:
            if answer.completion is None:
                raise ServerError(self.server_id, what, "deadline", _silence(flight, deadline_seconds)) from error
        except (NonsenseAnswer, RefusedAnswer) as error:
            raise ServerError(
                self.server_id, what, "status" if isinstance(error, RefusedAnswer) else "nonsense", str(error)
            ) from error
        except aiohttp.ClientResponseError as error:
            raise ServerError(self.server_id, what, "status", f"HTTP {error.status}: {error.message}") from error
        except (aiohttp.ClientError, OSError) as error:
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
        self, path: str, body: dict, answer: Answer, flight: Flight, limit: asyncio.Timeout, limit_bytes: int
    ) -> None:
        async with self._request("POST", path, body) as response:
            if response.status != 200:
                text = (await read_body(response, _MOST_CONTROL_BYTES)).decode(errors="replace")
                raise aiohttp.ClientResponseError(
                    response.request_info, (), status=response.status, message=_message(text)
                )
            async for report in read_events(response, limit_bytes):
                if (count := answer.add(report)) > 0:
                    flight.report(count)
                if answer.completion is not None:
                    # Read on to the end of the stream, so that the connection can be used again.
                    limit.reschedule(asyncio.get_running_loop().time() + _TAIL_SECONDS)

    def _abort(self, unique_id: str, deadline_seconds: float) -> None:
        """Ask the server to end this request. Its answer ends then, with what it has; nobody waits for this call's
        own.
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
        answer = self.check_object(await self.call(path, body, deadline_seconds, what=what), what or path)
        if answer.get("success") is not True:
            raise ServerError(self.server_id, what or path, "status", str(answer.get("message", answer)))
        return answer

    def check_object(self, answer: Any, what: str) -> dict[str, Any]:
        """`answer` of the call `what`. Raises ServerError where it is not a JSON object."""
        if not isinstance(answer, dict):
            raise ServerError(self.server_id, what, "nonsense", f"an object expected, not {str(answer)[:200]!r}")
        return answer

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None,
        deadline_seconds: float,
        *,
        what: str | None = None,
        method: str = "POST",
    ) -> Any:
        """One request and its whole answer: decoded JSON, or the text for a path that answers with text."""
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
        if path in _TEXT_ANSWERS:
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError(self.server_id, what, "nonsense", f"not JSON: {text[:200]!r}") from error

    def _request(self, method: str, path: str, body: dict | None):
        """The request, to be entered with `async with`; no bound on its time but the caller's."""
        if self._session is None:
            # Concurrency is bounded by the pool; a second bound here would only hide requests in a queue.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                headers={"Authorization": f"Bearer {self._api_key}", **IDENTITY},
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            )
        return self._session.request(method, self.address + path, json=body)


def _silence(flight: Flight, deadline_seconds: float) -> str:
    return (
        f"no new token within {deadline_seconds:g} s, after {flight.num_tokens}"
        if flight.cause != "moved"
        else f"did not give up a request within {flight.grace_seconds:g} s"
    )


_TEXT_ANSWERS = frozenset({"/health", "/flush_cache", "/abort_request", "/pause_generation", "/continue_generation"})


def _message(text: str) -> str:
    """What SGLang says went wrong, out of the several forms it says it in."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text[:500]
    if isinstance(answer, dict):
        error = answer.get("error")
        answer = answer.get("message") or (error.get("message") if isinstance(error, dict) else error) or answer
    return str(answer)[:2000]
