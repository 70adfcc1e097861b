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


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_models_that_were_compared_are_allowed(load, shape, kind):
    plan_run(load(ON, "precision=fp32"), "cpu", shape(kind))


@pytest.mark.parametrize(
    ("model", "has"),
    [
        ("gpt_oss", r"gpt_oss\) has sinks and sliding windows"),
        ("olmo3", r"olmo3\) has sliding windows"),
        ("qwen3_next", r"qwen3_next\) has gated delta nets"),
        ("qwen3_5", r"qwen3_5\w*\) has gated delta nets"),
    ],
)
def test_layers_that_do_not_know_of_it_are_refused(load, model, has):
    said = rf"batch\.share_prefixes: prompts, and the model \({has}, which have not .* nearest .* off"
    with pytest.raises(PlanError, match=said):
        plan_run(load(ON, "precision=fp32"), "cpu", f"configs/models/certify_{model}.json")
