import errno
import json
import os
from pathlib import Path

import pytest

from gspo_mega.base import untrusted
from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import read_model_spec, spec_from_config
from gspo_mega.models.spec import MoeSpec

SHAPES = Path(__file__).parents[3] / "configs" / "models"

# As transformers 4.51 wrote it for a published Qwen3-30B-A3B, shortened to what is read and some of what is not.
PUBLISHED_MOE_4 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def dense(**changes):
    raw = json.loads((SHAPES / "quickstart_dense.json").read_text())
    return {key: value for key, value in {**raw, **changes}.items() if value != "absent"}


def moe(**changes):
    raw = json.loads((SHAPES / "quickstart_moe.json").read_text())
    return {key: value for key, value in {**raw, **changes}.items() if value != "absent"}


def test_a_published_moe_config_of_transformers_4():
    spec = spec_from_config(PUBLISHED_MOE_4)
    assert spec.family == "qwen3_moe"
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        48,
        2048,
        32,
        4,
        128,
    )
    assert (spec.vocab_size, spec.max_position_embeddings, spec.intermediate_size) == (151936, 40960, 6144)
    assert (spec.rope_theta, spec.rms_norm_eps, spec.torch_dtype) == (1e6, 1e-6, "bfloat16")
    assert spec.moe == MoeSpec(num_experts=128, experts_per_token=8, expert_intermediate_size=768, norm_topk_prob=True)
    assert spec.eos_token_ids == (151645,)
    assert spec.qk_norm and not spec.attention_bias and not spec.tie_word_embeddings
    assert spec.raw == PUBLISHED_MOE_4


def test_the_same_model_as_transformers_5_writes_it():
    raw = {
        key: value
        for key, value in PUBLISHED_MOE_4.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype", "num_experts")
    }
    raw |= {
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "dtype": "bfloat16",
        "num_local_experts": 128,
    }
    four, five = spec_from_config(PUBLISHED_MOE_4), spec_from_config(raw)
    assert (five.rope_theta, five.torch_dtype, five.moe) == (four.rope_theta, four.torch_dtype, four.moe)


@pytest.mark.parametrize("architecture", ["Qwen3Config", "Qwen3MoeConfig"])
def test_what_the_installed_transformers_writes_is_read(architecture, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    config = getattr(transformers, architecture)(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        eos_token_id=[7, 8],
        dtype="bfloat16",
        architectures=[architecture.replace("Config", "ForCausalLM")],
    )
    config.save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    assert (spec.rope_theta, spec.torch_dtype, spec.eos_token_ids, spec.head_dim) == (5e5, "bfloat16", (7, 8), 16)
    assert (spec.moe is not None) == (architecture == "Qwen3MoeConfig")
    if spec.moe is not None:
        assert (spec.moe.num_experts, spec.moe.norm_topk_prob) == (config.num_experts, config.norm_topk_prob)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (dense(hidden_act="gelu"), "hidden_act"),
        (dense(attention_bias=True), "attention_bias"),
        (dense(attention_dropout=0.1), "attention_dropout"),
        (dense(use_sliding_window=True), "use_sliding_window"),
        (dense(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types"),
        (dense(rope_scaling={"type": "yarn", "factor": 4.0}), "rope_scaling"),
        (dense(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "rope_parameters"),
        (
            dense(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "rope_parameters",
        ),
        (dense(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dense(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (dense(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (dense(torch_dtype="float16"), "torch_dtype"),
        (dense(dtype="float8_e4m3fn"), "dtype"),
        (dense(rope_theta="absent"), "rope_theta"),
        (dense(head_dim="absent"), "head_dim"),
        (dense(head_dim=15), "head_dim"),
        (dense(num_key_value_heads=3), "num_key_value_heads"),
        (dense(hidden_size="64"), "hidden_size"),
        (dense(num_hidden_layers=0), "num_hidden_layers"),
        (dense(rms_norm_eps="absent"), "rms_norm_eps"),
        (dense(tie_word_embeddings=1), "tie_word_embeddings"),
        (dense(eos_token_id=512), "eos_token_id"),
        (dense(eos_token_id=["</s>"]), "eos_token_id"),
        (moe(mlp_only_layers=[0]), "mlp_only_layers"),
        (moe(decoder_sparse_step=2), "decoder_sparse_step"),
        (moe(shared_expert_intermediate_size=64), "shared_expert_intermediate_size"),
        (moe(num_experts_per_tok=9), "num_experts_per_tok"),
        (moe(num_experts="absent"), "num_experts"),
        (moe(norm_topk_prob="yes"), "norm_topk_prob"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(raw, key):
    with pytest.raises(ModelError) as caught:
        spec_from_config(raw, where="m/config.json")
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"m/config.json: {key}: ")


def test_a_family_that_always_normalises_refuses_another_value_which_only_servers_would_read():
    text = moe(architectures="absent", torch_dtype="absent", norm_topk_prob=False)
    raw = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text, "dtype": "bfloat16"}
    said = "norm_topk_prob: False: transformers does not read it here, and SGLang does; supported: True"
    with pytest.raises(ModelError, match=said):
        spec_from_config(raw)
    moe_spec = spec_from_config(raw | {"text_config": text | {"norm_topk_prob": True}}).moe
    assert moe_spec is not None and moe_spec.norm_topk_prob


def test_neutral_values_of_the_same_fields_are_accepted():
    neutral = dict(
        use_sliding_window=False,
        sliding_window=4096,
        layer_types=["full_attention"] * 3,
        rope_scaling=None,
        partial_rotary_factor=1.0,
        quantization_config=None,
        num_nextn_predict_layers=0,
        torch_dtype="torch.bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 2e4},
    )
    spec = spec_from_config(dense(**neutral))
    assert (spec.torch_dtype, spec.rope_theta) == ("bfloat16", 2e4)
    assert spec_from_config(moe(norm_topk_prob="absent")).moe.norm_topk_prob is False
    assert spec_from_config(moe(head_dim="absent")).head_dim == 64 // 4
    assert spec_from_config(dense(torch_dtype="absent")).torch_dtype == "float32"


def test_all_problems_are_listed():
    with pytest.raises(ModelError) as caught:
        spec_from_config(moe(hidden_act="relu", mlp_only_layers=[1], vocab_size=-1))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "architectures", [["GemmaForCausalLM"], [], None, "Qwen3ForCausalLM", ["Qwen3ForCausalLM", "X"]]
)
def test_another_architecture(architectures):
    with pytest.raises(ModelError, match="supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        spec_from_config(dense(architectures=architectures))


def test_end_of_sequence_ids_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dense(eos_token_id=3)))
    assert read_model_spec(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert read_model_spec(tmp_path).eos_token_ids == (5, 3)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        read_model_spec(tmp_path / "none")
    with pytest.raises(ModelError, match="no config.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text('{\n "a": }')
    with pytest.raises(ModelError, match=r"config.json:2:7: not JSON"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match="UTF-8"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="config.json: is a folder, not a file"):
        read_model_spec(tmp_path)


def test_a_shape_file_stands_for_a_folder():
    spec = read_model_spec(SHAPES / "quickstart_moe.json")
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.head_dim) == (512, 64, 3, 16)
    assert spec.moe == MoeSpec(num_experts=8, experts_per_token=2, expert_intermediate_size=64, norm_topk_prob=True)
    assert read_model_spec(SHAPES / "quickstart_dense.json").moe is None


def test_a_file_that_is_no_json_or_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ModelError, match="config.json: not JSON: it is nested too deeply"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dense()))

    def refused(path, most_bytes=None):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(untrusted, "open_regular", refused)
    with pytest.raises(ModelError, match="config.json: cannot be read: Permission denied"):
        read_model_spec(tmp_path)


def test_more_experts_in_all_than_a_plan_can_list_are_refused():
    with pytest.raises(ModelError, match="1000 layers of 4096 experts; no model has more than 262144 experts in all"):
        spec_from_config(moe(num_hidden_layers=1_000, num_experts=4_096))
