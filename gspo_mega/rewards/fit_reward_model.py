"""Fit a reward model, a sequence classifier with one output, in one process: in fp32, with AdamW.

For models that one device holds; ranks in a layout are `train/fit_scores.py`'s. The result is a Hugging Face folder
that AutoModelForSequenceClassification loads. Owns that folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_mega.base.errors import ModelError
from gspo_mega.base.guarded_files import read_json_file
from gspo_mega.rewards.fit_data import (
    Example,
    Fitted,
    Fitting,
    batches_of,
    in_batches,
    loss_of,
    num_right,
    split_rows,
    token_ids,
)

# SGLang 0.5.23 gives the head of these a bias. Transformers has none, so a checkpoint has no value for it, and SGLang
# then adds an uninitialized one to every score: another one with each start of a server.
_WITH_SERVED_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


def fit(model: Path, examples: Sequence[Example], out: Path, how: Fitting, say: Callable[[str], None]) -> Fitted:
    """Fit a model on `examples` and write it to `out`. Raises ModelError: no such model, or one that is too long."""
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
        """Scores [rows, texts] and labels [rows]."""
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
    tokenizer.save_pretrained(out)
    give_served_bias(out)
    fitted = Fitted(losses, accuracy, len(trained), len(held_out))
    (out / "reward_model.json").write_text(json.dumps(asdict(how) | asdict(fitted), indent=2) + "\n", encoding="utf-8")
    return fitted


def give_served_bias(folder: Path) -> None:
    """Add a bias of 0 to a head for which SGLang would make one up."""
    architectures = read_json_file(folder / "config.json").get("architectures") or []
    weights = folder / "model.safetensors"
    if not any(name in _WITH_SERVED_BIAS for name in architectures):
        return
    tensors = load_file(weights)
    if "score.bias" not in tensors:
        head = tensors["score.weight"]
        save_file(tensors | {"score.bias": torch.zeros(head.shape[0], dtype=head.dtype)}, weights, {"format": "pt"})
