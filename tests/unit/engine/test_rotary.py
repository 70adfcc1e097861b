"""Llama 3's rotary scaling equals transformers' bit for bit, for its published settings and others."""

from __future__ import annotations

import pytest
import torch

import gspo_mega.engine  # noqa: F401  the CPU backend comes before Megatron
from gspo_mega.engine.model import scaled_frequencies
from gspo_mega.models.spec import RopeScaling

SETTINGS = {
    "Llama 3.1": (128, 500000.0, RopeScaling(8.0, 1.0, 4.0, 8192)),
    "Llama 3.2": (64, 500000.0, RopeScaling(32.0, 1.0, 4.0, 8192)),
    "another": (32, 10000.0, RopeScaling(3.0, 0.5, 6.0, 128)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_those_of_transformers(name):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim, theta, scaling = SETTINGS[name]
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=theta,
            factor=scaling.factor,
            low_freq_factor=scaling.low_frequency_factor,
            high_freq_factor=scaling.high_frequency_factor,
            original_max_position_embeddings=scaling.original_positions,
        ),
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    ours = scaled_frequencies(plain, scaling)
    assert attention_factor == 1.0
    assert torch.equal(ours, theirs)
    stretched, kept = int((ours == plain / scaling.factor).sum()), int((ours == plain).sum())
    assert stretched and kept and stretched + kept < ours.numel(), "all three ranges are met"
