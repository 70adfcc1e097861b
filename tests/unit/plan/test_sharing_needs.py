"""`batch.share_prefixes` in a plan: what was not tried is refused, and what has not run on a GPU is named."""

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import plan_run

ON = "batch.share_prefixes=prompts"


@pytest.mark.parametrize("overrides", [["precision=fp32"], ["precision=bf16"], ["precision=fp8"]])
def test_on_gpus_it_is_named_as_not_yet_run(load, shape, overrides):
    def said(device, *more):
        return [
            notice
            for notice in plan_run(load(*overrides, *more), device, shape("dense")).notices
            if "FlexAtt" in notice
        ]

    (notice,) = said("gpu", ON)
    assert notice.startswith("batch.share_prefixes prompts on GPUs") and notice.endswith("it has not yet run on a GPU")
    assert not said("cpu", ON) and not said("gpu")


@pytest.mark.parametrize("model", ["dense", "moe", "gpt_oss", "olmo3", "qwen3_next", "qwen3_5"])
def test_models_that_were_compared_are_allowed(load, model):
    plan_run(load(ON, "precision=fp32"), "cpu", f"configs/models/certify_{model}.json")


def test_gated_delta_nets_may_share_on_tensor_and_context_ranks(load):
    layout = ("parallel.tensor=2", "parallel.context=2", "cluster.ranks_per_node=4")
    plan_run(load(ON, "precision=fp32", *layout), "cpu", "configs/models/certify_qwen3_5.json")


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_gated_delta_nets_may_not_on_gpus(load, model):
    own = ["precision=bf16", "engine.transformer_engine=false"]
    with pytest.raises(PlanError, match=rf"prompts on GPUs, and the model \({model}\w*\) has gated delta nets: .* off"):
        plan_run(load(ON, *own), "gpu", f"configs/models/certify_{model}.json")
