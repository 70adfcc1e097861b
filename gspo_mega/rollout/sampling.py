"""One sample, whatever happens to servers: try, back off, try elsewhere, and say why if it cannot be had.

Owns retries and their counts. Which prompts are sampled and what becomes of the responses is the collector's.
"""

from __future__ import annotations

import asyncio
import collections
import random

from gspo_mega.config.schema import Rollout
from gspo_mega.errors import RolloutError
from gspo_mega.records import Group, Prompt, Trajectory
from gspo_mega.rollout.client import ServerError
from gspo_mega.rollout.completion import Completion, SamplingParams
from gspo_mega.rollout.pool import ServerPool

_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 10.0


class Sampler:
    """Draws single responses from a pool. Runs on the pool's loop.

    `counts` adds up: num_request_failures (and _connection, _deadline, _status, _nonsense), num_retries,
    num_aborted_requests, num_generated_tokens (of answers kept).
    """

    def __init__(self, settings: Rollout, pool: ServerPool) -> None:
        self._settings = settings
        self._pool = pool
        self.counts: collections.Counter[str] = collections.Counter()

    async def sample(self, prompt: Prompt, params: SamplingParams, request_id: str) -> Completion:
        """One complete response, all of it from the committed weights.

        A request that fails, times out, is cut short by the server or comes back wrong is tried again, on another server
        if there is one. Raises RolloutError after `rollout.max_attempts` tries, or if no server is left.
        """
        avoid: frozenset[str] = frozenset()
        for attempt in range(1, self._settings.max_attempts + 1):
            if attempt > 1:
                self.counts["num_retries"] += 1
                delay = min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (attempt - 2))
                await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            entry = await self._pool.acquire(avoid)
            failure: ServerError | None = None
            try:
                completion = await self._pool.run_on(
                    entry,
                    entry.client.generate(
                        prompt.token_ids, params, request_id=request_id,
                        deadline_seconds=self._settings.request_deadline_seconds,
                    ),
                )  # fmt: skip
                if completion.finish_reason != "abort":
                    self._check_version(completion, entry.server_id, request_id)
                    self.counts["num_generated_tokens"] += len(completion.token_ids)
                    return completion
                self.counts["num_aborted_requests"] += 1
                last_error = f"{entry.server_id}: generate {request_id}: cut short by the server"
            except ServerError as error:
                failure = error
                last_error = str(error)
                avoid = frozenset({entry.server_id})
                self.counts["num_request_failures"] += 1
                self.counts[f"num_request_failures_{error.kind}"] += 1
            finally:
                await self._pool.release(entry, failure)
        raise RolloutError(
            f"prompt {prompt.prompt_id}: no answer in {self._settings.max_attempts} attempts (rollout.max_attempts);"
            f" the last: {last_error}"
        )

    def _check_version(self, completion: Completion, server_id: str, request_id: str) -> None:
        committed = self._pool.committed_version
        made_by = sorted(set(completion.weight_versions))
        if made_by != [committed]:
            raise ServerError(
                server_id, f"generate {request_id}", "nonsense", f"tokens of weight versions {made_by}; {committed} is committed"
            )


def make_trajectory(group: Group, request_id: str, completion: Completion, text: str) -> Trajectory:
    """The record of one response; its reward is still to come."""
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
