"""Parquet files and saved data sets give the rows, the order and the checks of the same rows as JSONL."""

from __future__ import annotations

import builtins
import datetime
import hashlib
import importlib
import json
import os
import subprocess
import sys

import pytest

from gspo_mega.base.errors import DataError
from gspo_mega.data.prompts import load_prompts
from gspo_mega.data.row_files import check_first_rows, open_rows
from gspo_mega.data.rows import JsonlFile
from gspo_mega.data.stream import PromptStream

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [
    {"prompt": f"{k}+1=", "answer": str(k + 1), "level": k / 2, "tests": [{"in": f"{k}", "n": None}], "ok": k % 2 == 0}
    for k in range(25)
]


def no_check(row):
    return None


def parquet(path, rows=ROWS, row_group_size=4, schema=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=row_group_size)
    return path


def saved(folder, rows=ROWS, num_files=2, **state):
    """As `datasets.Dataset.save_to_disk` writes: Arrow streams, state.json, dataset_info.json."""
    folder.mkdir(parents=True)
    files = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    share = -(-len(rows) // num_files)
    for number, name in enumerate(files):
        table = pa.Table.from_pylist(rows[number * share : (number + 1) * share])
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files], **state}))
    return folder


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_form_has_the_rows_of_the_same_jsonl_file(tmp_path):
    lines = JsonlFile(jsonl(tmp_path / "rows.jsonl"), no_check)
    want = [lines[k] for k in range(len(lines))]
    parquet(tmp_path / "shards/b.parquet", ROWS[10:])
    parquet(tmp_path / "shards/a.parquet", ROWS[:10])
    for path in (parquet(tmp_path / "rows.parquet"), tmp_path / "shards", saved(tmp_path / "saved")):
        seen = []
        file = open_rows(path, lambda row, seen=seen: seen.append(row))
        assert seen == want and len(file) == 25
        assert [file[k] for k in (24, 0, 13, 9, 10)] == [want[k] for k in (24, 0, 13, 9, 10)], "in any order"
        assert all(type(file[3][key]) is type(want[3][key]) for key in want[3])
        with pytest.raises(IndexError):
            file[25]


def test_messages_with_different_keys_are_the_same_prompts(tmp_path, tokenizer, data_settings):
    """Arrow gives every message of a column all keys of the others, as nulls."""
    rows = [
        {"prompt": [{"role": "user", "content": "1+1=", "name": "Ada"}], "answer": "2"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2="}], "answer": "3"},
    ]
    table = parquet(tmp_path / "rows.parquet", rows)
    assert pq.read_table(table).to_pylist()[1]["prompt"][0]["name"] is None
    [one], [other] = (
        load_prompts(data_settings(path=str(path), chat_template=True), tokenizer)
        for path in (jsonl(tmp_path / "rows.jsonl", rows), table)
    )
    assert [one.item(0), one.item(1)] == [other.item(0), other.item(1)]


def test_a_stream_over_them_draws_the_same_prompts_and_goes_on_where_it_was(tmp_path, tokenizer, data_settings):
    def stream(path):
        [source] = load_prompts(data_settings(path=str(path)), tokenizer)
        return PromptStream([source], [1.0], seed=3, shuffle=True)

    lines = stream(jsonl(tmp_path / "rows.jsonl"))
    for path in (parquet(tmp_path / "rows.parquet"), saved(tmp_path / "rows")):
        one, lines = stream(path), stream(tmp_path / "rows.jsonl")
        assert [one.next() for _ in range(30)] == [lines.next() for _ in range(30)]
        state = json.loads(json.dumps(one.state_dict()))
        again = stream(path)
        again.load_state_dict(state)
        assert [again.next() for _ in range(30)] == [lines.next() for _ in range(30)]
    parquet(tmp_path / "rows.parquet", ROWS[::-1])
    with pytest.raises(DataError, match="rows.parquet"):
        stream(tmp_path / "rows.parquet").load_state_dict(state)


def test_the_fingerprint_is_of_the_bytes(tmp_path):
    path = parquet(tmp_path / "rows.parquet")
    assert open_rows(path, no_check).fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    folder = saved(tmp_path / "saved")
    whole = b"".join(file.read_bytes() for file in sorted(folder.glob("*.arrow")))
    assert open_rows(folder, no_check).fingerprint == hashlib.sha256(whole).hexdigest()


def test_a_replaced_file_is_read_as_it_was(tmp_path):
    path = parquet(tmp_path / "rows.parquet")
    file = open_rows(path, no_check)
    os.replace(parquet(tmp_path / "new.parquet", [{"prompt": "other"}]), path)
    assert file[20] == ROWS[20]


def test_problems_are_named_by_file_and_row(tmp_path):
    parquet(tmp_path / "shards/a.parquet", ROWS[:10])
    second = parquet(tmp_path / "shards/b.parquet", ROWS[10:])

    def check(row):
        return "level is 6" if row["level"] == 6.0 else None

    with pytest.raises(DataError) as raised:
        open_rows(tmp_path / "shards", check)
    assert str(raised.value) == f"{second}:row 3: level is 6"
    with pytest.raises(DataError, match=r"b.parquet:row 3: level is 6"):
        check_first_rows(tmp_path / "shards", check, 13)
    check_first_rows(tmp_path / "shards", check, 12)
    with pytest.raises(DataError, match=r"a.parquet:row 1: no \(so in all 25 rows\)$"):
        open_rows(tmp_path / "shards", lambda row: "no")
    with pytest.raises(DataError, match=r"a.parquet:row 1: no \(so in all of the first 12 rows\)$"):
        check_first_rows(tmp_path / "shards", lambda row: "no", 12)
    with pytest.raises(DataError, match=r"a.parquet:row 1: no \(so in all of the first 12 rows\)$"):
        open_rows(tmp_path / "shards", lambda row: "no", lambda num_rows: num_rows == 12)
    assert open_rows(tmp_path / "shards", no_check).line(12) == f"{second}:row 3"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"when": datetime.datetime(2026, 1, 1)},
            r"column 'when' is timestamp\[us\], which is not a JSON type; valid: text",
        ),
        ({"image": {"bytes": b"x"}}, "column 'image' is struct<bytes: binary>, which is not a JSON type"),
        ({"score": float("nan")}, "row 1: 'score': NaN or infinite is no JSON number"),
        ({"scores": [1.0, float("inf")]}, "row 1: 'scores': NaN or infinite is no JSON number"),
    ],
)
def test_what_no_json_value_is_is_refused(tmp_path, values, said):
    path = parquet(tmp_path / "rows.parquet", [{"prompt": "p", **values}])
    for opened in (lambda: open_rows(path, no_check), lambda: check_first_rows(path, no_check, 5)):
        with pytest.raises(DataError, match=said):
            opened()


def test_folders_and_files_that_are_no_data(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    splits = tmp_path / "dict"
    saved(splits / "train")
    saved(splits / "test")
    (splits / "dataset_dict.json").write_text("{}")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    for path, said in (
        (
            empty,
            "this is a folder without data; valid: a JSONL file, a Parquet file, a folder of Parquet files, or one",
        ),
        (splits, "a data set of several splits; name one of its folders: test, train"),
        (tmp_path / "bad.parquet", "bad.parquet: cannot be read: "),
        (tmp_path / "none.parquet", "none.parquet: no such file"),
        (parquet(tmp_path / "no_rows.parquet", [], schema=pa.schema({"prompt": pa.string()})), "no rows"),
        (saved(tmp_path / "indexed", _indices_data_files=[{"filename": "i"}]), "its rows are chosen by indices"),
    ):
        with pytest.raises(DataError, match=said):
            open_rows(path, no_check)


def test_row_groups_are_read_when_they_are_asked_for_and_only_some_are_kept(tmp_path, monkeypatch):
    from gspo_mega.data import row_files

    file = row_files.TableFile(parquet(tmp_path / "rows.parquet", row_group_size=5), no_check)
    read, part = [], file._parts[0]
    assert isinstance(part, row_files._ParquetPart)
    plain = part._parquet.read_row_group
    monkeypatch.setattr(
        part,
        "_parquet",
        type("Spy", (), {"read_row_group": lambda self, n, **more: read.append(n) or plain(n, **more)})(),
    )
    assert [file[k]["prompt"] for k in (7, 8, 22, 6)] == ["7+1=", "8+1=", "22+1=", "6+1="]
    assert read == [1, 4]
    monkeypatch.setattr(row_files, "_KEPT_BYTES", 1)
    assert [file[k]["prompt"] for k in (0, 1, 7, 0)] == ["0+1=", "1+1=", "7+1=", "0+1="]
    assert read == [1, 4, 0, 1, 0], "the one that was read last stays"


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = parquet(tmp_path / "rows.parquet")
    plain = builtins.__import__
    monkeypatch.setattr(
        importlib, "import_module", lambda name: plain("no_such_module_at_all") if "pyarrow" in name else plain(name)
    )
    with pytest.raises(DataError, match=r"pyarrow, which is not installed .*pip install 'gspo_mega\[parquet\]'.*JSONL"):
        open_rows(path, no_check)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"prompt,answer\nhello,3\n", "a table of text; expected is one JSON object per line, or Parquet"),
        ("a.tsv", b"prompt\tanswer\nhello\t3\n", "delimiter='\\t'"),
        ("a.json", b'[\n {"prompt": "a"}\n]', "a JSON array; expected is one JSON object per line. This writes it: "),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00abc", "compressed with gzip; decompress it"),
        ("a.xlsx", b"PK\x03\x04abc", "a zip archive or a spreadsheet"),
        ("a.jsonl", b"PAR1abc", "a Parquet file; its name has to end in .parquet"),
        ("b.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "UTF-16 text; save it as UTF-8"),
    ],
)
def test_a_file_of_another_form_is_named_in_one_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    for read in (lambda: open_rows(path, lambda row: None), lambda: check_first_rows(path, lambda row: None, 5)):
        with pytest.raises(DataError) as caught:
            read()
        text = str(caught.value)
        assert text.startswith(f"{path}: ") and said in text and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "prompt,answer\nhello,3\n"),
        ("a.tsv", "prompt\tanswer\nhello\t3\n"),
        ("a.json", '[{"prompt": "hello", "answer": "3"}]'),
    ],
)
def test_the_command_that_a_refusal_shows_makes_rows_that_are_read(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        open_rows(path, lambda row: None)
    command = str(caught.value).partition("This writes it: python")[2]
    subprocess.run(sys.executable + command, shell=True, cwd=tmp_path, check=True)
    assert open_rows(tmp_path / "a.jsonl", lambda row: None)[0] == {"prompt": "hello", "answer": "3"}
