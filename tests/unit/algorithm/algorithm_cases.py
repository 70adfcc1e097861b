"""Random packed batches for the algorithm's tests."""

from __future__ import annotations

import torch

from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective

RATIOS = ("sequence", "sequence_token", "token")
SURROGATES = ("cispo", "sapo", "dppo", "dppo_kl", "minirl", "vespo", "gmpo")
AGGREGATIONS = (
    "sequence_mean_token_mean",
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "group_mean_token_mean",
)


class Batch:
    """S sequences flat in [T]; some tokens masked, one sequence possibly without any active token."""

    def __init__(self, seed: int, num_sequences: int = 5, scale: float = 2e-3):
        g = torch.Generator().manual_seed(seed)
        rows = torch.randint(1, 9, (num_sequences,), generator=g)
        self.num_sequences = num_sequences
        self.segment_ids = torch.arange(num_sequences).repeat_interleave(rows)
        size = (int(rows.sum()),)
        self.mask = torch.rand(size, generator=g) < 0.75
        self.old = -torch.rand(size, generator=g, dtype=torch.float64) * 3
        drift = torch.randn(num_sequences, generator=g, dtype=torch.float64)[self.segment_ids] * scale
        self.new = self.old + drift + torch.randn(size, generator=g, dtype=torch.float64) * scale
        self.advantages = torch.randn(num_sequences, generator=g, dtype=torch.float64)
        self.group_ids = torch.randint(0, 2, (num_sequences,), generator=g)
        self.keep = torch.rand(num_sequences, generator=g) < 0.8
        self.weights = torch.rand(num_sequences, generator=g, dtype=torch.float64) + 0.5
        self.lengths = torch.zeros(num_sequences, dtype=torch.int64).index_add(0, self.segment_ids, self.mask.long())

    def denominator(self, aggregation: str) -> int:
        valid = self.lengths > 0
        if aggregation == "token_mean":
            return int(self.lengths.sum())
        if aggregation == "group_mean_token_mean":
            return int(self.group_ids[valid].unique().numel())
        return int(valid.sum())

    def group_sizes(self) -> torch.Tensor:
        return (self.group_ids[:, None] == self.group_ids[None, self.lengths > 0]).sum(dim=1)

    def run(self, settings: ObjectiveSettings, tokens=None, sequences=None, segment_ids=None, **changes):
        """(output, gradient of J in all T tokens) of the chosen tokens and sequences, everything by default."""
        tokens = torch.arange(self.segment_ids.numel()) if tokens is None else tokens
        sequences = torch.arange(self.num_sequences) if sequences is None else sequences
        new_index = torch.full((self.num_sequences,), -1)
        new_index[sequences] = torch.arange(len(sequences))
        new = self.new.clone().requires_grad_()
        arguments = {
            "log_probs": new[tokens],
            "old_log_probs": self.old[tokens],
            "mask": self.mask[tokens],
            "segment_ids": new_index[self.segment_ids[tokens]],
            "num_sequences": len(sequences),
            "advantages": self.advantages[sequences],
            "lengths": self.lengths[sequences],
            "keep": self.keep[sequences],
            "sequence_weights": self.weights[sequences],
            "group_sizes": self.group_sizes()[sequences],
            "denominator": self.denominator(settings.aggregation),
            "rollout_log_probs": self.old[tokens] - 0.02,
        } | changes
        output = policy_objective(settings, **arguments)
        output.objective_sum.backward()
        return output, new.grad


def settings_of(ratio="sequence", aggregation="sequence_mean_token_mean", **changes) -> ObjectiveSettings:
    """`ratio`: an importance ratio with the clipped term, or the name of a surrogate."""
    if ratio in SURROGATES:
        ratio, changes = "token", {"surrogate": ratio, "clip_low": 1e-3, "clip_high": 1e-3} | changes
    clip = {"clip_low": 0.02, "clip_high": 0.03} if ratio == "token" else {"clip_low": 1e-3, "clip_high": 2e-3}
    return ObjectiveSettings(ratio=ratio, aggregation=aggregation, norm_constant_tokens=16, **(clip | changes))
