"""The Python that servers run in on one machine: the command, what it finds there, and which are refused before a
start.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.config import load_config
from gspo_mega.launcher import server_python
from gspo_mega.launcher.local import launch
from gspo_mega.launcher.server_python import serve_command
from gspo_mega.launcher.slurm.size import Site

REPOSITORY = Path(__file__).parents[3]
CONFIG = REPOSITORY / "configs/quickstart.yaml"


def loaded(python: object = None):
    return load_config(CONFIG, [] if python is None else [f"server.python={python}"])


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_without_a_choice_it_is_the_ranks_own():
    assert serve_command(loaded(), {}) == ([sys.executable, "-m", "gspo_mega", "serve"], {})


def test_the_python_that_is_named_serves_and_finds_this_gspo_mega(tmp_path):
    other = program(tmp_path / "other-python", f'exec {sys.executable} "$@"')
    command, variables = serve_command(loaded(other), {**os.environ, "PYTHONPATH": "/elsewhere"})
    assert command == [str(other), "-m", "gspo_mega", "serve"]
    assert variables == {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}/elsewhere"}
    said = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, env={**os.environ, **variables}, cwd=tmp_path
    )
    assert said.returncode == 0 and "SGLang server" in said.stdout


def test_the_variable_of_a_site_names_it_without_slurm_too_and_the_key_replaces_it(tmp_path):
    site, key = (program(tmp_path / name, f'exec {sys.executable} "$@"') for name in ("of-the-site", "of-the-key"))
    environment = {**os.environ, "GSPO_SERVER_PYTHON": str(site)}
    assert serve_command(loaded(), environment)[0][0] == str(site)
    assert serve_command(loaded(key), environment)[0][0] == str(key)
    assert serve_command(loaded(), {**os.environ, "GSPO_SERVER_PYTHON": ""})[0][0] == sys.executable
    with pytest.raises(PlanError, match=r"^GSPO_SERVER_PYTHON: /nowhere/python: no such program"):
        serve_command(loaded(), {**os.environ, "GSPO_SERVER_PYTHON": "/nowhere/python"})


def test_an_installed_package_does_not_bring_its_neighbours_along(tmp_path, monkeypatch):
    site_packages = tmp_path / "site-packages"
    monkeypatch.setattr(server_python.gspo_mega, "__file__", str(site_packages / "gspo_mega" / "__init__.py"))
    other = program(tmp_path / "other-python", f'exec {sys.executable} "$@"')
    assert serve_command(loaded(other), os.environ)[1] == {}


def said(version: list[int], missing: list[str], sglang: str | None = "0.5.23") -> str:
    return f"echo '{json.dumps([version, missing, sglang])}'"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such program"),
        ("echo hello", "is not a Python that runs on this machine"),
        ("exit 1", "is not a Python that runs on this machine"),
        (said([3, 10], []), "is Python 3.10; 3.11 or newer is needed"),
        (
            said([3, 12], ["sglang", "yaml"]),
            "has no sglang, yaml; launch/env/gpu-server.txt lists what a server needs there",
        ),
        (
            said([3, 12], [], "0.5.17"),
            "SGLang 0.5.17 is older than 0.5.23, and lacks what a run asks of its servers (updates of weights as"
            " transactions); valid: sglang==0.5.23 (launch/env/gpu-server.txt)",
        ),
    ],
)
def test_a_python_that_could_not_serve_is_refused_with_its_place(tmp_path, text, words):
    path = tmp_path / "python"
    if text is not None:
        program(path, text)
    with pytest.raises(PlanError) as caught:
        serve_command(loaded(path), os.environ)
    assert words in str(caught.value) and f"server.python: {path}: " in str(caught.value)


def test_one_that_does_not_answer_is_refused_after_the_time_that_the_key_gives(tmp_path):
    named = [f"server.python={program(tmp_path / 'python', 'exec sleep 60')}", "cluster.preflight_seconds=0.2"]
    with pytest.raises(PlanError, match=r"did not answer within 0\.2 s \(cluster\.preflight_seconds\)"):
        serve_command(load_config(CONFIG, named), os.environ)


def test_under_slurm_the_key_of_slow_folders_replaces_the_sites():
    site = Site.read({"GSPO_PREFLIGHT_SECONDS": "900"})
    assert site.with_preflight_seconds(None).preflight_seconds == 900
    assert site.with_preflight_seconds(1800.5).preflight_seconds == 1801


def test_a_run_on_gpus_is_refused_before_it_starts_where_the_servers_have_another_torch(tmp_path, monkeypatch):
    (tmp_path / "torch-2.0.1.dist-info").mkdir()
    (tmp_path / "torch-2.0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")
    other = program(tmp_path / "python", f'PYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    shape = f"model.path={REPOSITORY / 'configs/models/quickstart_moe.json'}"
    words = [shape, f"run.dir={tmp_path / 'runs'}", f"server.python={other}", "publish.method=distributed"]
    with pytest.raises(PlanError, match=r"publish\.method: distributed: torch is .* and 2\.0\.1 in the servers'"):
        launch(load_config(CONFIG, words), "train", print)
    assert not (tmp_path / "runs").exists()


def test_under_slurm_it_replaces_the_sites_and_the_site_stands_without_it():
    site = Site.read({"GSPO_SERVER_PYTHON": "/opt/sglang/bin/python", "GSPO_TRAINER_PYTHON": "/opt/trainer/bin/python"})
    assert site.with_server_python(None) == site
    changed = site.with_server_python("/other/python")
    assert changed.server.command("-m", "x") == ["/other/python", "-m", "x"] and changed.trainer == site.trainer
