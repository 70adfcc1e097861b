"""Rotary frequencies of models whose positions were stretched after training, such as Llama 3.1.

Megatron has the same formula with three of its four numbers fixed; this one takes all four from the checkpoint.
"""

from __future__ import annotations

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from gspo_mega.models.spec import RopeScaling


def scaled_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """`frequencies` after Llama 3's scaling: [head_dim / 2] float32, radians per token, the same on all ranks, as
    given.

    With w = 2 pi / f and o = original_positions: f / factor if w > o / low_frequency_factor, f if
    w < o / high_frequency_factor, and between them (1 - m) f / factor + m f with
    m = (o / w - low_frequency_factor) / (high_frequency_factor - low_frequency_factor).
    """
    low, high, original = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions
    wavelengths = 2 * math.pi / frequencies
    share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    result = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= original / low) & (wavelengths >= original / high), between, result)


def scale_rotary(embedding: RotaryEmbedding, scaling: RopeScaling) -> None:
    """Apply the model's scaling to a fresh rotary embedding, in place."""
    embedding.inv_freq = scaled_frequencies(embedding.inv_freq, scaling)
