"""What the end of a run says besides its numbers: rewards of its first and last steps, and responses."""

from __future__ import annotations

import json

import pytest

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.held_out_responses import write_responses_of
from gspo_mega.train.final_table import _reward_rows, held_out_to_show, responses_to_show


def batch_of(rewards, response="answer worth {}", prompt="a question", errors=()):
    rows = [
        one_turn_row(
            f"r{place}", 0, Prompt("p:0", "p", (1, 2), prompt), [5], [1], [-1.0], [0], "stop",
            reward=reward, response_text=response.format(reward),
        )
        for place, reward in enumerate(rewards)
    ]  # fmt: skip
    for place in errors:
        rows[place].reward_error = "the judge was away"
    return RolloutBatch(0, [Group.from_rows(0, rows[0].prompt, rows)])


def test_the_highest_a_middle_and_the_lowest_reward():
    lines = responses_to_show(batch_of([0.5, 1.0, -0.25, 0.75]), 12)
    assert lines[0] == "responses of step 12, by reward: the highest, a middle one, the lowest"
    assert [line.split()[0] for line in lines[1::2]] == ["1.000", "0.500", "-0.250"]
    assert [line.split("-> ")[1] for line in lines[2::2]] == [f'"answer worth {r}"' for r in (1.0, 0.5, -0.25)]


def test_a_row_that_was_not_scored_is_not_shown_and_a_batch_without_rewards_shows_nothing():
    batch = batch_of([0.5, 1.0, -0.25, 0.75], errors=range(3))
    assert [line.split()[0] for line in responses_to_show(batch, 1)[1::2]] == ["0.750"]
    assert responses_to_show(batch_of([0.5, 0.5], errors=range(2)), 1) == []


def test_long_texts_are_cut_and_control_characters_written_out():
    batch = batch_of([0.5] * 4, response="\x1b[31m" + "a" * 1000, prompt="b" * 500 + "é\n")
    lines = responses_to_show(batch, 1)
    assert all(len(line) < 350 and "\x1b" not in line and "\n" not in line for line in lines)
    assert lines[1].endswith('bé\\n"') and lines[2].endswith('a ..."')


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ([0.25], []),
        ([0.25, None, 0.75], [["reward, first step", "0.250"], ["reward, last step", "0.750"]]),
        ([0.25, 0.75], [["reward, first step", "0.250"], ["reward, last step", "0.750"]]),
        ([0, 1, 0, 9, 2, 0, 2], [["reward, first 3 steps", "0.333"], ["reward, last 3 steps", "1.333"]]),
        ([1.0] * 10 + [2.0] * 10, [["reward, first 5 steps", "1.000"], ["reward, last 5 steps", "2.000"]]),
    ],
)
def test_rewards_of_the_first_and_last_steps(tmp_path, rewards, shown):
    lines = [json.dumps({"step": step, "reward/mean": reward}) for step, reward in enumerate(rewards, 1)]
    lines.insert(1, json.dumps({"step": 1, "eval/accuracy": 0.5}))  # a late evaluation has a line of its own
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert _reward_rows(tmp_path / "metrics.jsonl") == shown


def test_metrics_that_cannot_be_read_do_not_end_a_run_that_ended_well(tmp_path):
    assert _reward_rows(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text("no json\n")
    assert _reward_rows(tmp_path / "metrics.jsonl") == []


def test_two_held_out_prompts_before_and_after(tmp_path):
    folder = RunFolder(tmp_path)

    def row(number, correct, response):
        return {"set": "a", "row": number, "prompt": f"{number}+1=", "response": response, "correct": correct}

    assert held_out_to_show(folder) == []
    write_responses_of(folder, 0, [row(1, True, "2"), row(2, False, "9\x1b[2J"), row(3, None, "?")])
    assert held_out_to_show(folder) == [], "nothing to compare with"
    write_responses_of(folder, 12, [row(1, True, "2"), row(2, True, "3"), row(3, False, "y" * 1000)])
    header, *lines = held_out_to_show(folder)
    assert header == "held-out answers at step 0 and at step 12"
    assert [line.split() for line in lines] == [
        ['"2+1="'],
        ["wrong", "->", '"9\\u001b[2J"'],
        ["right", "->", '"3"'],
        ['"1+1="'],
        ["right", "->", '"2"'],
        ["right", "->", '"2"'],
    ]
