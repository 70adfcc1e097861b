"""A rank of `gspo-mega reward-model --ranks`: fits a reward model in a layout, with the engine of critics.

The attempt's `work_file`, which `cli/reward_model.py` writes, says what to do. A step computes the scores of a whole
batch, then the derivative of the loss with respect to each score, and then the gradient of the scores weighted with
these. So the two texts of a pair may be in different packs and on different ranks. Collective over all ranks
throughout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo_mega.base import progress
from gspo_mega.base.errors import ModelError
from gspo_mega.base.records import MicroBatch
from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.checkpoint.critic import export_critic, import_critic
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.data.demonstrations import Demonstration
from gspo_mega.data.rows import JsonlFile
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.precision import DTYPES
from gspo_mega.engine.process_groups import destroy_groups, groups_of
from gspo_mega.models.value_models import read_critic_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.rewards.fitting import (
    Example,
    Fitted,
    Fitting,
    Loss,
    batches_of,
    examples_of,
    in_batches,
    loss_of,
    num_right,
    problem_of_row,
    split_rows,
    token_ids,
)
from gspo_mega.train.batches import assemble_supervised
from gspo_mega.train.context import WorkerContext


def run_fit(context: WorkerContext) -> dict[str, Any] | None:
    """Fit the model and write its folder. Returns the fields of `Fitted` on rank 0, None on other ranks. Collective."""
    work = read_json(Attempt(context.attempt_dir).work_file)
    assert work is not None, "the attempt of a reward model has no work"
    progress.enter("train")
    config, how = context.config, Fitting(**work["how"])
    groups = groups_of(config.parallel, config.run.seed)
    try:
        examples = read_examples(Path(work["data"]), how.loss, work["text"])
        held_out, trained = split_rows(len(examples), how)
        num_steps = how.epochs * -(-len(trained) // how.batch_size)
        spec = read_critic_spec(config.model.path)
        critic = CriticEngine(config, spec, groups, num_steps)
        import_critic(config.model.path, spec, groups, critic.chunks)
        critic.after_weights_loaded()
        scores = ScoreFitting(critic, examples, how)
        losses = []
        for epoch in range(how.epochs):
            total = 0.0
            for rows in batches_of(trained, epoch, how):
                total += scores.step(rows) * len(rows)
                progress.beat()
            losses.append(total / len(trained))
            context.console(f"epoch {epoch + 1}/{how.epochs}  loss {losses[-1]:.4f}")
        right = sum(num_right(*scores.scores_of(rows), how.loss) for rows in in_batches(held_out, how.batch_size))
        fitted = Fitted(losses, right / len(held_out) if held_out else None, len(trained), len(held_out))
        out = Path(work["out"])
        export_critic(out, spec, groups, critic.chunks, DTYPES[config.precision], config.model.path, num_steps)
        if not context.is_lead:
            return None
        (out / "reward_model.json").write_text(
            json.dumps(asdict(how) | asdict(fitted), indent=2) + "\n", encoding="utf-8"
        )
        return asdict(fitted)
    finally:
        destroy_groups()


def read_examples(path: Path, loss: Loss, text: str) -> list[Example]:
    """The examples in a JSONL file. Raises DataError with the line of a row that is not an example."""
    rows = JsonlFile(path, lambda row: problem_of_row(row, loss))
    return examples_of((rows[number] for number in range(len(rows))), loss, text)


class ScoreFitting:
    """Fits `critic`, whose weights are loaded, to `examples`. Its configuration has the optimizer's learning rate and
    schedule.
    """

    def __init__(self, critic: CriticEngine, examples: Sequence[Example], how: Fitting) -> None:
        self._critic, self._config, self._examples, self._how = critic, critic.config, examples, how
        self._layout = resolve_layout(critic.config, critic.spec)
        self._tokenizer = load_tokenizer(critic.config.model.path)
        self._num_batches = 0

    def step(self, rows: Sequence[int]) -> float:
        """Make one optimizer step on a batch of examples. Returns its mean loss before the step, in nats. Collective.

        Raises NumericsError if a score or a gradient is not finite.
        """
        packs = self._packs(rows)
        scores, labels = self._scores(rows, packs)
        scores.requires_grad_(True)
        loss = loss_of(scores, labels, self._how.loss)
        (slopes,) = torch.autograd.grad(loss, scores)
        # Filler has the row -1, which is the last entry.
        flat = torch.cat([slopes.flatten(), slopes.new_zeros(1)])
        self._critic.step_scores(packs, [flat[torch.from_numpy(pack.trajectory_index)] for pack in packs])
        return float(loss.detach())

    def scores_of(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of examples, [B, 1] or for pairs [B, 2], and their labels [B]: float64, the same on every rank.
        Collective.
        """
        return self._scores(rows, self._packs(rows))

    def _packs(self, rows: Sequence[int]) -> list[MicroBatch]:
        """This rank's packs of the texts. Only the last token of each text is active, because its score follows it."""
        texts = []
        for row in rows:
            for text in self._examples[row].texts:
                ids = token_ids(self._tokenizer, text, self._how.max_tokens)
                if len(ids) < 2:
                    raise ModelError(f"an example has only one token, and ranks need at least two to pack it: {text!r}")
                texts.append(Demonstration.of_one_turn(str(row), ids[:-1], ids[-1:]))
        self._num_batches += 1
        (mine,) = assemble_supervised(texts, self._config.batch, self._config.run, self._layout, self._num_batches)[
            self._critic.groups.data.rank
        ]
        return mine.micro_batches

    def _scores(self, rows: Sequence[int], packs: list[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        width, groups = len(self._examples[rows[0]].texts), self._critic.groups
        scores = torch.zeros(len(rows) * width, dtype=torch.float64)
        values = self._critic.values(packs)
        if groups.is_last_stage and groups.tensor.rank == groups.context.rank == 0:
            for pack, found in zip(packs, values, strict=True):
                real = torch.from_numpy(pack.trajectory_index) >= 0
                scores[torch.from_numpy(pack.trajectory_index)[real]] = found.after.detach().double().cpu()[real]
        dist.all_reduce(scores, group=groups.host.group)
        labels = torch.tensor([self._examples[row].label for row in rows], dtype=torch.float64)
        return scores.view(len(rows), width), labels
