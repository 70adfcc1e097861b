"""What cannot run by its figures: a GPU's memory, by estimate, and the GPUs of nodes; how the commands end then."""

from __future__ import annotations

import pytest
from test_memory import BIG

from gspo_mega.base.errors import FitError, PlanError
from gspo_mega.cli.main import main
from gspo_mega.plan import estimate, plan_run, refuse_what_does_not_fit
from gspo_mega.plan.memory import GIB

LARGE = ("precision=bf16", "cluster.gpu_memory_gib=16", "batch.micro_batch_tokens=65536", "rollout.max_new_tokens=512")
ON_H100 = "configs/qwen3_30b_a3b_4nodes.yaml"


def judge(load, shape, *overrides, device=None, **sizes):
    loaded = load(*overrides)
    plan = plan_run(loaded, device, shape("dense", **sizes))
    refuse_what_does_not_fit(plan, estimate(plan, loaded.where), loaded.where)


def test_over_memory_by_estimate_is_refused_with_the_keys_to_change(load, shape):
    with pytest.raises(FitError) as caught:
        judge(load, shape, *LARGE, **BIG)
    told = str(caught.value)
    assert caught.value.exit_code == 10 and told.startswith("override 'cluster.gpu_memory_gib=16': cluster.gpu_memory")
    assert "over by " in told and "GiB (activations " in told and "`recompute.granularity: full`" in told
    assert "a smaller batch.micro_batch_tokens than 65536" in told and "plan.over_memory: warn" in told
    with pytest.raises(FitError) as caught:
        judge(load, shape, *LARGE, "recompute.granularity=full", "batch.micro_batch_tokens=1000000", **BIG)
    assert "recompute" not in str(caught.value)  # what is done already helps no more


def test_the_user_may_start_it_all_the_same(load, shape):
    judge(load, shape, *LARGE, "plan.over_memory=warn", **BIG)
    judge(load, shape, *LARGE, device="cpu", **BIG)  # where there is no GPU's memory
    judge(load, shape, *LARGE, "batch.micro_batch_tokens=2048", **BIG)


def test_a_configuration_that_only_evaluates_needs_no_memory_for_training(load, shape):
    judge(load, shape, *LARGE, "train=null", "eval.path=held_out.jsonl", **BIG)


def test_what_exceeds_exactly_has_the_same_code_whatever_is_asked(load, shape):
    with pytest.raises(FitError, match="weights, gradients and optimizer state take"):
        judge(load, shape, *LARGE, "plan.over_memory=warn", "cluster.gpu_memory_gib=0.5", **BIG)
    with pytest.raises(FitError, match="leaves a cache of 0 tokens, while one response may take"):
        judge(load, shape, *LARGE, "server.memory_fraction=0.001", **BIG)
    found = estimate(plan_run(load(*LARGE), None, shape("dense", **BIG))).servers.memory
    assert found is not None
    for num_tokens, fits in ((100, False), (1000, True)):
        share = (found.weights + num_tokens * found.cache / found.cache_tokens) / (16 * GIB)
        words = (*LARGE, "plan.over_memory=warn", f"server.memory_fraction={share}")
        if fits:
            judge(load, shape, *words, **BIG)
        else:
            with pytest.raises(FitError, match=rf"cache of {num_tokens - 1}|{num_tokens} tokens, while one response"):
                judge(load, shape, *words, **BIG)


@pytest.mark.parametrize(
    ("cluster", "server", "said"),
    [
        (
            "{gpus_per_node: 8, num_rollout_nodes: 1}",
            "{num_servers: 8, tensor: 2}",
            "1 node of 8 GPUs .* need 16; .* least 2 n",
        ),
        ("{gpus_per_node: 8, num_rollout_nodes: 2}", "{num_servers: 5, tensor: 4}", "2 nodes of 8 .* 12; .* least 3 n"),
        ("{gpus_per_node: 8, ranks_per_node: 4}", "{num_servers: 5}", r"a node of 8 GPUs .* 9; .*num_rollout_nodes: 1"),
        (
            "{gpus_per_node: 2, num_rollout_nodes: 2}",
            "{num_servers: 2, tensor: 4, num_nodes: 2}",
            "need 4; .* least 4 ",
        ),
        (
            "{num_nodes: 2, gpus_per_node: 8, ranks_per_node: 8}",
            "{num_servers: 5, tensor: 4}",
            r"a node of 8 GPUs .* would need 20; .*cluster.num_rollout_nodes: 3\)",
        ),
    ],
)
def test_nodes_with_too_few_gpus(load, shape, cluster, server, said):
    words = (f"cluster={cluster}", f"server={server}", "publish.verify=replicas", "batch.num_mini_batches=1")
    with pytest.raises(PlanError, match=said) as caught:
        judge(load, shape, *words)
    assert str(caught.value).startswith("override 'cluster=") and caught.value.exit_code == 2
    if "num_rollout_nodes" not in cluster:
        judge(load, shape, *words, device="cpu")
    judge(load, shape, *words, "train={num_steps: 1, from_rollouts: /recorded}")  # which has no servers
    nodes = said.split("least " if "least" in said else "num_rollout_nodes: ")[-1][0]
    judge(load, shape, *words, f"cluster.num_rollout_nodes={nodes}")  # what is offered


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 0, "fits, "),
        (["batch.micro_batch_tokens=131072", "recompute.granularity=none"], 10, "does not fit, over by "),
        (["batch.micro_batch_tokens=131072", "recompute.granularity=none", "plan.over_memory=warn"], 0, "does not fit"),
        (["server.num_servers=8", "server.tensor=2", "cluster.num_rollout_nodes=1"], 2, ""),
    ],
)
def test_the_plan_command_says_it_by_its_exit_code(capsys, words, code, said):
    assert main(["plan", ON_H100, *words]) == code
    seen = capsys.readouterr()
    assert said in seen.out and bool(seen.err) == bool(code)
    if code == 10:
        assert "cluster.gpu: by estimate a rank of stage 0 needs" in seen.err
