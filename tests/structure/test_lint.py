"""The tools that keep format, lint rules and types, as pyproject.toml sets them up: no finding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
# The project by name: pyright would prefer a pyrightconfig.json of any folder above.
PYRIGHT = ("--project", "pyproject.toml", "--pythonpath", sys.executable)


def findings(*command, cwd=ROOT):
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    ended = subprocess.run(
        [str(PROGRAMS / command[0]), *command[1:]], cwd=cwd, capture_output=True, text=True, env=environment
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("command", [("ruff", "format", "--check", "."), ("ruff", "check", ".")], ids=" ".join)
def test_format_and_lint(command):
    code, text = findings(*command)
    assert code == 0, text


def test_types():
    code, text = findings("pyright", *PYRIGHT)
    assert code == 0 and "0 errors" in text, text


def test_a_finding_of_each_is_a_failure(tmp_path):
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "gspo_mega").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "gspo_mega" / "x.py").write_text("import os\nx:int = 'a'\n")
    assert findings("ruff", "format", "--check", ".", cwd=tmp_path)[0] == 1
    assert "F401" in findings("ruff", "check", ".", cwd=tmp_path)[1]
    code, text = findings("pyright", *PYRIGHT, cwd=tmp_path)
    assert code == 1 and "reportAssignmentType" in text
