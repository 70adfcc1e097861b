"""Episodes of several rows: vectors by hand, and random cases from the independent 60-digit implementation."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from reference_objective import expected_of
from test_vectors import KEYS, case_of, random_case, write

from gspo_mega.algorithm import objective
from gspo_mega.verify.certify import vectors
from gspo_mega.verify.certify.vectors import replay_file

VECTORS = Path(__file__).parent / "data" / "episode_vectors.json"
# J by hand, of the formulas in each case's description.
BY_HAND = {
    ("P01_one_episode_of_two_branches", "gspo/seq_mean_token_mean"): 1.00015,
    ("P01_one_episode_of_two_branches", "gspo/group_mean_token_mean"): 1.00015,
    ("P02_and_one_that_did_not_branch", "gspo/seq_mean_token_mean"): 7.5e-5,
    ("P02_and_one_that_did_not_branch", "gspo/group_mean_token_mean"): 7.5e-5,
    ("P02_and_one_that_did_not_branch", "gspo/token_mean"): (3 * 1.0002 + 1 - 1) / 5,
    ("P02_and_one_that_did_not_branch", "gspo/seq_mean_token_sum"): (3 * 1.0002 + 1 - 1) / 2,
    ("P03_two_prompts", "gspo/group_mean_token_mean"): 1.0000375,
    ("P03_two_prompts", "gspo/seq_mean_token_mean"): (1.00015 - 1 + 2) / 3,
    ("P04_a_rejected_branch", "gspo/seq_mean_token_mean"): (0.75 * 1.0002 - 1) / 2,
    ("P05_token_advantages", "gspo_token/seq_mean_token_mean"): -0.500025,
}


def content():
    return json.loads(VECTORS.read_text())


@pytest.mark.parametrize("name, key", BY_HAND)
def test_the_files_numbers_are_those_by_hand(name, key):
    case = next(case for case in content()["cases"] if case["name"] == name)
    # Half a unit of the last digit of a log-prob near -1, over the terms of this case.
    assert case["expected"][key]["objective"] == pytest.approx(BY_HAND[name, key], rel=0, abs=1e-15)
    assert expected_of(case["inputs"], key) == case["expected"][key]


def test_every_vector_agrees():
    assert replay_file(VECTORS) == (6, [])


@pytest.mark.parametrize("seed", range(12))
def test_random_episodes_of_every_algorithm_and_aggregation_agree(tmp_path, seed):
    inputs = random_case(2000 + seed)["inputs"]
    rng = random.Random(seed)
    # Three episodes of the first group, two of the others: rows join one of their own group's, in any order.
    inputs["episode_ids"] = [10 * g + rng.randrange(3 if g == 0 else 2) for g in inputs["group_ids"]]
    keys = [key for key in KEYS if not key.startswith("gspo_rawseq")]
    case = case_of(f"episodes{seed}", inputs, keys)
    assert replay_file(write(tmp_path, [case])) == (1, [])


def no_weight(monkeypatch):
    def without(*arguments, **named):
        return objective.policy_objective(*arguments, **named | {"branch_weights": None})

    monkeypatch.setattr(vectors, "policy_objective", without)


def rows_counted(monkeypatch):
    def of_rows(packed, inputs):
        every = true_episodes(packed, {key: value for key, value in inputs.items() if key != "episode_ids"})
        every.branch_weights = true_episodes(packed, inputs).branch_weights
        return every

    true_episodes = vectors._Episodes
    monkeypatch.setattr(vectors, "_Episodes", of_rows)


def prompts_not_weighed(monkeypatch):
    rule = objective.AGGREGATIONS["group_mean_token_mean"]
    wrong = rule._replace(coefficients=lambda parts: parts.scale / parts.group_sizes.double().clamp(min=1.0))
    monkeypatch.setitem(objective.AGGREGATIONS, "group_mean_token_mean", wrong)


@pytest.mark.parametrize(
    "fault, name, key",
    [
        (no_weight, "P01", "gspo/seq_mean_token_mean objective is 2.0002"),
        (rows_counted, "P01", "gspo/seq_mean_token_mean objective is 0.500075"),
        (prompts_not_weighed, "P03", "gspo/group_mean_token_mean objective"),
    ],
)
def test_a_wrong_average_is_seen(monkeypatch, tmp_path, fault, name, key):
    case = next(case for case in content()["cases"] if case["name"].startswith(name))
    # Only the wrong aggregation's own vectors: the test names what it means to see.
    case["expected"] = {k: v for k, v in case["expected"].items() if k == key.split()[0]}
    fault(monkeypatch)
    passed, failures = replay_file(write(tmp_path, [case]))
    assert passed == 0 and key in failures[0]


def test_an_episode_of_two_groups_is_refused(tmp_path):
    case = content()["cases"][1]
    case["inputs"]["group_ids"] = [0, 1, 0]
    with pytest.raises(Exception, match="episode 0 has rows in groups 0 and 1"):
        replay_file(write(tmp_path, [case]))
