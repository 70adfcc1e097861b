import os
import subprocess
import sys
import time

import pytest

from gspo_mega.base.errors import DataError
from gspo_mega.config.schema import Source
from gspo_mega.data import prompts as prompts_module
from gspo_mega.data.prompts import PromptSource, encoder_of, load_prompts

ROWS = [{"prompt": f"{k}+{k}=", "answer": str(2 * k), "level": k} for k in range(10, 20)]


def test_a_row_becomes_a_prompt(write_jsonl, data_settings, tokenizer):
    data = data_settings(path=str(write_jsonl([ROWS[0], ROWS[1] | {"response": "x"}])))
    [source] = load_prompts(data, tokenizer)
    prompt = source.item(1)
    assert (prompt.prompt_id, prompt.source, prompt.text, prompt.answer) == ("data:1", "data", "11+11=", "22")
    assert prompt.metadata == {"level": 11}
    assert prompt.token_ids == tuple(tokenizer.encode("11+11="))
    assert (len(source), source.num_overlong, source.num_examined) == (2, 0, 2)


def test_keys_are_the_configurations(write_jsonl, data_settings, tokenizer):
    """The shape of GSM8K's files."""
    path = write_jsonl(
        [{"question": "Tom has 3 eggs and eats 1. How many are left?", "answer": "3 - 1 = <<3-1=2>>2\n#### 2"}]
    )
    data = data_settings(path=str(path), prompt_key="question", chat_template=True)
    [source] = load_prompts(data, tokenizer)
    prompt = source.item(0)
    assert prompt.text.startswith("<|im_start|>user\nTom has") and prompt.text.endswith("<|im_start|>assistant\n")
    assert prompt.answer.endswith("#### 2")


def test_an_answer_of_several_columns(write_jsonl, data_settings, tokenizer):
    path = write_jsonl([{"prompt": "1+1=", "test": "t", "entry_point": "f", "level": 1}])
    [source] = load_prompts(data_settings(path=str(path), answer_keys=("test", "entry_point")), tokenizer)
    prompt = source.item(0)
    assert prompt.answer == {"test": "t", "entry_point": "f"} and prompt.metadata == {"level": 1}
    with pytest.raises(DataError, match=r"data.jsonl:1: no key 'tests'; did you mean 'test'.*data.answer_keys choo"):
        load_prompts(data_settings(path=str(path), answer_keys=("entry_point", "tests")), tokenizer)


def test_several_sources_in_their_order(write_jsonl, data_settings, tokenizer):
    entries = tuple(
        Source(name=name, path=str(write_jsonl(ROWS[:k], f"{name}.jsonl"))) for k, name in ((2, "b"), (3, "a"))
    )
    sources = load_prompts(data_settings(sources=entries), tokenizer)
    assert [(source.name, len(source), source.item(0).prompt_id) for source in sources] == [
        ("b", 2, "b:0"),
        ("a", 3, "a:0"),
    ]


def test_a_prompt_of_megabytes_is_left_out_without_the_tokenizer(write_jsonl, data_settings, tokenizer):
    rows = [{"prompt": "7" * 20_000_000, "answer": ""}, ROWS[0]]
    began = time.process_time()
    [source] = load_prompts(data_settings(path=str(write_jsonl(rows)), max_prompt_tokens=8), tokenizer)
    assert source.num_overlong == 1 and time.process_time() - began < 3


def test_overlong_prompts_are_counted_and_left_out(write_jsonl, data_settings, tokenizer):
    rows = [{"prompt": "7" * length, "answer": ""} for length in (3, 9, 8, 12, 1)]
    [source] = load_prompts(data_settings(path=str(write_jsonl(rows)), max_prompt_tokens=8), tokenizer)
    assert [source.item(k) is None for k in range(5)] == [False, True, False, True, False]
    assert (source.num_overlong, source.num_examined) == (2, 5)
    assert [prompt.prompt_id for prompt in source.items()] == ["data:0", "data:2", "data:4"]
    assert [prompt.prompt_id for prompt in source.items(2)] == ["data:0", "data:2"]


def test_nothing_but_overlong_prompts_is_an_error(write_jsonl, data_settings, tokenizer):
    path = write_jsonl(ROWS)
    with pytest.raises(DataError, match=f"{path}: every one of its 10 rows is too long .data.max_prompt_tokens: 2"):
        load_prompts(data_settings(path=str(path), max_prompt_tokens=2), tokenizer)


def test_a_long_file_is_examined_as_it_is_used(write_jsonl, data_settings, tokenizer, monkeypatch):
    monkeypatch.setattr(prompts_module, "NUM_ROWS_SURVEYED", 3)
    rows = [{"prompt": "7" * length, "answer": ""} for length in (9, 9, 9, 9, 3, 9, 9)]
    [source] = load_prompts(data_settings(path=str(write_jsonl(rows)), max_prompt_tokens=8), tokenizer)
    # It went on until one fitted.
    assert (source.num_overlong, source.num_examined) == (4, 5)
    assert source.item(6) is None
    assert (source.num_overlong, source.num_examined) == (5, 6)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"question": "a", "answer": "b"},
            "no key 'prompt'; the line has 'question', 'answer' (data.prompt_key chooses the key)",
        ),
        ({"promt": "a", "answer": "b"}, "no key 'prompt'; did you mean 'promt'? the line has"),
        ({"prompt": "a", "anser": "b"}, "no key 'answer'; did you mean 'anser'?"),
        ({"prompt": 7, "answer": "b"}, "'prompt' must be a text or a list of chat messages"),
        ({"prompt": " ", "answer": "b"}, "'prompt' is empty"),
        ({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}, "needs data.chat_template: true"),
        ({}, "the line has no keys at all"),
    ],
)
def test_a_malformed_row_is_named_with_its_line(write_jsonl, data_settings, tokenizer, row, text):
    path = write_jsonl([ROWS[0], "", row])
    with pytest.raises(DataError) as caught:
        load_prompts(data_settings(path=str(path)), tokenizer)
    assert str(caught.value).startswith(f"{path}:3: ") and text in str(caught.value)


def test_any_answer_will_do_but_it_must_be_there(write_jsonl, data_settings, tokenizer):
    rows = [{"prompt": "a", "answer": answer} for answer in (None, 7, ["x"], {"y": 1})]
    [source] = load_prompts(data_settings(path=str(write_jsonl(rows))), tokenizer)
    assert [prompt.answer for prompt in source.items()] == [None, 7, ["x"], {"y": 1}]


def test_a_row_that_the_template_refuses_is_named(write_jsonl, data_settings, tokenizer):
    path = write_jsonl([ROWS[0], {"prompt": [{"role": "user", "content": "a"}], "answer": ""}])
    data = data_settings(path=str(path), chat_template=True)
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% if messages[0].content == 'a' %}{{ raise_exception('no a') }}{% endif %}x"
        encoder = encoder_of(data, tokenizer)
        with pytest.raises(DataError, match=f"{path}:2: .*no a"):
            PromptSource("data", path, data, encoder)
    finally:
        tokenizer.chat_template = template


def test_no_data_at_all(data_settings, tokenizer):
    with pytest.raises(DataError, match="data.path or data.sources"):
        load_prompts(data_settings(), tokenizer)


def test_ten_thousand_prompts_load_in_seconds(write_jsonl, data_settings, tokenizer):
    path = write_jsonl([{"prompt": f"{k}+{k}=", "answer": ""} for k in range(10_000)])
    start = time.process_time()
    load_prompts(data_settings(path=str(path)), tokenizer)
    assert time.process_time() - start < 10


def test_importing_the_package_costs_no_transformers():
    code = (
        "import sys, gspo_mega.data.prompts, gspo_mega.data.demonstrations, gspo_mega.data.stream,"
        " gspo_mega.data.quickstart\nassert 'transformers' not in sys.modules and 'torch' not in sys.modules and"
        " 'tokenizers' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_a_prompts_messages_are_there_with_a_chat_template_alone(write_jsonl, data_settings, tokenizer):
    asked = [{"role": "user", "content": "1+2="}]
    path = str(write_jsonl([{"prompt": "1+2=", "answer": "3"}, {"prompt": asked, "answer": "3"}]))
    data = data_settings(path=path, chat_template=True, system_prompt="Add.")
    [source] = load_prompts(data, tokenizer)
    for prompt in source.items():
        assert list(prompt.messages) == [{"role": "system", "content": "Add."}, *asked]
    text = data_settings(path=str(write_jsonl([{"prompt": "1+2=", "answer": "3"}])))
    assert load_prompts(text, tokenizer)[0].item(0).messages == ()
