"""`engine.batch_invariant` in a plan: it is named, and refused for the models and devices that have no such operations."""

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import plan_run, render_report

ON, FP32 = "engine.batch_invariant=true", "precision=fp32"
SAID = "products, attention and log-softmax in the servers' order (engine.batch_invariant)"


def test_the_plan_names_it(load, shape):
    assert SAID in render_report(plan_run(load(ON, FP32), "cpu", shape("dense")))
    assert SAID not in render_report(plan_run(load(FP32), "cpu", shape("dense")))


@pytest.mark.parametrize(
    ("kind", "changes", "device", "text"),
    [
        ("dense", {}, "gpu", "true on GPUs: its operations are written and measured for CPUs; nearest valid: false"),
        ("moe", {}, "cpu", "true, and the model is qwen3_moe: the servers' layers are written for dense qwen3"),
        (
            "dense",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "cpu",
            "true, and the model's rotary positions are stretched (rope_scaling); nearest valid: false",
        ),
    ],
)
def test_other_models_and_devices_are_refused(load, shape, kind, changes, device, text):
    with pytest.raises(PlanError) as error:
        plan_run(load(ON, FP32), device, shape(kind, **changes))
    assert text in str(error.value)
