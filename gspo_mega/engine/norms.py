"""The norm of a layer: Transformer Engine's, or this package's if Transformer Engine's layers are not used."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.engine.megatron_precision import uses_transformer_engine
from gspo_mega.engine.packed_attention import TorchNorm
from gspo_mega.models.deepseek import LATENT_NORM_EPS


def norm_class(config: TransformerConfig) -> type:
    """The class that makes norms of this configuration."""
    if not uses_transformer_engine(config):
        return TorchNorm
    # This module imports Transformer Engine; `require_precision` has checked that it is installed.
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


class LatentNorm:
    """The norm of a latent. It has an epsilon of its own, so it is not fused into the projection after it."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float, **unused: object) -> torch.nn.Module:
        return norm_class(config)(config=config, hidden_size=hidden_size, eps=LATENT_NORM_EPS)
