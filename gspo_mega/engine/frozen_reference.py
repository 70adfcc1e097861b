"""The frozen reference policy of a KL term: the same model in the same layout, never trained, never saved.

Its log-probs come from the same function, packs and precision as the policy's. Weights are loaded by the layer above.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gspo_mega.base.records import MicroBatch
from gspo_mega.config.schema import Config
from gspo_mega.engine.adapters import without_adapters
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.forward_backward import Pipeline
from gspo_mega.engine.losses import PassOutput, require_finite
from gspo_mega.engine.model import build_chunks, transformer_config
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import ParallelGroups, ends_with_groups
from gspo_mega.engine.routing import Routers, RoutingPass
from gspo_mega.models.spec import ModelSpec


class ReferencePolicy:
    """This rank's part of the reference. `chunks` have no gradients, no data parallelism and no optimizer; they are
    untrained until loaded. Its routers always choose freely, also if the policy replays routes.

    Constructing it is collective over all ranks.
    """

    def __init__(self, config: Config, spec: ModelSpec, groups: ParallelGroups) -> None:
        megatron_config = transformer_config(config, spec)
        self.chunks = build_chunks(megatron_config, spec, groups)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
            ends_with_groups(chunk)
        self._pipeline = Pipeline(
            spec,
            groups,
            megatron_config,
            self.chunks,
            self.chunks,
            temperature=config.rollout.temperature,
            log_prob_chunk_tokens=config.batch.log_prob_chunk_tokens,
        )
        self._routers = Routers(
            self.chunks, spec.moe, groups, sequence_parallel=megatron_config.sequence_parallel, recompute=False
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the parameters on this rank."""
        return sum(p.numel() * p.element_size() for chunk in self.chunks for p in chunk.parameters())

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of this rank's active tokens, [N] float32 nats per micro-batch; empty except on last-stage ranks.

        Raises NumericsError naming the trajectory with a non-finite log-prob. Collective.
        """
        routing = RoutingPass(self._routers, len(micro_batches))
        outputs = self._pipeline.run(micro_batches, _keep, forward_only=True, routing=routing)
        return [output.columns["reference_log_probs"] for output in outputs]


class OwnBase:
    """The policy's own frozen weights as the reference, where it trains adapters: passes without them, and no
    memory."""

    num_bytes = 0
    chunks: Sequence[torch.nn.Module] = ()

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor]:
        """As `ReferencePolicy.log_probs`. Collective."""
        with without_adapters(self._engine.chunks):
            outputs = self._engine.score(micro_batches, _keep, replays_rollout=False)
        return [output.columns["reference_log_probs"] for output in outputs]


def _keep(batch: DeviceBatch, log_probs: torch.Tensor, _entropies: torch.Tensor | None) -> PassOutput:
    require_finite(batch, reference_log_probs=log_probs)
    return PassOutput(columns={"reference_log_probs": log_probs})
