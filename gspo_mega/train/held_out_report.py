"""Held-out results under their names of the catalogue, and which sets are due after a step."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.session import Session


def due_sets(session: Session, step: int, is_last: bool) -> list[str]:
    """The sets to measure after `step`: by the cadence of each, and all after the last step. Alike on all ranks."""
    return [one.name for one in session.eval_sets if is_last or one.is_due(step)]


def evaluation_metrics(found: Mapping[str, Evaluation], first: str) -> dict[str, float]:
    """Metrics of the sets that were measured. The set named `first` also has the short names."""
    metrics: dict[str, float] = {}
    for name, evaluation in found.items():
        own = _metrics_of(evaluation)
        if name == first:
            metrics |= {f"eval/{key}": value for key, value in own.items()}
        metrics |= {f"eval/set/{name}/{key}": value for key, value in own.items()}
        for k, (value, error) in evaluation.pass_at.items():
            metrics |= {f"eval/set/{name}/pass_at/{k}": value, f"eval/set/{name}/pass_at_standard_error/{k}": error}
        if evaluation.majority is not None:
            value, error = evaluation.majority
            metrics |= {f"eval/set/{name}/majority": value, f"eval/set/{name}/majority_standard_error": error}
    return metrics


def _metrics_of(evaluation: Evaluation) -> dict[str, float]:
    return {
        "accuracy": evaluation.accuracy,
        "accuracy_standard_error": evaluation.standard_error,
        "reward_mean": evaluation.reward_mean,
        "response_length_mean": evaluation.response_tokens_mean,
        "turns_mean": evaluation.turns_mean,
        "truncated_fraction": evaluation.truncated_fraction,
        "num_samples": evaluation.num_samples,
        "num_reward_failures": evaluation.num_reward_failures,
    }
