"""Adapters: what contradicts them is refused, and what they change is said."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.precision import fused_keys, fusion_obstacle, has_transformer_engine_layers

LORA = "lora={rank: 4, alpha: 8}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["precision=fp8"],
            "precision: fp8 with `lora`: adapters on FP8 layers were not tried; valid then: bf16",
        ),
        (
            ["lora.dropout=0.1", "parallel.tensor=2"],
            "lora.dropout: 0.1 with parallel.tensor 2: tensor ranks would drop different inputs of one adapter",
        ),
        (
            ["moe.expert_bias_update_rate=0.001"],
            "it moves the model's own bias, which neither an adapter nor its checkpoint",
        ),
        (["lora.targets=[q_proj, q_proj]"], "lora.targets: 'q_proj' occurs 2 times; list it once"),
    ],
)
def test_what_contradicts_adapters_is_refused(write, overrides, said):
    assert said in refused(write(), LORA, *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lora=null"], "publish.lora: adapter without `lora`: there are no adapters to publish; valid then: merged"),
        (["publish.method=distributed"], "SGLang loads adapters from a folder; valid then: disk"),
        (["model.weights=elsewhere"], "servers hold the weights of model.path; leave it out"),
        (["cluster.colocated=true"], "whether adapters that a server holds survive giving its GPU away was not tried"),
        (["train={num_steps: 1, rollouts_only: true}"], "with `train.rollouts_only`: nothing is trained or published"),
        (["server.quantization=fp8"], "adapters with quantized layers were not compared with the trainer's"),
        (["server.speculative={algorithm: ngram}"], "the draft would propose tokens of a policy without them"),
        (
            ["server.tensor=2", "server.attention_data=2"],
            "server.attention_data: 2 with `publish.lora: adapter`: SGLang then takes only adapters that stay loaded",
        ),
        (
            ["rollout.max_staleness=1", "rollout.on_publish=continue_with_cache"],
            "an open request keeps the adapter that it began with, and SGLang does not unload that before",
        ),
        (
            ["eval={path: held_out.jsonl, every_steps: 1, blocking: false}"],
            "eval.blocking: false with `publish.lora: adapter`: a server that is set aside loads a version as whole",
        ),
    ],
)
def test_what_contradicts_adapters_on_servers_is_refused(write, overrides, said):
    assert said in refused(write(), LORA, "publish.lora=adapter", *overrides)


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "on_gpu"),
    [
        (["precision=bf16"], False, True),
        (["precision=bf16", "engine.transformer_engine=false"], False, False),
        (["precision=bf16", "engine.transformer_engine=true"], True, True),
        (["precision=fp32"], False, False),
    ],
)
def test_adapters_have_the_layers_that_a_whole_policy_has(write, overrides, on_cpu, on_gpu):
    for config in (load_config(write(), [*more, *overrides]).config for more in ([], [LORA])):
        found = [
            has_transformer_engine_layers(config.precision, config.engine, has_gpu=has_gpu) for has_gpu in (False, True)
        ]
        assert found == [on_cpu, on_gpu]


def test_no_weight_gradient_is_fused_where_weights_are_frozen(write):
    config = load_config(write(), [LORA, "precision=bf16"]).config
    assert fused_keys(config, has_experts=True, has_gpu=True) == {"fuse_activation", "fuse_permutation"}
    obstacle = fusion_obstacle(config, "fuse_weight_gradient", has_experts=True, has_gpu=True)
    assert obstacle == "layers whose weights are frozen"


def test_dropout_and_the_reference_are_said(write):
    notices = load_config(write(), [LORA, "lora.dropout=0.1", "algorithm=grpo", "kl.coefficient=0.1"]).notices
    assert any("lora.dropout 0.1: training passes leave inputs of adapters out" in line for line in notices)
    assert any("to the model without its adapters, one more forward pass" in line for line in notices)
