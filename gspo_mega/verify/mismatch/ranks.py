"""A rank of `gspo-mega mismatch`: evaluate the points of its start and write their log-probs to the attempt's folder.

The attempt's `work_file`, which `run.py` writes, says what to do: {"tokens": folder of the fixed tokens, or null to
sample them now, "server": points, "trainer": points with overrides of the configuration}. Only rank 0 asks servers.

`score_on_server` and `score_on_trainer` compute the log-probs of the fixed tokens at one point: the server's as
returned with the samples, or scored again in one pass, together or one by one; the trainer's in the precision, layout
and packing of the point, on every rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.base import progress
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.base.run_folder import Attempt, RunFolder, read_json
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config import Config, load_config
from gspo_mega.config.derived import least_of_group
from gspo_mega.config.schema import Budget, Rollout
from gspo_mega.cpu import delta_rule
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.losses import PassOutput, require_finite_tokens
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import destroy_groups, groups_of
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.rollout.client.server_client import score_tokens
from gspo_mega.rollout.groups import TaskGroup
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.train.batches import assemble, fill_advantages, plan_batch
from gspo_mega.train.context import StopRequest, StopRequested, WorkerContext
from gspo_mega.train.eval_rank import wait_for_servers
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.verify.certify.measure import gather_tokens, packing
from gspo_mega.verify.mismatch.causes import CACHED, CHUNK, HOW, PACKING, SAMPLED, TOGETHER
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens, Sampled
from gspo_mega.verify.mismatch.walks import Point


def point_from_json(value: list[Any]) -> Point:
    """Return a point of the work, from [side, [[key, JSON of its value], ...]]."""
    return Point(value[0], tuple((key, setting) for key, setting in value[1]))


def run_budget(context: WorkerContext) -> dict[str, Any] | None:
    """Evaluate every point of this start. Collective over all ranks."""
    attempt = Attempt(context.attempt_dir)
    work = read_json(attempt.work_file)
    assert work is not None, "the budget's attempt has no work"
    try:
        evaluate(context, work, attempt.path)
    except StopRequested as request:
        return {"stopped": str(request)}
    return {"points": len(work["server"]) + len(work["trainer"])} if context.is_lead else None


def evaluate(context: WorkerContext, work: dict[str, Any], folder: Path) -> None:
    """Evaluate the points of `work` and write their log-probs to the existing `folder`. Collective over all ranks.
    Raises StopRequested on rank 0.
    """
    if work["server"] and context.is_lead:
        _server_points(context, work, folder)
    dist.barrier()  # from here on all ranks can read the tokens
    if work["trainer"]:
        progress.enter("train")
        _trainer_points(context, work, folder)


def _server_points(context: WorkerContext, work: dict[str, Any], folder: Path) -> None:
    config, attempt = context.config, Attempt(context.attempt_dir)
    spec = read_model_spec(config.model.path)
    stop_request = StopRequest(context.attempt_dir)
    points = [point_from_json(value) for value in work["server"]]
    progress.enter("start")
    with contextlib.ExitStack() as stack:
        if work["tokens"] is None:
            rollouts = stack.enter_context(Rollouts(config, spec, attempt))
            pool = rollouts.pool
            on_wait = wait_for_servers(pool, config.server, stop_request)
            progress.enter("rollout")
            tokens = sample_tokens(rollouts, config, on_wait)
            tokens.save(folder)
        else:
            pool = stack.enter_context(ServerPool(config.rollout, spec, attempt))
            on_wait = wait_for_servers(pool, config.server, stop_request)
            progress.enter("rollout")
            tokens = FixedTokens.load(Path(work["tokens"]))
        for point in points:
            on_wait()
            started = time.monotonic()
            values = score_on_server(pool, config.budget, config.rollout, tokens, point)
            np.save(folder / f"{point.name}.npy", values)
            logging.info("%s %s: %.1f s", point.name, point.settings, time.monotonic() - started)


def _trainer_points(context: WorkerContext, work: dict[str, Any], folder: Path) -> None:
    tokens = FixedTokens.load(Path(work["tokens"] or folder))
    file = RunFolder(context.run_dir).config_file
    engine: PolicyEngine | None = None
    built = ""
    try:
        for value, overrides in work["trainer"]:
            point = point_from_json(value)
            started = time.monotonic()
            config = load_config(file, overrides, "budget").config
            if engine is None or _engine_key(config) != built:
                if engine is not None:
                    engine = None  # free its memory before the next one needs it
                    destroy_groups()
                engine, built = build_engine(config), _engine_key(config)
            kind = point.values.get(PACKING, "planned")
            with delta_rule.chunks_of(point.values.get(CHUNK, delta_rule.CHUNK)):
                log_probs, entropies = score_on_trainer(engine, config, tokens, kind)
            if context.is_lead:
                np.save(folder / f"{point.name}.npy", log_probs)
                np.save(folder / f"{point.name}.entropies.npy", entropies)
                logging.info("%s %s: %.1f s", point.name, point.settings, time.monotonic() - started)
            progress.beat()
    finally:
        if engine is not None:
            destroy_groups()


def _engine_key(config: Config) -> str:
    """Return what an engine is built from: configurations that differ only in routing replay share one."""
    tree = config.model_dump(mode="json")
    tree["moe"].pop("routing_replay")
    return json.dumps(tree, sort_keys=True)


_FLUSH_SECONDS = 60.0


def sample_tokens(rollouts: Rollouts, config: Config, on_wait: Callable[[], None]) -> FixedTokens:
    """Sample the tokens from the run's own data at the run's temperature, from all tokens, and compute
    advantages from the rewards as the run does. `on_wait` is called while ranks work; an exception from it ends this.
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
