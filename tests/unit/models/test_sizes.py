import dataclasses
import json
from pathlib import Path

import pytest

from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.tensors import attention_crossover_tokens, count_parameters, forward_flops_per_token

SHAPES = Path(__file__).parents[3] / "configs" / "models"


def spec_of(name):
    return spec_from_config(json.loads((SHAPES / f"{name}.json").read_text()))


def test_a_dense_model_by_hand():
    attention = 64 * 64 + 2 * (32 * 64) + 64 * 64 + 2 * 16  # q, k and v, output, query and key norms
    layer = attention + 3 * 64 * 128 + 2 * 64
    counts = count_parameters(spec_of("quickstart_dense"))
    assert counts.embedding == 512 * 64
    assert counts.total == 2 * 512 * 64 + 3 * layer + 64
    assert counts.active == counts.total


def test_a_moe_model_by_hand():
    attention = 64 * 64 + 2 * (32 * 64) + 64 * 64 + 2 * 16
    layer = attention + 8 * 64 + 8 * 3 * 64 * 64 + 2 * 64
    counts = count_parameters(spec_of("quickstart_moe"))
    assert counts.total == 2 * 512 * 64 + 3 * layer + 64
    assert counts.active == counts.total - 3 * 6 * 3 * 64 * 64


def test_tied_embeddings_count_once():
    spec = spec_of("quickstart_dense")
    tied = dataclasses.replace(spec, tie_word_embeddings=True)
    assert count_parameters(spec).total - count_parameters(tied).total == 512 * 64


def test_a_published_model_has_its_published_size():
    spec = spec_of("quickstart_moe")
    large = dataclasses.replace(
        spec,
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        moe=dataclasses.replace(spec.moe, num_experts=128, experts_per_token=8, expert_intermediate_size=768),
    )  # Qwen3-30B-A3B: 30.5 billion, 3.3 billion activated
    counts = count_parameters(large)
    assert counts.total / 1e9 == pytest.approx(30.5, abs=0.05)
    assert counts.active / 1e9 == pytest.approx(3.3, abs=0.06)


def test_flops_by_hand():
    spec = spec_of("quickstart_dense")
    matrices = 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128) + 512 * 64
    # At one token attention reads one position; at 9 it reads 5 on average. Scores and values: 2 x 2 FLOPs an element.
    for tokens, positions in ((1, 1), (9, 5)):
        assert forward_flops_per_token(spec, tokens) == 2 * matrices + 3 * 4 * 64 * positions
    tied = dataclasses.replace(spec, tie_word_embeddings=True)
    assert forward_flops_per_token(tied, 9) == forward_flops_per_token(spec, 9)


def test_the_crossover_is_where_attention_takes_half():
    # 12288 weights of attention, 512 of the router, 2 experts of 12288: three layers and a head of 512 x 64, two FLOPs
    # each; attention takes 3 x 4 x 64 x (L + 1) / 2.
    moe = spec_of("quickstart_moe")
    assert attention_crossover_tokens(moe) == round((3 * (12288 + 512 + 2 * 12288) + 512 * 64) * 2 / 384 - 1) == 754
    dense = spec_of("quickstart_dense")
    crossover = attention_crossover_tokens(dense)
    without_attention = forward_flops_per_token(dense, -1)
    assert forward_flops_per_token(dense, crossover) == pytest.approx(2 * without_attention, rel=1e-3)


def test_biases_are_parameters_and_multiply_nothing():
    raw = json.loads((SHAPES / "quickstart_dense.json").read_text())
    without = spec_from_config(raw | {"architectures": ["LlamaForCausalLM"]})
    with_biases = spec_from_config(raw | {"architectures": ["Qwen2ForCausalLM"]})
    assert count_parameters(with_biases).total - count_parameters(without).total == 3 * (64 + 2 * 32)
    assert forward_flops_per_token(with_biases, 100) == forward_flops_per_token(without, 100)


def test_deepseek_v3_has_its_published_size():
    """671 billion without multi-token prediction; 36.6 billion active, the head among them and the input embedding
    not.
    """
    spec = spec_of("deepseek_v3")
    counts = count_parameters(spec)
    assert counts.total == 671_026_419_200
    assert (counts.active - counts.embedding) / 1e9 == pytest.approx(36.6, abs=0.05)
    # By hand, for one token: the head, attention's five matrices in every layer, and an MLP 3 x 18432 wide in every
    # layer (the 8 + 1 experts of 2048 a token goes to are as wide), and the routers.
    attention = 7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    matrices = 129280 * 7168 + 61 * (attention + 3 * 7168 * 18432) + 58 * 256 * 7168
    assert forward_flops_per_token(spec, 1) == 2 * matrices + 61 * 2 * 128 * (192 + 128)
    assert spec.cache_elements_per_token == 61 * 576


def test_moonlight_has_its_published_size():
    """16 billion: the same code without a latent of queries, with one group and two shared experts."""
    raw = json.loads((SHAPES / "deepseek_v3.json").read_text()) | dict(
        vocab_size=163840,
        hidden_size=2048,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=11264,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        rope_theta=50000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        num_nextn_predict_layers=0,
    )
    assert count_parameters(spec_from_config(raw)).total / 1e9 == pytest.approx(15.96, abs=0.005)
