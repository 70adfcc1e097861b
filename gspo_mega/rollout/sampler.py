"""One turn, even if servers fail: try, continue elsewhere with the tokens so far, and report why if that fails.

`Sampler` retries and counts. Episodes decide what is sampled after which tokens, and what is done with it.

No request is ended for being long. One that ends early, on a slow, stalled or dying server, continues from the tokens
reported so far, which are a draw from the policy like any others. What a dying server had not reported is sampled
again, while responses that ended in that time are kept. So a death favours short responses by at most one report.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gspo_mega.agents.turn import OnTokens, Turn
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import distinct_values
from gspo_mega.config.derived import on_publish
from gspo_mega.config.schema import Rollout
from gspo_mega.rollout.client.completion import Completion, PartialResponse, SamplingParams
from gspo_mega.rollout.client.server_client import InFlightRequest, ServerError
from gspo_mega.rollout.pooled_server import PooledServer

_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 10.0
# Tokens per report of a turn whose reader waits for its text.
_STREAMED_REPORT_TOKENS = 4


class SamplingServers(Protocol):
    """The servers that turns are sampled on: those of the pool that serve training, or those of `eval_servers.py`."""

    @property
    def committed_version(self) -> int:
        """The weight version that a request samples from, until the next publish."""
        ...

    @property
    def returns_routed_experts(self) -> bool: ...
    @property
    def num_registration_errors(self) -> int: ...
    async def acquire(
        self, avoid: frozenset[str] = ..., num_tokens: int = ..., prefer: str | None = ...
    ) -> PooledServer:
        """As `ServerPool.acquire`."""
        ...

    async def release(self, server: PooledServer, error: ServerError | None = ..., num_tokens: int = ...) -> None:
        """As `ServerPool.release`."""
        ...


class Sampler:
    """Samples single turns: a `TurnSampler`. It runs on the pool's loop.

    `counts` adds up: num_request_failures (and _connection, _deadline, _status, _nonsense), num_retries,
    num_aborted_requests, num_moved_responses, num_drained_responses, num_paused_responses (ended for a publish),
    num_continued_requests, num_discarded_tokens, num_generated_tokens (of answers kept), num_sessions_moved (turns that
    ended elsewhere than where their context was read).
    """

    def __init__(self, settings: Rollout, pool: SamplingServers) -> None:
        self._settings = settings
        self._pool = pool
        self._keeps_cache = on_publish(settings) == "continue_with_cache"
        self.counts: collections.Counter[str] = collections.Counter()

    async def sample(
        self,
        name: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        prefer: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Sample one complete turn after `token_ids`, and return it. Each part of it comes from weights that were
        committed when it was sampled. `name` is the prompt's name, for errors.

        A request that fails, stalls, is cut short by the server, is moved away from a slow server or is ended for a
        publish is continued, on another server if there is one. A request with a wrong answer is tried again. Raises
        RolloutError after `rollout.max_attempts` tries in a row that brought no token, if no server is left, or at
        `rollout.request_deadline_seconds` if that is set.
        """
        asked = _SampleRequest(name, token_ids, params, request_id, prefer, on_tokens)
        response = PartialResponse(len(token_ids), params, self._pool.returns_routed_experts)
        try:
            async with asyncio.timeout(None) as limit:
                server_id = await self._complete(response, asked, limit)
        except TimeoutError:
            raise RolloutError(
                f"prompt {name}: no whole response within {self._settings.request_deadline_seconds:g} s"
                f" (rollout.request_deadline_seconds), {len(response)} of at most {params.max_new_tokens} tokens so"
                " far. Without such responses the run would train on short ones only. Raise the deadline or remove it:"
                " rollout.progress_deadline_seconds is enough to find servers that hang"
            ) from None
        self.counts["num_generated_tokens"] += len(response)
        self.counts["num_sessions_moved"] += prefer not in (None, server_id)
        whole = response.whole
        return Turn(
            whole.token_ids,
            whole.log_probs,
            whole.weight_versions,
            whole.finish_reason,
            whole.routed_experts,
            server_id,
            whole.sampling_masks,
            whole.num_cached_tokens,
        )

    async def _complete(self, response: PartialResponse, asked: _SampleRequest, limit: asyncio.Timeout) -> str:
        """Sample until the response is complete, and return the server that sampled its end. `limit` starts when a
        server takes the first request.
        """
        avoid: frozenset[str] = frozenset()
        server_id: str | None = None
        tries, last_error, total = 0, "", self._settings.request_deadline_seconds
        while response.whole.finish_reason == "abort":
            if tries == self._settings.max_attempts:
                raise RolloutError(
                    f"prompt {asked.name}: no answer in {tries} attempts (rollout.max_attempts); the last: {last_error}"
                )
            if tries > 0:
                self.counts["num_retries"] += 1
                delay = min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (tries - 1))
                await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            before = len(response)
            server = await self._pool.acquire(avoid, len(asked.token_ids) + before, asked.prefer)
            server_id = server.server_id
            if total is not None and limit.when() is None:
                limit.reschedule(asyncio.get_running_loop().time() + total)
            problem = await self._continue_on(server, response, asked)
            avoid = frozenset({server_id})
            if problem is None or len(response) > before:
                tries = 0
            else:
                last_error, tries = problem, tries + 1
        assert server_id is not None
        return server_id

    async def _continue_on(self, server: PooledServer, response: PartialResponse, asked: _SampleRequest) -> str | None:
        """Send one request to `server` for the rest of the response. Return what went wrong, or None."""
        before, request_id, since = len(response), asked.request_id, self._pool.committed_version
        self.counts["num_continued_requests"] += before > 0
        report_tokens = server.load.report_tokens(self._settings.progress_deadline_seconds)
        on_tokens, watch = asked.on_tokens, asked.params.watch
        is_read = on_tokens is not None or watch is not None
        if is_read:
            report_tokens = min(report_tokens, _STREAMED_REPORT_TOKENS)

        def tell(start: int, token_ids: Sequence[int]) -> None:
            if on_tokens is not None:
                on_tokens(before + start, token_ids)
            if watch is not None and watch.add(before + start, asked.without_end(token_ids)):
                flight.end("ended")

        progress_seconds = self._settings.progress_deadline_seconds
        flight = InFlightRequest(progress_seconds, server.load, tell if is_read else None, asked.name)
        server.load.flights.add(flight)
        failure: ServerError | None = None
        try:
            part = await server.run(
                server.client.generate(
                    [*asked.token_ids, *response.whole.token_ids],
                    asked.params.after(before),
                    request_id=request_id,
                    deadline_seconds=self._settings.progress_deadline_seconds,
                    report_tokens=report_tokens,
                    flight=flight,
                    # A publish that keeps requests cannot flush the cache. The key keeps later requests from reading
                    # what older weights cached.
                    cache_key=f"version {since}" if self._keeps_cache else None,
                    weight_version=since,
                ),
            )
            self.counts["num_discarded_tokens"] += flight.num_tokens - len(part.token_ids)
            self._check_version(part, since, server.server_id, request_id)
            self._add(response, part, asked)
            if response.whole.finish_reason != "abort":
                return None
            if flight.cause in ("moved", "drained", "paused"):
                self.counts[f"num_{flight.cause}_responses"] += 1
                return None
            self.counts["num_aborted_requests"] += 1
            return f"{server.server_id}: generate {request_id}: cut short by the server"
        except ServerError as error:
            failure = error
            self.counts["num_request_failures"] += 1
            self.counts[f"num_request_failures_{error.kind}"] += 1
            if error.kind != "nonsense":
                part = flight.so_far()  # these tokens are as good as any others
                self.counts["num_discarded_tokens"] += flight.num_tokens - len(part.token_ids)
                self._add(response, part, asked)
            return str(error)
        finally:
            server.load.flights.discard(flight)
            await self._pool.release(server, failure, len(asked.token_ids) + before + flight.num_tokens)

    def _add(self, response: PartialResponse, part: Completion, asked: _SampleRequest) -> None:
        if not response.add(part):
            self.counts["num_discarded_tokens"] += len(part.token_ids)
        whole, watch = response.whole, asked.params.watch
        if watch is not None and (end := watch.end_of(asked.without_end(whole.token_ids))) is not None:
            self.counts["num_discarded_tokens"] += len(whole.token_ids) - end
            response.whole = _until(whole, end, len(asked.token_ids))

    def _check_version(self, part: Completion, since: int, server_id: str, request_id: str) -> None:
        """Raise ServerError unless all tokens are of `since`, the version that was committed when the request began, or
        of a later committed one.
        """
        committed = self._pool.committed_version
        if not all(since <= version <= committed for version in distinct_values(part.weight_versions)):
            raise ServerError(
                server_id,
                f"generate {request_id}",
                "nonsense",
                f"tokens of weight versions {sorted(distinct_values(part.weight_versions))};"
                f" {committed if since == committed else f'{since} to {committed}'} is committed",
            )


@dataclass(frozen=True)
class _SampleRequest:
    """The arguments of one call of `Sampler.sample`."""

    name: str
    token_ids: Sequence[int]
    params: SamplingParams
    request_id: str
    prefer: str | None
    on_tokens: OnTokens | None

    def without_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens without an end token, which is no text."""
        return token_ids[:-1] if len(token_ids) and token_ids[-1] in self.params.stop_token_ids else token_ids


def _until(whole: Completion, num_tokens: int, num_context_tokens: int) -> Completion:
    """Return the first tokens of a response, which its text ends with a stop string. What was sampled after them is no
    part of it, because it would not have been sampled had the string been looked for after every token.
    """
    routes, masks = whole.routed_experts, whole.sampling_masks
    return Completion(
        whole.token_ids[:num_tokens],
        whole.log_probs[:num_tokens],
        whole.weight_versions[:num_tokens],
        "stop_string",
        None if routes is None else routes[: num_context_tokens + num_tokens - 1].copy(),
        None if masks is None else masks.between(0, num_tokens),
        whole.num_cached_tokens,
    )
