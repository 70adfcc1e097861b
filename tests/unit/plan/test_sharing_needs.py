"""`batch.share_prefixes` in a plan: models and devices without that attention are refused."""

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import plan_run

ON = "batch.share_prefixes=prompts"


def test_gpus_are_refused(load, shape):
    with pytest.raises(
        PlanError, match=r"batch\.share_prefixes: prompts on GPUs: .* runs on CPUs only; nearest .* off"
    ):
        plan_run(load(ON, "precision=fp32"), "gpu", shape("dense"))


@pytest.mark.parametrize("model", ["dense", "moe", "gpt_oss", "olmo3", "qwen3_next", "qwen3_5"])
def test_models_that_were_compared_are_allowed(load, model):
    plan_run(load(ON, "precision=fp32"), "cpu", f"configs/models/certify_{model}.json")


def test_gated_delta_nets_may_share_on_tensor_and_context_ranks(load):
    layout = ("parallel.tensor=2", "parallel.context=2", "cluster.ranks_per_node=4")
    plan_run(load(ON, "precision=fp32", *layout), "cpu", "configs/models/certify_qwen3_5.json")
