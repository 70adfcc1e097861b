"""With one mini-batch a step old is current: the ratio is 1 to the bit, whatever noise a second forward pass has."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_configs import make_config

from gspo_mega.algorithm.correction import CorrectionRule
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.config.derived import may_correct_in_training, needs_old_log_prob_pass, old_is_current
from gspo_mega.engine.losses import OldPass, PolicyLoss, SequenceCorrection

GROUPS = SimpleNamespace(context=SimpleNamespace(size=1, rank=0, group=None))


def batch_of(rollout: torch.Tensor) -> SimpleNamespace:
    """What the loss reads of two sequences of 3 and 2 tokens."""
    return SimpleNamespace(
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
        labels=torch.arange(5),
        rollout_log_probs=rollout,
        num_sequences=2,
        num_versions=1,
        token_advantages=None,
        kept=None,
        trajectory_index=np.arange(2),
        sequence=dict(
            advantage=torch.tensor([0.7, -1.1], dtype=torch.float64),
            length=torch.tensor([3, 2]),
            group_size=torch.ones(2),
        ),
    )


@pytest.mark.parametrize("ratio", ["sequence", "sequence_token", "token"])
@pytest.mark.parametrize("is_current", [True, False])
def test_noise_of_the_pass_for_the_correction_does_not_reach_the_ratio(ratio, is_current):
    """The training pass gives log-probs that differ from the old pass's by noise, as kernels that are not deterministic
    make it. The second response is dropped: the correction is that of the old pass.
    """
    values = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1])
    batch = batch_of(values - 0.01)
    rule = CorrectionRule()
    old = OldPass(GROUPS, rule)(batch, values + torch.tensor([1e-3, -3e-3, 2e-3, 5e-3, 1e-3]), torch.ones(5)).old
    old.correction = SequenceCorrection(
        weights=torch.tensor([1.0, 0.0]).double(),
        keep=torch.tensor([True, False]),
        deviations=torch.zeros(2).double(),
        centre=torch.zeros(2).double(),
    )
    head = PolicyLoss(
        GROUPS,
        ObjectiveSettings(ratio, 3e-4, 4e-4),
        2.0,
        OldPass(GROUPS, rule),
        use_rollout=False,
        old=[old],
        old_is_current=is_current,
    )
    log_probs = values.clone().requires_grad_()
    output = head(batch, log_probs, None)
    output.loss.backward()
    log_s = output.columns["log_s"]
    assert (not log_s.any()) == is_current
    assert output.columns["correction_weight"].tolist() == [1.0, 0.0]
    if is_current:
        # d J / d log pi = A / (2 responses x 3 tokens) of the kept one; the loss is -J.
        assert log_probs.grad.tolist() == pytest.approx([-0.7 / 6] * 3 + [0.0] * 2, rel=1e-6)


@pytest.mark.parametrize("mode", ["mask", "truncate"])
@pytest.mark.parametrize("makes_old_pass", [True, False])
def test_a_correction_that_nobody_decided_is_an_error(makes_old_pass, mode):
    """Not the loss of an uncorrected batch, whatever a caller forgot: `PolicyEngine.correct`, or `corrects`."""
    values = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1])
    old_pass = OldPass(GROUPS, CorrectionRule(mode))
    old = [old_pass(batch_of(values - 0.01), values, torch.ones(5)).old] if makes_old_pass else None
    with pytest.raises(ValueError, match=f"mismatch.correction is {mode}, and the correction was not decided.*correct"):
        PolicyLoss(GROUPS, ObjectiveSettings("sequence", 3e-4, 4e-4), 2.0, old_pass, False, old)
    # Where the servers' log-probs are the old ones the gap is in the ratio, and nothing is to be decided.
    PolicyLoss(GROUPS, ObjectiveSettings("sequence", 3e-4, 4e-4), 2.0, old_pass, True, old)
    if not makes_old_pass:
        PolicyLoss(GROUPS, ObjectiveSettings("sequence", 3e-4, 4e-4), 2.0, old_pass, False, None, corrects=True)


@pytest.mark.parametrize("makes_old_pass", [True, False])
def test_keeping_the_gap_of_each_token_changes_nothing_else(makes_old_pass):
    values = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1])
    batch = batch_of(values - torch.tensor([0.5, -0.25, 0.0, 2e-6, 1.0]))
    found = []
    for keeps_gaps in (False, True):
        old_pass = OldPass(GROUPS, CorrectionRule("none"), keeps_gaps)
        first = old_pass(batch, values, torch.ones(5))
        old = [first.old] if makes_old_pass else None
        head = PolicyLoss(GROUPS, ObjectiveSettings("sequence", 3e-4, 4e-4), 2.0, old_pass, False, old)
        log_probs = values.clone().requires_grad_()
        output = head(batch, log_probs, torch.ones(5))
        output.loss.backward()
        columns = [(name, value.tolist()) for name, value in output.columns.items()]
        found.append((output.loss.item(), log_probs.grad.tolist(), columns))
        measured = first if makes_old_pass else output
        assert (measured.gaps is not None) == keeps_gaps
    assert found[0] == found[1]
    assert measured.gaps.tolist() == pytest.approx([0.5, -0.25, 0.0, 2e-6, 1.0], rel=0.2)
    assert (output.gaps is None) == makes_old_pass


@pytest.mark.parametrize(
    ("num_mini_batches", "old_log_probs", "correction", "makes", "current"),
    [
        (1, "trainer", "mask", True, True),
        (1, "trainer", "none", False, True),
        (1, "rollout", "mask", False, False),
        (4, "trainer", "mask", True, False),
        (4, "trainer", "none", True, False),
    ],
)
def test_what_follows_from_the_keys(num_mini_batches, old_log_probs, correction, makes, current):
    config = make_config(
        old_log_probs=old_log_probs,
        mismatch=dict(correction=correction),
        batch=dict(prompts_per_step=4, group_size=4, num_mini_batches=num_mini_batches, micro_batch_tokens=128),
    )
    assert (needs_old_log_prob_pass(config), old_is_current(config.old_log_probs, config.batch)) == (makes, current)
    assert may_correct_in_training(config) == (makes and current)
