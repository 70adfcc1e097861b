"""The mismatch correction in whole replayed runs: what it drops, what a run says of it, and that ranks agree."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from recovery_support import KILLED, outcome

from gspo_mega.base.episodes import Node
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal

# A server whose log-probs are near the trainer's at every token, but for one response and one token.
NOISE = 0.02
BROKEN, VETOED = 1, 4


def rewrite(source: RunFolder, target: RunFolder, change: Callable[[int, int, Node], None]) -> None:
    """The recording again, each turn (step, row) changed."""
    read, write = Journal(source.journal_dir), Journal(target.journal_dir)
    for step in read.steps():
        record = read.read(step)
        with write.begin(step, step, len(record.batch.groups[0].episodes), {}) as writer:
            for row, episode in enumerate(record.batch.episodes):
                change(step, row, episode.turns[0])
                writer.add(episode)
            order = {"seed": 1, "sources": {"train": {"epoch": 0, "position": 3 * (step + 1), "num_rows": 64}}}
            writer.finish(record.batch, order)


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    """Folder of a recording in which the trainer's log-probs of an untrained model, near -log 512, are the server's."""
    root = tmp_path_factory.mktemp("nearly_equal")
    rng = np.random.default_rng(2)

    def change(step: int, row: int, turn: Node) -> None:
        noise = rng.normal(0, NOISE, len(turn.token_ids))
        if row == BROKEN:
            noise -= 6.0  # the whole response, 6 nats per token
        if row == VETOED:
            noise[0] += 12.0  # one token that it found next to impossible
        turn.log_probs = (-np.log(512) - noise).tolist()

    rewrite(RunFolder(ranks.config_file.parent / "recorded"), RunFolder(root / "recorded"), change)
    return root / "recorded"


def lines_of(ranks, name: str) -> list[dict]:
    return [json.loads(line) for line in ranks.folder(name).metrics_file.read_text().splitlines()]


def without_time(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k.startswith(("mismatch/", "policy/"))} for line in lines]


def test_a_broken_response_and_a_vetoed_token_are_dropped_in_one_rank_and_in_two(ranks, recorded):
    overrides = [f"train.from_rollouts={recorded}", "train.num_steps=2", "mismatch.bound_nats=4"]
    assert ranks.train("corrected", "", *overrides) == [0], ranks.log("corrected")
    assert ranks.train("corrected_two", "", *overrides, num_ranks=2) == [0, 0], ranks.log("corrected_two")
    one, two = lines_of(ranks, "corrected"), lines_of(ranks, "corrected_two")
    for line in one:
        assert line["mismatch/num_token_vetoes"] == line["mismatch/num_vetoed_sequences"] == 1
        assert line["policy/kept_fraction"] == pytest.approx(4 / 6)
        assert line["mismatch/acted_fraction"] == pytest.approx(2 / 6) and line["mismatch/weight_mean"] == 1.0
        assert line["mismatch/length/1-63/kept_fraction"] == pytest.approx(4 / 6)
        kept = [line[f"mismatch/advantage/{sign}/kept_fraction"] for sign in ("positive", "negative")]
        assert sorted(kept) == pytest.approx([1 / 3, 1.0]) or kept == pytest.approx([2 / 3, 2 / 3])
        assert abs(line["mismatch/centre"]) < 1.0
    assert "mismatch.correction mask dropped 0.33 of the responses" in ranks.console("corrected")
    assert "kept by mismatch.correction, mean" in ranks.console("corrected")
    for a, b in zip(without_time(one), without_time(two), strict=True):
        assert a.keys() == b.keys()
        assert all(b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5) for name in a)


def test_one_mini_batch_makes_its_old_pass_for_the_correction_alone(ranks, recorded):
    common = [f"train.from_rollouts={recorded}", "train.num_steps=1", "batch.num_mini_batches=1"]
    assert ranks.train("single", "", *common, "mismatch.bound_nats=4") == [0], ranks.log("single")
    assert ranks.train("single_none", "", *common, "mismatch.correction=none") == [0], ranks.log("single_none")
    (with_it,), (without,) = lines_of(ranks, "single"), lines_of(ranks, "single_none")
    assert with_it["policy/kept_fraction"] == pytest.approx(4 / 6) and with_it["policy/clip_fraction"] == 0
    assert without["policy/kept_fraction"] == 1 and "mismatch/centre" not in without
    assert with_it["mismatch/k3"] == without["mismatch/k3"], "the same gap, from the one pass or the other"


def test_server_log_probs_as_old_ones_are_warned_of_with_the_measured_share(ranks, recorded):
    overrides = [f"train.from_rollouts={recorded}", "train.num_steps=2", "old_log_probs=rollout"]
    assert ranks.train("of_rollout", "", *overrides) == [0], ranks.log("of_rollout")
    console = ranks.console("of_rollout")
    first, _ = lines_of(ranks, "of_rollout")
    share = first["policy/mini_batch/0/clip_fraction_negative"]
    # Measured before any update: what the split says of the first mini-batch, and nothing of later ones.
    assert share == pytest.approx(first["mismatch/advantage/negative/clip_fraction"], rel=1e-12)
    signs = [first.get(f"mismatch/advantage/{sign}/num_sequences", 0) for sign in ("positive", "negative")]
    assert sum(signs) == 3 and signs[1] > 0
    assert f"old_log_probs: rollout clips {share:.2f} of the responses with A < 0" in console
    assert console.count("warning  old_log_probs: rollout clips") == 1
    assert "clipped with no update, A < 0, mean" in console
    assert "before any update" in console and "`gspo-mega mismatch " in console


def test_clip_cov_leaves_out_the_same_tokens_after_a_kill_and_on_two_ranks(ranks):
    """Advantages of -1 and 1 and log-probs near -6 give covariances around 0. A step is one mini-batch, so its old pass
    is made for the choice alone.
    """
    chosen = "objective={covariance_low: 0, covariance_high: 100, covariance_share: 0.2}"
    once = ("train.num_steps=2", "batch.num_mini_batches=1", "mismatch.correction=none")
    overrides = ("algorithm=clip_cov", chosen, *once)
    assert ranks.train("covariant", "", *overrides) == [0], ranks.log("covariant")
    killed = "covariant-killed"
    assert ranks.train(killed, "point=step.optimizer,hit=2", *overrides) == [KILLED], ranks.log(killed)
    assert ranks.train(killed, "", *overrides) == [0], ranks.log(killed)
    want, got = outcome(ranks.folder("covariant")), outcome(ranks.folder(killed))
    assert {name for name in want.keys() | got.keys() if want.get(name) != got.get(name)} == set()
    assert ranks.train("covariant-two", "", *overrides, num_ranks=2) == [0, 0], ranks.log("covariant-two")
    for one, two in zip(lines_of(ranks, "covariant"), lines_of(ranks, "covariant-two"), strict=True):
        assert 0.1 < one["policy/covariance_clip_fraction"] <= 0.2 < one["policy/covariance_candidate_fraction"] < 0.8
        for name in ("clip", "candidate"):
            assert one[f"policy/covariance_{name}_fraction"] == two[f"policy/covariance_{name}_fraction"]
        assert one["optimizer/grad_norm"] == pytest.approx(two["optimizer/grad_norm"], rel=1e-4)
