"""GSPO_REQUIRE turns skips into failures (tests/conftest.py)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[2] / "conftest.py"


def outcome(folder, text, require):
    folder.mkdir(exist_ok=True)
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text("import pytest\n" + text)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "GSPO_REQUIRE": require},
    )
    return ran.returncode, ran.stdout.strip().splitlines()[-1], ran.stdout


def test_a_test_skipped_for_want_of_a_required_thing_fails(tmp_path):
    text = "@pytest.mark.skip(reason='sglang is not installed')\ndef test_a(): pass\ndef test_b(): pass\n"
    assert outcome(tmp_path, text, "")[0] == 0
    assert outcome(tmp_path, text, "slurm")[0] == 0
    code, last, out = outcome(tmp_path, text, "slurm, sglang")
    assert code == 1 and "1 passed" in last
    assert "GSPO_REQUIRE names sglang" in out


def test_a_module_skipped_for_want_of_a_required_thing_fails(tmp_path):
    text = "pytest.importorskip('sglang_of_another_world')\ndef test_a(): pass\n"
    # With every test of the folder skipped at collection there is none to run, which is code 5 of pytest.
    assert outcome(tmp_path, text, "slurm")[0] == 5
    code, _, out = outcome(tmp_path, text, "sglang")
    assert code not in (0, 5) and "GSPO_REQUIRE names sglang" in out


def test_an_expected_failure_is_left_alone(tmp_path):
    assert outcome(tmp_path, "@pytest.mark.xfail(reason='sglang')\ndef test_a(): assert 0\n", "sglang")[0] == 0
