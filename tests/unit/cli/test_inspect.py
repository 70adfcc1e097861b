"""`gspo-mega inspect`: what the journal has of a run, for people and for programs."""

import json
from dataclasses import replace

import pytest

from gspo_mega.base.episodes import Episode, Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.cli.main import main
from gspo_mega.config import load_config, render_config
from gspo_mega.data.journal.episode_log import EpisodeLog, FileBegin
from gspo_mega.data.journal.journal import Journal


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    atomic_write_text(folder.config_file, render_config(load_config("configs/quickstart.yaml").config))
    prompt = Prompt("train:7", "train", (1, 2), "1 + 1 =", answer="2")
    rows = []
    for sample, reward in enumerate((0.0, 1.0)):
        rows.append(
            one_turn_row(
                f"g0-s{sample}",
                0,
                prompt,
                [5, 6],
                [1, 1],
                [-1.0, -0.5],
                [0] * 2,
                "stop",
                f"two\n{sample}",
                reward=reward,
            )
        )
    group = Group.from_rows(0, prompt, rows)
    journal = Journal(folder.journal_dir)
    with journal.begin(0, 0, 2, {0: group}) as writer:
        writer.finish(RolloutBatch(0, [group], {}, {}), {})
    with journal.begin(1, 1, 3, {}) as writer:
        writer.add(group.episodes[1])
    return folder


def test_a_step_as_json(run, capsys):
    assert main(["inspect", str(run.path), "--step", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (group,) = shown["groups"]
    assert (shown["complete"], shown["weight_version"], group["prompt"], group["answer"]) == (True, 0, "1 + 1 =", "2")
    one = group["trajectories"][1]
    assert (one["reward"], one["advantage"], one["response"]) == (1.0, 1.0, "two\n1")
    assert (one["log_prob_sum"], one["log_prob_mean"], one["log_prob_min"]) == (-1.5, -0.75, -1.0)


def test_the_reward_of_a_step_is_that_of_all_that_was_sampled(run, capsys):
    journal = Journal(run.journal_dir)
    group = journal.read(0).batch.groups[0]
    with journal.begin(0, 0, 2, {0: group}) as writer:
        writer.finish(RolloutBatch(0, [group], {}, {}, {"reward/mean": 0.125}), {})
    assert main(["inspect", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["reward_mean"] == 0.125


def test_a_run_that_sampled_ahead_and_keeps_its_last_steps_is_listed(run, capsys):
    """The oldest step that is kept has a group whose record began in a file that is removed."""
    journal = Journal(run.journal_dir)
    group = journal.read(0).batch.groups[0]
    log = EpisodeLog(journal, 2)
    log.begin(FileBegin(1, 1, {}), {}, {})
    for number in (1, 2, 3):
        log.admit(number, group.prompt, 1)
    for number in (1, 2):
        for one in group.episodes:
            log.complete(replace(one, group_id=number, episode_id=f"g{number}-{one.episode_id[-2:]}"))
        ahead = {one for one in (2, 3) if one > number}
        whole = Group(number, group.prompt, [])
        batch = RolloutBatch(number, [whole])
        log.consume(batch, ahead, FileBegin(number + 1, number + 1, {})).write(batch, {})
    log.close()
    journal.prune(before_step=2)
    assert journal.steps() == [2]
    assert main(["inspect", str(run.path)]) == 0
    assert "step      3  groups     1  trajectories      2  reward 0.500  its groups in earlier files were removed" in (
        capsys.readouterr().out
    )
    assert main(["inspect", str(run.path), "--step", "3"]) == 8
    assert "a part of its batch is in step_00000001, which is not there" in capsys.readouterr().err


def test_a_step_for_people(run, capsys):
    assert main(["inspect", str(run.path), "--step", "1"]) == 0
    text = capsys.readouterr().out
    assert (
        "train:7   answer: '2'" in text
        and "reward 1  advantage +1.000  2 tokens, stop  log-prob per token -0.7500" in text
    )


def test_all_steps_and_one_that_was_cut_short(run, capsys):
    assert main(["inspect", str(run.path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "reward 0.500" in first and "cut short" not in first
    assert "trajectories      1  reward 1.000  cut short" in second
    assert main(["inspect", str(run.path), "--step", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["trajectories"][0]["advantage"] is None


def test_a_failed_scoring_is_no_reward_of_zero(run, capsys):
    journal = Journal(run.journal_dir)
    record = journal.read(0)
    (group,) = record.batch.groups
    group.episodes.append(
        Episode.from_row(
            one_turn_row("g0-s2", 0, group.prompt, [5], [1], [-1.0], [0], "stop", "", reward_error="judge: it hung")
        )
    )
    with journal.begin(0, 0, 3, {0: group}) as writer:
        writer.finish(RolloutBatch(0, [group], {}, {}), {})
    assert main(["inspect", str(run.path), "--step", "1"]) == 0
    text = capsys.readouterr().out
    assert "reward 1  advantage +1.000" in text and "reward 0  advantage -1.000" in text, "as if it had not been there"
    assert (
        "g0-s2  reward -  advantage -" in text and "not trained on, because its scoring failed: judge: it hung" in text
    )
    assert main(["inspect", str(run.path)]) == 0
    assert "trajectories      3  reward 0.500  reward failures 1" in capsys.readouterr().out


def test_a_response_that_was_sampled_ahead_says_by_which_weights(run, capsys):
    row = one_turn_row(
        "g0-s000", 0, Prompt("train:7", "train", (1,), "1 + 1 ="), [5, 6], [1, 1], [-1.0] * 2, [3, 4], "stop"
    )
    with Journal(run.journal_dir).begin(2, 4, 1, {}) as writer:
        writer.add(Episode.from_row(row))
    assert main(["inspect", str(run.path), "--step", "3"]) == 0
    assert "log-prob per token -1.0000 (lowest -1.00)  sampled from 3, 4" in capsys.readouterr().out
    main(["inspect", str(run.path), "--step", "1"])
    assert "sampled from 0" not in capsys.readouterr().out.partition("\n")[2]


def test_what_is_not_there_is_named(run, tmp_path, capsys):
    assert main(["inspect", str(run.path), "--step", "5"]) == 8
    assert "step 5 is not recorded; recorded are steps 1 to 2" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 8
    assert "no rollouts are recorded" in capsys.readouterr().err
