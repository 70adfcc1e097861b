"""The metrics of what was sampled, by hand, and against those of what was trained on."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from run_configs import make_config

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import compares_within_groups, least_of_group
from gspo_mega.config.schema import Advantage
from gspo_mega.metrics.reductions import sampled_metrics
from gspo_mega.metrics.trends import trend_of
from gspo_mega.train.batches import fill_advantages, scored_batch
from gspo_mega.train.reports import StepReport


def group(number, rewards, source="train", errors=(), lengths=None, finish="stop"):
    prompt = Prompt(f"{source}:{number}", source, (1, 2), "", answer="")
    rows = []
    for sample, reward in enumerate(rewards):
        length = 1 if lengths is None else lengths[sample]
        row = one_turn_row(
            f"step000000-g{number:05d}-s{sample:03d}", number, prompt, [5] * length, [1] * length, [-0.1] * length,
            [0] * length, finish, reward=reward, reward_error="late" if sample in errors else None,
        )  # fmt: skip
        row.reward_parts = {"a function:of mine": 2 * reward}
        rows.append(row)
    return Group.from_rows(number, prompt, rows)


def test_each_by_hand():
    groups = [
        group(0, [1.0, 0.0, 1.0, 1.0], lengths=[1, 2, 3, 4]),
        group(1, [0.0, 0.0], source="other", lengths=[5, 9], finish="length"),
        group(2, [9.0, 1.0], errors=(0,)),
    ]
    found = sampled_metrics(groups, Advantage(), True)
    # Seven rewards, of which four are 1; by prompt they differ from the mean of 4/7 by 5/7, -8/7 and 3/7 in sum.
    assert found == pytest.approx(
        {
            "reward/mean": 4 / 7,
            "reward/sd": math.sqrt(4 / 7 * 3 / 7),
            "reward/standard_error": math.sqrt((25 + 64 + 9) / 49 * 3 / 2) / 7,
            "reward/source/train": 4 / 5,
            "reward/source/other": 0.0,
            "reward/function/a.function.of.mine": 8 / 7,
            "response/length_mean": (1 + 2 + 3 + 4 + 5 + 9 + 1) / 7,
            "response/length_max": 9.0,
            "response/truncated_fraction": 2 / 7,
            "groups/constant_fraction": 1 / 2,
        }
    )
    assert sampled_metrics([group(0, [1.0, 2.0], errors=(0, 1))], Advantage(), True) == {}
    assert sampled_metrics([group(0, [0.0, 1.0])], Advantage(), True)["reward/standard_error"] == pytest.approx(0.5)


def test_the_standard_error_is_that_of_means_over_prompts():
    """Eight responses to one prompt are worth less than eight prompts."""
    chance = random.Random(1)
    means, errors = [], []
    for _ in range(300):
        groups = []
        for number in range(8):
            rate = chance.betavariate(0.5, 0.5)
            groups.append(group(number, [float(chance.random() < rate) for _ in range(8)]))
        found = sampled_metrics(groups, Advantage(), True)
        means.append(found["reward/mean"])
        errors.append(found["reward/standard_error"])
    spread = math.sqrt(sum((mean - 0.5) ** 2 for mean in means) / len(means))
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) == pytest.approx(spread, rel=0.1)
    assert spread > 1.7 * math.sqrt(0.25 / 64), "as if they were independent it would be far too small"


def reported(config, batch):
    """The metrics of a step that trains on `batch`, as rank 0 makes them."""
    trained = scored_batch(batch, least_of_group(config), config.objective.scope)
    fill_advantages(trained, config, batch.step)
    session = SimpleNamespace(config=config, state=SimpleNamespace(weight_version=0))
    return StepReport(session, trained, 0)._batch_metrics(trained)


def test_a_filter_hides_no_rise():
    """A run whose rate rises from .15 to .85: the groups with a signal stay near a half."""
    config = make_config(rollout={"filter_constant_groups": True})
    chance = random.Random(2)
    shown, trained, constant = [], [], []
    for step in range(60):
        rate = 0.15 + 0.7 * step / 60
        groups = []
        for number in range(32):
            own = min(1.0, max(0.0, chance.gauss(rate, 0.15)))
            groups.append(group(number, [float(chance.random() < own) for _ in range(8)]))
        kept = [one for one in groups if not one.is_constant]
        metrics = reported(
            config,
            RolloutBatch(
                step,
                kept,
                {},
                {"generate": 1.0},
                sampled_metrics(groups, config.advantage, compares_within_groups(config)),
            ),
        )
        shown.append(metrics["reward/mean"])
        trained.append(metrics["reward/trained_mean"])
        constant.append((metrics["groups/constant_fraction"], metrics["groups/trained_constant_fraction"]))
    trend = trend_of(range(60), shown)
    assert trend.kind == "learns" and trend.level_since is None
    assert trend.start == pytest.approx(0.19, abs=0.05) and trend.end == pytest.approx(0.81, abs=0.05)
    assert trained[0] > 0.22 and trained[-1] < 0.83
    assert all(kept == 0.0 for _, kept in constant) and sum(whole for whole, _ in constant) > 3


def test_a_record_of_an_earlier_release_tells_what_was_trained():
    metrics = reported(make_config(), RolloutBatch(0, [group(0, [0.0, 1.0, 1.0, 1.0])], {}, {"generate": 1.0}))
    assert metrics["reward/mean"] == metrics["reward/trained_mean"] == 0.75
