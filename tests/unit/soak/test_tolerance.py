"""The pure parts of tests/soak/tolerance.py: rows, resumption, definitions, statistics, figures."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import tolerance
import tolerance_figures
import tolerance_rows
from tolerance_cases import line_of, row

from gspo_mega.metrics.catalogue import find_metric

# --- rows and resumption --------------------------------------------------------------------------------------------


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rows.csv"
    assert tolerance_rows.read_rows(path) == []
    written = [row(), row(seed=2, k3=1.5e-7, log_s_mismatch_sd=math.nan, outcome="collapsed")]
    for one in written:
        tolerance_rows.append_row(path, one)
    read = tolerance_rows.read_rows(path)
    assert read[0] == written[0] and math.isnan(read[1].log_s_mismatch_sd)
    assert (read[1].k3, read[1].seed, read[1].outcome) == (1.5e-7, 2, "collapsed")
    assert path.read_text().count("protocol") == 1 and path.read_text().endswith("\n")


def test_a_row_cut_short_and_other_columns_are_errors(tmp_path):
    path = tmp_path / "rows.csv"
    tolerance_rows.append_row(path, row())
    whole = path.read_text()
    path.write_text(whole[: whole.rindex(",")] + "\n")
    with pytest.raises(ValueError, match=f"rows.csv:2: {len(tolerance_rows.COLUMNS)} columns expected"):
        tolerance_rows.read_rows(path)
    path.write_text(whole.replace("accuracy_se", "error", 1))
    with pytest.raises(ValueError, match="not the columns"):
        tolerance_rows.read_rows(path)


@pytest.fixture
def study(monkeypatch):
    """The study with runs that take no time; the list of those that were made. `stop_at`: the one that is interrupted."""

    class Made(list):
        stop_at = None
        checksum = "abc"

    made = Made()

    def run(self, arm, seed):
        if len(made) == made.stop_at:
            raise KeyboardInterrupt
        made.append((arm.name, seed))
        return row(arm.name, seed, block=arm.block, cold_start=made.checksum)

    monkeypatch.setattr(tolerance.Study, "run", run)
    monkeypatch.setattr(tolerance.Study, "cold_start", lambda self: (Path("hf"), made.checksum, (0.4, 0.02)))
    monkeypatch.setattr(tolerance.signal, "signal", lambda *_: None)
    return made


def test_an_interrupt_loses_the_run_in_flight_alone(study, tmp_path):
    arguments = ["--rows", str(tmp_path / "rows.csv"), "--folder", str(tmp_path), "--block", "anchors", "direct"]
    study.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        tolerance.main(arguments)
    assert len(tolerance_rows.read_rows(tmp_path / "rows.csv")) == 5
    study.stop_at = None
    assert tolerance.main(arguments) == 0
    assert len(study) == len(set(study)) == 9 + 12
    assert tolerance.main(arguments) == 0 and len(study) == 21, "nothing is left to make"


def test_no_run_starts_after_the_hours(study, tmp_path):
    assert tolerance.main(["--rows", str(tmp_path / "rows.csv"), "--folder", str(tmp_path), "--hours", "0"]) == 0
    assert study == []


def test_arms_by_name(study, tmp_path, capsys):
    place = ["--rows", str(tmp_path / "rows.csv"), "--folder", str(tmp_path)]
    assert tolerance.main([*place, "--arm", "grpo-fp32-same-old_trainer", "--seeds", "2"]) == 0
    assert study == [("grpo-fp32-same-old_trainer", 2)]
    with pytest.raises(SystemExit):
        tolerance.main([*place, "--arm", "ppo"])
    assert "no such arm: ppo" in capsys.readouterr().err


def test_two_cold_starts_are_not_mixed(study, tmp_path, capsys):
    tolerance_rows.append_row(tmp_path / "rows.csv", row(cold_start="other"))
    assert tolerance.main(["--rows", str(tmp_path / "rows.csv"), "--folder", str(tmp_path)]) == 2
    assert study == [] and "rows of another cold start (here abc): seed 1 of other; name" in capsys.readouterr().out
    # Seeds are compared one by one: another one may have another cold start.
    assert tolerance.main(["--rows", str(tmp_path / "rows.csv"), "--folder", str(tmp_path), "--seeds", "2"]) == 0
    assert {seed for _, seed in study} == {2}


def test_rows_of_another_protocol_are_no_rows_of_this_one():
    rows = [row(seed=1), row(seed=2, protocol=tolerance.PROTOCOL + 1)]
    assert tolerance_rows.finished(rows, tolerance.PROTOCOL) == {(rows[0].arm, 1)}


# --- definitions ----------------------------------------------------------------------------------------------------


def test_columns_of_a_run():
    steps = []
    for step in range(1, 13):
        line = {"step": step, "reward/mean": step / 100, "mismatch/k3": 0.1 * step, "mismatch/abs_log_ratio_max": 1.0}
        line |= {f"policy/{name}": 0.5 for name in ("clip_fraction", "kept_fraction", "entropy")}
        line |= {
            f"policy/mini_batch/{m}/clip_fraction_{sign}": m / 10 for m in range(4) for sign in ("positive", "negative")
        }
        line |= {f"policy/mini_batch/0/{sign}_mass_left": 0.75 for sign in ("positive", "negative")}
        steps.append(line)
    steps.append({"step": 12, "eval/accuracy": 0.5})  # the evaluation after a stop has a line of its own
    columns = tolerance_rows.measured(steps)
    assert columns["reward_last"] == columns["reward_best"] == pytest.approx(0.075)
    assert columns["k3_first"] == pytest.approx(0.1) and columns["k3"] == pytest.approx(0.65)
    assert columns["k3_last"] == pytest.approx(0.75) and columns["clip_negative_3"] == pytest.approx(0.3)
    assert math.isnan(columns["log_s_mismatch_sd"]), "no bin of lengths was measured"
    assert set(columns) <= set(tolerance_rows.COLUMNS)
    steps[3]["mismatch/k3"] = None
    assert math.isnan(tolerance_rows.measured(steps)["k3"]), "a value that was not finite is not left out"


def test_a_clip_fraction_by_sign_is_of_the_steps_that_had_that_sign():
    """A mini-batch without A > 0 has no such fraction, and what it has left of their mass, 1, is of nothing."""
    name, left = "policy/mini_batch/0/clip_fraction_positive", "policy/mini_batch/0/positive_mass_left"
    steps = [line_of(**{name: 0.2, left: 0.8}), line_of(**{name: None, left: 1.0}), line_of(**{name: 0.4, left: 0.6})]
    columns = tolerance_rows.measured(steps)
    assert columns["clip_positive_0"] == pytest.approx(0.3) and columns["positive_left"] == pytest.approx(0.7)
    never = tolerance_rows.measured([line_of(**{name: None, left: 1.0})])
    assert math.isnan(never["clip_positive_0"]) and math.isnan(never["positive_left"])
    not_finite = tolerance_rows.measured([line_of(), line_of() | {name: None}])
    assert math.isnan(not_finite["clip_positive_0"]), "null is a value that was not finite"


def test_the_spread_of_log_s_is_that_of_all_responses_before_any_update():
    """From the bins of lengths, which are written whoever's log-probs are the old ones."""
    log_s = {"1-63": [0.01, -0.03, 0.02], "64-255": [0.05, 0.04]}
    line = line_of()
    for name, values in log_s.items():
        of_bin = dict(num_sequences=len(values), log_s_mean=fmean(values), log_s_sd=pstdev(values))
        line |= {f"mismatch/length/{name}/{key}": float(value) for key, value in of_bin.items()}
    columns = tolerance_rows.measured([line, line_of()])
    assert columns["log_s_mismatch_sd"] == pytest.approx(pstdev([*log_s["1-63"], *log_s["64-255"]]), rel=1e-12)


def test_the_metrics_that_are_read_are_in_the_catalogue():
    read = set()

    class Line(dict):
        def get(self, name, default=None):
            read.add(name)
            return 0.5

        def __contains__(self, name):
            return self.get(name) is not None

    tolerance_rows.measured([Line()])
    assert len(read) > 15
    for name in read:
        find_metric(name)


@pytest.mark.parametrize(
    ("accuracy", "last", "collapsed"),
    [(0.38, 0.6, False), (0.371, 0.6, False), (0.369, 0.6, True), (0.6, 0.31, False), (0.6, 0.29, True)],
)
def test_collapse(accuracy, last, collapsed):
    assert tolerance_rows.has_collapsed((0.4, 0.0), (accuracy, 0.015), best=0.6, last=last) == collapsed


def test_worse_than_the_cold_start_counts_the_errors_of_both():
    """Both accuracies are estimates: 2 sqrt(.015^2 + .02^2) = .05."""
    for accuracy, collapsed in ((0.351, False), (0.349, True)):
        assert tolerance_rows.has_collapsed((0.4, 0.02), (accuracy, 0.015), best=0.6, last=0.6) == collapsed


# --- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "freedom", "value"),
    [
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.975, 20, 2.086),
        (0.8, 4, 0.941),
        (0.8, 20, 0.860),
        (0.975, 1000, 1.962),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(p, freedom, value):
    assert tolerance_rows.t_quantile(p, freedom) == pytest.approx(value, abs=6e-4)


def test_the_spread_is_pooled_within_arms():
    assert tolerance_rows.pooled_spread([[0.1, 0.3], [0.7, 0.7, 0.7], [0.9]]) == (pytest.approx(math.sqrt(0.02 / 3)), 3)
    with pytest.raises(ValueError, match="no arm has two seeds"):
        tolerance_rows.pooled_spread([[0.1], [0.2]])
    rows = [row("a", 1, 0.5), row("a", 2, 0.7), row("b", 1, 0.1), row("b", 2, 0.9, outcome="collapsed")]
    assert tolerance_rows.spread_of(rows) == (pytest.approx(math.sqrt(0.02)), 1), "b has collapsed in part"


def test_the_detectable_differences_that_the_protocol_names():
    """Of two arms, and of two losses, each of which is a difference of two arms."""
    for freedom, arms, losses in ((4, 0.091, 0.129), (20, 0.072, 0.102)):
        assert tolerance_rows.smallest_detectable(0.03, freedom, (3, 3)) == pytest.approx(arms, abs=5e-4)
        assert tolerance_rows.smallest_detectable(0.03, freedom, (3, 3, 3, 3)) == pytest.approx(losses, abs=5e-4)
    assert (
        "with s = .03" in tolerance.__doc__ and ".091 with 4 degrees of freedom and .072 with 20" in tolerance.__doc__
    )
    assert "s sqrt(4/3)" in tolerance.__doc__ and ".129 and .102" in tolerance.__doc__
    uneven = tolerance_rows.smallest_detectable(0.03, 4, (3, 1))
    assert uneven == pytest.approx(0.091 * math.sqrt((1 / 3 + 1) / (2 / 3)), abs=1e-3)


@pytest.mark.parametrize(
    ("gspo_arm", "grpo_arm", "said"),
    [
        # spread .02 from 8 degrees of freedom: (2.306 + .889) .02 sqrt(4/3) = .074
        (0.55, 0.45, "| 0.050 | 0.150 | -0.100, GSPO loses less | 0.074 |"),
        (0.45, 0.55, "| 0.150 | 0.050 | +0.100, GRPO loses less | 0.074 |"),
        # .06 could be told apart if two arms were compared (.052), but two losses are
        (0.54, 0.48, "| 0.060 | 0.120 | -0.060, no difference seen | 0.074 |"),
    ],
)
def test_which_algorithm_bears_more_is_said_of_losses(gspo_arm, grpo_arm, said):
    rows = []
    for seed, off in ((1, -0.02), (2, 0.0), (3, 0.02)):
        for algorithm, with_gap in (("gspo", gspo_arm), ("grpo", grpo_arm)):
            rows.append(row(f"{algorithm}-fp32-same-old_trainer", seed, 0.6 + off))
            rows.append(row(f"{algorithm}-fp32-same-1bits-old_rollout", seed, with_gap + off))
    text = tolerance_figures.table(rows)
    assert f"\n| `fp32-same-1bits-old_rollout` {said}\n" in text
    assert "\n| `fp32-same-old_trainer`" not in text, "an anchor is compared with nothing"
    without_anchor = [one for one in rows if one.arm != "grpo-fp32-same-old_trainer"]
    assert "loses" not in tolerance_figures.table(without_anchor), "there is no loss without an anchor"


def test_arms_are_compared_within_cold_starts():
    """Every run of seed 2 ends .3 higher, for its cold start: not a spread, and no difference to an anchor without one."""
    rows = []
    for seed, higher, start in ((1, 0.0, "x"), (2, 0.3, "y"), (3, 0.3, "y")):
        rows.append(row(seed=seed, accuracy=0.5 + higher, before=0.2 + higher, cold_start=start))
        arm = "gspo-fp32-same-1bits-old_trainer"
        rows.append(row(arm, seed, accuracy=0.4 + higher + seed / 100, before=0.2 + higher, cold_start=start))
    text = tolerance_figures.table(rows)
    assert "| 0.500 0.800 0.800 |" in text, "the table has what was measured"
    # Without the effects -+.15375 the squares within arms are .0000375 + .0000875, over 4 - 1 degrees of freedom.
    assert "-0.080, beyond ± 0.011" in text and "Spread between seeds 0.006 (3 degrees" in text
    assert "Cold starts 0.200 ± 0.250 (seed 1), 0.500 ± 0.250 (seed 2, 3): arms are compared seed by seed" in text


# --- figures --------------------------------------------------------------------------------------------------------


def test_figures_show_every_run_and_the_page_gets_the_table(tmp_path):
    path = tmp_path / "rows.csv"
    other = "gspo-fp32-same-1bits-old_rollout"
    for seed, accuracy in ((1, 0.60), (2, 0.62), (3, 0.64)):
        tolerance_rows.append_row(path, row(seed=seed, accuracy=accuracy, k3_first=4e-13))
        tolerance_rows.append_row(path, row(other, seed, accuracy - 0.1, k3_first=0.01 * seed, outcome="collapsed"))
    results = tmp_path / "RESULTS.md"
    results.write_text("above\n<!-- rows of precision begin -->\nold\n<!-- rows of precision end -->\nbelow\n")
    place = ["--out", str(tmp_path), "--page", str(results)]
    assert tolerance_figures.main(["--rows", str(path), *place]) == 0
    protocol = tolerance.PROTOCOL
    for name, num_marks in ((f"tolerance_arms_{protocol}.svg", 6), (f"tolerance_dose_{protocol}.svg", 6)):
        circles = ElementTree.parse(tmp_path / name).findall("{http://www.w3.org/2000/svg}circle")
        assert len(circles) == num_marks + 3
    page = results.read_text()
    assert page.startswith("above\n") and page.endswith("\nbelow\n") and "old\n" not in page.replace("old_", "")
    # two seeds' spread .02 with three runs on each side: 2 x .02 x sqrt(2/3)
    assert "-0.100, beyond ± 0.033" in page and "3 of 3" in page and "Spread between seeds 0.020 (2 degrees" in page


def test_the_committed_figures_and_table_are_of_the_committed_rows():
    docs, rows = tolerance.ROWS.parent, tolerance_rows.read_rows(tolerance.ROWS)
    assert {one.outcome for one in rows} <= {"trained", "collapsed", "not finite", "ended"} and len(rows) > 0
    for protocol in tolerance_figures.PROTOCOLS:
        mine = [one for one in rows if one.protocol == protocol]
        for seed in tolerance.SEEDS:
            assert len({one.cold_start for one in mine if one.seed == seed}) <= 1, "compared among themselves"
        assert len(tolerance_rows.finished(mine, protocol)) == len(mine), "one row for each arm and seed"
    text, figures = tolerance_figures.documents(rows)
    assert {path.name: path.read_text() for path in docs.glob("tolerance_*.svg")} == figures
    study = (docs / "precision.md").read_text()
    assert all(f"]({name})" in study for name in figures)
    page = tolerance_figures.RESULTS.read_text()
    assert tolerance_figures.with_table(page, "precision", text) == page, "run: python tests/soak/tolerance_figures.py"


def test_a_page_without_the_marks_is_an_error():
    with pytest.raises(ValueError, match="rows of claims begin"):
        tolerance_figures.with_table("text <!-- rows of precision begin -->", "claims", "table")


def test_the_plan_of_the_study_is_its_command(capsys, tmp_path):
    tolerance_rows.append_row(tmp_path / "rows.csv", row())
    assert tolerance.main(["--plan", "--rows", str(tmp_path / "rows.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 57 and "has a row" in lines[0] and "has a row" not in "".join(lines[1:])
    assert tolerance.main(["--plan", "--breaking", "0", "--rows", str(tmp_path / "rows.csv")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
