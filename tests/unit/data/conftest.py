import json

import pytest
from transformers import AutoTokenizer

from gspo_mega.config.schema import Data
from gspo_mega.data.quickstart import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def write_jsonl(tmp_path):
    """write_jsonl(rows, name) -> path; a row that is a str or bytes is written as it is."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture
def data_settings():
    """data_settings(**changes) -> Data with no chat template and a generous limit."""

    def make(**changes):
        return Data(**({"max_prompt_tokens": 64, "chat_template": False} | changes))

    return make
