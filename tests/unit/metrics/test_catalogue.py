"""The catalogue: every name once, patterns, and that it holds what the algorithm computes."""

from __future__ import annotations

import pytest
import torch

from gspo_mega.algorithm.correction import mismatch_metrics, mismatch_sums
from gspo_mega.algorithm.diagnostics import POLICY_SUMS, log_ratio_summary, policy_metrics
from gspo_mega.metrics.catalogue import CATALOGUE, _entries, find_metric
from gspo_mega.metrics.tables import PHASES


def test_names_are_unique_and_described():
    names = [metric.name for metric in _entries()]
    assert len(names) == len(set(names)) == len(CATALOGUE)
    assert all(metric.unit and metric.description for metric in CATALOGUE.values())


def test_everything_the_algorithm_computes_has_a_name():
    policy = policy_metrics(torch.zeros(len(POLICY_SUMS)))
    sums = mismatch_sums(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), 1, 2.0)
    mismatch = mismatch_metrics(*sums)
    summary = log_ratio_summary(torch.zeros(3))
    names = [f"policy/{key}" for key in policy] + [f"policy/mini_batch/3/{key}" for key in policy]
    names += [f"mismatch/{key}" for key in mismatch]
    names += [f"policy/log_ratio{part}/{key}" for part in ("", "/mismatch", "/staleness") for key in summary]
    assert len({find_metric(name).name for name in names}) == len(names)


def test_patterns_match_one_placeholder():
    assert find_metric("reward/source/gsm8k-v1.2").name == "reward/source/<source>"
    assert find_metric("policy/mini_batch/0/clip_fraction").name == "policy/mini_batch/<index>/clip_fraction"
    assert find_metric("rollout/num_request_failures_nonsense").unit == "requests"
    assert all(find_metric(f"time/{phase}_seconds").unit == "seconds" for phase in PHASES)


@pytest.mark.parametrize(
    "name", ["reward/source/", "reward/source/a/b", "reward/source/<source>x y", "reward/maen", "step"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="is not in the catalogue"):
        find_metric(name)


def test_a_typing_error_is_answered_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean reward/mean"):
        find_metric("reward/maen")


@pytest.mark.parametrize("sign", [">", "<"])
@pytest.mark.parametrize("place", ["policy", "policy/mini_batch/<index>"])
def test_a_clip_fraction_by_sign_says_what_a_token_ratio_counts(place, sign):
    """GRPO's is a mean over sequences of the share of their tokens, neither a share of sequences nor of all tokens."""
    name = "positive" if sign == ">" else "negative"
    said = CATALOGUE[f"{place}/clip_fraction_{name}"].description
    assert f"of those with A {sign} 0" in said and "a sequence counts by its share of tokens" in said
