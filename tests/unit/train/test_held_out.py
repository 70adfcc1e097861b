"""What held-out accuracy is of, and what is said of the prompts that it is measured on."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from gspo_mega.base.episodes import Group, one_turn_row
from gspo_mega.base.errors import DataError, RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.config.prompt_sources import HELD_OUT, eval_sets, source_rewards
from gspo_mega.config.schema import Config, RewardFunction
from gspo_mega.data.prompts import load_prompts
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.train.held_out import HeldOut, summarize


def groups_of(*samples):
    """One group a list of (reward, correct); reward None: its scoring failed."""
    groups = []
    for number, rows in enumerate(samples):
        prompt = Prompt(f"h:{number}", "h", (1,), "x")
        answers = []
        for sample, (reward, correct) in enumerate(rows):
            error = "judge: it hung" if reward is None else None
            answers.append(
                one_turn_row(
                    f"g{number}-s{sample}",
                    number,
                    prompt,
                    [1],
                    [1],
                    [0.0],
                    [0],
                    "stop",
                    reward=reward,
                    reward_parts={"judge": 1.0},
                    reward_error=error,
                    correct=correct,
                )
            )
        groups.append(Group.from_rows(number, prompt, answers))
    return groups


def test_a_penalty_takes_no_right_answer_away():
    """Three of four right, and 0.1 off for length on two of them."""
    found = summarize(groups_of([(0.9, True)], [(0.9, True)], [(1.0, True)], [(0.0, False)]))
    assert (found.accuracy, found.reward_mean) == (0.75, pytest.approx(0.7))


def test_penalties_alone_say_nothing_of_what_is_right():
    with pytest.raises(
        RewardError, match=r"no reward function says which responses are correct .judge.*eval.correct_threshold"
    ):
        summarize(groups_of([(-0.1, None)], [(0.0, None)]))


def test_a_threshold_says_it_for_them_and_stands_over_what_they_say():
    groups = groups_of([(0.1 + 0.2, None)], [(0.29, None)], [(0.5, False)], [(0.0, True)])
    assert summarize(groups, correct_threshold=0.3).accuracy == 0.5, "0.1 + 0.2 is 0.3"


def test_what_could_not_be_scored_is_no_wrong_answer():
    found = summarize(groups_of([(1.0, True), (None, None)], [(0.0, False), (1.0, True)], [(None, None), (None, None)]))
    assert (found.accuracy, found.reward_mean, found.num_reward_failures) == (0.75, 0.75, 3)
    assert (found.num_prompts, found.num_samples) == (3, 6)
    assert found.standard_error == pytest.approx(0.25)


def test_where_nothing_could_be_scored_there_is_no_accuracy():
    with pytest.raises(RewardError, match=r"scoring failed for all 2 samples.*\n  g0-s0 .h:0.: judge: it hung"):
        summarize(groups_of([(None, None)], [(None, None)]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def make(tmp_path):
    """make(training rows, held-out rows, **changes of sections) -> Config"""

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    def config(train, held_out, reward="exact_match", data=None, **evaluation):
        files = dict(path=write("train.jsonl", train)) if data is None else data
        return Config.model_validate(
            dict(
                run=dict(name="t"),
                model=dict(path="m"),
                optimizer=dict(lr=1e-3),
                rollout=dict(max_new_tokens=32),
                batch=dict(prompts_per_step=4, group_size=4, micro_batch_tokens=128),
                data=dict(max_prompt_tokens=8, chat_template=False, **files),
                reward=dict(functions=(dict(function=reward),)),
                eval=dict(path=write("held_out.jsonl", held_out), **evaluation),
            )
        )

    return config


def rows(*prompts):
    return [{"prompt": prompt, "answer": "7"} for prompt in prompts]


def report(config, tokenizer):
    held_out = HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer)
    load_prompts(config.data, tokenizer, held_out.check_of)
    return held_out.report()


def test_prompts_that_are_trained_on_are_found_by_what_they_say(make, tokenizer):
    """In another file, another order, with another answer beside them."""
    config = make(rows("1+1=", "3+3=", " 5+5=\n", "7+7="), rows("2+2=", "5+5=", "3+3=", "4+4="))
    line, notice = report(config, tokenizer)
    assert line.endswith("held_out.jsonl: 4 prompts")
    assert notice.startswith("notice   2 of 4 held-out prompts are also in the training data (the first is row 2 of ")
    assert len(report(make(rows("1+1="), rows("2+2=")), tokenizer)) == 1
    _, every = report(make(rows("1+1="), rows("1+1=")), tokenizer)
    assert every == "notice   every held-out prompt (1) is also in the training data: the accuracy is not held-out"


def test_of_the_held_out_file_only_what_is_measured_counts(make, tokenizer):
    assert len(report(make(rows("5+5="), rows("2+2=", "5+5="), num_prompts=1), tokenizer)) == 1


@pytest.mark.parametrize("num_prompts", [None, 2])
def test_rows_that_are_left_out_are_said(make, tokenizer, num_prompts):
    config = make(rows("1+1="), rows("2+2=", "9" * 20, "3+3=", "8" * 20), num_prompts=num_prompts)
    held_out = HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer)
    (one,) = held_out.sets
    assert one.num_left_out == 2 and [p.text for p in one.prompts] == ["2+2=", "3+3="]
    assert report(config, tokenizer)[0].endswith(": 2 prompts; 2 longer than data.max_prompt_tokens and left out")
    assert summarize(groups_of([(1.0, True)]), None, one.num_left_out).num_left_out == 2


def test_too_few_are_refused(make, tokenizer):
    with pytest.raises(DataError, match=r"eval.num_prompts asks for 2 prompts, but there are 1 .1 left out"):
        report(make(rows("1+1="), rows("2+2=", "9" * 20), num_prompts=2), tokenizer)


def test_an_answer_that_its_reward_cannot_use_is_named_by_its_line(make, tokenizer, tmp_path):
    bad = [*rows("1+1="), {"prompt": "2+2=", "answer": "3 or 4"}]
    with pytest.raises(
        DataError, match=r"held_out.jsonl:2: 'answer': several numbers in the answer '3 or 4'.*.reward gsm8k."
    ):
        report(make(rows("1+1="), bad, reward="gsm8k"), tokenizer)
    config = make(bad, rows("5+5="), reward="gsm8k")
    with pytest.raises(DataError, match=r"train.jsonl:2: 'answer': several numbers"):
        report(config, tokenizer)
    own = dict(sources=(dict(name="a", path=str(tmp_path / "train.jsonl"), reward="exact_match"),))
    assert report(make([], rows("5+5="), reward="gsm8k", data=own), tokenizer), "a source's own reward takes it"


def test_the_reward_of_held_out_prompts(make):
    def rewards(*own, named=None):
        sources = tuple(dict(name=f"s{k}", path="x", reward=reward) for k, reward in enumerate(own))
        config = make([], [], data=dict(sources=sources))
        named = named and (RewardFunction(function=named),)
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"reward": named})})
        found = source_rewards(config.eval, config.data).get(HELD_OUT)
        return found and "+".join(one.function for one in found)

    assert rewards("gsm8k", "gsm8k") == "gsm8k", "what all sources have"
    assert rewards("gsm8k", None) is None and rewards(None) is None
    assert rewards("gsm8k", None, named="arithmetic") == "arithmetic"
