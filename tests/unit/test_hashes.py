"""The file of hashes: it names every pin, it is what the tool writes, and pip refuses another file by it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENTS = REPOSITORY / "launch" / "env"
OFFLINE = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")} | {
    "PIP_CONFIG_FILE": os.devnull
}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(*files: str) -> dict[str, str]:
    lines = [
        line.split()
        for file in files
        for line in (ENVIRONMENTS / file).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {canonical(line[0].split("==")[0].split("[")[0]): line[0].split("==")[1] for line in lines}


def test_every_pin_has_its_hash():
    assert pins("cpu-hashes.txt") == pins("cpu.txt", "cpu-no-deps.txt", "test.txt"), "run: python tools/write_hashes.py"
    assert pins("cpu-te-hashes.txt") == pins("cpu-te.txt"), "run: python tools/write_hashes.py"
    assert pins("reasoning-gym-hashes.txt") == pins("reasoning-gym.txt"), "run: python tools/write_hashes.py"
    made = "".join(path.read_text() for path in sorted(ENVIRONMENTS.glob("*-hashes.txt")))
    lines = [line for line in made.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines), (
        "no local build among them (+cpu)"
    )


def wheel(folder: Path, content: str) -> Path:
    path = folder / "tiny_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny_package.py", content)
        file.writestr(
            "tiny_package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n"
        )
        file.writestr(
            "tiny_package-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("tiny_package-1.0.dist-info/RECORD", "")
    return path


def test_the_tool_writes_what_pip_accepts_and_another_file_is_refused(tmp_path):
    wheel(tmp_path, "x = 1")
    (tmp_path / "pins.txt").write_text("tiny-package==1.0\n")
    here = ["--no-index", f"--find-links={tmp_path}"]
    tool = [
        sys.executable,
        str(REPOSITORY / "tools/write_hashes.py"),
        "--pins",
        str(tmp_path / "pins.txt"),
        "--out",
        str(tmp_path / "hashes.txt"),
    ]
    assert subprocess.run(
        [*tool, "--", *here], env=OFFLINE, capture_output=True, text=True, check=True
    ).stdout.endswith("hashes.txt: 1 packages\n")

    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--require-hashes",
        *here,
        "-r",
        str(tmp_path / "hashes.txt"),
    ]
    assert (
        "Would install tiny" in subprocess.run(install, env=OFFLINE, capture_output=True, text=True, check=True).stdout
    )
    wheel(tmp_path, "x = 2")
    refused = subprocess.run(install, env=OFFLINE, capture_output=True, text=True)
    assert refused.returncode == 1 and "DO NOT MATCH THE HASHES" in refused.stderr

    (tmp_path / "pins.txt").write_text("absent-package==1.0\n")
    assert subprocess.run([*tool, "--", *here], env=OFFLINE, capture_output=True).returncode == 1


def test_what_resolves_normally_fits_a_pytorch_with_cuda_too():
    """`launch/setup.sh` installs cpu.txt with pip's resolver. From an ordinary index pip takes the PyTorch with CUDA,
    which pins packages that the CPU build does not ask for.
    """
    of_cuda_build = {"triton": "3.7.1"}  # of torch 2.13.0's requirements, those of which a build without CUDA has none
    resolved = pins("cpu.txt") | pins("test.txt")
    assert resolved["torch"] == "2.13.0", "look at the new PyTorch's requirements"
    assert {name: resolved.get(name, version) for name, version in of_cuda_build.items()} == of_cuda_build
