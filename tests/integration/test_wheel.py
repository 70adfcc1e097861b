"""A wheel of the project works where only its base dependencies are installed: no torch, no Megatron-Core, no SGLang."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gspo_mega

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SHAPE = ROOT / "configs" / "models" / "quickstart_moe.json"


def run(*command, **more):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, for a build writes beside its sources; no network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("gspo_mega", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--wheel-dir", source / "dist", source),
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = (source / "dist").glob("*.whl")
    return found


def declared(distribution, extra=""):
    """Names of what a distribution requires on this machine without an extra, or for this one only."""
    names = set()
    for line in distribution.requires or ():
        one = Requirement(line)
        plain = one.marker is None or one.marker.evaluate({"extra": ""})
        if plain if not extra else not plain and one.marker.evaluate({"extra": extra}):
            names.add(one.name)
    return names


def with_all_they_need(names):
    """The installed distributions of these names, and what those require in turn."""
    found, open_names = {}, set(names)
    while open_names:
        name = open_names.pop()
        found[name] = metadata.distribution(name)
        open_names |= {other for other in declared(found[name]) if other not in found}
    return found


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory):
    """`gspo-mega` of an environment that holds the wheel and links to its declared dependencies, nothing else."""
    venv = tmp_path_factory.mktemp("login") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    installed = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel),
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (packages,) = venv.glob("lib/python*/site-packages")
    (own,) = metadata.distributions(name="gspo_mega", path=[str(packages)])
    for distribution in with_all_they_need(declared(own)).values():
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (packages / top).symlink_to(distribution.locate_file(top))
    return python.with_name("gspo-mega")


@pytest.fixture
def outside(tmp_path):
    """Where no source tree is, and nothing says where one would be."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {"cwd": tmp_path, "env": environment}


def test_what_the_environment_lacks(program, outside):
    for heavy in ("torch", "megatron.core", "sglang", "transformers"):
        found = run(program.with_name("python"), "-c", f"import {heavy}", **outside)
        assert found.returncode != 0 and "ModuleNotFoundError" in found.stderr, heavy
    found = run(program.with_name("python"), "-c", "import gspo_mega; print(gspo_mega.__file__)", **outside)
    assert "site-packages" in found.stdout


def test_version_and_help(program, outside):
    assert run(program, "--version", **outside).stdout == f"gspo-mega {gspo_mega.__version__}\n"
    shown = run(program, "--help", **outside)
    assert shown.returncode == 0 and "usage: gspo-mega COMMAND" in shown.stdout
    for command in re.findall(r"^  (\w+)  ", shown.stdout, re.MULTILINE):
        helped = run(program, command, "--help", **outside)
        assert helped.returncode == 0, helped.stderr


def test_plan(program, outside):
    planned = run(program, "plan", QUICKSTART, "--model", SHAPE, "--device", "cpu", **outside)
    assert planned.returncode == 0 and planned.stderr == "" and "experts per rank" in planned.stdout, planned.stderr
    refused = run(program, "plan", QUICKSTART, "--model", SHAPE, "parallel.expert=3", **outside)
    assert refused.returncode == 2 and "does not divide the model's 8 experts" in refused.stderr


def test_its_configurations(program, outside):
    listed = run(program, "configs", **outside)
    assert listed.returncode == 0 and "qwen3_06b_1gpu" in listed.stdout, listed.stderr
    copy = Path(outside["cwd"], "copy.yaml")
    copy.write_text(run(program, "configs", "certify_dense", **outside).stdout)
    planned = run(program, "plan", copy, "--device", "cpu", **outside)
    assert planned.returncode == 0 and str(ROOT) not in copy.read_text(), planned.stderr


def test_doctor_names_what_is_missing(program, outside):
    shown = run(program, "doctor", "--gpus", "0", **outside)
    assert shown.returncode == 1 and shown.stderr == ""
    assert "a trainer needs torch, megatron-core, safetensors" in shown.stdout


def test_completion(program, outside):
    shown = run(program, "completion", "bash", **outside)
    assert shown.returncode == 0 and "complete " in shown.stdout, shown.stderr


def test_metadata(wheel, tmp_path):
    shutil.unpack_archive(wheel, tmp_path, "zip")
    (own,) = metadata.distributions(name="gspo_mega", path=[str(tmp_path)])
    assert own.version == gspo_mega.__version__ and own.metadata["License-Expression"] == "Apache-2.0"
    assert own.metadata["Author"] == "gspo_mega contributors" and not own.metadata.get_all("Project-URL")
    assert declared(own) == {"pyyaml", "pydantic", "numpy", "rich"}
    assert {"torch", "megatron-core"} <= declared(own, "trainer") and "sglang" in declared(own, "server")
    assert "pytest" in declared(own, "dev")
    files = {str(path) for path in own.files}
    data = "share/gspo_mega/configs"  # beside site-packages
    inside = [path for path in own.files if data not in str(path)]
    assert {path.parts[0] for path in inside} == {"gspo_mega", f"gspo_mega-{own.version}.dist-info"}
    configs = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.*")}
    assert configs == {str(path).partition(f"{data}/")[2] for path in own.files if path not in inside}
    assert f"gspo_mega-{own.version}.dist-info/licenses/LICENSE" in files
    # A folder without an __init__.py would be left out.
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "gspo_mega").rglob("*.py")} <= files
