"""One sample, even if servers fail: try, continue elsewhere with the tokens so far, and report why if that fails.

Owns retries and their counts. The collector decides which prompts are sampled and what is done with the responses.

Nothing here prefers short responses: no request is ended for being long. A request that ends early, on a slow, stalled
or dying server, continues from the tokens sampled so far, which are a draw from the policy like any others.
"""

from __future__ import annotations

import asyncio
import collections
import random

from gspo_mega.config.schema import Rollout
from gspo_mega.errors import RolloutError
from gspo_mega.records import Group, Prompt, Trajectory
from gspo_mega.rollout.client.completion import Completion, Response, SamplingParams
from gspo_mega.rollout.client.flight import Flight
from gspo_mega.rollout.client.server_client import ServerError
from gspo_mega.rollout.pooled_server import PooledServer
from gspo_mega.rollout.server_pool import ServerPool

_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 10.0


class Sampler:
    """Draws single responses from a pool. Runs on the pool's loop.

    `counts` adds up: num_request_failures (and _connection, _deadline, _status, _nonsense), num_retries,
    num_aborted_requests, num_moved_responses, num_continued_requests, num_discarded_tokens, num_generated_tokens (of
    answers kept).
    """

    def __init__(self, settings: Rollout, pool: ServerPool) -> None:
        self._settings = settings
        self._pool = pool
        self.counts: collections.Counter[str] = collections.Counter()

    async def sample(self, prompt: Prompt, params: SamplingParams, request_id: str) -> Completion:
        """One complete response, all of it from weights that the pool's `freshness` admits.

        A request that fails, stalls, is cut short by the server or moved away from a slow one is continued, on another
        server if there is one. A request with a wrong answer is tried again. Raises RolloutError after
        `rollout.max_attempts` tries in a row that brought no token, if no server is left, or at
        `rollout.request_deadline_seconds` where that is set.
        """
        response = Response(len(prompt.token_ids), params, self._pool.returns_routed_experts)
        try:
            async with asyncio.timeout(None) as limit:
                await self._complete(response, prompt, params, request_id, limit)
        except TimeoutError:
            raise RolloutError(
                f"prompt {prompt.prompt_id}: no whole response within {self._settings.request_deadline_seconds:g} s"
                f" (rollout.request_deadline_seconds), {len(response)} of at most {params.max_new_tokens} tokens so"
                " far. Without such responses the run would train on short ones only. Raise the deadline or remove it:"
                " rollout.progress_deadline_seconds alone finds servers that hang"
            ) from None
        self.counts["num_generated_tokens"] += len(response)
        return response.whole

    async def _complete(
        self, response: Response, prompt: Prompt, params: SamplingParams, request_id: str, limit: asyncio.Timeout
    ) -> None:
        """Sample until the response is complete. `limit` starts when a server takes the first request."""
        avoid: frozenset[str] = frozenset()
        tries, last_error, total = 0, "", self._settings.request_deadline_seconds
        while response.whole.finish_reason == "abort":
            if tries == self._settings.max_attempts:
                raise RolloutError(
                    f"prompt {prompt.prompt_id}: no answer in {tries} attempts (rollout.max_attempts); the last:"
                    f" {last_error}"
                )
            if tries > 0:
                self.counts["num_retries"] += 1
                delay = min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (tries - 1))
                await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            before = len(response)
            server = await self._pool.acquire(avoid, len(prompt.token_ids) + before)
            if total is not None and limit.when() is None:
                limit.reschedule(asyncio.get_running_loop().time() + total)
            problem = await self._continue_on(server, response, prompt, params, request_id)
            avoid = frozenset({server.server_id})
            if problem is None or len(response) > before:
                tries = 0
            else:
                last_error, tries = problem, tries + 1

    async def _continue_on(
        self, server: PooledServer, response: Response, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> str | None:
        """One request to `server` for the rest of the response. Returns what went wrong, or None."""
        before = len(response)
        self.counts["num_continued_requests"] += before > 0
        flight = Flight(self._settings.progress_deadline_seconds, server.load)
        server.load.flights.add(flight)
        failure: ServerError | None = None
        try:
            part = await server.run(
                server.client.generate(
                    [*prompt.token_ids, *response.whole.token_ids],
                    params.after(before),
                    request_id=request_id,
                    deadline_seconds=self._settings.progress_deadline_seconds,
                    report_tokens=server.load.report_tokens(self._settings.progress_deadline_seconds),
                    flight=flight,
                ),
            )
            self._check_version(part, server.server_id, request_id)
            self._add(response, part)
            if response.whole.finish_reason != "abort":
                return None
            if flight.cause == "moved":
                self.counts["num_moved_responses"] += 1
                return None
            self.counts["num_aborted_requests"] += 1
            return f"{server.server_id}: generate {request_id}: cut short by the server"
        except ServerError as error:
            failure = error
            self.counts["num_request_failures"] += 1
            self.counts[f"num_request_failures_{error.kind}"] += 1
            if error.kind != "nonsense":
                self._keep(response, flight)
            return str(error)
        finally:
            server.load.flights.discard(flight)
            await self._pool.release(server, failure, len(prompt.token_ids) + before + flight.num_tokens)

    def _keep(self, response: Response, flight: Flight) -> None:
        """Keep what a failed request had reported, if its weights are admitted: its tokens are as good as any."""
        part = flight.so_far()
        if self._pool.freshness.admits_all(part.weight_versions, self._pool.committed_version):
            self._add(response, part)
        else:
            self.counts["num_discarded_tokens"] += len(part.token_ids)

    def _add(self, response: Response, part: Completion) -> None:
        if not response.add(part):
            self.counts["num_discarded_tokens"] += len(part.token_ids)

    def _check_version(self, part: Completion, server_id: str, request_id: str) -> None:
        freshness, committed = self._pool.freshness, self._pool.committed_version
        if not freshness.admits_all(part.weight_versions, committed):
            raise ServerError(
                server_id,
                f"generate {request_id}",
                "nonsense",
                f"tokens of weight versions {sorted(set(part.weight_versions))}; {freshness.describe(committed)}",
            )


def make_trajectory(group: Group, request_id: str, completion: Completion, text: str) -> Trajectory:
    """The record of one response, before it is scored."""
    return Trajectory(
        trajectory_id=request_id,
        group_id=group.group_id,
        prompt=group.prompt,
        response_token_ids=completion.token_ids,
        response_mask=[1] * len(completion.token_ids),
        rollout_log_probs=completion.log_probs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
        response_text=text,
        routed_experts=completion.routed_experts,
    )
