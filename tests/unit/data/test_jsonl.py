import os

import pytest

from gspo_mega.base.errors import DataError
from gspo_mega.data.rows import JsonlFile, check_first_rows


def no_check(row):
    return None


def needs_a(row):
    return None if "a" in row else "no a"


def test_rows_are_read_and_blank_lines_are_no_rows(write_jsonl):
    path = write_jsonl([b"\xef\xbb\xbf" + b'{"a": 1}', "", {"a": "é\n"}, "   ", {"a": [1, None]}])
    file = JsonlFile(path, no_check)
    assert len(file) == 3
    assert [file[k] for k in range(3)] == [{"a": 1}, {"a": "é\n"}, {"a": [1, None]}]
    assert file.line(0) == f"{path}:1" and file.line(2) == f"{path}:5"
    with pytest.raises(IndexError):
        file[3]


def test_last_line_needs_no_newline_and_crlf_is_fine(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\r\n{"a": 2}')
    file = JsonlFile(path, needs_a)
    assert [file[0], file[1]] == [{"a": 1}, {"a": 2}]


def test_every_malformed_line_is_named_with_its_number(write_jsonl):
    path = write_jsonl(
        [{"a": 1}, '{"a": 1,}', "", "[1]", b'{"a": "\xff"}', {"b": 1}, "7", '{"a": ' + "9" * 5000 + "}", "[" * 100_000]
    )
    with pytest.raises(DataError) as caught:
        JsonlFile(path, needs_a)
    lines = str(caught.value).split("\n")
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{number}" for number in (2, 4, 5, 6, 7, 8, 9)]
    assert "not JSON" in lines[0] and "column" in lines[0]
    assert "an array where a JSON object was expected" in lines[1]
    assert "not UTF-8 (byte 8 of the line)" in lines[2]
    assert lines[3].endswith("no a")
    assert "a number where" in lines[4]
    assert "nested too deeply" in lines[6]


def test_ten_problems_are_shown_and_the_others_counted(write_jsonl):
    path = write_jsonl([{"b": number} for number in range(25)])
    with pytest.raises(DataError) as caught:
        JsonlFile(path, lambda row: f"b is {row['b']}")
    lines = str(caught.value).split("\n")
    assert len(lines) == 11 and lines[-1] == "... and 15 more of 25 lines"


def test_equal_problems_are_one_line_with_their_number(write_jsonl):
    """One wrong key is wrong in each row."""
    path = write_jsonl([{"b": 1}] * 25 + [{"a": 1}, {"c": 1}])
    for read in (lambda: JsonlFile(path, needs_a), lambda: check_first_rows(path, needs_a, 100)):
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value) == f"{path}:1: no a (so 26 of 27 lines: 1, 2, 3, 4, 5, ...)"
    two = write_jsonl([{"b": 1}, {"a": 1}, {"b": 1}])
    with pytest.raises(DataError, match=r":1: no a \(so 2 of 3 lines: 1, 3\)$"):
        JsonlFile(two, needs_a)


def test_a_problem_of_every_row_that_was_read_says_so_and_how_many_were_read(write_jsonl):
    """Of a longer file only its first lines are read, so their number is not the file's."""
    path = write_jsonl([{"b": 1}] * 40)
    for read, said in (
        (lambda: JsonlFile(path, needs_a), "(so in all 40 lines)"),
        (lambda: check_first_rows(path, needs_a, 100), "(so in all 40 lines)"),
        (lambda: JsonlFile(path, needs_a, lambda num_rows: num_rows == 20), "(so in all of the first 20 lines)"),
        (lambda: check_first_rows(path, needs_a, 20), "(so in all of the first 20 lines)"),
    ):
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value) == f"{path}:1: no a {said}"
    some = write_jsonl([{"b": 1}, {"a": 1}, {"b": 1}, {"b": 1}])
    with pytest.raises(DataError, match=r":1: no a \(so 2 of the first 3 lines: 1, 3\)$"):
        check_first_rows(some, needs_a, 3)
    other = write_jsonl([{"b": number} for number in range(25)])
    with pytest.raises(DataError, match=r"\.\.\. and 5 more of the first 15 lines$"):
        JsonlFile(other, lambda row: f"b is {row['b']}", lambda num_rows: num_rows == 15)


def test_a_pretty_printed_array_is_recognised(write_jsonl):
    with pytest.raises(DataError, match="one JSON object per line"):
        JsonlFile(write_jsonl(["[", '{"a": 1},', '{"a": 2}', "]"]), no_check)


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_a_file_without_rows(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="no rows"):
        JsonlFile(path, no_check)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        JsonlFile(tmp_path / "none.jsonl", no_check)
    with pytest.raises(DataError, match="a folder"):
        JsonlFile(tmp_path, no_check)


def test_fingerprint_is_of_the_content(write_jsonl):
    first = JsonlFile(write_jsonl([{"a": 1}], "one.jsonl"), no_check)
    same = JsonlFile(write_jsonl([{"a": 1}], "two.jsonl"), no_check)
    other = JsonlFile(write_jsonl([{"a": 2}], "three.jsonl"), no_check)
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_replacing_the_file_while_it_is_read_does_no_harm(write_jsonl):
    path = write_jsonl([{"a": 1}, {"a": 2}])
    file = JsonlFile(path, no_check)
    os.replace(write_jsonl([{"a": 9}], "new.jsonl"), path)
    assert file[1] == {"a": 2}


def test_writing_over_the_file_is_noticed(write_jsonl):
    path = write_jsonl([{"a": 1}, {"a": 2}])
    file = JsonlFile(path, no_check)
    path.write_text("shorter")
    with pytest.raises(DataError, match="written over"):
        file[1]


REFUSED = {
    b'{"a": NaN}': "NaN is no JSON number",
    b'{"a": [-Infinity]}': "-Infinity is no JSON number",
    b'{"a": 1e999}': "the number 1e999 is larger than a 64-bit float",
    b'{"a": {"b": "x\\ud83d"}}': r"a text has \ud83d, half of a surrogate pair",
    b'{"a": 1, "\\udc00": 2}': r"a text has \udc00, half of a surrogate pair",
    b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}": "nested more than 64 levels deep",
}


@pytest.mark.parametrize("line", REFUSED)
@pytest.mark.parametrize("whole", [True, False])
def test_what_could_not_be_written_down_again_is_refused_with_its_line(write_jsonl, line, whole):
    path = write_jsonl([{"a": 1}, line])
    with pytest.raises(DataError) as caught:
        JsonlFile(path, no_check) if whole else check_first_rows(path, no_check, 10)
    assert str(caught.value).startswith(f"{path}:2: not JSON: {REFUSED[line]}")


def test_a_whole_surrogate_pair_and_a_number_near_the_limit_are_rows(write_jsonl):
    path = write_jsonl([b'{"a": "\\ud83d\\ude00", "b": 1.7e308, "c": ' + b"[" * 63 + b"]" * 63 + b"}"])
    assert JsonlFile(path, no_check)[0]["a"] == "\U0001f600"


def test_a_line_without_end_is_refused_and_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("gspo_mega.data.rows.MOST_LINE_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b" " * 990 + b'{"a": 2}\n')
    assert [JsonlFile(path, needs_a)[row]["a"] for row in range(2)] == [1, 2]
    with path.open("ab") as file:
        file.truncate(1 << 40)
    for read in (lambda: JsonlFile(path, needs_a), lambda: check_first_rows(path, needs_a, 100)):
        with pytest.raises(DataError, match=r"rows.jsonl:3: has more than 1000 bytes"):
            read()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"  \n", b""])
def test_a_line_that_ends_too_early_is_said_to(tmp_path, line_end):
    """The column is that of the line's end, counted by hand, not one of the line below."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2' + line_end)
    with pytest.raises(DataError, match=r"x.jsonl:2: not JSON: .* at column 8, the end of the line"):
        JsonlFile(path, needs_a)


def test_an_error_inside_a_line_is_not_said_to_be_at_its_end(write_jsonl):
    path = write_jsonl(['{"a" 1}'])
    with pytest.raises(DataError, match=r"at column 6$"):
        JsonlFile(path, needs_a)


def test_answers_that_fail_alike_are_one_line(write_jsonl):
    """Each answer is another text; what is wrong with them is one thing. A problem of another kind has its own line."""
    path = write_jsonl([{"a": f"it's {number}" if number % 2 else f"is {number}"} for number in range(60)] + [{"a": 7}])

    def check(row):
        return f"no number in the answer {row['a']!r} (reward r)" if row["a"] != 7 else "several numbers in the answer"

    with pytest.raises(DataError) as caught:
        JsonlFile(path, check)
    assert str(caught.value).split("\n") == [
        f"{path}:1: no number in the answer 'is 0' (reward r) (so 60 of 61 lines: 1, 2, 3, 4, 5, ...)",
        f"{path}:61: several numbers in the answer",
    ]
