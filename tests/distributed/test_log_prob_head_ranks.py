"""The LM head in chunks over real tensor-parallel ranks, under Megatron's DDP and without, against whole logits."""

from __future__ import annotations

import log_prob_head_jobs as jobs
import numpy as np
import pytest
import torch
from layout_models import make_folder

# name: (vocabulary, rows of the padded head). 64 of 128 leave the second rank of two with padding only.
VOCABULARIES = {"whole": (96, 96), "padded": (83, 96), "padding-only-rank": (64, 128)}


def reference(
    vocab: int,
    temperature: float = 0.7,
    tied_rows: int | None = None,
    entropy: float = 0.0,
    with_sets: bool = False,
) -> dict[str, np.ndarray]:
    """The plain path in float64; `tied_rows`: also through the embedding of the first label modulo that many rows.
    `with_sets`: the softmax of the log-probs is masked outside of each row's set.
    """
    case = {name: t.double() if t.is_floating_point() else t for name, t in jobs.head_case(vocab).items()}
    hidden, weight = case["hidden"].requires_grad_(), case["weight"].requires_grad_()
    states = hidden if tied_rows is None else hidden + weight[case["labels"][0] % tied_rows]
    logits = states[:, 0][case["rows"]] @ weight.t() / temperature
    everything = torch.log_softmax(logits, dim=-1)
    inside = torch.ones(logits.shape, dtype=torch.bool)
    for row, one in enumerate(jobs.head_sets(vocab) if with_sets else ()):
        inside[row] = False
        inside[row, one] = True
    masked = torch.log_softmax(logits.masked_fill(~inside, float("-inf")), dim=-1)
    log_probs = masked.gather(1, case["labels"][:, None])[:, 0]
    entropies = -(everything.exp() * everything).sum(1)
    (log_probs @ case["upstream"] + entropy * (entropies @ case["upstream"].flip(0))).backward()
    return dict(
        log_probs=log_probs.detach().numpy(),
        log_mass=(everything.exp() * inside).sum(1).log().detach().numpy(),
        entropies=entropies.detach().numpy(),
        hidden_grad=hidden.grad.numpy(),
        weight_grad=weight.grad.numpy(),
    )


def check(results: list[dict], want: dict[str, np.ndarray], vocab: int, sequence_parallel: bool) -> None:
    for result in results:
        for name in ("log_probs", "entropies"):
            assert np.abs(result[name] - want[name]).max() < 1e-6 * np.abs(want[name]).max(), name
        assert np.array_equal(result["log_probs"], results[0]["log_probs"]), "tensor ranks differ"
    hidden = np.concatenate([r["hidden_grad"] for r in results]) if sequence_parallel else results[-1]["hidden_grad"]
    weight = np.concatenate([r["weight_grad"] for r in results])
    assert np.linalg.norm(hidden - want["hidden_grad"]) < 1e-6 * np.linalg.norm(want["hidden_grad"])
    assert np.linalg.norm(weight[:vocab] - want["weight_grad"]) < 1e-6 * np.linalg.norm(want["weight_grad"])
    assert not weight[vocab:].any(), "padding has a gradient"


@pytest.mark.parametrize("wrapped", ["", "ddp", "ddp-overlap"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP2", "TP2+SP"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tensor_parallel_head_equals_whole_logits(rank_pools, vocabulary, sequence_parallel, wrapped):
    vocab, padded = VOCABULARIES[vocabulary]
    results = rank_pools(2).run(
        "log_prob_head_jobs:run_head",
        vocab=vocab,
        padded=padded,
        tensor=2,
        sequence_parallel=sequence_parallel,
        wrapped=wrapped,
    )
    check(results, reference(vocab), vocab, sequence_parallel)


@pytest.mark.parametrize("wrapped", ["", "ddp"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_gradient_of_an_entropy_bonus_equals_that_of_whole_logits(rank_pools, vocabulary, wrapped):
    """With the vocabulary over two ranks, in chunks, added to the gradient of the log-probs; no further collective."""
    vocab, padded = VOCABULARIES[vocabulary]
    results = rank_pools(2).run(
        "log_prob_head_jobs:run_head",
        vocab=vocab,
        padded=padded,
        tensor=2,
        sequence_parallel=wrapped == "ddp",
        wrapped=wrapped,
        entropy=0.7,
    )
    check(results, reference(vocab, entropy=0.7), vocab, wrapped == "ddp")
    if not wrapped:
        assert [r["collectives"] for r in results] == [dict(all_reduces=3, here=3, elsewhere=0)] * 2


def test_chunks_cost_no_collective(rank_pools):
    """Fifteen rows in chunks of one or in one chunk: the maximum, the sums, and the gradient of the hidden states."""
    for chunk in (1, 15):
        results = rank_pools(2).run(
            "log_prob_head_jobs:run_head",
            vocab=96,
            padded=96,
            tensor=2,
            sequence_parallel=False,
            wrapped="",
            chunk=chunk,
        )
        assert [r["collectives"] for r in results] == [dict(all_reduces=3, here=3, elsewhere=0)] * 2
        check(results, reference(96), 96, False)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("wrapped", ["", "ddp"])
def test_sets_of_tokens_over_tensor_ranks(rank_pools, vocabulary, wrapped):
    """Some sets are on one rank only, and no further collective is made for them."""
    vocab, padded = VOCABULARIES[vocabulary]
    arguments = dict(vocab=vocab, padded=padded, tensor=2, sequence_parallel=bool(wrapped), wrapped=wrapped)
    results = rank_pools(2).run("log_prob_head_jobs:run_head", **arguments, with_sets=True)
    want = reference(vocab, with_sets=True)
    check(results, want, vocab, bool(wrapped))
    assert not np.allclose(want["log_probs"], reference(vocab)["log_probs"], atol=0.1)
    for result in results:
        assert np.abs(result["log_mass"] - want["log_mass"]).max() < 1e-6 * np.abs(want["log_mass"]).max()
        if not wrapped:
            assert result["collectives"] == dict(all_reduces=3, here=3, elsewhere=0)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_an_entropy_bonus_beside_sets_is_that_of_the_whole_vocabulary(rank_pools, vocabulary):
    vocab, padded = VOCABULARIES[vocabulary]
    arguments = dict(vocab=vocab, padded=padded, tensor=2, sequence_parallel=False, wrapped="")
    results = rank_pools(2).run("log_prob_head_jobs:run_head", **arguments, with_sets=True, entropy=0.7)
    check(results, reference(vocab, with_sets=True, entropy=0.7), vocab, False)


@pytest.mark.parametrize("wrapped", ["", "ddp", "ddp-overlap"])
def test_tied_embedding_adds_its_part(rank_pools, wrapped):
    """The weight is head and embedding at once: both parts arrive, each once, in both micro-batches."""
    (result,) = rank_pools(1).run(
        "log_prob_head_jobs:run_head",
        vocab=83,
        padded=96,
        tensor=1,
        sequence_parallel=False,
        wrapped=wrapped,
        tied=True,
    )
    check([result], reference(83, tied_rows=96), 83, False)


@pytest.mark.parametrize("overlap", [False, True])
def test_data_parallel_ranks_add_up(rank_pools, overlap):
    """Two data ranks with the same pack: the reduced main gradient is twice one rank's."""
    results = rank_pools(2).run(
        "log_prob_head_jobs:run_head",
        vocab=83,
        padded=96,
        tensor=1,
        sequence_parallel=False,
        wrapped="ddp-overlap" if overlap else "ddp",
    )
    want = reference(83)["weight_grad"]
    for result in results:
        got = result["weight_grad"][:83]
        assert np.linalg.norm(got - 2 * want) < 1e-6 * np.linalg.norm(2 * want)


def test_engine_asks_for_the_configured_chunk_and_for_entropy_where_it_is_reported(rank_pools, tmp_path):
    folder = str(make_folder(tmp_path / "dense", moe=False, layers=1))
    (few,), (many,) = (
        rank_pools(1).run("log_prob_head_jobs:run_engine", folder=folder, chunk=chunk) for chunk in (3, 512)
    )
    # Old pass; training after it; training without; supervised.
    assert few["asked"] == [(3, True), (3, False), (3, True), (3, True)]
    assert many["asked"] == [(512, True), (512, False), (512, True), (512, True)]
    for result in (few, many):
        assert np.array_equal(result["bits"][0], result["bits"][1]), (
            "old = current, bit for bit, with entropy and without"
        )
        assert not result["log_s"][0].any() and not result["log_s"][1].any()
        assert result["columns"][0] == ["log_s"] and "entropy_sum" in result["columns"][1]
        assert result["entropy"][0].min() > 0 and np.array_equal(*result["entropy"])
    assert np.abs(few["bits"][0] - many["bits"][0]).max() < 1e-5
