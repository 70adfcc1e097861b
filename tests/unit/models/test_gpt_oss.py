"""gpt-oss: its published configurations, what is refused by name, its stacked experts, FLOPs with windows."""

import json
from pathlib import Path

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import folder_needs_plain_copy, read_stored, spec_from_config
from gspo_mega.models.spec import SlidingWindow, YarnScaling, shape_differences
from gspo_mega.models.tensors import (
    attended_positions,
    attention_crossover_tokens,
    checkpoint_tensors,
    count_parameters,
    forward_flops_per_token,
    hf_tensors,
    is_stacked,
    stackings,
)

SHAPES = Path(__file__).parents[3] / "configs" / "models"
# As published; gpt-oss-120b differs in these.
SMALL = json.loads((SHAPES / "gpt_oss_20b.json").read_text())
LARGE = SMALL | dict(
    num_hidden_layers=36, num_local_experts=128, layer_types=["sliding_attention", "full_attention"] * 18
)
EXPERTS = "model.layers.3.mlp.experts"


def test_published_configs():
    small, large = spec_from_config(SMALL), spec_from_config(LARGE)
    assert small.window == SlidingWindow(128, (True, False) * 12) and len(large.window.layers) == 36
    assert (small.sinks, small.linear_bias, small.attention_bias, small.swiglu_limit) == (True, True, True, 7.0)
    assert small.rope_scaling == YarnScaling(32.0, 4096, 32.0, 1.0, 1.0, 0.0, rounds=False)
    assert (small.stored_fp4, small.stored, small.torch_dtype) == (True, None, "bfloat16")
    # The model card: 20.9 billion parameters with 3.6 active, 116.8 with 5.1; active ones without the input embedding.
    for spec, total, active in ((small, 20.9, 3.6), (large, 116.8, 5.1)):
        counts = count_parameters(spec)
        assert round(counts.total / 1e9, 1) == total
        assert round((counts.active - counts.embedding) / 1e9, 1) == active


def test_keys_that_may_be_left_out_are_as_transformers_has_them():
    left_out = {"layer_types", "swiglu_limit", "attention_bias", "quantization_config"}
    spec = spec_from_config({key: value for key, value in SMALL.items() if key not in left_out})
    assert shape_differences(spec, spec_from_config(SMALL)) == []
    assert not spec.stored_fp4 and spec.torch_dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(attention_bias=False), "attention_bias: False is not supported in this family"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha: 1.0 is not supported; supported: 1.702"),
        (dict(swiglu_limit=0), "swiglu_limit: is 0; must be a positive number"),
        (dict(sliding_window=None), "sliding_window: missing; a positive whole number"),
        (dict(layer_types=["full_attention"] * 23), "layer_types: is ["),
        (dict(layer_types=["chunked_attention"] * 24), "must be one of full_attention, sliding_attention"),
        (dict(rope_scaling=None), "rope_scaling: missing; transformers then takes YaRN"),
        (dict(rope_scaling=SMALL["rope_scaling"] | dict(truncate="no")), "truncate is 'no'"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "rotary scaling 'linear' is not supported"),
        (dict(quantization_config=dict(quant_method="mxfp4", group=16)), "of mxfp4: not known: group"),
        (dict(quantization_config=dict(quant_method="gptq")), "only FP8 in blocks can be read"),
    ],
)
def test_what_is_not_supported_is_named(changes, text):
    with pytest.raises(ModelError) as refused:
        spec_from_config(SMALL | changes)
    assert text in str(refused.value)


def test_other_families_refuse_windows_still():
    llama = json.loads((SHAPES / "llama3_70b.json").read_text())
    with pytest.raises(ModelError, match="layer_types: sliding-window"):
        spec_from_config(llama | {"layer_types": ["sliding_attention"] * llama["num_hidden_layers"]})


def test_files_stack_the_experts_of_a_layer():
    spec = spec_from_config(SMALL)
    shapes = {entry.name: entry.shape for entry in checkpoint_tensors(spec)}
    assert {name: shapes[f"{EXPERTS}.{name}"] for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj")} == {
        "gate_up_proj": (32, 2880, 5760),
        "gate_up_proj_bias": (32, 5760),
        "down_proj": (32, 2880, 2880),
    }
    assert shapes["model.layers.3.self_attn.sinks"] == (64,) and is_stacked(spec)
    parts = {whole.name: parts for whole, parts in stackings(hf_tensors(spec))}[f"{EXPERTS}.gate_up_proj"]
    assert len(parts) == 64 and [part.expert for part in parts[:4]] == [0, 0, 1, 1]
    assert {(part.role, part.stack.first, part.stack.step, part.shape) for part in parts} == {
        ("gate", 0, 2, (2880, 2880)),
        ("up", 1, 2, (2880, 2880)),
    }
    assert sum(entry.num_elements for entry in checkpoint_tensors(spec)) == count_parameters(spec).total


def test_a_server_starts_from_a_plain_copy_of_mxfp4_and_of_another_dtype(tmp_path):
    def needs(dtype, **changes):
        (tmp_path / "config.json").write_text(json.dumps(SMALL | changes))
        assert read_stored(tmp_path) is None
        return folder_needs_plain_copy(tmp_path, dtype)

    plain = dict(quantization_config=None, torch_dtype="bfloat16")
    assert needs("bfloat16") and needs("bfloat16", torch_dtype="bfloat16")
    assert not needs("bfloat16", **plain) and needs("float32", **plain)
    assert not needs("float32", **plain, architectures=["Qwen3ForCausalLM"])


def test_a_window_bounds_attention():
    """Half of the layers attend to 128 tokens: by counting, and 4 heads x (64 + 64) x 2 FLOPs a position."""
    spec = spec_from_config(SMALL)

    def mean(length):
        return sum(min(p, 128) + p for p in range(1, length + 1)) / 2 / length

    for length in (1, 100, 128, 129, 5000):
        assert attended_positions(spec, length) == pytest.approx(mean(length))
    more = forward_flops_per_token(spec, 5000) - forward_flops_per_token(spec, 100)
    assert more == pytest.approx(2 * 24 * 64 * 128 * (mean(5000) - mean(100)))


def test_attention_to_everything_equals_the_rest_at_the_crossover():
    spec = spec_from_config(SMALL)
    length = attention_crossover_tokens(spec)
    to_everything = 2 * 12 * 64 * 128 * (length + 1) / 2
    assert forward_flops_per_token(spec, length) == pytest.approx(2 * to_everything, rel=1e-2)
