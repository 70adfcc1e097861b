"""The prompt that a teacher reads in place of the policy's (`teacher.context`)."""

from __future__ import annotations

import pytest

from gspo_mega.base.errors import DataError
from gspo_mega.config.derived import OneTeacher
from gspo_mega.config.schema import TeacherModel
from gspo_mega.data.prompts import encoder_of, load_prompts, taught_prompt

ROWS = [
    {"prompt": "2+2=", "answer": "4", "worked": "2+2=4 {answer}", "steps": ["a", "b"]},
    {"prompt": "3+3=", "answer": "6", "worked": "3+3=6" * 40, "steps": []},
]
CONTEXT = "{metadata.worked};{prompt}"


def teachers(context, most=64, source=None):
    return [OneTeacher("teacher", TeacherModel(policy=True, context=context, max_prompt_tokens=most), source)]


def test_marks_are_replaced_once_and_the_rest_stays(write_jsonl, data_settings, tokenizer):
    data = data_settings(path=str(write_jsonl(ROWS)))
    [source] = load_prompts(data, tokenizer)
    prompt, encoder = source.item(0), encoder_of(data, tokenizer)
    ids = taught_prompt(encoder, CONTEXT + "{answer}{metadata.steps}", prompt)
    assert tokenizer.decode(ids) == '2+2=4 {answer};2+2=4["a", "b"]'
    assert prompt.token_ids == tuple(tokenizer.encode("2+2=")), "the policy's own prompt stays"


def test_a_chat_keeps_its_other_messages(write_jsonl, data_settings, tokenizer):
    data = data_settings(
        path=str(write_jsonl(ROWS)), chat_template=True, system_prompt="Be brief.", max_prompt_tokens=256
    )
    [source] = load_prompts(data, tokenizer)
    prompt = source.item(0)
    text = tokenizer.decode(taught_prompt(encoder_of(data, tokenizer), "Example: {metadata.worked}\n{prompt}", prompt))
    own = tokenizer.decode(list(prompt.token_ids))
    assert text == own.replace("2+2=", "Example: 2+2=4 {answer}\n2+2=") and "Be brief." in text


def test_rows_whose_teacher_has_no_room_are_left_out(write_jsonl, data_settings, tokenizer):
    data = data_settings(path=str(write_jsonl(ROWS)))
    [all_of_them] = load_prompts(data, tokenizer)
    [source] = load_prompts(data, tokenizer, taught=teachers(CONTEXT))
    assert [one.num_overlong for one in (all_of_them, source)] == [0, 1]
    assert [prompt.prompt_id for prompt in source.items()] == ["data:0"]
    [other] = load_prompts(data, tokenizer, taught=teachers(CONTEXT, source="elsewhere"))
    assert other.num_overlong == 0


def test_a_row_without_the_column_is_named(write_jsonl, data_settings, tokenizer):
    data = data_settings(path=str(write_jsonl([ROWS[0], {"prompt": "1+1=", "answer": "2"}])))
    with pytest.raises(DataError, match=r"data.jsonl:2: teacher.context: no key 'worked'; the row has"):
        load_prompts(data, tokenizer, taught=teachers(CONTEXT))
