"""The trainer's Python and the servers', compared: with two real Pythons whose packages are metadata alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_mega.base import versions
from gspo_mega.base.errors import PlanError
from gspo_mega.base.versions import Finding
from gspo_mega.config import load_config
from gspo_mega.launcher.server_python import check_same_software

REPOSITORY = Path(__file__).parents[3]
TRAINER = {"torch": "2.14.1+cu130", "nvidia-nccl-cu13": "2.30.7", "safetensors": "0.8.0", "numpy": "2.3.5"}
SERVER = {**TRAINER, "torch": "2.14.1", "sglang": "0.5.23"}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """python(name, packages, cuda): the program of a virtual environment that has these packages' metadata."""

    def make(name: str, packages: dict[str, str], cuda: str | None = "13.0") -> str:
        folder = tmp_path_factory.mktemp(name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        for package, version in packages.items():
            information = site / f"{package.replace('-', '_')}-{version}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        if "torch" in packages:
            (site / "torch").mkdir()
            (site / "torch/__init__.py").write_text("raise SystemExit('it is not to be imported')\n")
            (site / "torch/version.py").write_text(f"cuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n")
        return str(folder / "bin/python")

    return make


@pytest.fixture(scope="module")
def trainer(python):
    return python("trainer", TRAINER)


def asked(program: str) -> versions.Versions:
    return versions.versions_of(program, 60.0, {**os.environ, "PYTHONPATH": ""})


def nvidia_smi(folder: Path, text: str) -> str:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_another_python_tells_its_versions_without_importing_its_packages(trainer, python, tmp_path):
    found = asked(trainer)
    assert (found["torch"], found["NCCL"], found["CUDA"]) == ("2.14.1+cu130", "2.30.7", "13.0")
    assert (found["safetensors"], found["sglang"], found["executable"]) == ("0.8.0", None, trainer)
    empty = asked(python("empty", {}))
    assert empty["torch"] is None and empty["CUDA"] is None and empty["NCCL"] is None
    on_cpu = asked(python("on-cpu", {"torch": "2.13.0+cpu"}, cuda=None))
    assert (on_cpu["torch"], on_cpu["CUDA"]) == ("2.13.0+cpu", None)
    path = nvidia_smi(tmp_path, "echo 580.95.05; echo 580.95.05")
    assert versions.versions_of(trainer, 60.0, {**os.environ, "PATH": path})["driver"] == "580.95.05"
    for broken in ("echo NVIDIA-SMI has failed; exit 9", "echo no version"):
        path = nvidia_smi(tmp_path, broken)
        assert versions.versions_of(trainer, 60.0, {**os.environ, "PATH": path})["driver"] is None


def test_the_same_release_agrees_whatever_its_build_and_a_server_may_have_more(trainer, python):
    (found,) = versions.compare(asked(trainer), asked(python("server", SERVER)), by_nccl=True)
    assert found.level == "ok" and found.text.endswith(
        "agree: torch 2.14.1+cu130, NCCL 2.30.7, CUDA 13.0, safetensors 0.8.0"
    )


def test_another_torch_or_nccl_is_wrong_with_both_versions_and_what_to_do(trainer, python):
    other = python("other", {**SERVER, "torch": "2.11.0", "nvidia-nccl-cu13": "2.28.9", "safetensors": "0.7.0"})
    torch, nccl, told = versions.compare(asked(trainer), asked(other), by_nccl=True)
    assert torch.level == nccl.level == "wrong"
    assert torch.text.startswith(
        f"torch is 2.14.1+cu130 in the trainer's Python ({trainer}) and 2.11.0 in the servers' ({other}); "
    )
    assert nccl.text.startswith("NCCL is 2.30.7 in") and "launch/setup_gpu.sh makes both" in nccl.text
    assert "`publish.method: disk`" in nccl.text
    assert told == Finding("note", "pythons", "trainer's and servers' differ in: safetensors 0.8.0 and 0.7.0")
    assert [f.level for f in versions.compare(asked(trainer), asked(other), by_nccl=False)] == ["note"] * 3


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        ("13.0", "580.95.05", None),
        ("12.9", "535.104.05", None),
        ("13.0", "570.86.10", "driver is 570.86.10; torch 2.14.1 is built for CUDA 13.0, which needs 580 or newer"),
        ("13.0", None, None),
        (None, "450.1", None),
        ("14.1", "450.1", None),
    ],
)
def test_a_driver_that_is_too_old(cuda, driver, words):
    problem = versions.driver_problem({"torch": "2.14.1", "CUDA": cuda, "driver": driver})
    assert (problem is None) if words is None else words in str(problem)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be started: No such file"),
        ("echo hello", "no output"),
        ("echo no libc >&2; exit 1", "is not a Python that runs here: no libc"),
        ("exec sleep 60", "did not tell its versions within 0 s"),
    ],
)
def test_what_is_no_python_is_said(tmp_path, text, words):
    program = tmp_path / "python"
    if text is not None:
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    with pytest.raises(ValueError, match=words):
        versions.versions_of(str(program), 0.2 if "sleep" in str(text) else 60.0)


def doctor(trainer: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [trainer, "-m", "gspo_mega", "doctor", "--gpus", "1", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", **environment},
    )


def test_the_doctor_compares_them_before_anything_starts(trainer, python, tmp_path):
    other = python("third", {**SERVER, "torch": "2.11.0"})
    path = nvidia_smi(tmp_path, 'case "$*" in *driver*) echo 570.86.10 ;; *) echo "GPU 0: NVIDIA H100" ;; esac')
    folder = ["--folder", str(tmp_path)]
    ended = doctor(trainer, *folder, GSPO_SERVER_PYTHON=other, PATH=path)
    lines = [line.split(": ", 1)[1] for line in ended.stdout.splitlines()]
    assert ended.returncode == 1 and ended.stderr == "", ended.stderr
    assert any(line.startswith("wrong pythons   torch is 2.14.1+cu130 in the trainer's") for line in lines)
    assert sum(line.startswith("wrong driver    the GPU's driver is 570.86.10") for line in lines) == 2
    assert any(line.endswith(f"not installed for {other}") and "a server needs pydantic" in line for line in lines)
    assert f"it is not to be imported ({other})" in ended.stdout
    told = doctor(trainer, *folder, "--server-python", other, "--publish", "disk").stdout
    assert " note  pythons   torch is 2.14.1+cu130" in told
    nowhere = doctor(trainer, *folder, "--server-python", "/nowhere/python")
    assert "wrong pythons   the servers' Python: /nowhere/python cannot be started" in nowhere.stdout


def test_doctors_of_a_job_record_and_their_records_are_compared(trainer, python, tmp_path):
    other = python("fourth", {**SERVER, "nvidia-nccl-cu13": "2.28.9"})
    records = tmp_path / "software"
    words = ["--folder", str(tmp_path), "--versions", str(records)]
    assert versions.compare_records(records, by_nccl=True) == []
    ended = doctor(trainer, *words, "--role", "trainer", GSPO_SERVER_PYTHON=other)
    assert versions.compare_records(records, by_nccl=True) == [] and "pythons" not in ended.stdout
    doctor(other, *words, "--role", "server", "--index", "3")
    assert json.loads((records / "machine-3-server.json").read_text())["NCCL"] == "2.28.9"
    (found,) = versions.compare_records(records, by_nccl=True)
    assert found.level == "wrong" and "NCCL is 2.30.7 in the trainer's" in found.text


def test_a_run_on_gpus_refuses_servers_that_it_could_not_publish_to(python):
    other = python("fifth", {**SERVER, "torch": "2.0.1"})
    config = REPOSITORY / "configs/quickstart.yaml"

    def check(method: str, program: str = other) -> None:
        check_same_software(load_config(config, [f"publish.method={method}"]), program, {})

    with pytest.raises(PlanError) as caught:
        check("distributed")
    first = str(caught.value).splitlines()[0]
    assert "publish.method: distributed: torch is " in first and f"2.0.1 in the servers' ({other})" in first
    with pytest.raises(PlanError, match=r"publish.method: distributed: /nowhere/python cannot be started"):
        check("distributed", "/nowhere/python")
    check("disk")
    check("distributed", sys.executable)
