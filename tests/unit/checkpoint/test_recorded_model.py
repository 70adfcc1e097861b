"""What a checkpoint records of its model, and compares with the model of the run that continues it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gspo_mega.checkpoint.load import model_of
from gspo_mega.models.huggingface import read_model_spec

SHAPES = Path(__file__).parents[3] / "configs" / "models"
# The keys of a record that a release before gated delta nets wrote, for a model without experts or latent attention.
OLD = {
    *("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "moe"),
    *("vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "qk_norm"),
    *("attention_bias", "torch_dtype", "eos_token_ids", "rope_scaling", "rotary_share", "linear_bias", "sinks"),
    *("swiglu_limit", "window", "stored", "stored_fp4", "precision"),
}


def recorded(shape: str) -> dict[str, Any]:
    config = SimpleNamespace(lora=None, precision="bf16")
    return model_of(cast(Any, SimpleNamespace(spec=read_model_spec(SHAPES / shape), config=config)))


@pytest.mark.parametrize("shape", sorted(path.name for path in SHAPES.glob("*.json")))
def test_a_model_equals_what_the_file_gives_back(shape):
    """A window or a delta net has a tuple, which JSON gives back as a list: such a run could not be continued."""
    assert json.loads(json.dumps(recorded(shape))) == recorded(shape)


def test_a_field_of_later_families_is_left_out_where_it_says_nothing():
    assert recorded("qwen3_4b.json").keys() == OLD
    assert recorded("certify_qwen3_next.json").keys() == OLD | {"delta", "output_gate", "zero_centred_norms"}
