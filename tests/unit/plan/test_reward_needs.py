"""Servers of reward models in the plan: their GPUs, nodes and memory, and what does not fit."""

import json
import re

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.report import plan_json, plan_shell

# 2 key-value heads of 64 in 10 layers: 5 KiB of cache per token in bf16.
SHAPE = dict(
    architectures=["LlamaForSequenceClassification"],
    num_hidden_layers=10,
    num_attention_heads=8,
    hidden_size=512,
    num_key_value_heads=2,
    max_position_embeddings=100,
)
FUNCTIONS = "reward.functions=[{function: sums}]"


@pytest.fixture
def classifier(tmp_path):
    """classifier(gib): a folder whose weights have so many GiB in bf16, of which only the header is there."""

    def make(gib=8, **changes):
        (tmp_path / "sums").mkdir()
        (tmp_path / "sums" / "config.json").write_text(json.dumps(SHAPE | changes))
        header = json.dumps({"w": {"dtype": "BF16", "shape": [gib, GIB // 2], "data_offsets": [0, 0]}}).encode()
        (tmp_path / "sums" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        return tmp_path / "sums"

    return make


@pytest.fixture
def planned(load, shape):
    """planned(folder, *overrides, entry=""): the plan and its figures, with reward model `sums` in `folder`."""

    def make(folder, *overrides, entry=""):
        model = f"reward.model=[{{name: sums, path: {folder}{entry}}}]"
        memory = "cluster.gpu_memory_gib=16"
        loaded = load(f"model.path={shape('moe')}", FUNCTIONS, model, memory, "server.dtype=bf16", *overrides)
        plan = plan_run(loaded, "gpu")
        return plan, estimate(plan, loaded.where)

    return make


def test_a_server_takes_its_share_of_weights_and_the_rest_for_its_cache(classifier, planned):
    plan, figures = planned(classifier(), entry=", num_servers: 3, tensor: 2, memory_fraction: 0.75")
    (needs,) = figures.rewards
    assert (needs.name, needs.num_gpus, needs.context_tokens) == ("sums", 6, 100)
    token = 2 * 10 * 1 * 64 * 2
    assert needs.weights == 4 * GIB and needs.cache_tokens == 8 * GIB // token
    assert needs.cache == needs.cache_tokens * token
    report = render_report(plan, figures)
    assert "reward   model sums: 3 x tensor 2, 100 tokens of context" in report
    assert re.search(r"per GPU: 4\.0+ GiB weights, 8\.0+ GiB cache", report)
    assert "1 GPUs, and 6 of reward models, on 7 nodes of their own" not in report
    (told,) = json.loads(plan_json(plan, figures))["reward_models"]
    assert (told["name"], told["num_gpus"], told["weights"]) == ("sums", 6, 4 * GIB)
    assert "GSPO_REWARD_GPUS=6\n" in plan_shell(plan, figures)


def test_its_precision_is_its_own_where_it_says_one(classifier, planned):
    folder = classifier(4)
    assert planned(folder)[1].rewards[0].weights == 4 * GIB
    assert planned(folder, entry=", dtype: fp32")[1].rewards[0].weights == 8 * GIB


def test_what_a_folder_does_not_say_is_said(classifier, planned):
    plan, figures = planned(classifier(num_hidden_layers=None))
    assert (figures.rewards[0].weights, figures.rewards[0].cache) == (8 * GIB, None)
    assert "GiB weights; config.json does not say how large a cache is" in render_report(plan, figures)


def test_one_that_a_run_only_asks_needs_nothing(load, shape):
    asked = "reward.model=[{name: sums, url: 'http://127.0.0.1:9/'}]"
    loaded = load(f"model.path={shape('moe')}", FUNCTIONS, asked)
    plan = plan_run(loaded)
    figures = estimate(plan, loaded.where)
    assert figures.rewards == () and "reward   model" not in render_report(plan, figures)


def test_a_plan_for_another_machine_does_without_the_folder(load, shape):
    model = "reward.model=[{name: sums, path: /nowhere, num_servers: 2}]"
    loaded = load(FUNCTIONS, model, "cluster.gpu_memory_gib=16")
    plan = plan_run(loaded, "gpu", shape("moe"))  # as with --model
    figures = estimate(plan, loaded.where)
    assert (figures.rewards[0].num_gpus, figures.rewards[0].weights) == (2, None)
    assert "its folder is not here, so its size is not known" in render_report(plan, figures)


def test_a_run_on_recorded_rollouts_needs_none(classifier, planned):
    assert planned(classifier(), "train={num_steps: 1, from_rollouts: /recorded}")[1].rewards == ()


@pytest.mark.parametrize(
    ("gib", "entry", "said"),
    [
        (
            15,
            "",
            "reward.model.0.tensor: the weights of sums take 15.0 GiB on each of 1 GPUs, and memory_fraction 0.85 of"
            " 16.0 GiB leaves room for 0 tokens, while a text may have 100 (context_tokens); use more GPUs per server",
        ),
        (8, ", context_tokens: 101", "reward.model.0.context_tokens: 101 tokens, but the positions of"),
        (8, ", tensor: 3", "reward.model.0.tensor: 3 does not divide the 8 attention heads of"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_its_place(classifier, planned, gib, entry, said):
    with pytest.raises(PlanError) as error:
        planned(classifier(gib), entry=entry)
    assert said in str(error.value) and str(error.value).startswith("override 'reward.model=")


def test_a_head_that_sglang_would_add_to_is_refused_before_the_queue(classifier, planned):
    with pytest.raises(PlanError, match=r"reward\.model\.0\.path: .* have no score\.bias"):
        planned(classifier(architectures=["Qwen3ForSequenceClassification"]))
    with pytest.raises(PlanError, match=r"reward\.model\.0\.path: /nowhere is no Hugging Face model folder"):
        planned("/nowhere")


@pytest.mark.parametrize(
    ("cluster", "nodes"),
    [
        ("cluster.gpus_per_node=8", None),  # 1 rank, a server and 6 GPUs of reward models
        ("cluster.gpus_per_node=4", 2),
        ("cluster={gpus_per_node: 4, num_rollout_nodes: 3}", 3),
    ],
)
def test_their_gpus_count_in_the_nodes_of_servers(classifier, planned, cluster, nodes):
    memory = "cluster.gpu_memory_gib=16"
    plan, figures = planned(classifier(), cluster, memory, entry=", num_servers: 3, tensor: 2")
    assert figures.servers.nodes == nodes
    told = f"1 GPUs, and 6 of reward models, on {nodes} nodes of their own"
    assert (told in render_report(plan, figures)) == (nodes is not None)


def test_nodes_that_are_too_small_for_them_are_refused(classifier, planned):
    folder, memory = classifier(), "cluster.gpu_memory_gib=16"
    told = "1 node of 4 GPUs .* for 1 GPUs of servers .* and 6 of reward.model: one node would need 7; .* least 2 nodes"
    with pytest.raises(PlanError, match=f"cluster.num_rollout_nodes: {told}"):
        nodes = "cluster={gpus_per_node: 4, num_rollout_nodes: 1}"
        planned(folder, nodes, memory, entry=", num_servers: 3, tensor: 2")
    with pytest.raises(PlanError, match=r"reward\.model\.0\.tensor: a server on 8 GPUs does not fit on a node of 4"):
        planned(folder, "cluster.gpus_per_node=4", entry=", tensor: 8")
