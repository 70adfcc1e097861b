"""Several held-out sets: what each has of its own, what is measured of several samples, what is refused."""

from __future__ import annotations

import io
import json

import pytest
from transformers import AutoTokenizer

from gspo_mega.base.episodes import Group, one_turn_row
from gspo_mega.base.errors import DataError
from gspo_mega.base.records import Prompt
from gspo_mega.config import load_config
from gspo_mega.config.prompt_sources import eval_sets, source_rewards
from gspo_mega.config.schema import RewardFunction
from gspo_mega.data.prompts import load_prompts
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.train.held_out import HeldOut, summarize, write_responses
from gspo_mega.train.reports import evaluation_metrics

PLAIN = """
run: {name: t}
model: {path: m}
optimizer: {lr: 1.0e-3}
rollout: {max_new_tokens: 32}
batch: {prompts_per_step: 4, group_size: 4, micro_batch_tokens: 128}
data: {path: train.jsonl, max_prompt_tokens: 24, chat_template: false}
reward: exact_match
"""
TWO = "eval={samples_per_prompt: 4, every_steps: 5, sets: [{name: a, path: a.jsonl}, {name: b, path: b.jsonl, "


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(PLAIN)
    return lambda *overrides: load_config(tmp_path / "t.yaml", list(overrides)).config


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_set_has_its_own_settings_and_else_those_of_eval_and_data(load):
    config = load(
        TWO + "reward: gsm8k, temperature: 0.6, samples_per_prompt: 16, max_new_tokens: 8, every_steps: 2, votes: none,"
        " prompt_key: problem, correct_threshold: 0.5}]}"
    )
    a, b = eval_sets(config.eval, config.data)
    assert (a.samples_per_prompt, a.temperature, a.max_new_tokens, a.every_steps, a.votes) == (
        *(4, 1.0, None, 5),
        "final_answer",
    )
    assert (b.samples_per_prompt, b.temperature, b.max_new_tokens, b.every_steps, b.votes) == (16, 0.6, 8, 2, "none")
    assert (a.data.prompt_key, b.data.prompt_key, b.data.answer_key) == ("prompt", "problem", "answer")
    assert (a.correct_threshold, b.correct_threshold) == (None, 0.5)
    assert source_rewards(config.eval, config.data) == {"held-out prompts b": (RewardFunction(function="gsm8k"),)}
    assert [one.is_due(10) for one in (a, b)] == [True, True] and [one.is_due(4) for one in (a, b)] == [False, True]


def test_a_sets_answer_may_be_of_several_columns_or_of_one_again(load):
    config = load(
        "eval={sets: [{name: a, path: a, answer_keys: [test, entry_point]}, {name: b, path: b}, {name: c, path: c,"
        " answer_key: gold}]}",
        "data.answer_keys=[x, y]",
    )
    assert [(one.data.answer_keys, one.data.answer_key) for one in eval_sets(config.eval, config.data)] == [
        (("test", "entry_point"), "answer"),
        (("x", "y"), "answer"),
        ((), "gold"),
    ]


def test_an_eval_without_sets_is_one_set(load):
    config = load("eval={path: h.jsonl, temperature: 0}")
    (one,) = eval_sets(config.eval, config.data)
    assert (one.name, one.place, one.episodes, one.source) == ("held_out", "eval", "eval", "held-out prompts")
    assert eval_sets(None, config.data) == ()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_each_set_reads_its_own_columns(load, tokenizer, tmp_path):
    write(tmp_path / "train.jsonl", {"prompt": "1+1=", "answer": "2"}, {"prompt": "8+8=", "answer": "16"})
    write(tmp_path / "a.jsonl", {"prompt": "2+2=", "answer": "4"})
    write(tmp_path / "b.jsonl", {"problem": "8+8=", "solution": "16"}, {"problem": "9+9=", "solution": "18"})
    config = load(TWO + "prompt_key: problem, answer_key: solution, template: '({prompt})'}]}")
    held_out = HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer)
    load_prompts(config.data, tokenizer, held_out.check_of)
    a, b = held_out.sets
    assert [p.text for p in a.prompts] == ["2+2="] and [p.text for p in b.prompts] == ["(8+8=)", "(9+9=)"]
    assert b.prompts[1].answer == "18" and b.prompts[1].prompt_id == "held-out prompts b:1"
    (line,) = [line for line in held_out.report() if line.startswith("notice")]
    assert "1 of 2 held-out prompts is also in the training data (row 1 of b.jsonl)" in line


def test_sets_are_compared_with_each_other_and_with_the_training_data(load, tokenizer, tmp_path):
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    write(tmp_path / "train.jsonl", {"prompt": "0 " + long, "answer": "2"})
    write(tmp_path / "a.jsonl", {"prompt": "7+7=", "answer": "4"}, {"prompt": long, "answer": "4"})
    write(tmp_path / "b.jsonl", {"prompt": "9+9=", "answer": "18"}, {"prompt": " 7 + 7 =", "answer": "14"})
    config = load("data.max_prompt_tokens=200", "eval={sets: [{name: a, path: a.jsonl}, {name: b, path: b.jsonl}]}")
    held_out = HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer)
    load_prompts(config.data, tokenizer, held_out.check_of)
    close, double = [line for line in held_out.report() if line.startswith("notice")]
    assert "1 of 2 held-out prompts share at least half of their runs of 13 words with a training prompt" in close
    assert "(the first is row 2 of a.jsonl)" in close
    assert (
        "1 of 2 held-out prompts of set b are also in set a" in double and "(the first is row 2 of b.jsonl)" in double
    )


def test_a_template_is_put_around_a_text_only(load, tokenizer, tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"})
    config = load("data.chat_template=true", "eval={sets: [{name: a, path: a.jsonl, template: '({prompt})'}]}")
    with pytest.raises(DataError, match=r"a.jsonl:1: 'prompt' is an array; a template is put around a text only"):
        HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer)


def test_a_template_may_show_further_columns(load, tokenizer, tmp_path):
    row = {"prompt": "{tests}?", "answer": "4", "tests": ["a", "b"], "note": None}
    write(tmp_path / "a.jsonl", row)
    more = "template: '{prompt}<{tests}>{note}', template_keys: [tests, note]"
    config = load(f"eval={{sets: [{{name: a, path: a.jsonl, {more}}}]}}")
    assert (
        HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer).sets[0].prompts[0].text
        == "{tests}?<a\nb>"
    )
    write(tmp_path / "a.jsonl", {"prompt": "x", "answer": "4", "tests": []})
    with pytest.raises(DataError, match=r"a.jsonl:1: no key 'note'.*template_keys chooses the key"):
        HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer)


def sampled(*texts, right):
    """Groups of one prompt each: the texts of its responses, correct where they are among `right`."""
    groups = []
    for number, answers in enumerate(texts):
        prompt = Prompt(f"h:{number}", "h", (1,), "x", answer="4")
        rows = [
            one_turn_row(
                f"g{number}-s{k}", number, prompt, [1], [1], [0.0], [0], "stop", text,
                reward=None if text is None else float(text in right), reward_parts={"r": 1.0},
                reward_error="r: hung" if text is None else None, correct=None if text is None else text in right,
            )
            for k, text in enumerate(answers)
        ]  # fmt: skip
        groups.append(Group.from_rows(number, prompt, rows))
    return groups


FOUR = (["it is 4", "so 4", "so 7", "so 5"], ["so 4", "so 9", "so 9", "so 9"])


def test_what_is_measured_of_several_samples():
    found = summarize(sampled(*FOUR, right={"it is 4", "so 4"}), votes="final_answer")
    assert found.accuracy == pytest.approx(0.375) and found.pass_at["1"][0] == pytest.approx(0.375)
    assert found.pass_at["2"][0] == pytest.approx((5 / 6 + 1 / 2) / 2) and found.pass_at["4"] == [1.0, 0.0]
    assert found.majority == [0.5, pytest.approx(0.5)]
    assert summarize(sampled(*FOUR, right={"so 4"}), votes="none").majority is None
    assert summarize(sampled(["so 4"], right={"so 4"}), votes="final_answer").pass_at == {}


def test_pass_at_k_leaves_out_prompts_with_fewer_scored_samples():
    found = summarize(sampled(["so 4", None], ["so 9", "so 9"], right={"so 4"}), votes="text")
    assert (found.pass_at["1"][0], found.pass_at["2"][0], found.num_reward_failures) == (0.5, 0.0, 1)


def test_metrics_of_every_set_and_short_names_of_the_first():
    found = summarize(sampled(*FOUR, right={"so 4", "it is 4"}), votes="final_answer")
    metrics = evaluation_metrics({"a": found, "b": found}, "a")
    assert metrics["eval/accuracy"] == metrics["eval/set/b/accuracy"] == metrics["eval/set/a/accuracy"]
    assert metrics["eval/set/b/pass_at/4"] == 1.0 and metrics["eval/set/b/majority"] == 0.5
    assert "eval/accuracy" not in evaluation_metrics({"b": found}, "a"), "the first was not measured"


def test_every_response_is_a_line(load):
    config = load("eval={sets: [{name: a, path: a.jsonl}]}")
    (asked,) = eval_sets(config.eval, config.data)
    file = io.StringIO()
    write_responses(file, asked, sampled(["so 4", None], right={"so 4"}))
    first, second = map(json.loads, file.getvalue().splitlines())
    assert (first["set"], first["row"], first["response"], first["correct"], first["answer"]) == (
        *("a", 1, "so 4", True),
        "4",
    )
    assert (second["reward"], second["correct"], second["failure"]) == (None, None, "r: hung")
