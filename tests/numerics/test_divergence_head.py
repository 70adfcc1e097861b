"""The reverse KL of whole distributions in chunks: values and gradients against autograd on the whole logits, and a case
by hand.

One rank; tests/distributed has the same over tensor-parallel ranks.
"""

from __future__ import annotations

import math
import warnings

import pytest

warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

import torch  # noqa: E402
from divergence_oracle import divergence_of  # noqa: E402
from peak_memory import peak_extra_bytes  # noqa: E402

import gspo_mega.engine  # noqa: E402,F401  the CPU backend comes before Megatron
from gspo_mega.engine.log_probs import DivergenceRule, divergence_from_top, token_divergence  # noqa: E402
from gspo_mega.engine.process_groups import RankGroup  # noqa: E402

ALONE = RankGroup(group=None, rank=0, size=1, ranks=(0,))
RULES = {
    "full": DivergenceRule(),
    "teacher's 3, bucket": DivergenceRule(3),
    "policy's 3, bucket": DivergenceRule(3, of_teacher=False),
    "teacher's 3, renormalised": DivergenceRule(3, in_bucket=False),
    "policy's 1, bucket": DivergenceRule(1, of_teacher=False),
    "more than there are": DivergenceRule(40),
}


def diverge(hidden, weight, taught, teacher_weight, rule, *, rows=None, vocab=None, temperature=1.0, chunk=4):
    return token_divergence(
        hidden[:, None],
        weight,
        torch.arange(hidden.size(0)) if rows is None else rows,
        taught,
        teacher_weight,
        rule=rule,
        vocab_size=vocab or weight.size(0),
        temperature=temperature,
        tensor_group=ALONE,
        sequence_parallel=False,
        chunk_rows=chunk,
    )


def case(dtype=torch.float64, num=7, vocab=11, width=5, teachers_width=6):
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return (
        draw(num, width).requires_grad_(),
        draw(vocab, width).requires_grad_(),
        draw(num, teachers_width),
        draw(vocab, teachers_width),
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_values_and_gradients_equal_autograd_on_whole_logits(rule, chunk):
    hidden, weight, taught, teacher_weight = case()
    rows = torch.tensor([6, 0, 3, 2])
    upstream = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
    options = dict(rows=rows, vocab=9, temperature=0.7, chunk=chunk)
    got = diverge(hidden, weight, taught[rows], teacher_weight, rule, **options)
    (got @ upstream).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden[rows] @ weight[:9].t() / 0.7
    want = divergence_of(logits, taught[rows] @ teacher_weight[:9].t() / 0.7, rule)
    (want @ upstream).backward()
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)
    for one, other in zip(grads, (hidden.grad, weight.grad), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2). All: (log 2) / 2 - (log 2) / 4. The teacher's largest and a bucket:
    p = (1/4, 3/4), q = (1/2, 1/2). The policy's two largest, renormalised: p = (2/3, 1/3), q = (1/2, 1/2); the tie of
    the policy's second with its third adds the third, so the vocabulary is all of it.
    """
    log_p, log_q = ([math.log(x) for x in row] for row in ((0.5, 0.25, 0.25), (0.25, 0.25, 0.5)))
    identity = torch.eye(3, dtype=torch.float64)
    p, q = (torch.tensor([row], dtype=torch.float64) for row in (log_p, log_q))
    log2 = math.log(2)
    for rule, want in (
        (DivergenceRule(), log2 / 4),
        (DivergenceRule(1), 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        (DivergenceRule(2, of_teacher=False, in_bucket=False), log2 / 4),
        (DivergenceRule(1, of_teacher=False), 0.5 * log2 + 0.5 * math.log(0.5 / 0.75)),
        (DivergenceRule(1, in_bucket=False), 0.0),
    ):
        assert float(diverge(p, identity, q, identity, rule)) == pytest.approx(want, rel=1e-12, abs=1e-15), rule


def test_a_policy_that_is_its_teacher():
    hidden, weight, *_ = case()
    for rule in RULES.values():
        hidden.grad = None
        out = diverge(hidden, weight, hidden.detach(), weight.detach(), rule)
        out.sum().backward()
        assert out.abs().max() < 1e-14 and hidden.grad.abs().max() < 1e-14


def from_top(hidden, weight, ids, log_probs, *, in_bucket=True, rows=None, vocab=None, temperature=1.0, chunk=4):
    return divergence_from_top(
        hidden[:, None],
        weight,
        torch.arange(hidden.size(0)) if rows is None else rows,
        ids,
        log_probs,
        in_bucket=in_bucket,
        vocab_size=vocab or weight.size(0),
        temperature=temperature,
        tensor_group=ALONE,
        sequence_parallel=False,
        chunk_rows=chunk,
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("in_bucket", [True, False])
def test_a_teachers_most_likely_tokens_are_enough(in_bucket, chunk):
    """What a server says of 3 tokens gives the values and gradients of the teacher's whole logits."""
    hidden, weight, taught, teacher_weight = case()
    rows = torch.tensor([6, 0, 3, 2])
    upstream = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
    theirs = taught[rows] @ teacher_weight[:9].t()
    top = theirs.log_softmax(1).topk(3, dim=1)
    got = from_top(hidden, weight, top.indices, top.values, in_bucket=in_bucket, rows=rows, vocab=9, chunk=chunk)
    (got @ upstream).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    want = divergence_of(hidden[rows] @ weight[:9].t(), theirs, DivergenceRule(3, in_bucket=in_bucket))
    (want @ upstream).backward()
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)
    for one, other in zip(grads, (hidden.grad, weight.grad), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


def test_most_likely_tokens_by_hand():
    """p = (1/2, 1/4, 1/4), q's first is 1/2 of token 2: p = (1/4, 3/4), q = (1/2, 1/2) with a bucket. A q of all mass on
    token 0 has a tail of 2^-52 at least, as p has: 1/2 log(1/2) + 1/2 (log(1/2) + 52 log 2).
    """
    identity = torch.eye(3, dtype=torch.float64)
    p = torch.tensor([[math.log(x) for x in (0.5, 0.25, 0.25)]], dtype=torch.float64)
    half = torch.tensor([[math.log(0.5)]], dtype=torch.float64)
    got = from_top(p, identity, torch.tensor([[2]]), half)
    assert float(got) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-12)
    sure = from_top(p, identity, torch.tensor([[0]]), torch.zeros_like(half))
    assert float(sure) == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) + 52 * math.log(2)), rel=1e-12)


def test_far_apart_distributions_are_finite_in_fp32():
    hidden, weight, taught, teacher_weight = (tensor.detach() for tensor in case(torch.float32))
    hidden.requires_grad_()
    for rule in RULES.values():
        hidden.grad = None
        out = diverge(hidden, weight, 100 * taught, teacher_weight, rule)
        out.sum().backward()
        assert out.isfinite().all() and hidden.grad.isfinite().all() and (out >= -1e-5).all(), rule


def test_bf16_is_within_its_rounding():
    exact = case()
    rounded = [tensor.detach().bfloat16() for tensor in exact]
    rounded[0].requires_grad_()
    got = diverge(*rounded, DivergenceRule(3))
    got.sum().backward()
    logits = rounded[0].detach().double().requires_grad_()
    want = divergence_of(
        logits @ rounded[1].double().t(), rounded[2].double() @ rounded[3].double().t(), DivergenceRule(3)
    )
    want.sum().backward()
    assert got.dtype == torch.float32 and torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)
    assert (rounded[0].grad.double() - logits.grad).norm() < 0.01 * logits.grad.norm()


def test_memory_is_that_of_chunks():
    num, vocab, width, chunk = 512, 4096, 16, 8
    hidden, weight, taught, teacher_weight = case(torch.float32, num, vocab, width, width)

    def whole_pass():
        diverge(hidden, weight, taught, teacher_weight, DivergenceRule(16), chunk=chunk).sum().backward()

    # Two chunks of logits, their difference and masks; the head's gradient; nothing of all rows times the vocabulary.
    assert peak_extra_bytes(whole_pass) < 6 * chunk * vocab * 4 + 4 * vocab * width * 4 + 60 * num * 16
    assert peak_extra_bytes(whole_pass) < num * vocab * 4 / 4
