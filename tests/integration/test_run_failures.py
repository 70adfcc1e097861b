"""`gspo-mega train` with real parts that are killed and stopped: what the run loses (nothing), and how it goes on."""

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from router_ties import differ_by_rounding
from run_support import (
    REPOSITORY,
    Command,
    ScoreLog,
    descendants,
    freeze_at,
    is_constant_prompt,
    kill_server,
    small_overrides,
)

from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.stream import epoch_order
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.rollout.registration import read_registrations

CONFIG = str(REPOSITORY / "configs/quickstart.yaml")
# Of what happens at once on a free machine; whoever waits for ranks that stop in order waits for longer.
DEADLINE_SECONDS = 30.0


@pytest.fixture
def run(tmp_path, quickstart_files):
    """start(*overrides) runs the small quickstart in the test's run folder; nothing may be left of it at the end."""
    started = []

    class Run:
        folder = RunFolder(tmp_path / "runs" / "run")
        scores = ScoreLog(tmp_path / "scores")

        @staticmethod
        def start(function, *overrides, name="run"):
            reward = (
                f"reward.functions=[{{function: 'run_support:{function}', options: {{log: {tmp_path / 'scores'}}}}}]"
            )
            small = small_overrides(quickstart_files, Path("runs"), name)  # relative to where the command runs
            # Few requests at a time: a rollout takes seconds and can be met in its midst.
            words = (CONFIG, *small, reward, "rollout.max_concurrent_requests=2", *overrides)
            command = Command(tmp_path, "train", *words, tried_in_fork=True)
            started.append(command)
            return command

        @classmethod
        def continue_from_folder(cls, *options):
            """`gspo-mega train RUN`, in another working directory than the run's start."""
            elsewhere = tmp_path / "elsewhere"
            elsewhere.mkdir(exist_ok=True)
            folder = str(Path("..") / cls.folder.path.relative_to(tmp_path))
            command = Command(elsewhere, "train", folder, *options, tried_in_fork=True)
            started.append(command)
            return command

        def prompts_of(self, rows):
            """Prompts by place in the run's order."""
            order = epoch_order(64, seed=1, source="train", epoch=0)
            texts = (quickstart_files / "data/train.jsonl").read_text().splitlines()
            return {re.search(r'"prompt": "([^"]+)"', texts[order[row]]).group(1) for row in rows}

        def freeze_server_at(self, prompts):
            """The server stands still from when a response to one of these prompts is scored: its requests stay open."""
            return freeze_at(self.scores.path, prompts, descendants(self.registration().pid))

        def server_is_ready(self):
            return [one.state for one in read_registrations(self.folder.latest_attempt().servers_dir)] == ["ready"]

        def registration(self):
            (found,) = read_registrations(self.folder.latest_attempt().servers_dir)
            return found

    yield Run()
    assert [command.end() for command in started] == [[]] * len(started), "processes were left running"


def test_a_run_that_loses_a_rank_a_server_and_its_user_trains_on_what_it_would_have(run):
    """Three attempts of one command (a rank killed, a server killed and Ctrl-C, Ctrl-C twice), and the rest."""
    arguments = (
        "score",
        "algorithm=gspo_token",
        "train.num_steps=4",
        "train.max_restarts=0",
        "checkpoint.every_steps=1",
        "eval=null",
    )

    # Attempt 1: rank 1 is killed while rank 0 waits for it inside torch.distributed.
    command = run.start(*arguments)
    command.wait_for_line("step 1/4")
    rank_1 = command.rank(1)
    frozen = freeze_at(run.scores.path, run.prompts_of(range(4, 8)), [rank_1])
    command.wait_for("its checkpoint", run.folder.latest_checkpoint_file.exists)
    command.wait_for("the rollout of step 2", frozen)
    rank_log = run.folder.latest_attempt().rank_log(0)
    command.wait_for("rank 0 waits for rank 1", lambda: command.waits_for_another_rank(0, rank_log))
    os.kill(rank_1, signal.SIGKILL)
    seconds = command.seconds_to_finish()
    assert seconds < DEADLINE_SECONDS
    assert command.process.returncode == 7
    assert command.err.startswith("rank 1 was killed by SIGKILL") and command.err.count("rank 1 was killed") == 1
    assert "Traceback" not in command.out
    assert command.left_running(run.folder.path) == []
    assert run.folder.latest_checkpoint_file.read_text().strip() == "step_00000001"
    notes = run.scores.new()
    assert Counter(note["prompt"] for note in notes[:16]) == dict.fromkeys(run.prompts_of(range(4)), 4)
    assert Counter(note["prompt"] for note in notes[16:]) == dict.fromkeys(run.prompts_of(range(4, 8)), 4), (
        "step 2 was sampled, and not trained"
    )

    # Attempt 2: goes on after step 1, on the very rollouts that step 2 had. In the rollout of step 3 the server is
    # killed; in that of step 4, Ctrl-C.
    command = run.start(*arguments)
    command.wait_for_line("resumed from step_00000001: step 1, weight version 1")
    command.wait_for("its server", run.server_is_ready)
    frozen = run.freeze_server_at(run.prompts_of(range(8, 12)))
    command.wait_for_line("step 2/4")
    assert "step 2: its 16 trajectories are in the journal and are not sampled again" in command.out
    command.wait_for("the rollout of step 3", frozen)
    kill_server(run.registration().pid)
    command.wait_for("the server's restart", lambda: run.registration().generation == 2)
    assert run.registration().weight_version == 2, "it starts from what is published, not from the model of the start"
    command.wait_for_line("step 3/4")
    num_scored = len(run.scores)
    command.wait_for("the rollout of step 4", lambda: len(run.scores) > num_scored)
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == 130
    closing = (
        f"Stopped in order after step 3 (SIGINT). Saved: checkpoint step_00000003 in {run.folder.path}. To continue:"
    )
    assert command.out.splitlines()[-1] == f"{closing} gspo-mega train {run.folder.path}" and command.err == ""
    assert command.left_running(run.folder.path) == []
    assert run.folder.latest_checkpoint_file.read_text().strip() == "step_00000003"
    assert Counter(note["prompt"] for note in run.scores.new()[:16]) == dict.fromkeys(
        run.prompts_of(range(8, 12)), 4
    ), "each sample once"

    # Attempt 3: Ctrl-C while a rank cannot stop in order; the second Ctrl-C does not wait for it.
    command = run.start(*arguments)
    command.wait_for_line("resumed from step_00000003: step 3, weight version 3")
    os.kill(command.rank(0), signal.SIGSTOP)
    command.process.send_signal(signal.SIGINT)
    command.wait_for("the answer to Ctrl-C", lambda: "SIGINT: stopping after a checkpoint" in command.out)
    time.sleep(0.5)
    assert command.process.poll() is None, "one Ctrl-C waits for the ranks"
    command.process.send_signal(signal.SIGINT)
    assert command.seconds_to_finish() < DEADLINE_SECONDS
    assert command.process.returncode == 130 and "Ended at once" in command.out
    assert command.left_running(run.folder.path) == []
    assert run.scores.new() == []

    # Attempt 4, which the run's folder is enough for: to the end.
    trial = run.continue_from_folder("--dry-run")
    assert trial.finish() == 0, trial.out + trial.err
    assert f"{run.folder.path} would continue from its last whole checkpoint; nothing was started" in trial.out
    assert len(run.folder.attempts()) == 3
    command = run.continue_from_folder()
    assert command.finish() == 0, command.out + command.err
    sampled_again = Counter(note["prompt"] for note in run.scores.new())
    taken_over = re.search(r"step 4: (\d+) trajectories of the journal, in \d+ groups, are taken over", command.out)
    assert set(sampled_again) <= run.prompts_of(range(12, 16)) and max(sampled_again.values()) <= 4
    assert sampled_again.total() == 16 - int(taken_over[1] if taken_over else 0), "what was complete is not"
    trained = Counter(
        trajectory.prompt.text for trajectory in Journal(run.folder.journal_dir).read(3).batch.trajectories
    )
    assert sorted(trained.values()) == [4] * 4
    assert len(run.folder.attempts()) == 4

    # All in all the run that was asked for: each step once, none with less than its whole batch.
    lines = read_metrics(run.folder.metrics_file)
    assert [(line["step"], line["publish/weight_version"]) for line in lines] == [(step, step) for step in range(1, 5)]
    assert [line["rollout/num_trajectories"] for line in lines] == [16] * 4
    assert [line["optimizer/num_optimizer_steps"] for line in lines] == [2, 4, 6, 8]
    assert [line["data/epoch"] for line in lines] == [step * 4 / 64 for step in range(1, 5)]
    again = lines[2]["rollout/num_retries"] + lines[2]["rollout/num_continued_requests"]
    assert again >= 1, "requests were open when the server was killed"
    result = read_json(run.folder.latest_attempt().result_file)
    assert (result["step"], result["weight_version"]) == (4, 4)
    assert result["seconds"] == pytest.approx(sum(line["time/step_seconds"] for line in lines)), "over all attempts"
    assert list(run.folder.huggingface_dir.glob("*.safetensors"))


def test_a_killed_supervisor_leaves_nothing_behind_and_nothing_out(run):
    """Its run, continued, ends with the very weights that a run without servers has that trains on its record."""
    arguments = ("score", "train.num_steps=3", "checkpoint.every_steps=1", "eval=null")
    command = run.start(*arguments)
    command.wait_for_line("step 1/3")
    command.wait_for("its checkpoint", run.folder.latest_checkpoint_file.exists)
    command.wait_for("the rollout of step 2", lambda: len(run.scores) > 16 + 4)
    command.process.kill()
    command.process.wait()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while command.left_running(run.folder.path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert command.left_running(run.folder.path) == [], "the ranks, the server and the scorers ended with it"

    command = run.start(*arguments)
    assert command.finish() == 0, command.out + command.err
    assert "resumed from step_00000001: step 1, weight version 1" in command.out and command.err == ""
    journal = Journal(run.folder.journal_dir)
    for step in range(3):
        trained = Counter(trajectory.prompt.text for trajectory in journal.read(step).batch.trajectories)
        assert trained == dict.fromkeys(run.prompts_of(range(4 * step, 4 * step + 4)), 4), (
            "each prompt in its step, four times"
        )
    lines = read_metrics(run.folder.metrics_file)
    assert [(line["step"], line["publish/weight_version"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    assert all(differ_by_rounding(run.folder, line) for line in lines), (
        "every rollout was of the weights that its step began with"
    )

    num_scored = len(run.scores)
    replay = run.start(*arguments, "--from-rollouts", str(run.folder.path), name="replay")
    assert replay.finish() == 0, replay.out + replay.err
    assert len(run.scores) == num_scored, "a replay samples and scores nothing"
    replayed = RunFolder(run.folder.path.with_name("replay")).huggingface_dir
    assert {p.name: p.read_bytes() for p in replayed.glob("*.safetensors")} == {
        p.name: p.read_bytes() for p in run.folder.huggingface_dir.glob("*.safetensors")
    }


def test_distributed_publish_filter_and_unreliable_rewards_and_a_server_killed_twice(run, quickstart_files):
    """GRPO. The server, which does not hold the trainer's weights after a restart, is killed in an evaluation and in
    training.
    """
    command = run.start(
        "unreliable",
        "algorithm=grpo",
        "objective={}",
        *("publish.method=distributed", "publish.full_every=9"),
        "train.num_steps=3",
        "eval.every_steps=1",
        "rollout.filter_constant_groups=true",
        "rollout.max_oversampling=3",
        "reward.max_failed_fraction=0.5",
        "eval.correct_threshold=1",
    )
    held_out = set(re.findall(r'"prompt": "([^"]+)"', (quickstart_files / "data/heldout.jsonl").read_text()))

    command.wait_for_line("held-out accuracy before training")
    command.wait_for("the evaluation of step 1", run.freeze_server_at(held_out))
    kill_server(run.registration().pid)
    command.wait_for_line("step 1/3")
    assert run.registration().generation == 2
    # A rank that stands still keeps the others in training; meanwhile the only server goes. The publish that follows
    # meets a server that died just now, or one that is being restarted.
    rank_1, rank_log = command.rank(1), run.folder.latest_attempt().rank_log(0)
    command.wait_for("the rollout of step 2", freeze_at(run.scores.path, run.prompts_of(range(64)), [rank_1]))
    command.wait_for("the end of the rollout of step 2", lambda: command.waits_for_another_rank(0, rank_log))
    kill_server(run.registration().pid)
    os.kill(rank_1, signal.SIGCONT)
    assert command.finish() == 0, command.out + command.err
    assert command.err == ""
    assert command.left_running(run.folder.path) == []
    assert run.registration().generation == 3

    before, *lines = read_metrics(run.folder.metrics_file)
    assert before["step"] == 0 and before["eval/num_samples"] == 8
    assert [(line["step"], line["publish/weight_version"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    assert [line["publish/is_full"] for line in lines] == [0, 1, 0], "the server that was killed held nothing"
    assert (
        0
        < lines[0]["publish/num_delta_bytes"]
        <= lines[0]["publish/num_bytes_sent"]
        < 1.01 * lines[0]["publish/num_bytes"]
    )
    asked = [int(line["rollout/num_prompts_sampled"]) for line in lines]
    drawn = run.prompts_of(range(sum(asked)))
    notes = [note for note in run.scores.all() if note["prompt"] not in held_out]
    assert Counter(note["prompt"] for note in notes) == dict.fromkeys(drawn, 4), "every prompt asked for, four times"
    constant = sum(is_constant_prompt(prompt) for prompt in drawn)
    assert constant > 0, "a test in which nothing is filtered shows nothing"
    assert sum(line["rollout/num_groups_filtered"] for line in lines) >= constant
    for line, num_asked in zip(lines, asked):
        assert (
            line["groups/num_groups"] == 4 - line["rollout/num_groups_missing"]
            and line["groups/trained_constant_fraction"] == 0
        )
        filtered, unscored = line["rollout/num_groups_filtered"], line["rollout/num_groups_unscored"]
        assert line["groups/constant_fraction"] == pytest.approx(filtered / (num_asked - unscored))
        assert (
            line["rollout/num_groups_filtered"] + line["rollout/num_groups_unscored"]
            == num_asked - line["groups/num_groups"]
        )
        assert line["rollout/num_trajectories"] == 4 * num_asked
        assert line["eval/num_samples"] == 8
    failed = Counter(note["outcome"] for note in notes)
    assert failed["raised"] > 0 and failed["nan"] > 0
    assert sum(line["rollout/num_reward_failures"] for line in lines) == failed["raised"] + failed["nan"]
    assert [path.name for path in run.folder.weights_dir.glob("v*")] == [], "nothing went through the disk"
    assert "reward failures" in command.out
