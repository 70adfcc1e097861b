"""Every refusal of the configuration, the plan and the model has a test that reaches it and reads its words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import refusals

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# What is slow and refuses nothing.
LEFT_OUT = (
    "not coordinates and not published_size and not published_config and not published_moe and not published_layouts"
    " and not as_published and not on_four and not on_eight and not on_thirty and not fuzz and not"
    " hugging_face_saves and not transformers_writes and not real_configuration and not shipped_deadlines and not"
    " given_up_within and not report_of_deepseek and not stop_waits_for and not loads_back_equal and not"
    " other_yaml_readers"
)
# For a refusal that no listed test reads, the others run until one does, which takes up to some minutes.
MOST_NOT_LISTED = 10


def test_every_refusal_is_reached_and_read(tmp_path):
    """The unit tests run under `refusal_reader.py`, which spoils one refusal after the other and sees whether a test
    fails. Those that `readers.txt` names run first, the others only until every refusal has been read.
    """
    result = tmp_path / "read.json"
    environment = {**os.environ, "REFUSALS_READ": str(result), "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    folders = [f"tests/unit/{package}" for package in ("config", "plan", "models", "cli")]
    folders += [
        f"tests/unit/base/test_guarded_files.py::{test}"
        for test in (
            "test_a_huge_number_of_a_configuration_is_refused_by_its_key",
            "test_a_huge_number_of_a_model_is_refused_by_its_key",
            "test_no_number_of_a_model_holds_up_its_reader",
            "test_no_configuration_or_data_holds_up_a_plan",
        )
    ]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "pytest",
        "-q",
        "-p",
        "refusal_reader",
        "-p",
        "no:cacheprovider",
        "--tb=native",  # pytest's own parses the source of every frame of every spoiled test
        "-k",
        LEFT_OUT,
        *folders,
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
    found, every = json.loads(result.read_text()), list(refusals.refusals(ROOT))
    assert len(every) > 100 and found["reached"].keys() <= set(every)
    never = [f"{site}: no unit test reaches this refusal" for site in every if site not in found["reached"]]
    unread = [
        f"{site}: {len(found['reached'][site])} unit tests reach this refusal, and none reads it"
        for site in every
        if site in found["reached"] and site not in found["read"]
    ]
    assert not never + unread, "\n" + "\n".join(never + unread)
    others = sorted({refusals.reader_name(test) for test in found["read"].values()} - refusals.listed_readers())
    assert len(others) <= MOST_NOT_LISTED, "add to readers.txt, whose tests run first:\n" + "\n".join(others)


SOURCE = """
def check(config, problems):
    if config.a:
        raise PlanError(f"{config.a}: too many layers")
    if config.b:
        yield Violation("a.b", "wrong " + config.words["not words"], "a valid one")
    if config.c:
        raise ModelError("\\n".join(problems)) from None
    reader.problem("key", "one text" if config.d else "another text")

def explain(kind):
    return f"is {kind}; must be a number"
"""


def test_refusals_are_found_by_their_own_words():
    import ast

    assert refusals.sites(ast.parse(SOURCE), "x.py") == ["x.py:12", "x.py:4", "x.py:6", "x.py:9"]


def test_a_spoiled_refusal_has_other_words_and_nothing_else_changes(tmp_path):
    """In a process of its own: what is imported there is not the tests'."""
    (tmp_path / "gspo_mega" / "plan").mkdir(parents=True)
    for package in ("gspo_mega", "gspo_mega/plan"):
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "gspo_mega" / "plan" / "made.py").write_text(
        "class PlanError(Exception): ...\nTABLE = {'not words': 7}\ndef check(n):\n    raise PlanError(f\"{n}"
        " {TABLE['not words']}: too many layers\")\n"
    )
    script = (
        "import pathlib, refusals\n"
        f"refusals.spoil_through(pathlib.Path({str(tmp_path)!r}), lambda site, words: print(site) or '~~~')\n"
        "from gspo_mega.plan.made import check\n"
        "try:\n    check(3)\nexcept Exception as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE)])}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["gspo_mega/plan/made.py:4", "3 7~~~"]
