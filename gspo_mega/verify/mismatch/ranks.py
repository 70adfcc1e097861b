"""A rank of `gspo-mega mismatch`: evaluate the points of its start and write their log-probs to the attempt's folder.

The attempt's `work_file`, which `run.py` writes, says what to do: {"tokens": folder of the fixed tokens, or null to
sample them now, "server": points, "trainer": points with overrides of the configuration}. Only rank 0 asks servers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from gspo_mega.base import progress
from gspo_mega.base.run_folder import Attempt, RunFolder, read_json
from gspo_mega.config import Config, load_config
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import destroy_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.train.context import StopRequest, StopRequested, WorkerContext
from gspo_mega.train.eval_rank import wait_for_servers
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.verify.mismatch.causes import PACKING
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens
from gspo_mega.verify.mismatch.scores import build_engine, sample_tokens, score_on_server, score_on_trainer
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
