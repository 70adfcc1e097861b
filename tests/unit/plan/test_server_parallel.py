"""How a server is divided over its GPUs: what SGLang refuses or changes, and what each GPU holds."""

from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters, hf_tensors
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.servers import rank_weight_bytes

SHAPES = Path(__file__).parents[3] / "configs/models"
EIGHT = "server.tensor=8"
LARGE = dict(
    num_attention_heads=16, num_key_value_heads=8, moe_intermediate_size=64, intermediate_size=64, num_experts=16
)


@pytest.mark.parametrize(
    ("kind", "overrides", "device", "text"),
    [
        (
            "dense",
            ["server.expert=2"],
            None,
            "server.expert: 2, but the model (qwen3) has no experts; nearest valid: 1",
        ),
        (
            "moe",
            [EIGHT, "server.expert=3"],
            None,
            "does not divide both server.tensor 8 and the model's 16 experts; nearest valid: 2 or 4",
        ),
        ("moe", [EIGHT, "server.attention_data=3"], None, "3 does not divide server.tensor 8; nearest valid: 2 or 4"),
        (
            "moe",
            [EIGHT, "server.expert=4", "server.expert_dispatcher=deepep"],
            "gpu",
            "SGLang would set server.expert from 4 to server.tensor 8; nearest valid: none, or `server.expert: 8`",
        ),
        (
            "moe",
            [EIGHT, "server.expert=8", "server.expert_dispatcher=deepep"],
            "cpu",
            "deepep without GPUs: it consists of GPU kernels; nearest valid: none",
        ),
        (
            "moe",
            [EIGHT, "server.expert=2", "server.dtype=bf16"],
            "cpu",
            "server.expert: 2 without GPUs: SGLang computes experts of other ranks there only in fp32, not quantized",
        ),
    ],
)
def test_what_sglang_refuses_or_changes(load, shape, kind, overrides, device, text):
    sizes = LARGE if kind == "moe" else {key: LARGE[key] for key in list(LARGE)[:2]}
    with pytest.raises(PlanError) as error:
        plan_run(load(*overrides, "publish.verify=replicas"), device, shape(kind, **sizes))
    assert text in str(error.value)


def test_attention_that_sglang_divides_over_all_ranks(load):
    with pytest.raises(PlanError, match="SGLang divides the attention of llama over all of a server's ranks"):
        plan_run(
            load("server.tensor=2", "server.attention_data=2", "publish.verify=replicas"),
            None,
            SHAPES / "llama3_70b.json",
        )


def test_experts_that_are_not_cut_need_no_side_for_it(load, shape):
    """Four heads do not divide over eight ranks; in two groups of four they do. Nor do 36 values of an expert."""
    sizes = {**LARGE, "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 36}
    wide = [EIGHT, "publish.verify=replicas"]
    with pytest.raises(PlanError, match="server.tensor: 8 does not fit the model's 4 heads"):
        plan_run(load(*wide), None, shape("moe", **sizes))
    with pytest.raises(PlanError, match="server.tensor: 8 does not fit"):
        plan_run(load(*wide, "server.attention_data=2"), None, shape("moe", **sizes))
    plan = plan_run(load(*wide, "server.attention_data=2", "server.expert=8"), None, shape("moe", **sizes))
    assert "1 x tensor 8, expert 8, attention in 2 groups on" in render_report(plan, estimate(plan))


def test_each_gpu_holds_the_attention_of_its_group_and_its_cache(load, shape):
    spec = read_model_spec(shape("moe", **LARGE))
    total = count_parameters(spec).total
    words = ["precision=fp32", EIGHT, "publish.verify=replicas"]
    usual = load(*words).config
    grouped = load(*words, "server.attention_data=8", "server.expert=8").config
    attention = sum(entry.num_elements for entry in hf_tensors(spec) if ".self_attn." in entry.name)
    embedding = spec.vocab_size * spec.hidden_size
    extra = rank_weight_bytes(grouped.server, grouped.precision, spec, total) - rank_weight_bytes(
        usual.server, usual.precision, spec, total
    )
    assert extra == pytest.approx(4 * (attention + embedding) * 7 / 8, abs=8)
    # A group's GPU caches all 8 key-value heads of its own requests: as many tokens per byte, whatever the groups.
    memory = 10**8
    one, eight = (server_memory(config, spec, total, memory) for config in (usual, grouped))
    token = 2 * spec.num_layers * spec.head_dim * 4
    assert one.cache_tokens == (int(memory * 0.85) - one.weights) // token
    assert eight.cache_tokens == (int(memory * 0.85) - eight.weights) // (8 * token) * 8


def test_weights_that_leave_no_room_for_a_cache_are_refused(load, shape):
    words = ["cluster.gpu_memory_gib=1", "server.memory_fraction=0.0001"]
    with pytest.raises(PlanError) as error:
        estimate(plan_run(load(*words), "gpu", shape("moe")))
    told = "server.tensor: the weights of a server take 0.0 GiB on each of its 1 GPUs, and server.memory"
    assert told in str(error.value) and "leaves a cache of 0 tokens, while one" in str(error.value)
    estimate(plan_run(load("cluster.gpu_memory_gib=1"), "gpu", shape("moe")))
