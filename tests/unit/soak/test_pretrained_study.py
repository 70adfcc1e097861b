"""The study on a pretrained model: its arms are configurations, a run's row, and what the table says of rows."""

import dataclasses
import json
import math

import pretrained_study
import pytest
import study_rows

from gspo_mega.config import load_config
from gspo_mega.config.notices import notices


def row(arm, seed, accuracy, **changes):
    fields = dataclasses.fields(pretrained_study.Row)
    values = {field.name: {"int": 1, "float": 0.25, "str": "x"}[str(field.type)] for field in fields}
    values |= dict(arm=arm, seed=seed, accuracy=accuracy, area=accuracy / 2, outcome="trained")
    return pretrained_study.Row(**(values | changes))


def test_every_arm_is_a_configuration_and_seeds_are_balanced():
    runs = pretrained_study.in_order(pretrained_study.SEEDS)
    assert len(runs) == len(set(runs)) == 12
    assert [(arm.name, seed) for arm, seed in runs[:5]] == [
        ("gspo-bf16", 1),
        ("grpo-bf16", 1),
        ("gspo-fp8", 1),
        ("grpo-fp8", 1),
        ("gspo-bf16", 2),
    ]
    for arm, seed in runs:
        given = [f"run.name={arm.name}-seed{seed}", f"run.seed={seed}", *arm.overrides()]
        config = load_config(pretrained_study.CONFIG, given, "train").config
        assert (config.algorithm, config.precision, config.old_log_probs) == (arm.algorithm, "bf16", "rollout")
        assert (
            config.server.quantization == {"bf16": "none", "fp8": "fp8"}[arm.server] and config.server.dtype == "auto"
        )
        assert config.mismatch.correction == "none" and config.eval is None and config.kl.coefficient == 0
        low, high = {"gspo": (3e-3, 4e-3), "grpo": (0.2, 0.27)}[arm.algorithm]
        assert (config.objective.clip_low, config.objective.clip_high) == (low, high)
        assert config.objective.aggregation == "sequence_mean_token_mean"
        assert (config.train.num_steps, config.batch.prompts_per_step, config.batch.group_size) == (8, 8, 8)
        assert config.batch.num_mini_batches == 2 and config.batch.share_prefixes == "prompts"
    assert "8 steps of 8 prompts x 8 responses, 2 optimizer steps each" in pretrained_study.__doc__


def lines(k3):
    yield {"step": 0, "eval/accuracy": 0.1}
    for step in range(1, 9):
        line = {"step": step, "reward/mean": step / 16, "mismatch/k3": k3 * step, "mismatch/abs_log_ratio_max": 1.0}
        line |= {"mismatch/abs_log_ratio_mean": step / 100, "policy/clip_fraction": 0.5, "policy/kept_fraction": 1.0}
        line |= {"policy/entropy": 1.0 / step, "policy/mini_batch/1/clip_fraction_negative": 0.5}
        if step > 4:  # the mini-batches before have no response with A > 0
            line |= {"policy/mini_batch/0/clip_fraction_positive": step / 8}
            line |= {"policy/mini_batch/0/positive_mass_left": 1 - step / 8}
        yield line


@pytest.fixture
def study(monkeypatch, tmp_path):
    """study.train(arm, seed), of a run that takes no time; `k3` before its first update, `code` it ends with."""

    @dataclasses.dataclass(frozen=True)
    class Made(pretrained_study.Study):
        k3: dict = dataclasses.field(default_factory=lambda: {"bf16": 1e-3, "fp8": 0.03})
        codes: list = dataclasses.field(default_factory=list)

        def cold_start(self):
            return tmp_path, "abc", (0.1, 0.02)

        def accuracy(self, model, name):
            return {"accuracy": 0.6, "standard_error": 0.03}

    made = Made(tmp_path)

    def call(command, log, good=(0,)):
        name = next(word.removeprefix("run.name=") for word in command if word.startswith("run.name="))
        assert not any(word.startswith("eval.") for word in command) and "eval=null" in command
        folder = tmp_path / "arms" / name
        (folder / "hf").mkdir(parents=True)
        k3 = made.k3[name.split("-")[1]]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(k3)))
        return made.codes.pop() if made.codes else 0

    monkeypatch.setattr(pretrained_study, "call", call)
    return made


def test_a_run_has_a_row_that_is_read_back(study, tmp_path):
    arm = pretrained_study.ARMS[0]
    made = study.train(arm, 2)
    assert (made.arm, made.seed, made.num_steps, made.outcome, made.cold_start) == ("gspo-bf16", 2, 8, "trained", "abc")
    assert made.area == pytest.approx(36 / 8 / 16) and made.reward_first == 1 / 16
    assert made.reward_best == made.reward_last == pytest.approx((6 + 7 + 8) / 3 / 16)
    assert made.k3_first == 1e-3 and made.k3_last == pytest.approx(7e-3)
    assert made.abs_log_ratio == pytest.approx(0.045)
    assert made.clip_positive_0 == pytest.approx((5 + 6 + 7 + 8) / 32) and math.isnan(made.clip_positive_1)
    assert made.positive_left == pytest.approx(1 - 26 / 32) and made.clip_negative_1 == 0.5
    assert not (tmp_path / "arms" / "gspo-bf16-seed2" / "hf").exists(), "weights are not kept"
    file = tmp_path / "rows.csv"
    study_rows.append_row(file, made)
    (back,) = study_rows.read_table(file, pretrained_study.Row)
    assert pretrained_study.finished([back]) == {("gspo-bf16", 2)} and back.k3_first == 1e-3


def test_a_run_that_is_no_longer_finite_has_a_row(study):
    study.codes.append(pretrained_study.NumericsError.exit_code)
    made = study.train(pretrained_study.ARMS[2], 1)
    assert (made.outcome, made.accuracy, made.accuracy_se) == ("not finite", 0.0, 0.0)


@pytest.mark.parametrize(("server", "k3"), [("fp8", 1e-3), ("bf16", 0.03)])
def test_an_arm_whose_gap_is_not_its_servers_has_no_row(study, server, k3):
    study.k3[server] = k3
    arm = next(arm for arm in pretrained_study.ARMS if arm.server == server)
    with pytest.raises(pretrained_study.Failed, match="not what it is called"):
        study.train(arm, 1)


def test_the_table_says_what_can_be_told():
    """By hand: each arm has its mean -+.02 or so: s = .02 with 4 degrees of freedom, of area half of it. A loss, two arms
    of two runs, is detectable from 3.717 s on, two losses from 5.257 s.
    """
    step = 0.02 / math.sqrt(2)
    means = {"gspo-bf16": 0.60, "grpo-bf16": 0.58, "gspo-fp8": 0.30, "grpo-fp8": 0.54}
    rows = [row(arm, seed, mean + (2 * seed - 3) * step) for arm, mean in means.items() for seed in (1, 2)]
    text = pretrained_study.table(rows)
    assert "8 of 12 runs. Spread between seeds: 0.020 of accuracy (4 degrees of freedom) and 0.010 of area" in text
    assert "| GSPO loses (bf16 less FP8) | **+0.300** | 0.074 | **+0.150** | 0.037 |" in text
    assert "| GRPO loses (bf16 less FP8) | +0.040 | 0.074 | +0.020 | 0.037 |" in text
    assert "| GSPO's loss less GRPO's | **+0.260** | 0.105 | **+0.130** | 0.053 |" in text
    assert "| GSPO less GRPO, bf16 server | +0.020 |" in text and "GRPO bears more." in text
    near = [row(arm, seed, 0.5 + (2 * seed - 3) * step) for arm in means for seed in (1, 2)]
    assert "that either bears more was not seen" in pretrained_study.table(near)
    turned = {"gspo-fp8": "grpo-fp8", "grpo-fp8": "gspo-fp8"}
    turned_rows = [dataclasses.replace(one, arm=turned.get(one.arm, one.arm)) for one in rows]
    assert "GSPO bears more." in pretrained_study.table(turned_rows)
    assert "not known yet" in pretrained_study.table(rows[:1])
    unknown = [dataclasses.replace(one, clip_positive_0=math.nan, clip_positive_1=math.nan) for one in rows[:2]]
    assert "| -, - | 0.25, 0.25 |" in pretrained_study.table(unknown)


def test_the_table_goes_between_its_marks(tmp_path, capsys):
    file, page = tmp_path / "rows.csv", tmp_path / "page.md"
    page.write_text("above\n<!-- rows of pretrained begin -->\nold\n<!-- rows of pretrained end -->\nbelow\n")
    options = ["--rows", str(file), "--page", str(page)]
    assert pretrained_study.main([*options, "--table"]) == 1 and "old" in page.read_text()
    study_rows.append_row(file, row("gspo-bf16", 1, 0.5))
    assert pretrained_study.main([*options, "--table"]) == 0
    assert "| `gspo-bf16` |" in page.read_text() and page.read_text().endswith("\nbelow\n")
    capsys.readouterr()
    assert pretrained_study.main([*options, "--plan"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert len(planned) == 12 and [line for line in planned if line.endswith("has a row")] == [planned[0]]


def test_the_run_says_what_its_arm_does():
    """An FP8 arm with the server's log-probs as old ones names that its ratio has the mismatch."""
    config = load_config(pretrained_study.CONFIG, pretrained_study.ARMS[2].overrides(), "train").config
    assert any("old_log_probs: rollout" in notice for notice in notices(config))
