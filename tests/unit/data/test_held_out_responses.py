"""The responses that a run keeps of each held-out evaluation: which, how long, after a restart, before and after."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gspo_mega.base.episodes import Group, one_turn_row
from gspo_mega.base.errors import DataError, FolderError
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.load import TrainState
from gspo_mega.data.held_out_responses import (
    MOST_KEPT_CHARACTERS,
    MOST_KEPT_PROMPTS,
    before_and_after,
    clipped,
    drop_responses,
    read_responses,
    shown_places,
    write_responses_of,
)
from gspo_mega.train.async_eval import DUE
from gspo_mega.train.held_out import kept_responses, write_responses
from gspo_mega.train.rank0 import Rank0


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def row(number, correct=False, name="a", response="7", **more):
    return {"set": name, "row": number, "prompt": f"{number}+1=", "response": response, "correct": correct} | more


def names(folder):
    return sorted(path.name for path in folder.evaluations_dir.iterdir())


def group(number, *samples, response="eight", answer: Any = "8", prompt="7+1="):
    """A prompt with (reward, correct) of each sample; reward None: its scoring failed."""
    asked = Prompt(f"held:{number}", "held", (1,), prompt, answer=answer)
    rows = [
        one_turn_row(
            f"g{number}-s{place}", number, asked, [1], [1], [0.0], [0], "stop", reward=reward, correct=correct,
            response_text=f"{response} {place}", reward_error="it hung" if reward is None else None,
        )
        for place, (reward, correct) in enumerate(samples)
    ]  # fmt: skip
    return Group.from_rows(number, asked, rows)


ASKED = cast(Any, SimpleNamespace(name="a", correct_threshold=None, place="eval"))


def test_prompts_are_spread_over_the_set_and_the_same_each_time():
    assert shown_places(0) == [] and shown_places(3) == [0, 1, 2] and shown_places(16) == list(range(16))
    assert shown_places(17) == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16]
    for size in (17, 31, 256, 1319):
        places = shown_places(size)
        assert len(set(places)) == MOST_KEPT_PROMPTS and places[0] == 0 and places[-1] == size - 1


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert clipped("a" * MOST_KEPT_CHARACTERS) == "a" * MOST_KEPT_CHARACTERS
    assert clipped("abcdefghij", 4) == "ab\n[... 6 characters ...]\nij"


def test_the_first_response_to_a_prompt_with_how_many_of_all_are_right(tmp_path):
    groups = [group(4, (1.0, True), (0.0, False), (None, None)), group(9, (None, None))]
    first, failed = kept_responses(ASKED, groups)
    assert (first["row"], first["response"], first["correct"], first["prompt"]) == (5, "eight 0", True, "7+1=")
    assert (first["num_scored"], first["num_correct"]) == (2, 1)
    assert (failed["correct"], failed["failure"], failed["num_scored"]) == (None, "it hung", 0)
    with (tmp_path / "all").open("w+") as file:
        write_responses(file, ASKED, groups)
        file.seek(0)
        whole = json.loads(file.readline())
    assert whole == {key: first[key] for key in whole}, "as gspo-mega eval --out writes it"


def test_what_is_kept_of_an_evaluation_is_bounded():
    long = "x" * 50_000
    rows = kept_responses(
        ASKED, [group(n, (1.0, True), response=long, prompt=long, answer={"tests": [long]}) for n in range(100)]
    )
    assert len(rows) == MOST_KEPT_PROMPTS and all(len(json.dumps(one)) < 4 * MOST_KEPT_CHARACTERS for one in rows)
    assert all(one["response"].endswith("x 0") for one in rows), "a final answer is at the end"


def test_an_evaluation_that_is_made_again_replaces_its_file(folder):
    write_responses_of(folder, 4, [row(1), row(2)])
    write_responses_of(folder, 4, [row(1, response="lone \ud800")])
    assert names(folder) == ["step_00000004.jsonl"]
    (only,) = read_responses(folder.evaluations_dir / "step_00000004.jsonl")
    assert only["response"] == "lone ?"


@pytest.mark.parametrize(
    ("step", "due", "left"), [(0, [], []), (2, [], [0, 2]), (3, [2], [0]), (9, [], [0, 2, 4]), (4, [0, 4], [2])]
)
def test_a_continued_run_drops_what_it_measures_again(folder, step, due, left):
    """A run that begins again from step 0 measures its start again, as its metrics."""
    for measured in (0, 2, 4):
        write_responses_of(folder, measured, [row(1)])
    lead = SimpleNamespace(
        source=SimpleNamespace(restore=lambda state: None),
        writer=SimpleNamespace(resume_from=lambda step: None),
        run_folder=folder,
    )
    Rank0.resume(cast(Any, lead), TrainState(step=step, summary={DUE: [{"step": one} for one in due]}))
    assert names(folder) == [f"step_{one:08d}.jsonl" for one in left]


def test_an_evaluation_that_is_stopped_leaves_no_file_and_one_that_ends_leaves_all_its_sets(folder):
    def evaluate(on_wait, which, keep, servers):
        keep(ASKED, [group(0, (1.0, True))])
        on_wait()
        keep(cast(Any, SimpleNamespace(name="b", correct_threshold=None, place="eval")), [group(0, (0.0, False))])
        return {"a": 1, "b": 2}

    def stop():
        raise KeyboardInterrupt

    lead = cast(Any, SimpleNamespace(rollouts=SimpleNamespace(evaluate=evaluate), run_folder=folder))
    lead.check_newest_attempt = lambda: None
    with pytest.raises(KeyboardInterrupt):
        Rank0.evaluate(lead, 6, stop, ["a", "b"])
    assert not folder.evaluations_dir.exists()
    assert Rank0.evaluate(lead, 6, lambda: None, ["a", "b"]) == {"a": 1, "b": 2}
    kept = list(read_responses(folder.evaluations_dir / "step_00000006.jsonl"))
    assert [(one["set"], one["correct"]) for one in kept] == [("a", True), ("b", False)]


def test_before_and_after_with_what_was_learnt_first(folder):
    write_responses_of(folder, 0, [row(1, True), row(2, False), row(3, True), row(4, None)])
    write_responses_of(folder, 1, [row(number, None) for number in (1, 2, 3, 4)])
    write_responses_of(folder, 2, [row(1, True), row(2, True), row(3, False), row(4, False), row(5, True)])
    (change,), problems = before_and_after(folder)
    assert (change.name, change.first_step, change.last_step, problems) == ("a", 0, 2, [])
    told = [(one.row, one.before and one.before["correct"], one.after["correct"]) for one in change.prompts]
    assert told == [(2, False, True), (3, True, False), (1, True, True), (4, None, False), (5, None, True)]


def test_sets_of_different_cadence_and_a_single_evaluation(folder):
    assert before_and_after(folder) == ([], [])
    write_responses_of(folder, 0, [row(1, name="a"), row(1, name="b")])
    found, _ = before_and_after(folder)
    assert [(one.name, one.first_step, one.prompts[0].before) for one in found] == [
        ("a", None, None),
        ("b", None, None),
    ]
    write_responses_of(folder, 5, [row(1, name="b")])
    write_responses_of(folder, 10, [row(1, name="a"), row(1, name="b")])
    write_responses_of(folder, 15, [row(1, name="b"), row(2, name="b")])
    found, _ = before_and_after(folder)
    assert [(one.name, one.first_step, one.last_step, len(one.prompts)) for one in found] == [
        ("a", 0, 10, 1),
        ("b", 0, 15, 2),
    ]


def test_another_prompt_in_the_same_row_is_not_compared(folder):
    write_responses_of(folder, 0, [row(1)])
    write_responses_of(folder, 1, [row(1) | {"prompt": "other"}])
    (change,), _ = before_and_after(folder)
    assert change.prompts[0].before is None


def test_a_damaged_file_is_named_and_the_others_are_read(folder):
    for step in (0, 1, 2):
        write_responses_of(folder, step, [row(1, bool(step))])
    damaged = folder.evaluations_dir / "step_00000002.jsonl"
    damaged.write_text('{"set": "a"}\n')
    (change,), problems = before_and_after(folder)
    assert (change.first_step, change.last_step) == (0, 1)
    assert problems == [f"{damaged}:1: is not a line with a held-out response; these held-out responses are not shown"]
    for key, value in {"set": 1, "row": [1], "prompt": None, "response": {}, "correct": "yes"}.items():
        damaged.write_text(json.dumps(row(1) | {key: value}) + "\n")
        with pytest.raises(DataError, match="is not a line with a held-out response"):
            list(read_responses(damaged))
    damaged.unlink()
    damaged.mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_responses(damaged))


def test_a_disk_that_refuses_ends_the_run_with_its_exit_code(folder):
    folder.path.mkdir()
    folder.evaluations_dir.write_text("not a folder")
    with pytest.raises(FolderError, match="the same command continues the run"):
        write_responses_of(folder, 0, [row(1)])
    folder.evaluations_dir.unlink()
    (folder.evaluations_dir / "step_00000001.jsonl").mkdir(parents=True)
    with pytest.raises(FolderError, match="cannot be removed"):
        drop_responses(folder, 0)
