"""Which failed runs are started again by themselves."""

from __future__ import annotations

import json
import time

import pytest

from gspo_mega.base.errors import ConfigError, DataError, NumericsError, RankError, RolloutError
from gspo_mega.base.run_folder import DamagedFileError, RunFolder
from gspo_mega.launcher.restarts import WINDOW_SECONDS, Furthest, Restarts, furthest, last_line, last_restart


def test_as_often_as_allowed_while_it_gets_further():
    restarts = Restarts(2, Furthest())
    decisions = [restarts.decide(RankError("rank 1 was killed"), Furthest(saved=step), now=step) for step in (1, 2, 3)]
    assert [decision.again for decision in decisions] == [True, True, False]
    assert "from the checkpoint of step 2 (restart 2 of 2" in decisions[1].why
    assert "2 restarts in 24 h (train.max_restarts)" in decisions[2].why


def test_never_twice_from_the_same_place():
    restarts = Restarts(5, Furthest())
    first = restarts.decide(RankError("x"), Furthest(saved=4, trained=5, sampled=5), 0.0)
    assert first.again
    # The new start took the line of step 5 back, trained it and failed before it was further than ever.
    assert not restarts.decide(RankError("x"), Furthest(saved=4, trained=5, sampled=5), 1.0).again
    assert not restarts.decide(RankError("x"), Furthest(saved=4, trained=4, sampled=5), 1.0).again
    assert restarts.decide(RankError("x"), Furthest(saved=4, trained=6, sampled=5), 1.0).again
    # What was reached once stays reached, though lines of metrics were taken back since.
    assert not restarts.decide(RankError("x"), Furthest(saved=4, trained=5, sampled=5), 2.0).again


def test_a_run_that_never_came_anywhere_is_not_started_again():
    decision = Restarts(3, Furthest()).decide(RankError("x"), Furthest(), 0.0)
    assert not decision.again and "came no further" in decision.why


@pytest.mark.parametrize(
    "error, again",
    [(DataError("x"), False), (NumericsError("x"), False), (RolloutError("x"), True), (RankError("x"), True)],
)
def test_what_only_a_person_can_mend_is_left_to_a_person(error, again):
    assert Restarts(3, Furthest()).decide(error, Furthest(saved=1), 0.0).again is again


def test_old_restarts_are_forgiven_and_none_at_all_is_a_choice():
    restarts = Restarts(1, Furthest())
    assert restarts.decide(RankError("x"), Furthest(saved=1), 0.0).again
    assert not restarts.decide(RankError("x"), Furthest(saved=2), WINDOW_SECONDS - 1).again
    assert restarts.decide(RankError("x"), Furthest(saved=2), WINDOW_SECONDS + 1).again
    assert not Restarts(0, Furthest()).decide(RankError("x"), Furthest(saved=9), 0.0).again


def test_the_budget_goes_on_in_a_job_that_was_queued_again_and_not_for_a_person(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    attempt = folder.new_attempt()
    restarts = Restarts.begin(folder, 1)
    (folder.path / "metrics.jsonl").write_text(json.dumps({"step": 7}) + '\n{"step": 8, "tor')
    monkeypatch.setattr(time, "time", lambda: 5.0)
    restarts.decide_and_record(
        attempt,
        RankError("rank 1 failed:\n\nTraceback (most recent call last):\nKeyError: 3\n\n(all of its output: there)"),
    )
    record = last_restart(folder)
    assert (record.again, record.cause, record.restarted_at, record.furthest) == (
        True,
        "rank 1 failed: KeyError: 3",
        [5.0],
        Furthest(trained=7),
    )
    folder.metrics_file.write_text(json.dumps({"step": 9}) + "\n")
    assert not Restarts.carry_on(folder, 1).decide(RankError("x"), furthest(folder), 6.0).again
    assert not Restarts.carry_on(folder, 2).decide(RankError("x"), Furthest(trained=7), 6.0).again
    assert Restarts.carry_on(folder, 2).decide(RankError("x"), furthest(folder), 6.0).again
    assert not Restarts.begin(folder, 1).decide(RankError("x"), furthest(folder), 6.0).again
    folder.metrics_file.write_text(json.dumps({"step": 10}) + "\n")
    assert Restarts(1, Furthest(trained=9)).decide(RankError("x"), furthest(folder), 6.0).again


def test_how_far_a_run_came(tmp_path):
    folder = RunFolder(tmp_path)
    assert furthest(folder) == Furthest()
    folder.checkpoints_dir.mkdir()
    folder.latest_checkpoint_file.write_text("step_00000006\n")
    folder.journal_dir.mkdir()
    for step in (6, 7):
        (folder.journal_dir / f"step_{step:08d}").touch()
    assert furthest(folder) == Furthest(saved=6, sampled=7)


def test_without_a_record_there_is_no_restart(tmp_path):
    folder = RunFolder(tmp_path)
    attempt = folder.new_attempt()
    folder.metrics_file.write_text(json.dumps({"step": 7}) + "\n")
    attempt.restart_file.mkdir()  # stands for a full disk
    decision = Restarts(3, Furthest()).decide_and_record(attempt, RankError("x"))
    assert not decision.again and decision.why.startswith(f"no automatic restart: {attempt.restart_file} cannot be")


def test_a_run_whose_files_cannot_be_read_is_not_started_again(tmp_path):
    """A disk that is lost fails reading too; the run's error must still be shown."""
    folder = RunFolder(tmp_path)
    attempt = folder.new_attempt()
    folder.metrics_file.mkdir()
    decision = Restarts(3, Furthest()).decide_and_record(attempt, RankError("rank 0 failed"))
    assert not decision.again and decision.why.startswith("no automatic restart: the run's files cannot be read")
    assert decision.cause == "rank 0 failed"


def test_the_error_of_a_rank_has_the_code_of_its_cause():
    """What the launcher raises is a RankError, whatever the rank raised."""
    for cause, again in ((NumericsError, False), (ConfigError, False), (RolloutError, True)):
        error = RankError("rank 1 failed")
        error.exit_code = cause.exit_code
        assert Restarts(3, Furthest()).decide(error, Furthest(trained=1), 0.0).again == again


def test_progress_of_each_kind_counts_and_none_is_forgotten_for_anothers_sake():
    for one in (Furthest(saved=1), Furthest(trained=1), Furthest(sampled=1)):
        assert Restarts(3, Furthest()).decide(RankError("x"), one, 0.0).again
    restarts = Restarts(9, Furthest(saved=4, trained=6))
    assert restarts.decide(RankError("x"), Furthest(saved=5, trained=5), 0.0).again
    assert not restarts.decide(RankError("x"), Furthest(saved=5, trained=6), 1.0).again, "step 6 was trained before"


def test_a_run_that_was_given_up_has_a_whole_budget_when_it_is_queued_again(tmp_path):
    folder = RunFolder(tmp_path / "run")
    used = Restarts(1, Furthest(), [time.time()])
    assert not used.decide_and_record(folder.new_attempt(), RankError("x")).again
    assert last_restart(folder).restarted_at and Restarts.carry_on(folder, 1).count == 0


def test_the_last_line_of_metrics_is_read_however_long_it_is(tmp_path):
    file = tmp_path / "metrics.jsonl"
    long = {"step": 2, "text": "x" * 200_000}
    file.write_text('{"step": 1}\n' + json.dumps(long) + "\n")
    assert last_line(file) == long
    file.write_text('{"step": 1, "eval/accuracy": 0.5}\n' + json.dumps(long) + "\n{half")
    assert last_line(file) == long and last_line(file, "eval/accuracy") == {"step": 1, "eval/accuracy": 0.5}
    assert last_line(file, "reward/mean") is None and last_line(tmp_path / "none") is None


def test_megabytes_without_a_line_are_no_metrics(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + "x" * 5_000_000 + "\n")
    with pytest.raises(DamagedFileError, match="its last 4 MiB have no line of metrics"):
        last_line(file)


def test_with_copies_in_memory_a_restart_is_not_said_to_be_from_the_checkpoint():
    restarts = Restarts(2, Furthest(), has_copies=True)
    decision = restarts.decide(RankError("x"), Furthest(saved=4), 0.0)
    assert "started again from the ranks' copies in memory, or else from the checkpoint of step 4" in decision.why
