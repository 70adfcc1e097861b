"""A server of an SGLang that a run cannot speak to is refused before it loads anything."""

import os
import subprocess
import sys

import pytest

from gspo_mega.base.versions import TESTED_SGLANG, sglang_problem
from gspo_mega.launcher.doctor import _packages


@pytest.mark.parametrize(
    "version", [TESTED_SGLANG, f"{TESTED_SGLANG}.post1", "0.5.24", "0.6.0rc1", "1.0.0", "0.0.0.dev1", "main", None]
)
def test_not_older_or_unknown(version):
    assert sglang_problem(version) is None


@pytest.mark.parametrize("version", ["0.5.17", "0.5.22.post1", "0.4.99", "0.0.9"])
def test_older(version):
    assert f"SGLang {version} is older than {TESTED_SGLANG}" in str(sglang_problem(version))


def test_the_server_refuses_the_package_that_it_finds_before_importing_it(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("raise RuntimeError('imported')")
    record = tmp_path / "sglang-0.5.17.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n")
    # In a process of its own, as in a run: the module makes its process one of SGLang's.
    code = "from gspo_mega.rollout.server import entry; entry.import_only([])"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert said.returncode != 0
    assert (
        "ConfigError" in said.stderr and "SGLang 0.5.17 is older than" in said.stderr and "imported" not in said.stderr
    )


def test_the_doctor_says_so():
    needed = dict.fromkeys(("torch", "pydantic", "pyyaml", "safetensors"), "1.0.0")
    found = {level: text for level, _, text in map(_parts, _packages("server", {**needed, "sglang": "0.5.17"}))}
    assert "is older than" in found["wrong"]
    found = {level: text for level, _, text in map(_parts, _packages("server", {**needed, "sglang": "0.5.99"}))}
    assert TESTED_SGLANG in found["note"] and "wrong" not in found


def _parts(finding):
    return finding.level, finding.what, finding.text
