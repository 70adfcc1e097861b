"""A rank of `gspo-mega compare`: compute the gradient of every algorithm on one recorded batch, at the same weights.

The attempt's `work_file`, which `run.py` writes, says what to do. Gradients are written to files of the attempt, tensor
by tensor, so that no rank holds two; rank 0 then reads them and computes the products. Collective over all ranks
throughout.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base import progress
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.base.records import MicroBatch
from gspo_mega.base.run_folder import Attempt, RunFolder, read_json
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.checkpoint.load import load_weights
from gspo_mega.config.derived import least_of_group, leaves_out_by_covariance
from gspo_mega.config.schema import Config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.engine.policy import OldState, PolicyEngine
from gspo_mega.engine.process_groups import destroy_groups, groups_of
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.train.batches import assemble, fill_advantages, plan_batch, scored_batch
from gspo_mega.train.context import WorkerContext
from gspo_mega.verify.certify.measure import gather_tokens
from gspo_mega.verify.certify.steps import complete_gradients
from gspo_mega.verify.compare.run import config_of
from gspo_mega.verify.compare.token_shares import TokenLogProbs, pull_of


def run_compare(context: WorkerContext) -> dict[str, Any] | None:
    """Evaluate every algorithm of the work. Returns the numbers on rank 0, None elsewhere."""
    attempt = Attempt(context.attempt_dir)
    work = read_json(attempt.work_file)
    assert work is not None, "the comparison's attempt has no work"
    progress.enter("train")
    folder = context.attempt_dir / "gradients"
    config = _engine_config(context.config, work)
    record = Journal(RunFolder(work["run"]).journal_dir).read(work["step"])
    assert record is not None and record.batch is not None, "the step was read before the ranks started"
    groups = groups_of(config.parallel, config.run.seed)
    try:
        # Each algorithm is compared with all tokens: Clip-Cov's random choice is no part of its term.
        own = config.model_copy(update={"algorithm": "grpo"}) if leaves_out_by_covariance(config.algorithm) else config
        engine = PolicyEngine(own, read_model_spec(config.model.path), groups, num_optimizer_steps=1)
        found = AlgorithmComparison(engine, config, record.batch, work, folder).run()
        return found if context.is_lead else None
    finally:
        destroy_groups()
        if context.is_lead:
            shutil.rmtree(folder, ignore_errors=True)


def _engine_config(config: Config, work: dict[str, Any]) -> Config:
    """Return the run's configuration for passes only: no correction, no router loss, and the work's old log-probs."""
    alone = config_of(config, config.algorithm)
    recorded = work["old"] is None
    moe = alone.moe
    if recorded and moe.routing_replay == "R2":  # there is no old pass whose routes could be replayed
        moe = moe.model_copy(update={"routing_replay": "none"})
    return alone.model_copy(
        update={
            "moe": moe,
            "mismatch": config.mismatch.model_copy(update={"correction": "none"}),
            "old_log_probs": "rollout" if recorded else "trainer",
            # With one mini-batch the engine would use the policy itself as the old policy.
            "batch": config.batch.model_copy(update={"num_mini_batches": 2}),
            "diagnostics": config.diagnostics.model_copy(update={"exact_staleness": False, "token_mismatch": False}),
        }
    )


class AlgorithmComparison:
    """Algorithms on the recorded `batch`. `engine` has no weights yet; gradients are written under `folder`."""

    def __init__(
        self, engine: PolicyEngine, config: Config, batch: RolloutBatch, work: dict[str, Any], folder: Path
    ) -> None:
        self.engine, self.config, self.folder = engine, config, folder
        self.recorded, self.work = batch, work
        self.layout = resolve_layout(config, engine.spec)

    def run(self) -> dict[str, Any]:
        """Return the numbers of each algorithm and the cosines of their gradients; on ranks other than 0 nothing."""
        names: list[str] = self.work["algorithms"]
        first, packs, _ = self._assemble(names[0])
        old: OldState | None = None
        if self.work["old"] is not None:
            self._load(self.work["old"])
            old = self.engine.old_pass(packs)
        self._load(self.work["policy"])
        log_probs = self._log_probs(first, packs, old)
        by_name: dict[str, Any] = {}
        for name in names:
            started = time.monotonic()
            config = config_of(self.config, name)
            batch, packs, denominator = self._assemble(name)
            settings = replace(
                objective_settings(name, config.objective), entropy_coefficient=0.0, covariance_share=None
            )
            self.engine.policy_gradients(packs, settings, denominator, old)
            complete_gradients(self.engine)
            self._write(name)
            if self.engine.groups.is_lead:
                by_name[name] = pull_of(config.algorithm, config.objective, batch, log_probs).as_json()
            logging.info("%s: %.1f s", name, time.monotonic() - started)
            progress.beat()
        if not self.engine.groups.is_lead:
            return {}
        products = self._products(names)
        for name, square in zip(names, np.diag(products), strict=True):
            by_name[name]["gradient_norm"] = float(np.sqrt(square))
        scale = np.sqrt(np.diag(products))
        outer = np.outer(scale, scale)
        cosines = [
            [float(p / o) if o > 0 else None for p, o in zip(row, scales, strict=True)]
            for row, scales in zip(products, outer, strict=True)
        ]
        return {
            "algorithms": by_name,
            "cosines": {name: dict(zip(names, row, strict=True)) for name, row in zip(names, cosines, strict=True)},
            "num_responses": len(first.trajectories),
            "num_groups": len(first.groups),
            "num_tokens": sum(int(np.asarray(row.response_mask, bool).sum()) for row in first.trajectories),
            "mean_log_ratio": float(np.mean((log_probs.policy - log_probs.old)[self._active(first)])),
        }

    def _assemble(self, name: str) -> tuple[RolloutBatch, list[MicroBatch], float]:
        """Return the batch with the advantages of algorithm `name`, this rank's packs, and the denominator."""
        config = config_of(self.config, name)
        batch = scored_batch(self.recorded, least_of_group(config), config.objective.scope)
        fill_advantages(batch, config, batch.step)
        plans = plan_batch(batch, config, self.layout, batch.step)
        shards = assemble(batch, config, self.layout, batch.step, plans)
        (mine,) = shards[self.engine.groups.data.rank]
        replays = self.config.moe.routing_replay == "R3"
        if (routes := ExpertRoutes.of(batch.trajectories, self.engine.spec, replays)) is not None:
            routes.attach(mine.micro_batches)
        return batch, mine.micro_batches, mine.denominator

    def _load(self, weights: str) -> None:
        """Load the engine's weights from a Hugging Face folder or a Megatron checkpoint."""
        engine = self.engine
        if (Path(weights) / "config.json").exists():
            import_huggingface(weights, engine.spec, engine.groups, engine.chunks)
        else:
            load_weights(Path(weights), engine)
        engine.after_weights_loaded()

    def _log_probs(self, batch: RolloutBatch, packs: list[MicroBatch], old: OldState | None) -> TokenLogProbs:
        now = gather_tokens(
            self.engine, batch, packs, [part.log_probs for part in self.engine.old_pass(packs).micro_batches]
        )
        server = np.concatenate([np.asarray(row.rollout_log_probs, np.float32) for row in batch.trajectories])
        server = server.astype(np.float64)
        if old is None:
            return TokenLogProbs(now, server, server)
        before = gather_tokens(self.engine, batch, packs, [part.log_probs for part in old.micro_batches])
        return TokenLogProbs(now, before, server)

    def _active(self, batch: RolloutBatch) -> np.ndarray:
        return np.concatenate([np.asarray(row.response_mask, bool) for row in batch.trajectories])

    def _write(self, name: str) -> None:
        """Write the gradient of J, tensor by tensor, to files that rank 0 reads."""
        engine = self.engine
        to = self.folder / name
        if engine.groups.is_lead:
            to.mkdir(parents=True, exist_ok=True)
        tensors = PolicyTensors(engine.spec, engine.groups, engine.chunks, values=_main_grad)
        for number, (_, tensor) in enumerate(tensors.stream(torch.float32)):
            np.save(to / f"{number}.npy", tensor.cpu().numpy())

    def _products(self, names: list[str]) -> np.ndarray:
        """Return the inner products of whole gradients, [n, n] float64."""
        total = np.zeros((len(names), len(names)))
        for number in range(len(list((self.folder / names[0]).iterdir()))):
            tensors = [np.load(self.folder / name / f"{number}.npy", mmap_mode="r") for name in names]
            for i, one in enumerate(tensors):
                for j in range(i, len(tensors)):
                    product = float(np.sum(np.multiply(one, tensors[j], dtype=np.float64)))
                    total[i, j] += product
                    total[j, i] = total[i, j]
            progress.beat()
        return total


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return cast(Any, parameter).main_grad  # Megatron's data parallelism adds the attribute
