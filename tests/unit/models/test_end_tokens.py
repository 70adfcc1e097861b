import json

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.end_tokens import EndToken, EndTokens, end_tokens, planned_end_tokens, stated_end
from gspo_mega.models.huggingface import read_end_tokens


def test_the_end_tokens_of_both_files_and_of_none(tmp_path):
    with pytest.raises(ModelError, match="neither generation_config.json nor config.json names eos_token_id"):
        read_end_tokens(tmp_path)
    with pytest.raises(
        ModelError, match="none: no such folder; the one of a Hugging Face model or tokenizer is needed"
    ):
        read_end_tokens(tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "eos_token_id": 3}))
    assert read_end_tokens(tmp_path) == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 11]}))
    with pytest.raises(ModelError, match="11"):
        read_end_tokens(tmp_path)


def test_the_tokenizer_alone_names_an_end(tmp_path):
    folder_with(tmp_path, config={"vocab_size": 9}, tokenizer_config=NAMED, tokenizer=WHOLE)
    assert read_end_tokens(tmp_path) == ()


NAMED = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
WHOLE = {"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"a": 0, "<text>": 3}}}


def folder_with(folder, **files):
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "files",
    [
        dict(tokenizer_config=NAMED, tokenizer=WHOLE),
        dict(tokenizer_config=NAMED | {"eos_token": {"content": "<end>", "lstrip": False}}, tokenizer=WHOLE),
        dict(tokenizer_config=NAMED | {"added_tokens_decoder": {"7": {"content": "<end>"}}}),
        dict(tokenizer_config=NAMED, added_tokens={"<end>": 7}),
        dict(tokenizer_config=NAMED, tokenizer={"added_tokens": [], "model": {"vocab": {"<end>": 7}}}),
        dict(tokenizer_config={}, special_tokens_map={"eos_token": "<end>"}, tokenizer=WHOLE),
        # transformers lets the older file have the last word, unless the newer one lists the added tokens
        dict(tokenizer_config={"eos_token": "a"}, special_tokens_map={"eos_token": "<end>"}, tokenizer=WHOLE),
        dict(
            tokenizer_config=NAMED | {"added_tokens_decoder": {"7": {"content": "<end>"}}},
            special_tokens_map={"eos_token": "a"},
            tokenizer=WHOLE,
        ),
    ],
)
def test_the_end_token_that_a_tokenizers_files_state(tmp_path, files):
    assert stated_end(folder_with(tmp_path, **files)) == EndToken(7, "<end>")


@pytest.mark.parametrize(
    "files",
    [
        {},
        dict(tokenizer_config={"eos_token": None}, tokenizer=WHOLE),
        dict(tokenizer_config=NAMED),
        dict(tokenizer_config=NAMED, tokenizer={"added_tokens": "x", "model": {"vocab": [["<end>", 1.0]]}}),
        dict(tokenizer_config=NAMED | {"added_tokens_decoder": ["<end>"]}, tokenizer="[" * 100_000),
        dict(tokenizer_config="[1]", tokenizer=WHOLE),
        dict(tokenizer_config={"eos_token": {"content": 3}}, tokenizer=WHOLE),
        dict(tokenizer_config=NAMED, tokenizer={"added_tokens": [{"id": True, "content": "<end>"}]}),
    ],
)
def test_files_that_state_none_or_cannot_be_read(tmp_path, files):
    assert stated_end(folder_with(tmp_path, **files)) is None


def test_a_response_ends_at_every_token_that_a_source_names():
    """In the order configuration, tokenizer, template, each once; nothing is said where the sources agree."""
    own, turn = EndToken(7, "<end>"), EndToken(5, "<turn>")
    assert end_tokens((7, 5), own, turn, 9) == EndTokens((7, 5))
    assert end_tokens((7, 3), own, None, 9) == EndTokens((7, 3))
    found = end_tokens((3,), own, turn, 9, {3: "<text>"})
    assert found.ids == (3, 7, 5)
    assert found.notices == (
        "the sources of the end token differ: config.json and generation_config.json name '<text>' (3), the tokenizer"
        " '<end>' (7), the chat template '<turn>' (5); a response ends at any of these tokens",
    )
    assert end_tokens((5,), turn, own, 9).ids == (5, 7), "the other direction"
    nobody = end_tokens((), own, None, 9)
    assert nobody.ids == (7,) and "generation_config.json name none, the tokenizer '<end>' (7)" in nobody.notices[0]
    assert end_tokens((), None, None, 9) == EndTokens(())


def test_an_end_token_outside_the_vocabulary_is_named_and_left_out():
    found = end_tokens((3,), EndToken(9, "<end>"), EndToken(8, "<turn>"), 9)
    assert found.ids == (3, 8)
    assert found.notices[0].startswith("the end token of the tokenizer, '<end>' (9), is outside the model's vocabulary")
    assert "'<end>'" not in found.notices[1]


def test_what_a_plan_can_tell(tmp_path):
    folder_with(tmp_path, tokenizer_config=NAMED, tokenizer=WHOLE)
    assert planned_end_tokens(tmp_path, (7,), 9) == EndTokens((7,))
    found = planned_end_tokens(tmp_path, (3,), 9)
    assert found.ids == (3, 7) and "name '<text>' (3), the tokenizer '<end>' (7);" in found.notices[0]
    assert planned_end_tokens(tmp_path, (), 9).ids == (7,)
    assert planned_end_tokens(tmp_path / "none", (3,), 9) == EndTokens((3,))
