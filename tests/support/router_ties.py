"""Ties of a router: two experts whose logits are equal up to rounding, of which rounding alone chooses one.

Behind a tie that two engines break differently they differ by far more than rounding, and neither is wrong. Among the
responses that a random small model samples, that happens to one of some hundred thousand positions and layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal

# In fp32 a router logit of these models is exact to some 1e-6.
TIE = 4e-6
# Nats, fp32: by which engines differ that hold the same weights and choose the same experts.
ROUNDING = 1e-3


@functools.lru_cache(maxsize=4)
def _model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()


def _above_next(values: torch.Tensor, count: int) -> torch.Tensor:
    """By how much the last of the `count` largest exceeds the next one, in each row."""
    ordered = values.sort(-1, descending=True).values
    return ordered[:, count - 1] - ordered[:, count]


def margins(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """By how much the logit of the last expert that a router chooses exceeds the next one: the smallest of all layers, at
    each token, [T] float64; infinite for a model without routers. DeepSeek's choose by sigmoid and bias, groups first.
    """
    model = _model(folder)
    found = [torch.full((len(token_ids),), torch.inf, dtype=torch.float64)]

    def note(router, inputs, _outputs) -> None:
        logits = inputs[0].reshape(len(token_ids), -1) @ router.weight.T
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
            logits = logits.sigmoid() + bias
            groups = logits.unflatten(-1, (model.config.n_group, -1))
            of_group = groups.topk(2).values.sum(-1)
            found.append(_above_next(of_group, model.config.topk_group))
            chosen = torch.zeros_like(of_group).scatter(1, of_group.topk(model.config.topk_group).indices, 1.0)
            logits = groups.masked_fill(chosen[..., None] == 0, -torch.inf).flatten(1)
        found.append(_above_next(logits, model.config.num_experts_per_tok))

    hooks = [part.register_forward_hook(note) for name, part in model.named_modules() if name.endswith("mlp.gate")]
    try:
        with torch.no_grad():
            model(torch.tensor([list(token_ids)]))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found).min(0).values


def check_log_probs(
    folder: Path,
    prompt: Sequence[int],
    response: Sequence[int],
    found: torch.Tensor,
    expected: torch.Tensor,
    most: float | torch.Tensor,
) -> None:
    """Fails where log-probs of a response's tokens, [R] nats, differ by more than `most` (of all or of each) and no tie
    comes before.
    """
    wide = ((found.double() - expected).abs() > most).nonzero()[:, 0]
    if len(wide):
        first = int(wide[0])
        before = margins(folder, [*prompt, *response])[: len(prompt) + first]
        assert before.min() < TIE, (first, found.tolist(), expected.tolist(), before.tolist())


def has_tie(run: RunFolder, step: int) -> bool:
    """Whether a router had a tie in a sampled trajectory of a step (from 0), under the weights that sampled it. They have
    to be kept (publish.keep_last).
    """
    return any(
        margins(run.weights_version_dir(version), [*row.prompt.token_ids, *row.response_token_ids]).min() < TIE
        for row in Journal(run.journal_dir).read(step).batch.trajectories
        for version in {v for v, mask in zip(row.weight_versions, row.response_mask, strict=True) if mask}
    )


def differ_by_rounding(run: RunFolder, line: dict) -> bool:
    """Whether the server and the trainer of a run give the tokens of a step the same log-probs, but for rounding. `line`:
    the step's metrics.
    """
    return line["mismatch/abs_log_ratio_max"] < ROUNDING or has_tie(run, int(line["step"]) - 1)
