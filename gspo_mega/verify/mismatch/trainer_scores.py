"""The trainer's log-probs and entropies of the fixed tokens, in the precision, layout and packing of one point.

Runs on every rank of a start. Owns the head that keeps them and the engine of a point; `certify` owns the packings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config import Config
from gspo_mega.data.expert_routes import ExpertRoutes
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.losses import PassOutput, require_finite
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.train.assemble import assemble, plan_batch
from gspo_mega.verify.certify.measure import gather_tokens
from gspo_mega.verify.certify.packings import packing
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens


@dataclass
class _Kept:
    """A head that keeps what it is given, [N] float32 nats of this rank's active tokens per micro-batch."""

    log_probs: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    wants_entropy: bool = True

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        assert entropies is not None  # asked for
        require_finite(batch, log_probs=log_probs)
        self.log_probs.append(log_probs.detach())
        self.entropies.append(entropies.detach())
        return PassOutput()


def build_engine(config: Config) -> PolicyEngine:
    """An engine of `config` with the weights of model.path. Collective; `destroy_groups` must follow."""
    parallel = config.parallel
    groups = create_groups(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        seed=config.run.seed,
    )
    engine = PolicyEngine(config, read_model_spec(config.model.path), groups, num_optimizer_steps=1)
    import_huggingface(config.model.path, engine.spec, engine.groups, engine.chunks)
    engine.after_weights_loaded()
    return engine


def score_on_trainer(
    engine: PolicyEngine, config: Config, tokens: FixedTokens, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs, entropies), [sum (tokens - 1)] float64 nats each, on every rank. Collective.

    `config` may differ from the engine's own in routing replay alone; `kind`: the packing, as `certify` names it.
    """
    layout = resolve_layout(config, engine.spec)
    batch = tokens.batch()
    planned = plan_batch(batch, config, layout, 0)
    plans = packing(kind, len(batch.trajectories), config.run.seed, layout, planned)
    micro_batches = assemble(batch, config, layout, 0, plans)[engine.groups.data.rank][0].micro_batches
    routes = ExpertRoutes.of(batch.trajectories, engine.spec, to_replay=config.moe.routing_replay == "R3")
    if routes is not None:
        routes.attach(micro_batches)
    kept = _Kept()
    engine.score(micro_batches, kept, replays_rollout=config.moe.routing_replay == "R3")
    first, second = (gather_tokens(engine, batch, micro_batches, part) for part in (kept.log_probs, kept.entropies))
    return first, second
