"""A teacher's advantages: hand-derived values, both ways into the objective, an oracle in plain PyTorch, the metrics."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import Batch

from gspo_mega.algorithm.distillation import (
    TEACHER_SUMS,
    has_token_terms,
    teacher_metrics,
    teacher_sums,
    token_guidance,
)
from gspo_mega.algorithm.losses import token_average
from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective

F64 = torch.float64
# Two responses of two tokens and one. log student - log teacher: log 2, -log 4, 0.
STUDENT = torch.tensor([-1.0, -2.0, -0.5], dtype=F64)
TEACHER = STUDENT - torch.tensor([math.log(2), -math.log(4), 0.0], dtype=F64)
SEGMENTS, REWARDS = torch.tensor([0, 0, 1]), torch.tensor([0.5, -1.5], dtype=F64)
LOG2 = math.log(2)


def guided(coefficient=1.0, reward_weight=1.0, mask=None, teacher=TEACHER, **changes):
    return token_guidance(
        coefficient,
        reward_weight,
        student_log_probs=STUDENT,
        teacher_log_probs=teacher,
        mask=torch.ones(3) if mask is None else mask,
        segment_ids=SEGMENTS,
        advantages=REWARDS,
        **changes,
    )


def test_advantages_by_hand():
    """A token that the teacher finds half as likely loses log 2; one that it finds four times as likely gains log 4."""
    out = guided()
    assert out.teacher.tolist() == pytest.approx([-LOG2, 2 * LOG2, 0.0], rel=1e-12)
    assert out.rewards.tolist() == [0.5, 0.5, -1.5]
    assert out.total.tolist() == pytest.approx([0.5 - LOG2, 0.5 + 2 * LOG2, -1.5], rel=1e-12)
    half = guided(coefficient=0.5, reward_weight=2.0)
    assert half.total.tolist() == pytest.approx([1.0 - LOG2 / 2, 1.0 + LOG2, -3.0], rel=1e-12)
    alone = guided(reward_weight=0.0)
    assert alone.total.tolist() == alone.teacher.tolist()


def test_advantages_of_tokens_take_the_place_of_the_sequences():
    own = torch.tensor([0.1, 0.2, math.nan], dtype=F64)
    out = guided(token_advantages=own, mask=torch.tensor([1.0, 1.0, 0.0]))
    assert out.rewards.tolist() == [0.1, 0.2, 0.0]


def test_a_masked_token_has_no_advantage_and_may_hold_anything():
    spoilt = torch.cat([TEACHER[:2], torch.tensor([math.nan], dtype=F64)])
    out = guided(teacher=spoilt, mask=torch.tensor([1.0, 1.0, 0.0]))
    assert out.teacher.tolist() == pytest.approx([-LOG2, 2 * LOG2, 0.0], rel=1e-12)
    assert out.rewards[2] == 0


def test_nothing_has_a_gradient():
    student = STUDENT.clone().requires_grad_()
    out = token_guidance(
        1.0,
        1.0,
        student_log_probs=student,
        teacher_log_probs=TEACHER,
        mask=torch.ones(3),
        segment_ids=SEGMENTS,
        advantages=REWARDS.clone().requires_grad_(),
    )
    assert not out.total.requires_grad


def _random(seed=5):
    batch = Batch(seed=seed, scale=0.02)
    g = torch.Generator().manual_seed(seed)
    return batch, batch.old + 0.5 * torch.randn(batch.old.shape, generator=g, dtype=F64)


def _objective(settings, batch, new, **changes):
    arguments = dict(
        log_probs=new,
        old_log_probs=batch.old,
        mask=batch.mask,
        segment_ids=batch.segment_ids,
        num_sequences=batch.num_sequences,
        advantages=batch.advantages,
        lengths=batch.lengths,
        denominator=batch.denominator("sequence_mean_token_mean"),
        keep=batch.keep,
        sequence_weights=batch.weights,
        group_sizes=batch.group_sizes(),
    )
    return policy_objective(settings, **{**arguments, **changes})


@pytest.mark.parametrize("clip", [0.01, 10.0])
def test_the_token_form_equals_an_oracle_in_plain_pytorch(clip):
    """GSPO-token with A_i + D_it: value and gradient of min(s A, clip(s) A) with s from one sum per sequence."""
    batch, teacher = _random()
    settings = ObjectiveSettings(ratio="sequence_token", clip_low=clip, clip_high=clip)
    guidance = token_guidance(
        0.7,
        1.3,
        student_log_probs=batch.old,
        teacher_log_probs=teacher,
        mask=batch.mask,
        segment_ids=batch.segment_ids,
        advantages=batch.advantages,
    )
    new = batch.new.clone().requires_grad_()
    out = _objective(settings, batch, new, token_advantages=guidance.total)
    out.objective_sum.backward()

    own = batch.new.clone().requires_grad_()
    active = batch.mask.bool()
    value = torch.zeros((), dtype=F64)
    for i in range(batch.num_sequences):
        rows = active & (batch.segment_ids == i)
        if not rows.any() or not batch.keep[i]:
            continue
        d = own[rows] - batch.old[rows]
        s = d.mean().exp().detach() * (own[rows] - own[rows].detach()).exp()
        a = 1.3 * batch.advantages[i] - 0.7 * (batch.old[rows] - teacher[rows])
        term = torch.minimum(s * a, s.clamp(1 - clip, 1 + clip) * a)
        value = value + batch.weights[i] * term.mean() / batch.denominator("sequence_mean_token_mean")
    value.backward()
    assert float(out.value) == pytest.approx(float(value.detach()), rel=1e-12)
    assert new.grad is not None and own.grad is not None
    assert torch.allclose(new.grad, own.grad, rtol=1e-12, atol=1e-15)


def test_gspos_second_term_is_what_gspo_token_has_more():
    """With nothing clipped, GSPO and the second term together have the gradient of GSPO-token with A_i + D_it."""
    batch, teacher = _random(seed=8)
    guidance = token_guidance(
        1.0,
        1.0,
        student_log_probs=batch.old,
        teacher_log_probs=teacher,
        mask=batch.mask,
        segment_ids=batch.segment_ids,
        advantages=batch.advantages,
    )
    gspo = ObjectiveSettings(ratio="sequence", clip_low=0.9, clip_high=9.0)
    token = replace(gspo, ratio="sequence_token")
    assert not has_token_terms(gspo) and has_token_terms(token)
    both, one = (batch.new.clone().requires_grad_() for _ in range(2))
    first = _objective(gspo, batch, both)
    second = _objective(token, batch, both, token_advantages=guidance.teacher)
    (first.objective_sum + second.objective_sum).backward()
    whole = _objective(token, batch, one, token_advantages=guidance.total)
    whole.objective_sum.backward()
    assert float(first.value + second.value) == pytest.approx(float(whole.value), rel=1e-12)
    assert both.grad is not None and one.grad is not None
    assert torch.allclose(both.grad, one.grad, rtol=1e-11, atol=1e-15)


def test_sums_and_metrics_by_hand():
    mask = torch.tensor([1.0, 1.0, 0.0])
    out = guided(coefficient=2.0, mask=mask)
    sums = teacher_sums(
        out,
        student_log_probs=STUDENT,
        teacher_log_probs=TEACHER,
        mask=mask,
        clipped=torch.tensor([True, False, True]),
    )
    assert dict(zip(TEACHER_SUMS, sums.tolist(), strict=True)) == pytest.approx(
        dict(tokens=2, reverse_kl=-LOG2, teacher_size=6 * LOG2, reward_size=1.0, clipped=1, divergence=0, all_tokens=2),
        rel=1e-12,
    )
    assert teacher_metrics(sums.tolist(), has_second_term=True) == pytest.approx(
        dict(
            reverse_kl=-LOG2 / 2,
            advantage_size=3 * LOG2,
            advantage_share=6 * LOG2 / (6 * LOG2 + 1),
            clip_fraction=0.5,
        ),
        rel=1e-12,
    )
    whole = teacher_metrics([4.0, 2.0, 0.0, 0.0, 0.0, 6.0, 4.0], has_second_term=True, has_divergence=True)
    assert whole == dict(reverse_kl=0.5, divergence=1.5), "no token has an advantage of the teacher"
    assert "clip_fraction" not in teacher_metrics(sums.tolist(), has_second_term=False)
    assert teacher_metrics([0.0] * len(TEACHER_SUMS), has_second_term=False)["advantage_share"] == 0.0


def test_tokens_without_a_teacher_enter_only_the_share_of_tokens_that_have_one():
    """STUDENT, TEACHER of `test_sums_and_metrics_by_hand`, whose second token has no teacher."""
    mask = torch.tensor([1.0, 1.0, 0.0])
    taught = torch.tensor([True, False, True])
    theirs = torch.where(taught, TEACHER, STUDENT)  # as `TeacherScores.beside` gives it
    out = guided(coefficient=2.0, mask=mask, teacher=theirs)
    assert out.teacher[1] == 0.0 and out.rewards[1] != 0.0, "only the reward teaches it"
    sums = teacher_sums(
        out, student_log_probs=STUDENT, teacher_log_probs=theirs, mask=mask, taught=taught, divergence=torch.ones(3)
    )
    found = dict(zip(TEACHER_SUMS, sums.tolist(), strict=True))
    assert (found["tokens"], found["all_tokens"], found["divergence"]) == (1.0, 2.0, 1.0)
    first = float(STUDENT[0] - TEACHER[0])
    assert found["reverse_kl"] == pytest.approx(first, rel=1e-12)
    metrics = teacher_metrics(sums.tolist(), has_second_term=False, by_source=True)
    assert metrics["token_fraction"] == 0.5 and metrics["reverse_kl"] == pytest.approx(first, rel=1e-12)
    assert "token_fraction" not in teacher_metrics(sums.tolist(), has_second_term=False)


def test_the_loss_of_divergences_is_averaged_as_the_objective_is():
    """Responses of two tokens and one: ((f_1 + f_2) / 2 + f_3) / 2, weighted, and without the rejected one."""
    f = torch.tensor([1.0, 3.0, 5.0], dtype=F64, requires_grad=True)
    given: dict[str, Any] = dict(segment_ids=SEGMENTS, num_sequences=2, lengths=torch.tensor([2, 1]), denominator=2.0)
    assert float(token_average(ObjectiveSettings(), f.detach(), **given)) == pytest.approx(3.5, rel=1e-12)
    weighted = token_average(ObjectiveSettings(), f.detach(), **given, sequence_weights=torch.tensor([0.5, 2.0]))
    assert float(weighted) == pytest.approx((0.5 * 2 + 2.0 * 5) / 2, rel=1e-12)
    kept = token_average(ObjectiveSettings(), f, **given, keep=torch.tensor([True, False]))
    kept.backward()
    assert kept.item() == pytest.approx(1.0, rel=1e-12) and f.grad is not None and f.grad.tolist() == [0.25, 0.25, 0.0]
    token_mean = token_average(ObjectiveSettings(aggregation="token_mean"), f.detach(), **{**given, "denominator": 3.0})
    assert float(token_mean) == pytest.approx(3.0, rel=1e-12)
