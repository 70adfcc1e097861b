"""What each recipe's clip range says of the mismatch: by hand, and alike in a run's metrics and in the command."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_configs import make_config

from gspo_mega.algorithm.correction import mismatch_sums
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.config.clip_range import Band, band_of
from gspo_mega.report.run_record import RunRecord, flat
from gspo_mega.report.verdicts import verdicts_of
from gspo_mega.train.mismatch_report import GapRows, gap_metrics, gap_warnings
from gspo_mega.verify.mismatch.attribution import TokenPlaces, make_row
from gspo_mega.verify.mismatch.findings import Advice, _budget, _direct_use, _origin

# Two responses, A < 0 and A > 0, of two tokens and of one; the trainer's log-probs less the servers'.
D = np.array([0.3, -0.5, 0.2])
SERVER = np.log([0.5, 0.8, 0.25])
NEW = np.exp(SERVER + D)  # probabilities .6749294, .4852245, .3053507
GRPO_WIDTH = math.log(1.27) - math.log(0.8)
# log s is -.1 and .2; the paper's range is far narrower.
OF_SEQUENCES = {"share": 0.15, "negative": 1.0, "positive": 1.0}


def log_width(low, high):
    return math.log1p(high) - math.log1p(-low)


BY_HAND = {
    "gspo": (OF_SEQUENCES["share"] / log_width(3e-4, 4e-4), 1.0, 1.0),
    "gspo_token": (0.15 / log_width(3e-4, 4e-4), 1.0, 1.0),
    "luspo": (0.15 / log_width(2e-3, 2.5e-3), 1.0, 1.0),
    # Of the three tokens .3, -.5, .2 the second is below log .8 = -.223, and its A is negative.
    "grpo": (1.0 / 3 / GRPO_WIDTH, 0.5, 0.0),
    "dapo": (1.0 / 3 / log_width(0.2, 0.28), 0.5, 0.0),
    # .2 is above log 1.2 = .182, and its A is positive.
    "dr_grpo": (1.0 / 3 / log_width(0.2, 0.2), 0.5, 1.0),
    "ppo": (1.0 / 3 / log_width(0.2, 0.2), 0.5, 1.0),
    "minirl": (1.0 / 3 / GRPO_WIDTH, 0.5, 0.0),
    # Only the upper edge, log 5: of the rises .3 and .2, each counted double.
    # Only the upper edge, log 2: of the rises .3 and .2, each counted double; neither is above it.
    "clip_cov": (2 * 0.5 / 3 / (2 * math.log(2)), 0.0, 0.0),
    "cispo": (2 * 0.5 / 3 / (2 * math.log(5)), 0.0, 0.0),
    "gmpo": (1.0 / 3 / 0.8, 0.5, 0.0),
    # Probabilities move by +.175, -.315 and +.055; edges at .15.
    "dppo": ((0.6749294 - 0.5 + 0.8 - 0.4852245 + 0.3053507 - 0.25) / 3 / 0.3, 0.5, 0.0),
}


def config_of(algorithm, **objective):
    sections = {"critic": {"optimizer": {"lr": 1e-5}}} if algorithm == "ppo" else {}
    recipe = RECIPES[algorithm]
    more = {"ratio": "token"} if algorithm == "custom" else {}
    more |= recipe.objective_defaults | {"clip_low": recipe.clip_low, "clip_high": recipe.clip_high}
    return make_config(algorithm=algorithm, objective={**more, **objective}, **sections)


def band(config):
    return band_of(config.algorithm, config.objective)


def in_a_run(config, server=SERVER, new=None, lengths=(2, 1), advantages=(-1.0, 1.0)):
    new = np.log(NEW) if new is None else new
    ids = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    sums, maxima = mismatch_sums(
        torch.from_numpy(new),
        torch.from_numpy(server),
        torch.ones(len(ids)),
        ids,
        len(lengths),
        band=band(config),
    )
    old = {"mismatch_sums": sums.numpy(), "mismatch_maxima": maxima.numpy()}
    everything = np.ones(len(lengths), bool)
    return GapRows.measured(old, {}, everything, np.array(advantages), ~everything)


def by_command(config, server=SERVER, new=None, lengths=(2, 1), advantages=(-1.0, 1.0)):
    new = np.log(NEW) if new is None else new
    count = len(lengths)
    tokens = TokenPlaces(np.repeat(np.arange(count), lengths), np.arange(count), np.sign(advantages).astype(int))
    return make_row(new - server, tokens, band(config), (1,), np.exp(new) - np.exp(server))


def test_every_recipe_is_here():
    assert set(BY_HAND) | {"sapo", "vespo", "dppo_kl", "custom"} == set(RECIPES)


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_by_hand_in_a_run_and_by_the_command(algorithm):
    share, negative, positive = BY_HAND[algorithm]
    config = config_of(algorithm)
    metrics, row = gap_metrics(band(config), in_a_run(config)), by_command(config)
    assert metrics["mismatch/budget_share"] == pytest.approx(share, rel=1e-6)
    assert row.band_share.value == pytest.approx(share, rel=1e-6)
    assert metrics["mismatch/advantage/negative/clip_fraction"] == row.negative.value == negative
    assert metrics["mismatch/advantage/positive/clip_fraction"] == row.positive.value == positive


def test_custom_follows_its_ratio_and_the_dual_clip_counts():
    assert not band(config_of("custom", ratio="sequence")).per_token
    assert band(config_of("custom", ratio="token")).per_token
    dual = config_of("grpo", dual_clip=1.3)
    assert gap_metrics(band(dual), in_a_run(dual))["mismatch/advantage/negative/clip_fraction"] == 1.0, (
        "log 1.3 is .262"
    )


def test_a_weight_is_bounded_whatever_the_sign():
    """CISPO clips a weight of A < 0 that is too large, as one of A > 0; no gradient is lost."""
    bounded = band(config_of("cispo", clip_low=0.2, clip_high=0.2))
    assert bounded.is_clipped(D, negative=True).tolist() == bounded.is_clipped(D, negative=False).tolist() == [True] * 3
    open_below = band(config_of("cispo"))
    assert open_below == Band(-math.inf, math.log(5), per_token=True, bounds_weight=True)
    assert "doubled" in open_below.what


@pytest.mark.parametrize("algorithm", ["sapo", "vespo"])
def test_what_clips_nothing_is_not_judged_by_a_range(algorithm):
    config = config_of(algorithm)
    gap = in_a_run(config)
    metrics = gap_metrics(band(config), gap)
    assert not any("budget_share" in name or "clip_fraction" in name for name in metrics)
    assert gap_warnings(config, Path("c.yaml"), gap, metrics, {}, 1) == []
    row = by_command(config)
    assert row.band_share is row.negative is row.positive is None
    said = sentences(config, row)
    assert (
        said[0][1:].startswith(f"{algorithm[1:]} clips nothing, so the mismatch has no clip range") and len(said) == 1
    )
    assert not any("far below" in sentence or "widths" in sentence for sentence in said)


def sentences(config, row):
    """What the command says of the range."""
    findings = SimpleNamespace(
        total=row, band=band(config), unsigned=None, num_negative=1, num_positive=1, num_prompts=30, faults=(),
        parts={"forward": {}}, moved={}, nothing={},
    )  # fmt: skip
    advice, facts = Advice(), SimpleNamespace(config=config)
    _direct_use(facts, findings, advice)
    _origin(findings, advice)
    _budget(facts, findings, advice)
    return advice.sentences


def noise(sd, seed=0, count=64, length=256):
    chance = np.random.default_rng(seed)
    server = np.log(chance.uniform(0.2, 0.9, count * length))
    d = np.minimum(chance.normal(-(sd**2) / 2, sd, count * length), -server - 1e-6)
    return dict(server=server, new=server + d, lengths=[length] * count, advantages=np.resize([-1.0, 1.0], count))


@pytest.mark.parametrize("algorithm", sorted(BY_HAND))
@pytest.mark.parametrize("sd", [1e-7, 0.3, 0.6])
def test_the_run_and_the_command_say_the_same(algorithm, sd):
    config, data = config_of(algorithm), noise(sd)
    gap, row = in_a_run(config, **data), by_command(config, **data)
    metrics = gap_metrics(band(config), gap)
    share = metrics["mismatch/budget_share"]
    assert share == pytest.approx(row.band_share.value, rel=1e-9)
    for sign, of_row in (("negative", row.negative), ("positive", row.positive)):
        assert metrics[f"mismatch/advantage/{sign}/clip_fraction"] == pytest.approx(of_row.value)
    run = RunRecord(Path("x"), "x", "train", steps=[1], series={name: [value] for name, value in metrics.items()})
    run.settings = flat(config.model_dump(mode="json"))
    verdict = next(one for one in verdicts_of(run) if one.topic == "Mismatch of trainer and servers")
    of_command = next(one for one in sentences(config, row) if "widths of the clip range" in one)
    plain = re.sub(r" \+- \S+", "", of_command)
    what = plain[0].lower() + plain[1:].partition(" widths")[0]
    assert what.rsplit(" is ", 1)[0] in verdict.text and "mismatch.budget is 0.5" in verdict.text
    assert float(what.rsplit(" is ", 1)[1]) == pytest.approx(share, rel=0.05)
    lines = gap_warnings(config, Path("c.yaml"), gap, metrics, {}, 1)
    (said,) = [line.split()[0] for line in lines if "of the clip range before any update" in line] or [None]
    if row.band_share.above(0.5) or row.band_share.below(0.5):
        words = {"warning": "a run will warn of it", "notice": "a run will note it"}
        assert [word for word in words if words[word] in of_command] == ([said] if said else [])
    warned = said == "warning"
    assert not warned or verdict.level == "warning"


@pytest.mark.parametrize(("sd", "least"), [(0.3, 0.2), (0.6, 0.3)])
def test_tokens_that_are_clipped_without_an_update_are_seen(sd, least):
    """The mean over a response of 1024 tokens hides them: it is a thirtieth of a token's size."""
    config, data = config_of("grpo"), noise(sd, length=1024)
    metrics = gap_metrics(band(config), in_a_run(config, **data))
    assert metrics["mismatch/clip_fraction"] > least * 0.9 and metrics["mismatch/budget_share"] > 0.45


def test_cispo_with_a_large_mismatch_is_not_called_rounding():
    config, data = config_of("cispo"), noise(1.0)
    said = " ".join(sentences(config, by_command(config, **data)))
    assert "far below" not in said and "next to nothing to correct" not in said and "bound the weight of" in said
