"""A server's log-probs of the fixed tokens: as it sampled them, and scored again in one pass, together or alone.

Runs on rank 0 of a start with servers. Owns how the server is asked; `prompt_scores.py` owns the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from gspo_mega.base import beats
from gspo_mega.base.rollout_batch import RolloutBatch
from gspo_mega.config import Config
from gspo_mega.config.critic_config import least_of_group
from gspo_mega.rollout.client.prompt_scores import score_tokens
from gspo_mega.rollout.sampled_groups import TaskGroup
from gspo_mega.rollout.server_pool import ServerPool
from gspo_mega.train.assemble import fill_advantages
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.verify.mismatch.causes import CACHED, HOW, SAMPLED, TOGETHER
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens, Sampled
from gspo_mega.verify.mismatch.walks import Point

_FLUSH_SECONDS = 60.0


def sample_tokens(rollouts: Rollouts, config: Config, on_wait: Callable[[], None]) -> FixedTokens:
    """Sample the tokens from the run's own data as training does, temperature, top_p and top_k included, and take the
    advantages from their rewards as the run does. `on_wait` is called meanwhile, and what it raises ends the wait.
    """
    prompts = [rollouts.prompts.next() for _ in range(config.budget.num_prompts)]
    groups = rollouts.collector.sample(
        prompts,
        config.budget.samples_per_prompt,
        config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        name="budget",
        on_wait=on_wait,
    )
    scored = RolloutBatch(0, groups).scored(least_of_group(config))  # of the same rows
    if scored.groups:
        fill_advantages(scored, config, scored.step)
    return FixedTokens.of(groups)


def score_on_server(pool: ServerPool, config: Config, tokens: FixedTokens, point: Point) -> np.ndarray:
    """[sum (tokens - 1)] float64 nats at temperature 1, of a point of the server's side on the servers that are up.

    `cached`: prompts may come from the server's cache as sampling left it; their own tokens are then 0. Otherwise the
    cache is emptied and everything computed anew. Raises ServerError; PublishError where a cache cannot be emptied.
    """
    values = point.values
    if values[HOW] == SAMPLED:
        return np.concatenate(
            [np.concatenate([np.zeros(len(s.prompt) - 1), np.asarray(s.log_probs)]) for s in tokens.sequences]
        )
    cached = values[HOW] == CACHED
    if not cached:
        for server in pool.controls():
            server.flush_cache(deadline_seconds=_FLUSH_SECONDS)
    together = values.get(TOGETHER, config.budget.together)
    return np.concatenate(pool.loop.run(_score_all(pool, config, tokens, cached, together)))


async def _score_all(
    pool: ServerPool, config: Config, tokens: FixedTokens, cached: bool, together: int
) -> list[np.ndarray]:
    room = asyncio.Semaphore(together)
    deadline_seconds = config.rollout.request_deadline_seconds or config.rollout.progress_deadline_seconds

    async def score(sequence: Sampled) -> np.ndarray:
        start = len(sequence.prompt) if cached else 1
        async with room:
            server = await pool.acquire(num_tokens=len(sequence.token_ids))
            try:
                values = await score_tokens(server.client, sequence.token_ids, start, pool.vocab_size, deadline_seconds)
            finally:
                await pool.release(server, num_tokens=len(sequence.token_ids))
        beats.beat()
        return np.concatenate([np.zeros(start - 1), values])

    async with TaskGroup() as tasks:
        running = [tasks.create_task(score(sequence)) for sequence in tokens.sequences]
    return [task.result() for task in running]
