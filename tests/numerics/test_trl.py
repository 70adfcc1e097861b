"""Our objective, gradient and clip fractions against what TRL 1.16.0's own loss code computed (`record_trl.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gspo_mega.algorithm.diagnostics import policy_metrics, policy_sums
from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective

RECORDED = json.loads((Path(__file__).parent / "data" / "trl_recorded.json").read_text())
RATIOS = {"sequence": "sequence", "token": "token"}
AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "sequence_mean_token_sum_norm",
    "luspo": "sequence_mean_token_sum",
}


def run(case):
    recorded = case["settings"]
    settings = ObjectiveSettings(
        ratio=RATIOS[recorded["importance_sampling_level"]],
        clip_low=recorded["epsilon_low"],
        clip_high=recorded["epsilon_high"],
        dual_clip=recorded["delta"],
        aggregation=AGGREGATIONS[recorded["loss_type"]],
        norm_constant_tokens=recorded["max_completion_length"],
    )
    mask = torch.tensor(case["mask"], dtype=torch.float64)
    rows, columns = mask.shape
    log_probs = torch.tensor(case["log_probs"], dtype=torch.float64).requires_grad_()
    arguments = {
        "mask": mask.flatten(),
        "segment_ids": torch.arange(rows).repeat_interleave(columns),
        "lengths": mask.sum(dim=1).long(),
        "advantages": torch.tensor(case["advantages"], dtype=torch.float64),
    }
    output = policy_objective(
        settings,
        log_probs=log_probs.flatten(),
        old_log_probs=torch.tensor(case["old_log_probs"], dtype=torch.float64).flatten(),
        num_sequences=rows,
        denominator=int(mask.sum()) if settings.aggregation == "token_mean" else rows,
        **arguments,
    )
    output.loss.backward()
    return output, log_probs.grad, policy_metrics(policy_sums(output, **arguments))


@pytest.mark.parametrize(
    "case",
    RECORDED["cases"],
    ids=lambda c: f"{c['settings']['importance_sampling_level']}-{c['settings']['loss_type']}",
)
def test_loss_gradient_and_clip_fractions_equal_trl(case):
    output, gradient, metrics = run(case)
    assert float(output.loss) == pytest.approx(case["loss"], rel=1e-12, abs=1e-15)
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"], dtype=torch.float64), rtol=1e-12, atol=0)
    prefix = "clip_fraction" if case["settings"]["importance_sampling_level"] == "sequence" else "token_clip_fraction"
    # TRL counts in float32
    assert metrics[f"{prefix}_high"] == pytest.approx(case["metrics"]["clip_ratio/high_mean"], abs=1e-7)
    assert metrics[f"{prefix}_low"] == pytest.approx(case["metrics"]["clip_ratio/low_mean"], abs=1e-7)


def test_the_recorded_cases_clip_on_both_sides_and_leave_some_alone():
    sequence_cases = [
        case["metrics"] for case in RECORDED["cases"] if case["settings"]["importance_sampling_level"] == "sequence"
    ]
    assert any(0 < m["clip_ratio/high_mean"] < 1 for m in sequence_cases)
    assert any(0 < m["clip_ratio/low_mean"] < 1 for m in sequence_cases)
    assert RECORDED["trl"] == "1.16.0"
