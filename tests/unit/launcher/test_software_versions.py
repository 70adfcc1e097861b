"""Which software a run names: the commit of its sources, or none where they are in no repository."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata

from gspo_mega.config.precision import wheel_folder
from gspo_mega.launcher.prepare import PACKAGES, commit, versions, versions_text


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def package(folder):
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    return folder


def test_the_commit_of_sources_in_a_repository(tmp_path):
    git(tmp_path, "init")
    sources = package(tmp_path / "pack")
    git(tmp_path, "add", "pack")
    git(tmp_path, "commit", "-m", "first")
    first = commit(sources)
    assert re.fullmatch("[0-9a-f]{40}", first)
    (sources / "__init__.py").write_text("more = 1\n")
    assert commit(sources) == first + "-dirty"


def test_installed_sources_have_no_commit(tmp_path):
    assert commit(package(tmp_path / "site-packages" / "pack")) is None


def test_a_repository_around_an_environment_is_not_that_of_what_is_installed_there(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "another project")
    assert commit(package(tmp_path / ".venv" / "pack")) is None


def test_versions_name_every_package_and_a_missing_one():
    found = versions()
    assert tuple(found) == PACKAGES
    assert found["torch"] == metadata.version("torch") and found["gspo_mega"]
    lines = versions_text().splitlines()
    assert f"torch {found['torch']}" in lines and any(line.startswith("commit ") for line in lines)


def test_transformer_engine_s_wheel_has_its_version_though_no_path_leads_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("sys.path", [])
    assert versions()["transformer-engine"] is None and "transformer-engine -" in versions_text()
    described = wheel_folder() / "transformer_engine-2.0.1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.0.1\n")
    assert versions()["transformer-engine"] == "2.0.1"
