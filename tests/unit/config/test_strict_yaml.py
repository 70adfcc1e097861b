from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_mega.config import strict_yaml
from gspo_mega.config.strict_yaml import YamlPosition, parse


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-6", 1e-6),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("true", True),
        ("FALSE", False),
        ("1:30:00", "1:30:00"),
        ("2024-01-02", "2024-01-02"),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1e-6'", "1e-6"),
        ('"true"', "true"),
        ("1e", "1e"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(written, value):
    document = parse(f"key: {written}\n")
    assert not document.problems
    assert document.value == {"key": value}
    assert type(document.value["key"]) is type(value)


@pytest.mark.parametrize("written", ["0x" + "f" * 6000, "1" * 5000, "0o" + "7" * 9000])
def test_a_number_that_python_does_not_write_out_is_a_problem_of_its_place(written):
    (problem,) = parse(f"key: {written}\n").problems
    assert f"a number of {len(written)} characters, {written[:20]}...; no key takes so long a number" in str(problem)


def test_positions_are_of_keys_and_of_list_entries():
    document = parse("a:\n  b: 1\n  c:\n  - x\n  -   y\n")
    assert document.positions[("a",)] == YamlPosition(1, 1)
    assert document.positions[("a", "b")] == YamlPosition(2, 3)
    assert document.positions[("a", "c", 1)] == YamlPosition(5, 7)


def test_anchors_and_merges():
    document = parse(
        "base: &base {x: 1, y: 2}\nother: &other {y: 3, z: 4}\n"
        "one: {<<: *base, y: 5}\nboth: {<<: [*base, *other]}\nalias: *base\n"
    )
    assert not document.problems
    assert document.value["one"] == {"x": 1, "y": 5}
    assert document.value["both"] == {"x": 1, "y": 2, "z": 4}
    assert document.value["alias"] == {"x": 1, "y": 2}
    assert document.positions[("one", "x")] == YamlPosition(1, 14)


def test_a_merge_inside_a_merged_mapping_gives_way_to_the_mapping_itself():
    document = parse("a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b}\n")
    assert document.value["c"] == {"x": 1, "y": 2}


def test_every_duplicate_key_is_named_with_its_first_place():
    problems = parse("a: 1\nb:\n  c: 1\n  c: 2\na: 2\n").problems
    assert {(p.position, p.path) for p in problems} == {(YamlPosition(4, 3), ("b", "c")), (YamlPosition(5, 1), ("a",))}
    assert [("first at line 1" in p.text) for p in problems if p.path == ("a",)] == [True]


@pytest.mark.parametrize(
    ("text", "position", "said"),
    [
        ("a:\n\tb: 1\n", YamlPosition(2, 1), "tab"),
        ("a: [1, 2\n", YamlPosition(2, 1), "not YAML"),
        ("a: 1\n---\nb: 2\n", YamlPosition(2, 1), "second document"),
        ("a: *nowhere\n", YamlPosition(1, 4), "undefined alias"),
        ("a: !!python/object:os.system x\n", YamlPosition(1, 4), "tag"),
        ("a: !!int x\n", YamlPosition(1, 4), "tag"),
        ("a: !mine {b: 1}\n", YamlPosition(1, 4), "tag"),
        ("a: .inf\n", YamlPosition(1, 4), "finite"),
        ("a: .NaN\n", YamlPosition(1, 4), "finite"),
        ("1: x\n", YamlPosition(1, 1), "must be text"),
        ("? [a]\n: x\n", YamlPosition(1, 3), "must be text"),
        ("a: {<<: 3}\n", YamlPosition(1, 9), "`<<`"),
        ("a: &a [*a]\n", YamlPosition(1, 4), "contains itself"),
        ("a: &a {<<: *a}\n", YamlPosition(1, 4), "`<<`"),
        ('a: "\\ud800"\n', YamlPosition(1, 4), "half a character"),
        ('"\\ud800": a\n', YamlPosition(1, 1), "half a character"),
        ("a: x\x00y\n", YamlPosition(1, 5), "may not stand"),
    ],
)
def test_refusals(text, position, said):
    problems = parse(text).problems
    assert said in problems[0].text
    assert problems[0].position is None or problems[0].position.line == position.line


def test_aliases_cannot_grow_without_bound():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    problems = parse("\n".join(lines)).problems
    assert len(problems) == 1 and "aliases" in problems[0].text


def test_merges_cannot_grow_without_bound():
    lines = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)]
    assert any("aliases" in problem.text for problem in parse("\n".join(lines)).problems)


@pytest.mark.parametrize("text", ["[" * 5000, "[" * 390 + "]" * 390, "[" * 450 + "]" * 450])
def test_deep_nesting_is_a_problem_and_not_a_crash(text):
    (problem,) = parse("a: " + text).problems
    assert "deeply" in problem.text


PIECES = st.sampled_from(
    [
        *(
            "a",
            "b",
            "run",
            "x y",
            "a:b",
            "http://x:1",
            "a#b",
            "it''s",
            "<<",
            "=",
            "`",
            "$",
            "/",
            "(",
            ";",
            ".",
            "+",
            "_",
        ),
        *("1", "-3", "1e-6", ".5", "0x1f", "true", "null", "~", "<<: ", "'", '"', "''", "'q'", '"q"', "# c", "#", "% "),
        *(
            ": ",
            ":",
            ", ",
            ",",
            "- ",
            "-",
            "{",
            "}",
            "[",
            "]",
            " ",
            "  ",
            "\n",
            "\n  ",
            "\n    ",
            "\n- ",
            "\n  - ",
            "\n\n",
        ),
        *(
            "k: v\n",
            "k: {a: 1}\n",
            "l: [1, b]\n",
            "&a ",
            "*a",
            "!x ",
            "|\n",
            ">-\n",
            "\t",
            "---\n",
            "? ",
            "\xe9",
            "\\n",
        ),
    ]
)


@settings(max_examples=500)
@given(text=st.lists(PIECES, min_size=1, max_size=14).map("".join))
@example(text="".join(f"k{n}:\n  - {{a: {n}, b: [x, y]}} # c\n" for n in range(30)))
@example(text="a: " + "[" * 390 + "]" * 390)
def test_libyaml_and_python_read_the_same(text):
    fast = parse(text)
    with mock.patch.object(strict_yaml, "_FastComposer", None):
        assert repr(parse(text)) == repr(fast)


def test_the_shipped_configurations_are_read_by_libyaml():
    """Nearly all; the others with Python, and none of them otherwise."""
    texts = [file.read_text() for file in (Path(__file__).parents[3] / "configs").rglob("*.yaml")]
    with mock.patch.object(strict_yaml, "_Composer", None):
        read_fast = [parse_or_none(text) for text in texts]
    with mock.patch.object(strict_yaml, "_FastComposer", None):
        assert all(one is None or one == parse(text) for one, text in zip(read_fast, texts, strict=True))
    assert strict_yaml._FastComposer is None or sum(one is not None for one in read_fast) > 0.7 * len(texts) > 30


def parse_or_none(text):
    try:
        return parse(text)
    except TypeError:  # there is no other composer
        return None


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a:\n  lr:1e-4\n  b: 2\n", 3, "line 2 has no space after its colon; write key: value"),
        ("a:\n    lr: 1\n  b: 2\n", 3, "indented differently from the lines of its section"),
        ("a:\n  lr: 1\n    b: 2\n", 3, "indented differently from the lines of its section"),
        ("a:\n\u00a0 lr: 1\n  b: 2\n", 3, "a no-break space (U+00A0) here or in the line above"),
    ],
)
def test_a_slip_of_the_form_is_told_in_words_without_the_parsers_terms(text, line, said):
    (problem,) = parse(text).problems
    assert problem.position is not None and problem.position.line == line
    assert problem.text.startswith(said) and "mapping" not in problem.text
