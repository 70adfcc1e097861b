"""A whole `gspo-mega train` run with real parts: what it shows, what it writes, and that both are true."""

import itertools
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from reward_services import service
from router_ties import differ_by_rounding
from run_support import PASSES_MARKER, REPOSITORY, Command, ScoreLog, small_overrides
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.config import load_config
from gspo_mega.data.held_out_responses import before_and_after
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import TokenGaps
from gspo_mega.metrics.catalogue import CATALOGUE, find_metric
from gspo_mega.metrics.tables import CRITIC, PHASES
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.report.learning_verdicts import learning_verdicts
from gspo_mega.report.run_record import read_run
from gspo_mega.rollout.registration import read_registrations, read_secret

CONFIG = REPOSITORY / "configs/quickstart.yaml"
NUM_STEPS = 3
KEY = "sk-0f9d1c-whole-run"


@pytest.fixture(scope="module")
def lengths():
    """The service, which rewards a response's length."""
    with service() as asked, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENGTHS_KEY", KEY)
        yield asked


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, quickstart_files, lengths):
    """(command, run folder, overrides) of a run that ended. Its rewards: the task's own, a user's function, and a
    service with a key. Its servers run in a Python that `server.python` names.
    """
    folder = tmp_path_factory.mktemp("whole")
    other = folder / "other-python"
    other.write_text(f'#!/bin/sh\necho "$*" >> {folder / "other-python.calls"}\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    rewards = (
        "[{function: arithmetic, weight: 0.5}, {function: lengths, weight: 0.001},"
        f" {{function: 'run_support:score', options: {{log: {folder / 'scores'}}}}}]"
    )
    overrides = [
        *small_overrides(quickstart_files, folder / "runs", "whole"),
        f"reward.functions={rewards}",
        f"reward.http=[{{name: lengths, url: '{lengths.url}', api_key_variable: LENGTHS_KEY}}]",
        f"train.num_steps={NUM_STEPS}",
        "eval.every_steps=2",
        "checkpoint.every_steps=1",
        f"server.python={other}",
        "diagnostics.token_mismatch=true",
    ]
    command = Command(folder, "train", str(CONFIG), *overrides)
    try:
        command.finish()
        yield command, RunFolder(folder / "runs" / "whole"), overrides
    finally:
        command.end()


@pytest.fixture(scope="module")
def lines(whole_run):
    """Of the steps; what was measured before the first is a line of its own."""
    return [line for line in read_metrics(whole_run[1].metrics_file) if line["step"] > 0]


def test_it_ends_well_and_leaves_nothing_running(whole_run):
    command, run, _ = whole_run
    assert command.process.returncode == 0, command.out + command.err
    assert command.err == ""
    assert command.left_running(run.path) == []


def test_a_service_gets_its_key_and_nothing_else_does(whole_run, lengths):
    command, run, _ = whole_run
    assert sum(len(body["responses"]) for _, body in lengths.requests) >= NUM_STEPS * 16
    assert {headers["Authorization"] for headers, _ in lengths.requests} == {f"Bearer {KEY}"}
    assert KEY not in command.out + command.err
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == [] and run.config_file in files


def test_servers_run_in_the_python_that_is_named_and_ranks_do_not(whole_run):
    _, run, _ = whole_run
    started = [
        line for line in (run.path.parents[1] / "other-python.calls").read_text().splitlines() if line.startswith("-m ")
    ]
    assert len(started) == 1 and started[0].startswith(f"-m gspo_mega serve {run.config_file} "), started


def test_the_console_has_a_line_a_step_and_the_final_table(whole_run, lines):
    command, run, _ = whole_run
    shown = [line for line in command.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == [f"{step}/{NUM_STEPS}" for step in range(1, NUM_STEPS + 1)]
    table = command.out[command.out.index("held-out accuracy before  ") :]
    assert re.search(rf"^steps \(optimizer steps\) +{NUM_STEPS} \({2 * NUM_STEPS}\)$", table, re.M)
    assert re.search(rf"^weight version +{NUM_STEPS}$", table, re.M)
    assert f"result   {run.huggingface_dir} " in table
    seconds = sum(line["time/step_seconds"] for line in lines)
    assert re.search(rf"^time in steps +{seconds:.1f} s$", table, re.M)
    for phase in ("rollout", "old_log_probs", "train", "publish", "eval", "checkpoint"):
        assert re.search(rf"^  {phase} +[\d.]+ s +\d+%$", table, re.M), phase
    result = read_json(run.latest_attempt().result_file)
    assert re.search(rf"^saving after the last step +{result['saving_seconds']:.1f} s$", table, re.M)
    assert result["saving_seconds"] > 0.05, "the last checkpoint and the export"
    assert (result["step"], result["weight_version"]) == (NUM_STEPS, NUM_STEPS)
    assert result["seconds"] == pytest.approx(seconds)


def test_a_line_of_metrics_a_step_each_name_in_the_catalogue(lines):
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line in lines:
        for name in line.keys() - {"step", "time"}:
            find_metric(name)


def test_where_the_run_begins_is_step_0_of_its_record_and_of_tensorboard(whole_run):
    _, run, _ = whole_run
    first, *others = read_metrics(run.metrics_file)
    assert first["step"] == 0 and 0 not in [line["step"] for line in others]
    result = read_json(run.latest_attempt().result_file)
    assert [first["eval/accuracy"], first["eval/accuracy_standard_error"]] == result["accuracy_before"]
    assert first["eval/num_samples"] == 8 and not [name for name in first if name.startswith(("reward/", "time/"))]
    events = EventAccumulator(str(run.tensorboard_dir)).Reload()
    shown = {event.step: event.value for event in events.Scalars("eval/accuracy")}
    assert (
        shown[0] == pytest.approx(first["eval/accuracy"])
        and min(event.step for event in events.Scalars("reward/mean")) == 1
    )
    before, after = result["accuracy_before"][0], result["accuracy_after"][0]
    (said,) = [one.text for one in learning_verdicts(read_run(run.path)) if one.topic == "Held-out accuracy"]
    assert said.startswith(f"{before:.3f} ± ") and f" before the first step, {after:.3f} ± " in said


def test_every_value_is_finite(lines):
    assert [
        (line["step"], name, value)
        for line in lines
        for name, value in line.items()
        if value is None or not math.isfinite(value)
    ] == []


def test_the_values_are_those_of_this_run(lines, whole_run):
    for line in lines:
        assert line["publish/weight_version"] == line["step"]
        assert line["rollout/num_trajectories"] == 16 and line["groups/num_groups"] == 4
        assert line["rollout/staleness_max"] == 0
        assert line["episode/turns_max"] == line["episode/rows_mean"] == 1 and line["episode/masked_fraction"] == 0
        assert (
            line["rollout/num_retries"]
            == line["rollout/num_request_failures"]
            == line["rollout/num_reward_failures"]
            == 0
        )
        assert line["optimizer/num_optimizer_steps"] == 2 * line["step"]
        assert line["data/epoch"] == 4 * line["step"] / 64
        parts = {name: line[f"reward/function/{name}"] for name in ("arithmetic", "run_support.score", "lengths")}
        assert line["reward/mean"] == pytest.approx(
            0.5 * parts["arithmetic"] + parts["run_support.score"] + 0.001 * parts["lengths"], abs=1e-12
        )
        assert (
            line["policy/num_sequences"]
            == line["policy/mini_batch/0/num_sequences"] + line["policy/mini_batch/1/num_sequences"]
            == 16
        )
        # The first mini-batch is trained on by the very policy that computed its old log-probs.
        assert line["policy/mini_batch/0/clip_fraction"] == line["policy/mini_batch/0/k3"] == 0
        assert line["mismatch/abs_log_ratio_max"] > 0
        assert differ_by_rounding(whole_run[1], line), "fp32: the two engines differ by rounding, and by no more"
        assert 0 < line["optimizer/grad_norm"] <= line["optimizer/grad_norm_max"]
    assert sum(line["rollout/num_generated_tokens"] for line in lines) == sum(
        16 * line["response/length_mean"] for line in lines
    )
    assert ["eval/accuracy" in line for line in lines] == [False, True, True], "every 2 steps, and at the end"
    evaluations = 3  # the third before the first step
    assert len(ScoreLog(whole_run[1].path.parents[1] / "scores")) == 16 * NUM_STEPS + 8 * evaluations


def test_responses_of_each_evaluation_are_kept_and_shown(whole_run):
    command, run, _ = whole_run
    assert sorted(path.name for path in run.evaluations_dir.iterdir()) == [
        f"step_{step:08d}.jsonl" for step in (0, 2, 3)
    ]
    (change,), problems = before_and_after(run)
    assert (change.first_step, change.last_step, len(change.prompts), problems) == (0, NUM_STEPS, 8, [])
    measured = {
        line["step"]: line["eval/accuracy"] for line in read_metrics(run.metrics_file) if line["step"] in (0, 3)
    }
    before = [one.before for one in change.prompts if one.before is not None]
    assert sum(one["correct"] for one in before) / 8 == measured[0], "every prompt is kept"
    assert sum(one.after["correct"] for one in change.prompts) / 8 == measured[3]
    assert f"held-out answers at step 0 and at step {NUM_STEPS}\n" in command.out


def test_the_phases_account_for_the_time(lines):
    for line in lines:
        phases = sum(line.get(f"time/{phase}_seconds", 0.0) for phase in PHASES)
        assert phases == pytest.approx(line["time/step_seconds"], rel=0.02)
        assert line["time/other_seconds"] <= 0.02 * line["time/step_seconds"] + 0.1
        parts = line["time/rollout/generate_seconds"] + line["time/rollout/score_seconds"]
        assert parts <= line["time/rollout_seconds"]
    for before, line in itertools.pairwise(lines):
        assert line["time"] - before["time"] == pytest.approx(line["time/step_seconds"], rel=0.02, abs=0.25), (
            "by the clock on the wall"
        )


def test_each_step_published_its_weights_and_the_result_is_the_last_of_them(whole_run):
    _, run, _ = whole_run
    assert sorted(path.name for path in run.weights_dir.glob("v*")) == [
        f"v{version:08d}" for version in range(NUM_STEPS + 1)
    ]
    current = read_json(run.current_weights_file)
    assert current == {"weight_version": NUM_STEPS, "path": str(run.weights_version_dir(NUM_STEPS))}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    token_ids = torch.tensor([AutoTokenizer.from_pretrained(run.huggingface_dir)("4719+2386=9+6=15#7105")["input_ids"]])
    folders = (
        run.weights_version_dir(0),
        run.weights_version_dir(NUM_STEPS - 1),
        run.weights_version_dir(NUM_STEPS),
        run.huggingface_dir,
    )
    with torch.no_grad():
        start, before, last, result = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(token_ids).logits for folder in folders
        )
    assert torch.equal(result, last)
    assert not torch.equal(last, before) and not torch.equal(before, start), "each step changed the policy"


def test_every_trained_token_has_its_mismatch_recorded(whole_run, lines):
    journal = Journal(whole_run[1].journal_dir)
    for line in lines:
        batch = journal.read(line["step"] - 1).batch.scored()
        recorded = TokenGaps(journal.folder, line["step"] - 1)
        gaps = [values for episode in batch.episodes for values in recorded.of(episode).values()]
        assert [len(values) for values in gaps] == [len(turn.token_ids) for one in batch.episodes for turn in one.turns]
        sizes = np.abs(np.concatenate(gaps).astype(np.float64))
        assert sizes.mean() == pytest.approx(line["mismatch/abs_log_ratio_mean"], rel=0.1, abs=1e-7)
        assert sizes.max() == pytest.approx(line["mismatch/abs_log_ratio_max"], rel=1e-3, abs=1e-7)


def test_the_run_folder_has_all_that_was_promised(whole_run):
    _command, run, overrides = whole_run
    assert load_config(run.config_file).config == load_config(CONFIG, [PASSES_MARKER, *overrides]).config
    assert run.latest_checkpoint_file.read_text().strip() == f"step_{NUM_STEPS:08d}"
    assert sorted(path.name for path in run.checkpoints_dir.glob("step_*")) == ["step_00000002", "step_00000003"]
    assert list(run.tensorboard_dir.glob("events.*"))
    attempt = run.latest_attempt()
    assert {path.name for path in attempt.logs_dir.iterdir()} == {
        "supervisor.log",
        "rank_0.log",
        "rank_1.log",
        "server_0.log",
        "stacks_rank_0.txt",
        "stacks_rank_1.txt",
    }
    assert attempt.api_key_file.stat().st_mode & 0o777 == 0o600
    key = read_secret(attempt.api_key_file)
    for log in [*attempt.logs_dir.iterdir(), attempt.console_log]:
        assert key not in log.read_text(errors="replace"), f"the API key is in {log}"


SUMMARY_KEYS = ("mean", "sd", "min", "max", "p1", "p99")
# What a plain run says nothing about: what only failures, filters, a cold start, NaNs or options that are off bring up.
NOT_OF_A_PLAIN_RUN = {
    "run/num_kept_servers",  # with train.keep_servers: test_run_kept.py
    "run/num_standby_ranks",  # with train.standby_processes: tests/recovery/test_recovery_restart.py
    "rollout/num_request_failures_<kind>",
    # What episodes of several turns alone can do: branch, fail, restart; and requests of agents to the endpoint, see
    # test_run_foreign.py.
    "rollout/num_branches_<cause>",
    "rollout/num_episode_failures_<kind>",
    "rollout/num_response_faults_<cause>",  # tests/unit/rewards/test_who_caused_it.py
    "rollout/num_episodes_redrawn_<kind>",
    "rollout/num_episodes_restarted",
    "rollout/num_endpoint_retries",
    "rollout/num_endpoint_unheard",
    "rollout/num_endpoint_errors",
    "rollout/num_ignored_sampling",
    "rollout/num_stop_strings",
    # Only of episodes with several turns: test_run_episodes.py.
    "rollout/num_history_tokens_read",
    "rollout/num_history_tokens_cached",
    "rollout/cached_history_fraction",
    "lora/num_parameters",
    "lora/norm",
    # Only with checkpoint.peer_copies: tests/recovery/test_recovery_copies.py.
    "checkpoint/peer_bytes",
    "time/checkpoint/peer_seconds",
    "time/checkpoint/peer_pause_seconds",
    # Only with batch.share_prefixes: tests/recovery/test_recovery_shared.py.
    "speed/shared_prefix_fraction",
    "speed/num_repeated_prefixes",
    "sft/loss",
    "sft/num_tokens",
    "metrics/num_non_finite",
    "policy/kl_reference",
    # Only with a critic: tests/recovery/test_recovery_critic.py.
    *(f"critic/{name}" for name in CRITIC),
    "time/critic_seconds",
    # Only with cluster.colocated, which needs GPUs: tests/unit/rollout/test_shared_gpus.py.
    *(f"colocated/{name}_seconds" for name in ("offload", "onload", "release", "resume")),
    "colocated/offloaded_bytes",
    "time/share_seconds",
    "time/reference_log_probs_seconds",
    "routing/changed_since_rollout",
    "routing/load_balancing_loss",
    "routing/load_max_over_mean",
    "routing/z_loss",
    # Only where tokens of several weight versions are trained together, or with diagnostics.exact_staleness: the run of
    # tests/recovery/test_recovery_ahead.py has both.
    "mismatch/num_segments",
    "mismatch/num_segment_decisions",
    *(f"policy/log_ratio/{part}/{key}" for part in ("staleness", "mismatch") for key in SUMMARY_KEYS),
    # Only beside training: test_run_beside.py.
    "eval/measured_step",
    *(f"eval/beside/{name}" for name in ("seconds", "num_servers", "num_begun", "num_steps")),
    # Only with a finite rollout.top_k: tests/recovery/test_recovery_masks.py.
    *(f"response/kept_tokens_{name}" for name in ("max", "mean")),
    "policy/kept_mass",
    # Only with publish.full_every above 1: test_run_failures.py.
    *(f"publish/{name}" for name in ("changed_share", "num_delta_bytes", "num_fallbacks")),
    # Only with a teacher: tests/recovery/test_recovery_teacher.py.
    *(f"teacher/{name}" for name in ("advantage_share", "advantage_size", "clip_fraction")),
    *(f"teacher/{name}" for name in ("divergence", "reverse_kl", "token_fraction")),
    "time/teacher_seconds",
    # Only if a teacher's server fails: tests/unit/rollout/test_teacher_server.py.
    "rollout/num_teacher_retries",
    # Only with clip_cov: tests/recovery/test_recovery_correction.py.
    *(f"policy/covariance_{name}_fraction" for name in ("candidate", "clip")),
    # Only with objective.entropy_coefficient, and with a correction that weighs tokens: test_run_experts.py.
    "policy/entropy_bonus",
    *(f"mismatch/token_{name}" for name in ("cut_fraction", "dropped_fraction", "weight_mean")),
    # Only of several samples per held-out prompt: tests/unit/train/test_held_out_sets.py.
    *(f"eval/set/<set>/{name}" for name in ("majority", "majority_standard_error")),
    *(f"eval/set/<set>/{name}/<k>" for name in ("pass_at", "pass_at_standard_error")),
}


def test_every_other_name_of_the_catalogue_is_computed(lines):
    computed = {find_metric(name).name for line in lines for name in line.keys() - {"step", "time"}}
    too_long = {name for name in CATALOGUE if name.startswith("mismatch/length/") and "/1-63/" not in name}
    assert CATALOGUE.keys() - computed == NOT_OF_A_PLAIN_RUN | too_long
    assert {name for name in CATALOGUE if "/length/1-63/" in name} <= computed, "its responses have up to 63 tokens"


def test_the_result_is_evaluated_by_servers_that_nobody_publishes_to(whole_run):
    """They load the folder themselves, and no trainer is there that could vouch for what they hold."""
    _, run, _ = whole_run
    command = Command(run.path.parent, "eval", str(run.path), "--json", "reward=arithmetic", "eval.num_prompts=4")
    try:
        assert command.finish() == 0, command.err
        result = json.loads(command.out)
        assert (result["num_prompts"], result["model"]) == (4, str(run.huggingface_dir))
        (registration,) = read_registrations(RunFolder(run.path / "eval").latest_attempt().servers_dir)
        assert registration.weight_version is None
    finally:
        command.end()
