"""What a report says of a run, on series made by hand."""

import math
import random
from pathlib import Path

import pytest

from gspo_mega.metrics.trends import rolling, setbacks_of, trend_of
from gspo_mega.report.learning_verdicts import moved_first
from gspo_mega.report.run_record import AttemptRecord, RunRecord
from gspo_mega.report.verdicts import verdicts_of

STEPS = list(range(1, 81))
LAST = " (mean of steps 73 to 80)"


def noisy(values, spread=0.03):
    chance = random.Random(7)
    return [value + chance.gauss(0, spread) for value in values]


def record(**series):
    run = RunRecord(Path("/runs/one"), "one", "train", steps=STEPS)
    run.series = {name.replace("__", "/"): values for name, values in series.items()}
    return run


def collapse(at):
    """Rises to .7 until the step `at`, and is at 0 ten steps later."""
    return [0.3 + 0.4 * step / at if step <= at else max(0.0, 0.7 - 0.07 * (step - at)) for step in STEPS]


def lines(run):
    return {verdict.topic: verdict for verdict in verdicts_of(run)}


def test_a_run_that_learns_and_since_when():
    trend = trend_of(STEPS, noisy([0.3 if step < 30 else 0.3 + 0.01 * (step - 30) for step in STEPS]))
    assert trend.kind == "learns" and 32 <= trend.since <= 50
    assert trend.end - trend.start == pytest.approx(0.46, abs=0.05)


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_a_flat_run_is_not_said_to_learn(level):
    assert trend_of(STEPS, noisy([level] * 80)).kind == "flat"
    assert trend_of(STEPS, [level] * 80).kind == "flat"


def test_many_flat_runs_of_pure_noise():
    kinds = []
    for seed in range(200):
        chance = random.Random(seed)
        kinds.append(trend_of(STEPS, [0.5 + chance.gauss(0, 0.05) for _ in STEPS]).kind)
    assert kinds.count("flat") >= 190 and "collapsed" not in kinds


@pytest.mark.parametrize("at", [20, 40, 60])
def test_the_step_of_a_collapse_is_found(at):
    trend = trend_of(STEPS, noisy(collapse(at), 0.02))
    assert trend.kind == "collapsed" and at <= trend.since <= at + 5
    assert abs(trend.peak_step - at) <= 5


def test_a_plateau_and_a_dip_are_no_collapse():
    dipped = [0.3 + 0.4 * step / 80 - (0.15 if 40 < step < 46 else 0) for step in STEPS]
    assert trend_of(STEPS, noisy(dipped, 0.01)).kind == "learns"
    slipped = [0.6 if step < 40 else 0.5 for step in STEPS]
    assert trend_of(STEPS, noisy(slipped, 0.01)).kind == "falls"


def test_a_dip_is_a_setback_and_a_collapse_is_none():
    dipped = [0.3 + 0.2 * step / 80 - (0.3 if 50 < step < 55 else 0) for step in STEPS]
    said = lines(record(reward__mean=noisy(dipped, 0.02)))
    assert said["Learning"].text.startswith("learns") and said["Setbacks"].metric == "reward/mean"
    (found,) = setbacks_of(STEPS, noisy(dipped, 0.02))
    assert 51 <= found.step <= 54 and found.before == pytest.approx(0.42, abs=0.03) and 53 <= found.back <= 56
    for steady in (collapse(40), [0.5] * 80, [0.3 + 0.4 * step / 80 for step in STEPS]):
        assert setbacks_of(STEPS, noisy(steady, 0.02)) == []
    flat = [setbacks_of(STEPS, [0.5 + random.Random(seed).gauss(0, 0.05) for _ in STEPS]) for seed in range(50)]
    assert not any(flat)


@pytest.mark.parametrize("num_steps", [14, 60, 200])
def test_a_collapse_in_the_first_steps_is_found_there(num_steps):
    """The reward of the quickstart's configuration with ten times its learning rate."""
    steps, rewards = list(range(1, num_steps + 1)), [0.352, 0.016, 0.016] + [0.0] * (num_steps - 3)
    assert trend_of(steps, rewards)[:6] == ("collapsed", 0.352, 0.0, 0.352, 1, 2)
    assert trend_of(steps, rewards).start_steps == (1, 1), "the mean of the steps before it"
    run = record(reward__mean=rewards, policy__k3=[0.194] + [0.01] * (num_steps - 1))
    run.steps = steps
    assert lines(run)["Learning"].text.startswith("collapsed at step 2: reward 0.352 at the start (step 1), 0.000 now")
    assert lines(run)["What moved first"].text == (
        "one step before it is too few to compare; the update of step 1: KL of the update (k3) 0.194"
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_steps_that_a_setback_names_have_the_values_it_says(seed):
    chance = random.Random(seed)
    at, depth, slope = chance.randrange(20, 60), chance.uniform(0.25, 0.5), chance.randrange(1, 5)
    values = [
        0.6 + chance.gauss(0, 0.02) - (depth * max(0.0, 1 - abs(step - at) / (slope + 1)) if step < at + 8 else 0)
        for step in STEPS
    ]
    for one in setbacks_of(STEPS, values):
        value, enough = dict(zip(STEPS, values, strict=True)), 0.9 * one.before
        first, last = one.before_steps
        assert one.before == pytest.approx(sum(value[step] for step in range(first, last + 1)) / (last - first + 1))
        assert value[one.step] == one.lowest == min(value[step] for step in range(one.began, one.back + 1))
        assert all(value[step] < enough for step in range(one.began, one.back)) and value[one.back] >= enough
        assert value[one.began - 1] >= enough


def test_setbacks_have_the_update_before_them_and_what_to_try():
    dipped = [0.3 + 0.2 * step / 80 - (0.3 if 50 < step < 55 else 0) for step in STEPS]
    run = record(reward__mean=noisy(dipped, 0.02), policy__k3=[0.2 if step == 50 else 0.001 for step in STEPS])
    run.settings = {"optimizer.lr": 3e-4, "optimizer.warmup_steps": 0, "algorithm": "gspo"}
    run.settings |= {"objective.clip_low": 3e-4, "objective.clip_high": 4e-4}
    said = lines(run)
    assert "falling from step 51, to" in said["Setbacks"].text
    assert said["Before the setback of step 51"].text == (
        "the update of step 50: KL of the update (k3) 0.2; k3 is in nats per token, as is the clip range,"
        " -0.0003 to +0.0004"
    )
    small = "smaller updates: lower optimizer.lr (now 0.0003) or raise optimizer.warmup_steps (now 0)"
    assert said["What to try"].text == small
    assert "What to try" not in lines(record(reward__mean=noisy([0.3 + 0.4 * step / 80 for step in STEPS], 0.02)))


def test_what_to_try_after_a_collapse_follows_what_moved_first():
    run = record(reward__mean=noisy(collapse(50), 0.02), response__truncated_fraction=[0.3] * 80)
    run.settings = {"optimizer.lr": 3e-4}
    assert lines(run)["What to try"].text.startswith("smaller updates: lower optimizer.lr (now 0.0003)")
    assert "; start again from before step 5" in lines(run)["What to try"].text
    assert (
        "after the collapse of step 5" in lines(run)["Truncation"].text and "raise" not in lines(run)["Truncation"].text
    )
    run.series["mismatch/k3"] = [1e-6 + 1e-8 * math.sin(step) + (1e-2 if step >= 44 else 0) for step in STEPS]
    assert "gspo-mega mismatch" in lines(run)["What to try"].text
    del run.series["mismatch/k3"]
    run.series["response/length_mean"] = [30 + math.sin(step) + (60 if step >= 44 else 0) for step in STEPS]
    assert "read those of step 44 and after" in lines(run)["What to try"].text


def test_since_when_a_run_has_not_risen():
    risen = [0.3 + 0.01 * min(step, 30) for step in STEPS]
    level = trend_of(STEPS, noisy(risen, 0.02)).level_since
    assert level is not None and 20 <= level <= 40
    assert f"no clear rise since step {level}" in lines(record(reward__mean=noisy(risen, 0.02)))["Learning"].text
    assert trend_of(STEPS, noisy([0.3 + 0.005 * step for step in STEPS], 0.02)).level_since is None


# The rewards of the first 11 steps of a small pretrained model that learnt its task, and their standard errors.
QUICK = [0.257, 0.252, 0.303, 0.372, 0.580, 0.629, 0.637, 0.807, 0.961, 0.937, 0.965]
QUICK_ERRORS = [0.042, 0.047, 0.032, 0.039, 0.069, 0.060, 0.066, 0.043, 0.013, 0.017, 0.013]


@pytest.mark.parametrize("num_steps", [8, 9, 10, 11])
def test_a_quick_rise_is_not_taken_for_noise(num_steps):
    trend = trend_of(STEPS[:num_steps], QUICK[:num_steps], QUICK_ERRORS[:num_steps])
    assert (trend.kind, trend.level_since) == ("learns", None)


@pytest.mark.parametrize("num_steps", [8, 11])
def test_the_same_rewards_in_another_order_do_not_learn(num_steps):
    kinds = []
    for seed in range(60):
        pairs = list(zip(QUICK, QUICK_ERRORS))[:num_steps]
        random.Random(seed).shuffle(pairs)
        kinds.append(trend_of(STEPS[:num_steps], [one for one, _ in pairs], [error for _, error in pairs]).kind)
    assert kinds.count("learns") + kinds.count("falls") <= 1 and kinds.count("flat") >= 36, kinds


@pytest.mark.parametrize("num_steps", [8, 16])
def test_short_runs_in_which_nothing_happened_do_not_learn(num_steps, stays=0.5):
    """`stays`: the part of the noise that is there in the next step too."""
    kinds = []
    for seed in range(150):
        chance, noise, values = random.Random(seed), 0.0, []
        for _ in range(num_steps + 20):
            noise = stays * noise + chance.gauss(0, 0.05)
            values.append(0.5 + noise)
        kinds.append(trend_of(STEPS[:num_steps], values[20:]).kind)
    assert max(kinds.count("learns"), kinds.count("falls")) <= 3, kinds


def test_few_steps_that_point_up_are_not_called_flat():
    run = record(reward__mean=[0.30, 0.33, 0.27, 0.35, 0.31, 0.38, 0.40, 0.34, 0.41, 0.43])
    run.steps = STEPS[:10]
    said = lines(run)["Learning"]
    assert said.level == "note" and said.text.startswith("10 steps are too few to judge: reward 0.300 at the start (")


def test_no_run_is_called_flat_whose_held_out_accuracy_rose():
    accuracy, errors = [0.1, *[None] * 78, 0.9], [0.04, *[None] * 78, 0.04]
    run = record(reward__mean=noisy([0.5] * 80))
    assert lines(run)["Learning"].text.startswith("flat: ")
    run.series |= {"eval/accuracy": accuracy, "eval/accuracy_standard_error": errors}
    said = lines(run)["Learning"]
    assert said.level == "note" and said.text.endswith("within noise, but held-out accuracy rose")
    run.series["eval/accuracy"] = [0.1, *[None] * 78, 0.15]
    assert lines(run)["Learning"].text.startswith("flat: ")


def test_the_held_out_accuracy_before_and_after():
    def said(first, last):
        accuracy = [first, *[None] * 78, last]
        return lines(record(eval__accuracy=accuracy, eval__accuracy_standard_error=[0.02, *[None] * 78, 0.02]))

    assert said(0.3, 0.5)["Held-out accuracy"][::2] == ("good", "0.300 ± 0.020 at step 1, 0.500 ± 0.020 at step 80")
    assert said(0.5, 0.3)["Held-out accuracy"].level == "warning"
    assert said(0.30, 0.34)["Held-out accuracy"].text.endswith("within two standard errors")
    assert said(None, 0.34)["Held-out accuracy"].text == "0.340 ± 0.020 at step 80, measured once"


def test_few_steps_are_not_judged():
    run = record(reward__mean=[0.1, 0.9, 0.1])
    run.steps = [1, 2, 3]
    assert "too few" in lines(run)["Learning"].text
    run = record()
    run.steps = []
    assert lines(run)["Learning"].text == "no step is complete yet"


def test_what_moved_first_comes_in_the_order_of_steps():
    run = record(
        reward__mean=noisy(collapse(50), 0.02),
        optimizer__grad_norm=[1.0 + 0.05 * math.sin(step) + (4.0 if step >= 44 else 0) for step in STEPS],
        policy__entropy=[0.5 + 0.01 * math.cos(step) + (0.3 if step >= 48 else 0) for step in STEPS],
        policy__k3=[1e-4 + 1e-6 * math.sin(step) for step in STEPS],
    )
    found = moved_first(run, 52)
    assert [(moved.metric, moved.step) for moved in found] == [("optimizer/grad_norm", 44), ("policy/entropy", 48)]
    said = lines(run)
    assert said["Learning"].text.startswith("collapsed at step 5")
    assert said["What moved first"].text.startswith("gradient norm at step 44")
    assert said["What to look at"].text == "look at reward/mean, optimizer/grad_norm"


def test_a_single_outlier_did_not_move():
    run = record(optimizer__grad_norm=[9.0 if step == 40 else 1.0 + 0.01 * (step % 3) for step in STEPS])
    assert moved_first(run, 80) == []


def test_each_line_from_its_metric():
    run = record(
        mismatch__budget_share=[0.8] * 80,
        policy__clip_fraction=[0.7] * 80,
        policy__token_clip_fraction=[0.6] * 80,
        response__truncated_fraction=[0.2] * 80,
        rollout__num_reward_failures=[0.0] * 79 + [3.0],
        eval__num_reward_failures=[None] * 79 + [2.0],
        groups__constant_fraction=[0.9] * 80,
        optimizer__num_skipped=[1.0] + [0.0] * 79,
        metrics__num_non_finite=[None] * 79 + [2],
        time__step_seconds=[10.0] * 80,
        time__rollout_seconds=[6.0] * 80,
        time__train_seconds=[4.0] * 80,
    )
    run.attempts = [AttemptRecord(1, "failed", 0.0, 1.0, error="a\nrank 1: out of memory"), AttemptRecord(2, "running")]
    said = lines(run)
    assert (
        said["Mismatch of trainer and servers"].text
        == "above budget: the mean |log s| is 0.8 widths of the clip range; mismatch.budget is 0.5" + LAST
    )
    assert said["Clipping"].text.startswith(
        f"70.0% of sequences, 60.0% of tokens{LAST}; the paper's GSPO clips 15% of tokens"
    )
    assert "raise rollout.max_new_tokens" in said["Truncation"].text
    assert said["Reward failures"].text.startswith("3 trajectories")
    assert said["Held-out reward failures"].text == "2 held-out samples could not be scored; they are in no accuracy"
    assert said["Signal"].text.startswith("90% of groups") and said["Gradients"].text.startswith("1 optimizer")
    assert said["Metrics"].text == "2 values were NaN or infinite"
    assert said["Attempts"].text == "1 of 2 failed; attempt 1: a rank 1: out of memory"
    assert said["Time"].text == "rollout takes 60% of a step"
    run.settings = {"mismatch.budget": 0.9}
    assert lines(run)["Mismatch of trainer and servers"].level == "good"


def test_a_failed_run_is_what_stands_out():
    run = record(reward__mean=noisy([0.3 + 0.004 * step for step in STEPS]))
    assert lines(run)["What to look at"].text == "nothing stands out"
    error = "rank 1 was killed by SIGKILL\nend of /x/rank_1.log:\n  loading the model\n  return func(*args, **kwargs)"
    run.attempts = [AttemptRecord(1, "failed", error=error), AttemptRecord(2, "failed", error=error)]
    said = lines(run)
    assert said["Attempts"].text == "2 of 2 failed; attempt 2: rank 1 was killed by SIGKILL"
    assert said["What to look at"][::2] == ("warning", "look at why attempt 2 failed (attempts/0002/logs)")
    run.attempts.append(AttemptRecord(3, "finished"))
    assert lines(run)["What to look at"].text == "nothing stands out"


@pytest.mark.parametrize(
    ("old_log_probs", "share", "level"),
    [("trainer", 0.2, "note"), ("trainer", 0.8, "note"), ("rollout", 0.2, "warning"), ("rollout", 0.8, "warning")],
)
def test_clips_by_the_mismatch_are_a_warning_where_the_servers_log_probs_are_the_old_ones(old_log_probs, share, level):
    run = record(mismatch__budget_share=[share] * 80, mismatch__clip_fraction=[0.3] * 80)
    run.settings = {"old_log_probs": old_log_probs}
    said = lines(run)["Mismatch of trainer and servers"]
    assert said.level == level and "it clips 30% of sequences with no update at all" in said.text
    assert ("were the servers' log-probs the old ones" in said.text) == (old_log_probs == "trainer")
    run.series["mismatch/k3"] = [0.03] * 80  # more than precisions explain
    warns = old_log_probs == "rollout" or share > 0.5
    assert (lines(run)["Mismatch of trainer and servers"].level == "warning") == warns


def test_a_mismatch_above_its_budget_is_a_note_where_the_ratio_does_not_contain_it():
    run = record(mismatch__budget_share=[1.36] * 80, mismatch__clip_fraction=[0.0] * 80, mismatch__k3=[1.7e-3] * 80)
    run.settings = {"old_log_probs": "trainer"}
    said = lines(run)["Mismatch of trainer and servers"]
    assert said.level == "note" and "with old_log_probs: trainer it is not in the ratio" in said.text
    run.settings = {"old_log_probs": "rollout"}
    said = lines(run)["Mismatch of trainer and servers"]
    assert said.level == "warning" and "not in the ratio" not in said.text


@pytest.mark.parametrize(("share", "level"), [(0.4, "good"), (0.6, "note"), (None, "good")])
def test_clips_are_not_good_where_the_mismatch_is_above_its_budget(share, level):
    run = record(policy__clip_fraction=[0.2] * 80)
    if share is not None:
        run.series["mismatch/budget_share"] = [share] * 80
    said = lines(run)["Clipping"]
    assert said.level == level
    assert ("the mismatch alone fills 0.6 of the range" in said.text) == (level == "note")
    run.settings = {"mismatch.budget": 0.7}
    assert lines(run)["Clipping"].level == "good"


def test_an_accuracy_of_zero_is_said_in_words():
    series = [0.0] + [None] * 78 + [0.0]
    run = record(eval__accuracy=series, eval__accuracy_standard_error=series)
    said = lines(run)["Held-out accuracy"].text
    assert said.endswith("; no response was right in either") and "two standard errors" not in said


def test_without_a_signal_nothing_is_said_of_the_clip_range():
    run = record(policy__clip_fraction=[0.0] * 80, groups__constant_fraction=[1.0] * 80)
    nothing = f"nothing to clip: 100% of groups have one reward, and no gradient{LAST}"
    assert lines(run)["Clipping"].text == nothing
    run.series |= {"optimizer/grad_norm": [0.0] * 80, "policy/k3": [1e-4] * 80}
    assert lines(run)["Clipping"].text == nothing + "; the optimizer's momentum still moves the policy"


def test_means_and_noise():
    assert rolling([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


@pytest.mark.parametrize(
    ("level", "kind", "said"),
    [
        (0.22, "good", "explains 22.0% of the variance of returns (mean of steps 74 to 80)"),
        (
            0.004,
            "note",
            "explains 0.4% of the variance of returns (mean of steps 74 to 80): it says little more than their",
        ),
        (-0.1, "note", "explains -10.0% of the variance of returns"),
    ],
)
def test_what_a_critic_explains(level, kind, said):
    verdict = lines(record(critic__explained_variance=[None] + [level] * 79))["Critic"]
    assert verdict.level == kind and verdict.text.startswith(said) and verdict.metric == "critic/explained_variance"
    assert "Critic" not in lines(record(reward__mean=[0.5] * 80))
