"""One session at the endpoint: its key, its turns, and the time that the agent takes of its own.

`EndpointSession` decides which requests ask for the same turn, and what becomes of a turn whose client is gone. HTTP is
in `endpoint.py`, the form of requests in `wire.py` and the protocols' modules, the tokens in `session.py`.

A turn that was begun is sampled to its end and stays in the record, even if its client no longer waits. Dropping it
would drop long turns sooner than short ones. The same request joins that turn if it says that it is a retry, or if the
answer to the earlier one did not reach its client. Any other equal request is another sample.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gspo_mega.agents.protocol import ContextFull, TooManyTurns, TurnRefused
from gspo_mega.agents.session import AgentTurn, EpisodeSession
from gspo_mega.agents.wire import ApiError, Message, Request, Sampling, refuse
from gspo_mega.base.errors import DataError, EpisodeError
from gspo_mega.config.schema import Episodes

MOST_OPEN_REQUESTS = 64
"""How many requests of one session may be open. Each may hold a body of `episodes.endpoint.max_body_bytes`."""

OnReport = Callable[[int, Sequence[int]], None]


@dataclass(eq=False)
class Call:
    """One turn that was asked for.

    `fingerprint` is that of its request, which holds a whole history and is not kept. `opening` is the text of the
    context before the turn and `num_context_tokens` its tokens, once they are known. `reports` is what was sampled so
    far. `is_heard` says whether a client still waits for the turn, `delivered` whether one has read its end.
    """

    fingerprint: str
    key: str | None
    is_heard: Callable[[], bool]
    num_restarts: int
    answer: asyncio.Task[AgentTurn] = field(init=False)
    delivered: bool = False
    opening: str | None = None
    num_context_tokens: int = 0
    reports: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_lost(self) -> bool:
        return not self.delivered and not self.is_heard()


class EndpointSession:
    """One session at the endpoint, on its event loop. `AgentEndpoint.open` makes it.

    Attributes:
        base_url, api_key, model: what a client is given.
        sampling: what a request may say about sampling.
        created: the `created` of its answers, in Unix seconds.
        refused: the refusal of the last turn that a limit refused; None if none was.
        failed: gets the error that ends the run if a turn meets one, which is any error that the agent did not cause.
        num_open: how many requests are being answered.
        responses: of each response that a client may continue by its id, the number of its turn, and whether its
            history begins with instructions.
        counts: num_endpoint_retries (requests that joined a turn of an earlier one), num_endpoint_unheard (turns
            whose client had gone before their end), num_endpoint_errors (requests that were refused),
            num_ignored_sampling (requests that asked for another distribution).
    """

    def __init__(self, session: EpisodeSession, base_url: str, model: str) -> None:
        self.session = session
        self.base_url = base_url
        self.model = model
        params = session.params
        self.sampling = Sampling(params.temperature, params.top_p, params.top_k, model, params.min_p)
        self.api_key = secrets.token_urlsafe(32)
        self.created = int(time.time())
        self.refused: TurnRefused | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_open = 0
        self.responses: dict[str, tuple[int, bool]] = {}
        self._calls: list[Call] = []
        self._num_turns = 0
        self._own_seconds = 0.0
        self._own_since: float | None = time.monotonic()
        self._last_turn_ended = time.monotonic()

    def admits(self, authorization: str, api_key: str) -> bool:
        """Whether the header `Authorization` or `x-api-key` has the session's key. The check takes equally long for
        every wrong key.
        """
        key = f"Bearer {self.api_key}".encode()
        given = [one.encode("utf-8", "replace") for one in (authorization, f"Bearer {api_key}")]
        return sum(hmac.compare_digest(one, key) for one in given) > 0  # compares both, whatever the first says

    def calls(self, request: Request, key: str | None, is_retry: bool, is_heard: Callable[[], bool]) -> list[Call]:
        """Return the `request.n` turns that a request asks for: begun now, or by an equal request before. `key` is the
        request's `Idempotency-Key`. Raises ApiError if the key was used for another request, or if the episode has
        fewer turns left than several that are asked for.
        """
        earlier = self._earlier_calls(request, key, is_retry)
        missing = request.n - len(earlier)
        if request.n > 1 and missing > (left := self.session.num_turns_left):
            refuse("n", f"{request.n} turns are asked for, and the episode has {left} left (episodes.max_turns)")
        for call in earlier:
            call.is_heard = is_heard
        self.counts["num_endpoint_retries"] += bool(earlier)
        self.counts["num_ignored_sampling"] += bool(request.ignored)
        return [*earlier, *(self._begin(request, key, is_heard) for _ in range(missing))]

    def _earlier_calls(self, request: Request, key: str | None, is_retry: bool) -> list[Call]:
        """The turns that an earlier request asked for and this one joins, oldest first."""
        restarts = getattr(self.session, "num_restarts", 0)
        calls = [call for call in self._calls if call.num_restarts == restarts]
        if key is not None and (same_key := [call for call in calls if call.key == key]):
            if any(call.fingerprint != request.fingerprint for call in same_key):
                raise ApiError("Idempotency-Key: it was used for another request", code="idempotency_key")
            return same_key[-request.n :]
        equal = [call for call in calls if call.fingerprint == request.fingerprint]
        lost = [call for call in equal if call.is_lost]
        return lost[-request.n :] or (equal[-request.n :] if is_retry else [])

    def remember(self, response_id: str, request: Request, answer: AgentTurn) -> None:
        """Note which turn a response is, if its request lets a client continue it by its id."""
        if request.told and request.told.get("store") is not False:
            self.responses[response_id] = (answer.number, request.told.get("instructions") is not None)

    def history_of(self, response_id: str) -> list[Message] | None:
        """Return the messages up to a response, its own last, without the instructions that it was asked for with; None
        if the session knows no such response.
        """
        if response_id not in self.responses:
            return None
        turn, has_instructions = self.responses[response_id]
        return self.session.history(turn)[int(has_instructions) :]

    async def num_context_tokens(self, request: Request) -> int:
        """Return how many tokens the turn that a request asks for would be sampled after. Raises ApiError."""
        try:
            return await self.session.num_context_tokens(request.messages, request.tools)
        except (DataError, EpisodeError) as error:
            raise self.refusal_of(error) from error

    def _begin(self, request: Request, key: str | None, is_heard: Callable[[], bool]) -> Call:
        call = Call(request.fingerprint, key, is_heard, getattr(self.session, "num_restarts", 0))
        self._begin_turn()
        call.answer = asyncio.ensure_future(self._answer(call, request))
        call.answer.add_done_callback(lambda _: self._end_turn(call))
        self._calls.append(call)
        return call

    async def _answer(self, call: Call, request: Request) -> AgentTurn:
        def begin(opening: str, num_tokens: int) -> None:
            call.opening, call.num_context_tokens = opening, num_tokens
            call.news.set()

        def report(position: int, token_ids: Sequence[int]) -> None:
            call.reports.append((position, token_ids))
            call.news.set()

        try:
            return await self.session.answer(
                request.messages,
                tools=request.tools,
                max_new_tokens=request.max_new_tokens,
                stop=request.stop,
                on_tokens=report if request.stream else None,
                on_begin=begin if request.stream else None,
            )
        except TurnRefused as error:
            self.refused = error
            raise
        except (DataError, EpisodeError):
            raise
        except Exception as error:  # no server can serve, or this package has a defect: it ends the run
            if not self.failed.done():
                self.failed.set_exception(error)
            raise

    def refusal_of(self, error: BaseException) -> ApiError:
        """Return what a client is told about a turn that failed."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextFull):
            return ApiError(str(error), param="messages", code="context_length_exceeded")
        if isinstance(error, TurnRefused):
            return ApiError(str(error), code=error.kind)
        if isinstance(error, DataError | EpisodeError):
            return ApiError(str(error), param="messages", code="refused_messages")
        return ApiError("the run cannot answer; it ends", status=503, code="run_ends")

    def start_clock(self) -> None:
        """Start the agent's own time now. What came before, the start of its process, does not count."""
        self._own_seconds, self._own_since = 0.0, time.monotonic()
        self._last_turn_ended = self._own_since

    def _begin_turn(self) -> None:
        """Stop the agent's own time until `_end_turn`."""
        if self._num_turns == 0 and self._own_since is not None:
            self._own_seconds += time.monotonic() - self._own_since
            self._own_since = None
        self._num_turns += 1

    def _end_turn(self, call: Call) -> None:
        call.news.set()
        if not call.answer.cancelled() and isinstance(call.answer.exception(), TooManyTurns):
            # An agent may go on asking. Each request holds a whole history, and the next one is refused in the same
            # way.
            self._calls.remove(call)
        self._num_turns -= 1
        if self._num_turns == 0:
            self._own_since = self._last_turn_ended = time.monotonic()

    @property
    def own_seconds(self) -> float:
        """The time so far in which the agent waited for no turn."""
        return self._own_seconds + (0.0 if self._own_since is None else time.monotonic() - self._own_since)

    def left(self, episodes: Episodes) -> tuple[float, str]:
        """Return the seconds of its own that the agent has left, and the configuration key that limits them. They are
        below 0 once a deadline has passed.
        """
        if self._own_since is None:
            return episodes.turn_deadline_seconds, ""
        since = time.monotonic() - self._last_turn_ended
        return min(
            (episodes.turn_deadline_seconds - since, "episodes.turn_deadline_seconds"),
            (episodes.deadline_seconds - self.own_seconds, "episodes.deadline_seconds"),
        )

    async def finish(self) -> None:
        """Wait for the turns that are still being sampled, after the agent has ended. Raises the error in `failed`."""
        waiting = [call.answer for call in self._calls if not call.answer.done()]
        if waiting:
            await asyncio.wait(waiting)
        answered = [call for call in self._calls if not call.answer.cancelled() and call.answer.exception() is None]
        self.counts["num_endpoint_unheard"] = sum(not call.delivered for call in answered)
        if self.failed.done():
            self.failed.result()

    async def drop(self) -> None:
        """End all turns that are not over."""
        for call in self._calls:
            call.answer.cancel()
        await asyncio.gather(*(call.answer for call in self._calls), return_exceptions=True)
        if not self.failed.cancel():
            self.failed.exception()  # so that the loop does not report it
