"""Compute log-probs of the fixed tokens at one point: the trainer's, in the precision, layout and packing of the point,
on every rank of a start; and on rank 0 the server's, as returned with the samples or scored again in one pass, together
or one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from gspo_mega.base import progress
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config import Config
from gspo_mega.config.derived import least_of_group
from gspo_mega.config.schema import Budget, Rollout
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.losses import PassOutput, require_finite_tokens
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import groups_of
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.rollout.client.server_client import score_tokens
from gspo_mega.rollout.groups import TaskGroup
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.train.batches import assemble, fill_advantages, plan_batch
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.verify.certify.measure import gather_tokens, packing
from gspo_mega.verify.mismatch.causes import CACHED, HOW, SAMPLED, TOGETHER
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens, Sampled
from gspo_mega.verify.mismatch.walks import Point

_FLUSH_SECONDS = 60.0


def sample_tokens(rollouts: Rollouts, config: Config, on_wait: Callable[[], None]) -> FixedTokens:
    """Sample the tokens from the run's own data at the run's temperature, from all tokens, and compute
    advantages from the rewards as the run does. `on_wait` is called meanwhile; an exception from it ends the wait.
    """
    prompts = [rollouts.prompts.next() for _ in range(config.budget.num_prompts)]
    groups = rollouts.collector.sample(
        prompts,
        config.budget.samples_per_prompt,
        config.rollout.temperature,
        name="budget",
        on_wait=on_wait,
    )
    scored = RolloutBatch(0, groups).scored(least_of_group(config))  # of the same rows
    if scored.groups:
        fill_advantages(scored, config, scored.step)
    return FixedTokens.of(groups)


def score_on_server(
    pool: ServerPool, budget: Budget, rollout: Rollout, tokens: FixedTokens, point: Point
) -> np.ndarray:
    """Return the log-probs of a server point, [sum (tokens - 1)] float64 nats, from the running servers.

    `sampled`: as returned with the samples. Otherwise scored again at temperature 1; `cached`: prompts may come from
    the server's cache as sampling left it, and without `cached` the cache is emptied first. Prompt tokens are 0 with
    `sampled` and `cached`. Raises ServerError; PublishError if a cache cannot be emptied.
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
    together = values.get(TOGETHER, budget.together)
    return np.concatenate(pool.loop.run(_score_all(pool, rollout, tokens, cached, together)))


async def _score_all(
    pool: ServerPool, rollout: Rollout, tokens: FixedTokens, cached: bool, together: int
) -> list[np.ndarray]:
    room = asyncio.Semaphore(together)
    deadline_seconds = rollout.request_deadline_seconds or rollout.progress_deadline_seconds

    async def score(sequence: Sampled) -> np.ndarray:
        start = len(sequence.prompt) if cached else 1
        async with room:
            server = await pool.acquire(num_tokens=len(sequence.token_ids))
            try:
                values = await score_tokens(server.client, sequence.token_ids, start, pool.vocab_size, deadline_seconds)
            finally:
                await pool.release(server, num_tokens=len(sequence.token_ids))
        progress.beat()
        return np.concatenate([np.zeros(start - 1), values])

    async with TaskGroup() as tasks:
        running = [tasks.create_task(score(sequence)) for sequence in tokens.sequences]
    return [task.result() for task in running]


@dataclass
class _KeptLogProbs:
    """A head that keeps the log-probs and entropies that it gets: [N] float32 nats of this rank's active tokens, per
    micro-batch.
    """

    log_probs: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    wants_entropy: bool = True

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        assert entropies is not None  # asked for
        require_finite_tokens(batch, log_probs=log_probs)
        self.log_probs.append(log_probs.detach())
        self.entropies.append(entropies.detach())
        return PassOutput()


def build_engine(config: Config) -> PolicyEngine:
    """Build an engine of `config` with the weights of model.path. Collective; call `destroy_groups` afterwards."""
    groups = groups_of(config.parallel, config.run.seed)
    engine = PolicyEngine(config, read_model_spec(config.model.path), groups, num_optimizer_steps=1)
    import_huggingface(config.model.path, engine.spec, engine.groups, engine.chunks)
    engine.after_weights_loaded()
    return engine


def score_on_trainer(
    engine: PolicyEngine, config: Config, tokens: FixedTokens, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (log-probs, entropies), [sum (tokens - 1)] float64 nats each, on every rank. Collective.

    `config` may differ from the engine's own only in routing replay; `kind`: the packing, as `certify` names it.
    """
    layout = resolve_layout(config, engine.spec)
    batch = tokens.batch()
    planned = plan_batch(batch, config, layout, 0)
    plans = packing(kind, len(batch.trajectories), config.run.seed, layout, planned)
    micro_batches = assemble(batch, config, layout, 0, plans)[engine.groups.data.rank][0].micro_batches
    routes = ExpertRoutes.of(batch.trajectories, engine.spec, to_replay=config.moe.routing_replay == "R3")
    if routes is not None:
        routes.attach(micro_batches)
    kept = _KeptLogProbs()
    engine.score(micro_batches, kept, replays_rollout=config.moe.routing_replay == "R3")
    first, second = (gather_tokens(engine, batch, micro_batches, part) for part in (kept.log_probs, kept.entropies))
    return first, second
