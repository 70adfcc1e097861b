"""The LM head in chunks: its gradients, its equality with the whole logits, and the memory that it takes.

One rank; tests/distributed has the same over tensor-parallel ranks.
"""

from __future__ import annotations

import math
import warnings

import pytest

warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

import torch  # noqa: E402
from peak_memory import peak_extra_bytes  # noqa: E402

import gspo_mega.engine  # noqa: E402,F401  the CPU backend comes before Megatron
from gspo_mega.engine import log_probs as log_probs_module  # noqa: E402
from gspo_mega.engine.log_probs import KeptTokens, token_log_probs  # noqa: E402
from gspo_mega.engine.process_groups import RankGroup  # noqa: E402

ALONE = RankGroup(group=None, rank=0, size=1, ranks=(0,))


def head(hidden, weight, labels, *, rows=None, vocab=None, temperature=1.0, chunk=4, entropy=False, kept=None):
    """token_log_probs of [N, H] hidden states on one rank."""
    return token_log_probs(
        hidden[:, None],
        weight,
        torch.arange(hidden.size(0)) if rows is None else rows,
        labels,
        vocab_size=vocab or weight.size(0),
        temperature=temperature,
        tensor_group=ALONE,
        sequence_parallel=False,
        chunk_rows=chunk,
        with_entropy=entropy,
        kept=kept,
    )


def whole(hidden, weight, labels, *, vocab=None, temperature=1.0):
    """(log-probs, entropies) by the plain path, all logits at once."""
    everything = torch.log_softmax(hidden @ weight[:vocab].t() / temperature, dim=-1)
    return everything.gather(1, labels[:, None])[:, 0], -(everything.exp() * everything).sum(1)


def case(num_rows: int, vocab: int, width: int, dtype=torch.float32, seed: int = 0, grad: bool = True):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = (torch.randn(vocab, width, generator=generator, dtype=torch.float64) / math.sqrt(width) * 2).to(dtype)
    labels = torch.randint(vocab, (num_rows,), generator=generator)
    return hidden.requires_grad_(grad), weight.requires_grad_(grad), labels


def under_ddp(weight: torch.Tensor) -> torch.nn.Parameter:
    """A parameter as Megatron's DDP leaves it, with a main gradient that already holds something."""
    parameter = torch.nn.Parameter(weight.detach().clone())
    parameter.main_grad = torch.full(parameter.shape, 0.25)
    parameter.grad_added_to_main_grad = False
    return parameter


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_the_derivatives(chunk, temperature):
    hidden, weight, labels = case(7, 11, 5, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: head(h, w, labels, chunk=chunk, temperature=temperature)[0], (hidden, weight)
    )


def test_gradients_of_chosen_rows_and_a_padded_vocabulary():
    hidden, weight, _ = case(6, 12, 5, torch.float64)
    rows, labels = torch.tensor([4, 0, 3]), torch.tensor([9, 0, 8])
    padded = torch.cat([weight[:10].detach(), torch.full((2, 5), 50.0, dtype=torch.float64)]).requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: head(h, w, labels, rows=rows, vocab=10, chunk=2)[0], (hidden, padded))
    got = head(hidden, padded, labels, rows=rows, vocab=10, chunk=2, entropy=True)
    for ours, plain in zip(got, whole(hidden[rows], padded, labels, vocab=10)):
        assert (ours - plain).abs().max() < 1e-12
    got[0].sum().backward()
    assert padded.grad[:10].abs().min() > 0 and padded.grad[10:].abs().max() == 0


def test_no_rows():
    hidden, weight, _labels = case(3, 11, 5)
    none = torch.zeros(0, dtype=torch.int64)
    log_probs, entropies = head(hidden, weight, none, rows=none, entropy=True)
    assert log_probs.shape == entropies.shape == (0,) and log_probs.dtype == torch.float32
    log_probs.sum().backward()
    assert hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


@pytest.mark.parametrize("chunk", [1, 13, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_whole_logits(chunk, temperature):
    hidden, weight, labels = case(50, 1000, 32)
    upstream = torch.randn(50, generator=torch.Generator().manual_seed(1))
    plain, plain_entropy = whole(hidden, weight, labels, temperature=temperature)
    want = torch.autograd.grad(plain @ upstream, (hidden, weight))
    log_probs, entropies = head(hidden, weight, labels, chunk=chunk, temperature=temperature, entropy=True)
    got = torch.autograd.grad(log_probs @ upstream, (hidden, weight))
    # 1e-6 of numbers of size 10: a little more than one rounding of fp32.
    assert (log_probs - plain).abs().max() < 1e-6 * plain.abs().max()
    assert (entropies - plain_entropy).abs().max() < 1e-6 * plain_entropy.abs().max()
    for ours, reference in zip(got, want):
        assert relative(ours, reference) < 1e-6


def test_entropy_is_on_request_and_changes_no_bit():
    hidden, weight, labels = case(50, 1000, 32)
    without, nothing = head(hidden, weight, labels, chunk=16)
    with_entropy, entropies = head(hidden, weight, labels, chunk=16, entropy=True)
    assert nothing is None and entropies.shape == (50,)
    assert torch.equal(without, with_entropy)
    gradients = [torch.autograd.grad(one.sum(), (hidden, weight)) for one in (without, with_entropy)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_logits_far_from_zero_and_non_finite_ones():
    hidden, weight, labels = case(8, 1000, 32, torch.float64, grad=False)
    want = whole(hidden * 300, weight, labels)
    got = head(hidden * 300, weight, labels, chunk=3, entropy=True)
    assert want[0].min() < -1000 and all((g - w).abs().max() < 1e-9 for g, w in zip(got, want))
    hidden[2] = float("nan")
    hidden[5] = float("inf")
    bad = ~torch.isfinite(head(hidden, weight, labels, chunk=3)[0])
    assert bad.tolist() == [False, False, True, False, False, True, False, False]


def test_bf16_accumulates_in_fp32():
    hidden, weight, labels = case(40, 3000, 256, torch.bfloat16)
    log_probs, _ = head(hidden, weight, labels, chunk=16)
    plain, _ = whole(hidden.detach().float(), weight.detach().float(), labels)
    assert log_probs.dtype == torch.float32 and (log_probs - plain).abs().max() < 2e-6 * plain.abs().max()
    got = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    want = torch.autograd.grad(whole(*exact, labels)[0].sum(), exact)
    for ours, reference in zip(got, want):
        assert ours.dtype == torch.bfloat16 and relative(ours.float(), reference) < 4e-3  # bf16 rounds by 2^-9


def test_bf16_is_widened_in_pieces(monkeypatch):
    """The widened copies are bounded for any vocabulary, and cutting it up changes only rounding."""
    hidden, weight, labels = case(40, 3000, 64, torch.bfloat16)
    want = head(hidden, weight, labels, chunk=16)[0]
    gradient = torch.autograd.grad(want.sum(), weight)[0].float()
    monkeypatch.setattr("gspo_mega.engine.log_probs.WIDENED_NUMBERS", 3016 * 7)
    monkeypatch.setattr("gspo_mega.engine.log_probs.CACHED_NUMBERS", 64 * 130)
    got = head(hidden, weight, labels, chunk=16)[0]
    assert (got - want).abs().max() < 2e-6 * want.abs().max()
    assert relative(torch.autograd.grad(got.sum(), weight)[0].float(), gradient) < 1e-3


@pytest.mark.parametrize("shape", [(7, 5, 300), (300, 5, 7), (7, 300, 5), (1, 1, 1)])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_product_of_bf16_is_exact_to_fp32_in_any_pieces(shape, beta, monkeypatch):
    """The vocabulary as columns, as rows and as the contraction; (rows, contraction, columns)."""
    rows, length, columns = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, length, generator=generator).bfloat16()
    b = torch.randn(length, columns, generator=generator).bfloat16()
    before = torch.randn(rows, columns, generator=generator)
    want = beta * before.double() + 0.5 * (a.double() @ b.double())
    for cached, widened, most in ((2**20, 2**24, 2**20), (35, 2**24, 2**20), (2**20, 400, 2**20), (2**20, 2**24, 40)):
        monkeypatch.setattr(log_probs_module, "CACHED_NUMBERS", cached)
        monkeypatch.setattr(log_probs_module, "WIDENED_NUMBERS", widened)
        out = before.clone() if beta else torch.full_like(before, torch.nan)
        log_probs_module._add_product(out, a, b, alpha=0.5, beta=beta, most_numbers=most)
        assert (out - want).abs().max() < 2e-6 * max(1, want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_gradient_goes_straight_into_the_main_gradient(dtype, tied):
    hidden, weight, labels = case(50, 1000, 32, dtype)
    log_probs, _ = head(hidden, weight, labels, chunk=16, vocab=990)
    log_probs[labels < 990].sum().backward()
    parameter = under_ddp(weight)
    parameter.zero_out_wgrad = tied
    seen = []
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # it lives as long as someone holds it
    accumulator.register_hook(lambda *_: seen.append(parameter.grad))
    before = parameter.detach().clone()
    for _ in range(2):  # two micro-batches
        parameter.grad = None  # what DDP's hook does
        again, _ = head(hidden.detach().requires_grad_(), parameter, labels, chunk=16, vocab=990)
        again[labels < 990].sum().backward()
    assert parameter.grad_added_to_main_grad and torch.equal(parameter, before)
    assert relative(parameter.main_grad - 0.25, 2 * weight.grad.float()) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert (parameter.main_grad[990:] == 0.25).all()
    # DDP's hook runs for each micro-batch. A tied weight gets nothing from here, since what autograd brings is added;
    # another gets a stand-in that takes no memory of its own.
    assert len(seen) == 2
    for grad in seen:
        assert grad is None if tied else grad.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("num_rows", [64, 512, 4096])
def test_memory_is_bounded_by_the_chunk(num_rows, entropy):
    """Forward, and forward with backward, hold at most 2.2 chunks of logits for any number of rows."""
    chunk, vocab = 64, 20_000
    hidden, weight, labels = case(num_rows, vocab, 16)
    parameter = under_ddp(weight)
    bound = 2.2 * chunk * vocab * 4

    def forward():
        return head(hidden, parameter, labels, chunk=chunk, entropy=entropy)

    def both():
        forward()[0].sum().backward()

    with torch.no_grad():
        assert chunk * vocab * 4 < peak_extra_bytes(forward) < bound
    assert chunk * vocab * 4 < peak_extra_bytes(both) < bound
    if num_rows == 512:  # and the measure sees what it should: the plain path holds several times all logits
        assert peak_extra_bytes(lambda: whole(hidden, weight, labels)[0].sum().backward()) > 2 * num_rows * vocab * 4


def test_memory_of_the_main_gradient_path_is_independent_of_the_width():
    """No [v, H] temporary: at H = 8 chunks one would be many times the bound."""
    chunk, vocab = 16, 4_000
    hidden, weight, labels = case(16, vocab, 8 * chunk)
    parameter = under_ddp(weight)

    def both():
        head(hidden, parameter, labels, chunk=chunk)[0].sum().backward()

    def autograd():
        head(hidden, weight, labels, chunk=chunk)[0].sum().backward()

    assert peak_extra_bytes(both) < 2.2 * chunk * vocab * 4 < vocab * 8 * chunk * 4 < peak_extra_bytes(autograd)


# --- over the sets of tokens that the sampler kept --------------------------------------------------------------------


def kept_tokens(sets: list[list[int]]) -> KeptTokens:
    counts = torch.tensor([len(one) for one in sets], dtype=torch.int64)
    offsets = [0, *counts.cumsum(0).tolist()]
    return KeptTokens(offsets, counts, torch.tensor([i for one in sets for i in one], dtype=torch.int32))


def random_sets(labels: torch.Tensor, vocab: int, most: int, seed: int = 2) -> list[list[int]]:
    """A set of 1 to `most` ids for each label, in ascending order, with the label among them."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for label in labels.tolist():
        count = int(torch.randint(0, most, (1,), generator=generator))
        sets.append(sorted({label, *torch.randperm(vocab, generator=generator)[:count].tolist()}))
    return sets


def over_sets(hidden, weight, labels, sets, temperature=1.0):
    """The plain path: all logits, -inf outside of the set, softmax. And the log of the set's mass without the mask."""
    logits = hidden @ weight.t() / temperature
    inside = torch.zeros(logits.shape, dtype=torch.bool)
    for row, one in enumerate(sets):
        inside[row, one] = True
    masked = torch.log_softmax(logits.masked_fill(~inside, float("-inf")), dim=-1)
    mass = (torch.softmax(logits, -1) * inside).sum(1).log()
    return masked.gather(1, labels[:, None])[:, 0], mass


def test_a_set_by_hand():
    """Logits 0, log 2, log 3, log 4 over temperature 1: kept are ids 1 and 3, so p = 2/6, and their mass is 6/10."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)], [math.log(4)]], dtype=torch.float64)
    kept = kept_tokens([[1, 3]])
    log_probs, _ = head(torch.ones(1, 1, dtype=torch.float64), weight, torch.tensor([1]), kept=kept)
    assert log_probs.item() == pytest.approx(math.log(2 / 6), abs=1e-14)
    assert kept.log_mass.item() == pytest.approx(math.log(6 / 10), abs=1e-14)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_over_sets_are_those_of_a_masked_softmax(chunk, temperature):
    hidden, weight, labels = case(9, 13, 5, torch.float64)
    sets = random_sets(labels, 13, 8)
    assert len({len(one) for one in sets}) > 3 and min(map(len, sets)) == 1
    upstream = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, mass = over_sets(hidden, weight, labels, sets, temperature)
    want = torch.autograd.grad(plain @ upstream, (hidden, weight))
    kept = kept_tokens(sets)
    log_probs, _ = head(hidden, weight, labels, chunk=chunk, temperature=temperature, kept=kept)
    got = torch.autograd.grad(log_probs @ upstream, (hidden, weight))
    assert (log_probs - plain).abs().max() < 1e-13 and (kept.log_mass - mass).abs().max() < 1e-13
    for ours, reference in zip(got, want, strict=True):
        assert relative(ours, reference) < 1e-13
    assert torch.autograd.gradcheck(
        lambda h, w: head(h, w, labels, chunk=chunk, temperature=temperature, kept=kept_tokens(sets))[0],
        (hidden, weight),
    )


def test_sets_leave_the_entropy_alone_and_a_set_of_all_tokens_changes_nothing():
    hidden, weight, labels = case(50, 200, 32)
    plain, entropies = head(hidden, weight, labels, chunk=16, entropy=True)
    kept = kept_tokens([list(range(200))] * 50)
    of_all, same = head(hidden, weight, labels, chunk=16, entropy=True, kept=kept)
    assert (of_all - plain).abs().max() < 2e-6 and torch.equal(entropies, same)
    assert kept.log_mass.abs().max() < 2e-6
    without, _ = head(hidden, weight, labels, chunk=16, kept=kept_tokens([list(range(200))] * 50))
    assert torch.equal(of_all, without)


def test_a_set_far_below_the_peak_and_non_finite_logits():
    """The set's own maximum is subtracted, so a set with probability e^-1000 has exact log-probs."""
    weight = torch.tensor([[1000.0], [0.0], [1.0]])
    kept = kept_tokens([[1, 2]])
    log_probs, _ = head(torch.ones(1, 1), weight, torch.tensor([2]), kept=kept)
    assert log_probs.item() == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)
    assert kept.log_mass.item() == pytest.approx(-999 + math.log1p(math.exp(-1)), abs=1e-3)
    log_probs, _ = head(torch.full((1, 1), float("nan")), weight, torch.tensor([2]), kept=kept_tokens([[1, 2]]))
    assert not torch.isfinite(log_probs).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sets_with_the_main_gradient(dtype):
    hidden, weight, labels = case(50, 1000, 32, dtype)
    sets = random_sets(labels, 1000, 20)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = torch.autograd.grad(over_sets(*exact, labels, sets)[0].sum(), exact)
    parameter = under_ddp(weight)
    states = hidden.detach().requires_grad_()
    head(states, parameter, labels, chunk=16, kept=kept_tokens(sets))[0].sum().backward()
    bound = 1e-6 if dtype == torch.float32 else 8e-3
    assert relative(parameter.main_grad.double() - 0.25, want[1]) < bound
    assert relative(states.grad.double(), want[0]) < bound


def test_memory_with_sets_is_bounded_by_the_chunk():
    chunk, vocab = 64, 20_000
    hidden, weight, labels = case(512, vocab, 16)
    sets, parameter = random_sets(labels, vocab, 20), under_ddp(weight)

    def both():
        head(hidden, parameter, labels, chunk=chunk, kept=kept_tokens(sets))[0].sum().backward()

    assert chunk * vocab * 4 < peak_extra_bytes(both) < 2.3 * chunk * vocab * 4
