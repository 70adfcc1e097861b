"""A live source whole, but for the server: real data files, tokenizer, scoring processes and journal."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from collector_support import SPEC_OF_TOKENIZER, collector_config
from teacher_stand_in import StandInTeacher, log_prob
from transformers import AutoTokenizer

from gspo_mega.config.derived import least_of_group
from gspo_mega.config.schema import Config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.train.batches import fill_advantages, scored_batch
from gspo_mega.train.reusable_records import made_by
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.train.sources import LiveSource, journalled_source

REWARDS = '''
import zlib

def judge(*, prompt, response, answer, metadata):
    """Fails on some responses to held-out prompts, and to one that is trained on."""
    kind = zlib.crc32(response.encode())
    if metadata.get("held_out") and kind % 3 == 0 or prompt == "3+3" and kind % 2:
        raise ValueError("no verdict")
    return {"reward": -0.1 + kind % 7, "correct": kind % 3 == 1}
'''


@pytest.fixture
def config(fakes, tmp_path, monkeypatch):
    fakes("server-0")
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "side_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{k}+{k}", "answer": "x"}) + "\n" for k in range(1, 7))
    )
    held_out = [{"prompt": f"{k}-{k}", "answer": "x", "held_out": True} for k in range(1, 7)] + [
        {"prompt": "9" * 50, "answer": "x"},
        {"prompt": "2+2", "answer": "x"},
    ]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    plain = collector_config(max_failed_fraction=0.5).model_dump()
    sections = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": "train.jsonl", "max_prompt_tokens": 8, "chat_template": False, "shuffle": False},
        "reward": plain["reward"] | {"functions": ({"function": "side_rewards:judge"},)},
        "eval": {"path": "held_out.jsonl", "samples_per_prompt": 4},
    }
    return Config.model_validate({**plain, **sections})


@pytest.fixture
def side(config, attempt):
    with Rollouts(config, SPEC_OF_TOKENIZER, attempt) as rollouts:
        rollouts.pool.wait_ready(1, 30.0)
        journal = Journal(attempt.run_folder.journal_dir)
        source = journalled_source(config, journal, LiveSource(rollouts, made_by(config)), lambda line: None)
        yield SimpleNamespace(config=config, evaluate=rollouts.evaluate, source=source)


def test_what_fails_is_left_out_of_the_batch_and_of_the_accuracy(side, attempt):
    report = side.source.describe()
    assert report[1].endswith("held_out.jsonl: 7 prompts; 1 longer than data.max_prompt_tokens and left out")
    assert "1 of 7 held-out prompts is also in the training data (row 8 of held_out.jsonl)" in report[2]
    found = side.evaluate(lambda: None)["held_out"]
    assert (found.num_prompts, found.num_samples, found.num_left_out) == (7, 28, 1)
    assert 0 < found.num_reward_failures < 28 and 0 < found.accuracy < 1

    batch = side.source.take(0, 0, lambda: None)
    failed = [t for t in batch.trajectories if not t.is_scored]
    assert {t.prompt.text for t in failed} <= {"3+3"} and all(
        "ValueError: no verdict" in t.reward_error for t in failed
    )
    trained = scored_batch(batch, least_of_group(side.config), side.config.objective.scope)
    fill_advantages(trained, side.config, 0)
    for group in trained.groups:
        assert abs(sum(t.advantage for t in group.trajectories)) < 1e-9
    assert all(t.advantage is None for t in failed)
    recorded = Journal(attempt.run_folder.journal_dir).read(0).groups.values()
    assert batch.counts["num_reward_failures"] == sum(not t.is_scored for group in recorded for t in group.trajectories)


def test_an_evaluation_needs_no_training_data_and_measures_the_sets_that_are_asked_for(config, attempt):
    sets = ({"name": "a", "path": "held_out.jsonl"}, {"name": "b", "path": "train.jsonl", "samples_per_prompt": 1})
    changed = {"data": config.model_dump()["data"] | {"path": None}, "eval": {"samples_per_prompt": 2, "sets": sets}}
    kept = []
    with Rollouts(Config.model_validate(config.model_dump() | changed), SPEC_OF_TOKENIZER, attempt) as rollouts:
        rollouts.pool.wait_ready(1, 30.0)
        *_, double, nothing = rollouts.held_out.report()
        found = rollouts.evaluate(lambda: None, keep=lambda asked, groups: kept.append((asked.name, len(groups))))
        only_b = rollouts.evaluate(lambda: None, ["b"])
    assert "1 of 6 held-out prompts of set b are also in set a" in double and "no training data is named" in nothing
    assert kept == [("a", 7), ("b", 6)] and (found["a"].num_samples, found["b"].num_samples) == (14, 6)
    assert list(only_b) == ["b"] and set(found["a"].pass_at) == {"1", "2"} and found["b"].pass_at == {}


def test_a_teachers_server_scores_what_is_trained_on_and_is_not_asked_again(config, attempt):
    """Held-out responses are not sent, nor are those without a reward; a second source finds all in the journal."""
    with StandInTeacher(AutoTokenizer.from_pretrained(config.model.path)) as teacher:
        taught = Config.model_validate(config.model_dump() | {"teacher": {"url": teacher.url}})

        def take(step=0):
            with Rollouts(taught, SPEC_OF_TOKENIZER, attempt, teaches=True) as rollouts:
                rollouts.pool.wait_ready(1, 30.0)
                journal = Journal(attempt.run_folder.journal_dir)
                source = journalled_source(taught, journal, LiveSource(rollouts, made_by(taught)), lambda line: None)
                rollouts.evaluate(lambda: None)
                assert not teacher.requests or step
                return source.take(0, 0, lambda: None)

        batch = take()
        scored = [row for row in batch.trajectories if row.is_scored]
        assert len(teacher.requests) >= len(scored) > 0
        for row in scored:
            assert row.teacher is not None
            assert row.teacher.log_probs.tolist() == [log_prob(token) for token in row.response_token_ids]
        asked = len(teacher.requests)
        again = take(step=1)
        assert len(teacher.requests) == asked and [t.teacher for t in again.trajectories] == [
            t.teacher for t in batch.trajectories
        ]
    assert made_by(taught)["teacher"] != made_by(config).get("teacher"), "records without scores are not used"
