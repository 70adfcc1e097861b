"""The files around the source agree with each other: version, licence, format, and what checks a commit."""

import configparser
import re
import tomllib
from pathlib import Path

import yaml

import gspo_mega

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = versions[versions[0] == "Unreleased" :]
    assert released[0] == gspo_mega.__version__ and "0.1.0" in released


def test_the_licence_is_the_one_that_is_declared():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert re.match(r"\s+Apache License\s+Version 2\.0, January 2004", text)
    assert "Copyright 2026 gspo_mega contributors" in text and "END OF TERMS AND CONDITIONS" in text


def test_commits_are_checked_by_the_programs_of_the_tests():
    pins = (ROOT / "launch/env/test.txt").read_text()
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    entries = [hook["entry"].split() for hook in repos[0]["hooks"]]
    assert {hook["language"] for hook in repos[0]["hooks"]} == {"system"}
    assert [entry[:2] for entry in entries] == [["ruff", "format"], ["ruff", "check"], ["pyright"]]
    assert all(re.search(rf"^{entry[0]}\b", pins, re.MULTILINE) for entry in entries)


def test_editors_and_ruff_use_one_width():
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    assert parser["*"]["max_line_length"] == str(PROJECT["tool"]["ruff"]["line-length"])
    assert parser["*.py"]["indent_size"] == "4"
