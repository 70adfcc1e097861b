"""A reward model fitted by ranks is the one that transformers and torch's AdamW make of the same rows."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conversions import tensors_of
from family_models import make_family_folder

from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.rewards.fitting import Fitting, fit
from gspo_mega.train.fit_scores import read_examples

TEXT = "{prompt}{response}"
ADAM = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, clip_grad=0.0)
DENSE = {
    "TP2": dict(tensor=2),
    "PP2": dict(pipeline=2),
    "CP2": dict(context=2),
    "DP2": {},
}


def classifier(folder, variant):
    """A random classifier of a family, with a tokenizer."""
    from transformers import AutoModelForSequenceClassification

    source = make_family_folder(folder / "policy", variant)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder / "start")
    write_tokenizer(folder / "start")
    return folder / "start"


@pytest.fixture(scope="module", params=["pointwise", "pairwise"])
def fitted(request, tmp_path_factory):
    """(start, rows, how, what transformers fitted, its tensors) of one loss."""
    folder = tmp_path_factory.mktemp(request.param)
    rows = [
        {"prompt": f"{a}+{b}=", "response": f"#{a + b + a % 2}", "label": 1 - a % 2} for a in range(6) for b in (7, 48)
    ]
    if request.param == "pairwise":
        rows = [
            {"prompt": r["prompt"], "chosen": r["response"], "rejected": "#1" * (n % 3 + 1)} for n, r in enumerate(rows)
        ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = classifier(folder, "qwen3")
    how = Fitting(request.param, epochs=2, lr=ADAM["lr"], batch_size=4, held_out=0.25)
    found = fit(start, read_examples(folder / "rows.jsonl", how.loss, TEXT), folder / "out", how, lambda line: None)
    return start, folder / "rows.jsonl", how, found, tensors_of(folder / "out")


def by_ranks(rank_pools, fitted, tmp_path, parallel, ranks=2, **sections):
    start, rows, how, _, _ = fitted
    work = {"data": str(rows), "text": TEXT, "out": str(tmp_path / "out"), "how": asdict(how)}
    sections = {"optimizer": ADAM, **sections}
    return rank_pools(ranks).run(
        "fit_score_jobs:fit", folder=str(start), parallel=parallel, attempt=str(tmp_path / "a"), work=work, **sections
    )


def moved(tensors, start):
    """How far the weights went from where they started, as one vector."""
    return np.concatenate([(tensors[name] - start[name]).numpy().ravel() for name in sorted(start)])


@pytest.mark.parametrize("layout", DENSE)
def test_every_layout_fits_what_transformers_fits(rank_pools, fitted, tmp_path, layout):
    start, _, how, want, want_tensors = fitted
    result, _ = by_ranks(rank_pools, fitted, tmp_path, DENSE[layout])
    assert isinstance(result, dict), result
    assert result["losses"] == pytest.approx(want.losses, rel=1e-4) and len(result["losses"]) == how.epochs
    assert (result["num_trained"], result["num_held_out"]) == (want.num_trained, want.num_held_out) == (9, 3)
    assert result["accuracy"] == want.accuracy
    before, after = tensors_of(start), tensors_of(tmp_path / "out")
    assert after.keys() - before.keys() == {"score.bias"} and after["score.bias"].tolist() == [0.0]
    distance = moved(want_tensors, before)
    assert np.linalg.norm(distance) > 0.1
    # Adam divides by the gradient's own size, so that rounding moves elements whose gradient is next to none.
    assert np.linalg.norm(moved(after, before) - distance) <= 1e-2 * np.linalg.norm(distance)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]
    assert json.loads((tmp_path / "out" / "reward_model.json").read_text())["losses"] == result["losses"]


def test_packs_do_not_change_a_fit(rank_pools, fitted, tmp_path):
    """A text a pack, so that the texts of a pair are apart, and over two ranks."""
    _, _, _, want, _ = fitted
    short = dict(data=dict(max_prompt_tokens=8), rollout=dict(max_new_tokens=8), batch=dict(micro_batch_tokens=16))
    result, _ = by_ranks(rank_pools, fitted, tmp_path, {}, **short)
    assert isinstance(result, dict) and result["losses"] == pytest.approx(want.losses, rel=1e-4)


def test_a_text_of_one_token_is_named(rank_pools, fitted, tmp_path):
    start, _, how, _, _ = fitted
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": "", "response": "7", "chosen": "7", "rejected": "7", "label": 1}) + "\n"
            for _ in range(4)
        )
    )
    found = by_ranks(rank_pools, (start, tmp_path / "rows.jsonl", how, None, None), tmp_path, {})
    assert found == ["an example has only one token, and ranks need at least two to pack it: '7'"] * 2
