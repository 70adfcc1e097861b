"""Fit a reward model, a sequence classifier with one output, on examples with one of two losses of its scores:

    pointwise   binary cross-entropy of sigmoid(score) with a label from 0 to 1
    pairwise    -log sigmoid(score of the chosen - score of the rejected), Bradley and Terry's

`fit` does it in one process, in fp32, with AdamW, for models that one device holds, and writes a Hugging Face folder
that AutoModelForSequenceClassification loads. Ranks in a layout do it in `train/fit_scores.py`. Both use the functions
before `fit`: rows of a file as texts, the order of their batches, and the loss.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import ModelError
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.rewards.services import filled

Loss = Literal["pointwise", "pairwise"]
_LABELLED, _PAIRED = ("prompt", "response", "label"), ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Fitting:
    """How a model is fitted. `trained`: only the head, or all weights. `held_out`: the share of the examples that
    measure the model instead of training it.
    """

    loss: Loss = "pointwise"
    trained: Literal["head", "all"] = "all"
    epochs: int = 1
    lr: float = 1e-4
    batch_size: int = 32
    max_tokens: int = 4096
    held_out: float = 0.1
    seed: int = 1


@dataclass(frozen=True)
class Example:
    """Texts as the model reads them: one text with its label, or the chosen and the rejected."""

    texts: tuple[str, ...]
    label: float = 1.0


@dataclass(frozen=True)
class Fitted:
    """The result. `accuracy`: the share of held-out examples whose score is on its label's side of 0, or whose chosen
    text scores above the rejected; None without held-out examples. `losses`: the mean of each epoch, nats per example.
    """

    losses: list[float]
    accuracy: float | None
    num_trained: int
    num_held_out: int


def examples_of(rows: Iterable[dict[str, Any]], loss: Loss, text: str) -> list[Example]:
    """Return the examples of rows without a `problem_of_row`. `text`: the form that puts a row's values together."""

    def words(row: dict[str, Any], key: str) -> str:
        known = {"answer": row.get("answer"), "metadata": row, "options": {}, "num_response_tokens": 0}
        return filled(text, known | {"prompt": row["prompt"], "response": row[key]})

    if loss == "pointwise":
        return [Example((words(row, "response"),), float(row["label"])) for row in rows]
    return [Example((words(row, "chosen"), words(row, "rejected"))) for row in rows]


def problem_of_row(row: dict[str, Any], loss: Loss) -> str | None:
    """Return what is wrong with a row of the data, or None."""
    keys = _LABELLED if loss == "pointwise" else _PAIRED
    for key in keys:
        if key not in row:
            return f"no key {key!r}; expected are {', '.join(keys)}"
        if key == "label":
            if not isinstance(row[key], (int, float)) or not 0 <= float(row[key]) <= 1:
                return f"'label' is {row[key]!r}; a number from 0 to 1 is expected"
        elif not isinstance(row[key], str):
            return f"{key!r} is no text"
    return None


def split_rows(num_rows: int, how: Fitting) -> tuple[list[int], list[int]]:
    """Return (rows that are held out, rows that are trained on); at least one row is trained on."""
    order = list(range(num_rows))
    random.Random(how.seed).shuffle(order)
    num_held_out = min(len(order) - 1, round(how.held_out * len(order)))
    return order[:num_held_out], order[num_held_out:]


def batches_of(trained: list[int], epoch: int, how: Fitting) -> Iterator[list[int]]:
    """Return the batches of one epoch. Shuffles `trained` in place; the next epoch shuffles the result."""
    random.Random(how.seed * 1000 + epoch).shuffle(trained)
    return in_batches(trained, how.batch_size)


def in_batches(rows: list[int], size: int) -> Iterator[list[int]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def token_ids(tokenizer: Any, text: str, most: int) -> list[int]:
    """Return the last `most` tokens of a text, because a judgement is about the end. Raises ModelError if there is
    none.
    """
    ids = tokenizer(text)["input_ids"][-most:]
    if not ids:
        raise ModelError(f"an example without a token: {text!r}")
    return ids


def loss_of(scores: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Return the mean loss in nats. `scores`: [B, 1] pointwise, [B, 2] (chosen, rejected) pairwise, floating; `labels`:
    [B] of that dtype, used pointwise.
    """
    if loss == "pointwise":
        return binary_cross_entropy_with_logits(scores[:, 0], labels)
    return -logsigmoid(scores[:, 0] - scores[:, 1]).mean()


def num_right(scores: Tensor, labels: Tensor, loss: Loss) -> int:
    """Return the number of examples that the scores judge correctly. Shapes as in `loss_of`."""
    margins = scores[:, 0] * (2 * labels - 1) if loss == "pointwise" else scores[:, 0] - scores[:, 1]
    return int((margins > 0).sum())


# SGLang 0.5.23 gives the heads of these models a bias. Transformers has none, so a checkpoint has no value for it, and
# SGLang then adds an uninitialized value to every score, a different one with each start of a server.
_WITH_SERVED_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


def fit(model: Path, examples: Sequence[Example], out: Path, how: Fitting, say: Callable[[str], None]) -> Fitted:
    """Fit a model on `examples` and write it to `out`. Raises ModelError if transformers makes no sequence classifier
    of it, or an example has no token.
    """
    import transformers

    torch.manual_seed(how.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        ).to(device)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model}: no model that transformers makes a sequence classifier of: {error}") from error
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    classifier.config.pad_token_id = pad  # by which transformers finds the last token of a row
    if how.trained == "head":
        for name, parameter in classifier.named_parameters():
            parameter.requires_grad = name.startswith("score.")
    encoded = [[token_ids(tokenizer, text, how.max_tokens) for text in example.texts] for example in examples]
    held_out, trained = split_rows(len(examples), how)

    def scores_of(rows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return scores [rows, texts] and labels [rows]."""
        chosen = list(rows)
        flat = [ids for row in chosen for ids in encoded[row]]
        longest = max(map(len, flat))
        ids = torch.tensor([one + [pad] * (longest - len(one)) for one in flat], device=device)
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in flat], device=device)
        scores = classifier(input_ids=ids, attention_mask=mask).logits.float()
        labels = torch.tensor([examples[row].label for row in chosen], device=device)
        return scores.view(len(chosen), -1), labels

    optimizer = torch.optim.AdamW([p for p in classifier.parameters() if p.requires_grad], lr=how.lr, weight_decay=0.0)
    losses: list[float] = []
    classifier.train()
    for epoch in range(how.epochs):
        total = 0.0
        for rows in batches_of(trained, epoch, how):
            loss = loss_of(*scores_of(rows), how.loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(trained))
        say(f"epoch {epoch + 1}/{how.epochs}  loss {losses[-1]:.4f}")
    classifier.eval()
    with torch.no_grad():
        right = sum(num_right(*scores_of(rows), how.loss) for rows in in_batches(held_out, how.batch_size))
    accuracy = right / len(held_out) if held_out else None
    classifier.save_pretrained(out, max_shard_size="100GB")
    atomic_io.follow_umask(out / "model.safetensors")
    tokenizer.save_pretrained(out)
    give_served_bias(out)
    fitted = Fitted(losses, accuracy, len(trained), len(held_out))
    (out / "reward_model.json").write_text(json.dumps(asdict(how) | asdict(fitted), indent=2) + "\n", encoding="utf-8")
    return fitted


def give_served_bias(folder: Path) -> None:
    """Add a bias of 0 to a head to which SGLang would add an uninitialized one."""
    architectures = read_json_file(folder / "config.json").get("architectures") or []
    weights = folder / "model.safetensors"
    if not any(name in _WITH_SERVED_BIAS for name in architectures):
        return
    tensors = load_file(weights)
    if "score.bias" not in tensors:
        head = tensors["score.weight"]
        save_file(tensors | {"score.bias": torch.zeros(head.shape[0], dtype=head.dtype)}, weights, {"format": "pt"})
        atomic_io.follow_umask(weights)
