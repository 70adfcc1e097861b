"""tools/mutants.py: its list can be applied; it finds a snippet in any file, and tells killed, survived and errors apart."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402

SOURCE = "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef least(x):\n    return x / 2 - math.inf\n"
TEST = "import gspo_mega.deep.a as a\ndef test_half():\n    assert a.half(4) == 2\ndef test_calls():\n    a.half(4)\n"
HALF = mutants.Mutant("half", "a", "f", "return x / 2\n", "return x / 3\n", ("test_a.py::test_half",))


@pytest.fixture
def tree(tmp_path):
    for name, text in {
        "gspo_mega/__init__.py": "",
        "gspo_mega/deep/__init__.py": "",
        "gspo_mega/deep/a.py": SOURCE,
        "tests/far/test_a.py": TEST,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_every_mutant_of_the_list_can_be_applied(capsys):
    assert mutants.main(["--check"]) == 0, capsys.readouterr().out


def test_a_snippet_is_found_in_any_file(tree):
    change = mutants.applied(tree, HALF)
    assert change.path == Path("gspo_mega/deep/a.py") and change.text == SOURCE.replace("x / 2\n", "x / 3\n")
    (tree / "gspo_mega/deep/a.py").rename(tree / "gspo_mega/b.py")
    assert mutants.applied(tree, HALF) == replace(change, path=Path("gspo_mega/b.py"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(snippet="return x / 4"), "occurs 0 times"),
        (dict(snippet="return x / 2"), "occurs 2 times: gspo_mega/deep/a.py:5, gspo_mega/deep/a.py:9"),
        (dict(snippet="import math\n"), "names a module"),
        (dict(replacement="return (x / 2)\n"), "the same program"),
        (dict(replacement="return x /\n"), "does not compile"),
        (dict(replacement="return (yield\n"), "does not compile"),
    ],
)
def test_what_cannot_be_applied_is_an_error(tree, change, said):
    with pytest.raises(mutants.MutantError, match=said):
        mutants.applied(tree, replace(HALF, **change))


def test_a_function_tells_two_places_apart(tree):
    mutant = replace(HALF, snippet="return x / 2", replacement="return x", function="least")
    assert mutants.applied(tree, mutant).text == SOURCE.replace("x / 2 - ", "x - ")


def test_tests_are_found_by_the_name_of_their_file(tree):
    assert mutants.paths_of_tests(tree, HALF) == ["tests/far/test_a.py::test_half"]
    for test, said in (("test_b.py::test_half", "in 0 files"), ("test_a.py::test_b", "not in that file")):
        with pytest.raises(mutants.MutantError, match=said):
            mutants.paths_of_tests(tree, replace(HALF, tests=(test,)))


def run(tree, monkeypatch, capsys, *entries):
    lines = [
        f"[[mutant]]\nid = '{name}'\narea = 'a'\nfault = 'f'\nsnippet = '''return x / 2\n'''\n"
        f"replacement = '''{replacement}\n'''\ntests = ['test_a.py::{test}']\n"
        for name, replacement, test in entries
    ]
    (tree / mutants.MUTANTS).parent.mkdir(parents=True)
    (tree / mutants.MUTANTS).write_text("".join(lines))
    monkeypatch.setattr(mutants, "ROOT", tree)
    code = mutants.main([])
    return code, capsys.readouterr().out


def test_killed_mutants_are_success(tree, monkeypatch, capsys):
    code, said = run(tree, monkeypatch, capsys, ("one", "return x / 3", "test_half"), ("two", "return x", "test_half"))
    assert code == 0 and "2 mutants: 2 killed, 0 survived, 0 error" in said, said
    assert (tree / "gspo_mega/deep/a.py").read_text() == SOURCE


def test_one_that_survives_is_none(tree, monkeypatch, capsys):
    code, said = run(tree, monkeypatch, capsys, ("one", "return x / 3", "test_calls"), ("two", "return x", "test_half"))
    assert code == 1 and "survived  one" in said and "1 killed, 1 survived, 0 error" in said, said


def test_tests_that_fail_without_a_fault_show_nothing(tree, monkeypatch, capsys):
    (tree / "tests/far/test_a.py").write_text(TEST.replace("== 2", "== 3"))
    code, said = run(tree, monkeypatch, capsys, ("one", "return x / 3", "test_half"))
    assert code == 1 and "do not pass without a fault" in said, said


def test_only_a_failed_test_kills():
    failed = "FAILED tests/far/test_a.py::test_half - assert 1\n1 failed"
    assert mutants.outcome_of(1, failed) == ("killed", "test_a.py::test_half")
    assert mutants.outcome_of(1, "FAILED tests/test_a.py::test_b[x/y] - 1")[1] == "test_a.py::test_b[x/y]"
    assert mutants.outcome_of(0, "1 passed")[0] == "survived"
    for code, output in ((None, failed), (2, "ERROR tests/far/test_a.py"), (1, "ERROR at setup"), (5, "no tests ran")):
        assert mutants.outcome_of(code, output)[0] == "error"
