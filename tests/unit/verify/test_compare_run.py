"""Which weights and step a comparison takes, what it refuses, and its table."""

from __future__ import annotations

import pytest
from compare_rows import batch, config

from gspo_mega.base.errors import ConfigError, JournalError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.verify.compare.run import Request, compare, find_step, render, weights_folder


def recorded(folder, steps):
    journal = Journal(folder.journal_dir)
    for step in steps:
        one = batch()
        one.step = step
        with journal.begin(step, step, 2, {}) as writer:
            for episode in one.episodes:
                writer.add(episode)
            writer.finish(one, {"seed": 1, "sources": {}})


def checkpoint(folder, step):
    folder.checkpoint_dir(step).joinpath("megatron").mkdir(parents=True)
    folder.latest_checkpoint_file.write_text(folder.checkpoint_dir(step).name)


def test_the_newest_checkpoint_and_the_last_step_that_it_was_trained_on(tmp_path):
    folder = RunFolder(tmp_path)
    recorded(folder, [0, 1, 2])
    checkpoint(folder, 2)
    assert weights_folder(folder, config().model, False, "latest", "--weights") == folder.checkpoint_dir(2)
    assert find_step(folder, Request(tmp_path, ["gspo"])) == 1
    assert find_step(folder, Request(tmp_path, ["gspo"], weights="start")) == 2
    assert find_step(folder, Request(tmp_path, ["gspo"], step=1)) == 0


def test_what_is_not_there_is_refused_with_what_is(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"is no run folder: it has no config\.resolved\.yaml"):
        compare(Request(tmp_path, ["gspo"]), print)
    with pytest.raises(ConfigError, match=r"--weights latest: .* has no checkpoint; valid: start"):
        weights_folder(folder, config().model, False, "latest", "--weights")
    with pytest.raises(ConfigError, match=r"--old start: model has neither config\.json .* nor megatron/"):
        weights_folder(folder, config().model, False, "start", "--old")
    with pytest.raises(JournalError, match="no rollouts are recorded"):
        find_step(folder, Request(tmp_path, ["gspo"]))
    recorded(folder, [3, 4])
    with pytest.raises(JournalError, match="step 9 is not recorded; recorded are steps 4 to 5"):
        find_step(folder, Request(tmp_path, ["gspo"], step=9))
    checkpoint(folder, 1)
    with pytest.raises(JournalError, match="no step up to the weights' has a complete rollout batch"):
        find_step(folder, Request(tmp_path, ["gspo"]))


def test_checkpoints_of_adapters_are_refused(tmp_path):
    folder = RunFolder(tmp_path)
    checkpoint(folder, 1)
    with pytest.raises(ConfigError, match="trains adapters .* and its checkpoints hold them alone; valid: start, or a"):
        weights_folder(folder, config().model, True, "latest", "--weights")


def test_the_table_names_every_algorithm_and_the_dropped():
    row = {
        "gradient_norm": 0.25,
        "clip_fraction": 0.5,
        "clip_fraction_positive": None,
        "clip_fraction_negative": 1.0,
        "token_clip_fraction": 0.125,
        "dropped": [f"step000000-g00000-s{n:03d}" for n in range(10)],
        "weakened": [],
        "num_effective": 3.25,
        "num_with_advantage": 12,
        "clip_low": 0.003,
        "clip_high": 0.004,
        "range_of": "run",
    }
    unclipped = {"clip_low": None, "clip_high": None, "range_of": None}
    text = render(
        {
            "run": "runs/a",
            "step": 3,
            "weights": "w",
            "old": "recorded",
            "num_responses": 12,
            "num_groups": 3,
            "num_tokens": 99,
            "mean_log_ratio": 1e-3,
            "algorithms": {"gspo": row, "sapo": row | unclipped | {"dropped": []}},
            "cosines": {"gspo": {"gspo": 1.0, "sapo": 0.5}, "sapo": {"gspo": 0.5, "sapo": None}},
        }
    )
    lines = text.splitlines()
    assert lines[0] == "rollouts  step 3 of runs/a: 12 responses of 3 groups, 99 tokens"
    row_of_gspo = next(line for line in lines if line.startswith("gspo"))
    shown = "gspo 0.003 / 0.004 * 2.500e-01 0.5000 - 1.0000 0.1250 10 0 3.2 of 12"
    assert row_of_gspo.split() == shown.split()
    assert next(line for line in lines if line.startswith("sapo")).split()[:3] == ["sapo", "-", "2.500e-01"]
    assert "range: clip_low / clip_high, of the run where marked *" in text
    assert "dropped by gspo: step000000-g00000-s000" in text and "and 2 more (--json has all)" in text
    assert "dropped by sapo" not in text
    assert any(line.split() == ["sapo", "0.5000", "-"] for line in lines)
