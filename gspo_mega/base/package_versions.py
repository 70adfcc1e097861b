"""The versions of the packages that one Python has, read without importing them.

This file uses only the standard library and nothing of this project, because `versions.py` also runs its text in
another Python. As a script it prints the versions as JSON:

    python gspo_mega/base/package_versions.py
"""

import importlib.util
import json
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *("torch", "sglang", "megatron-core", "transformer-engine", "transformer-engine-torch", "transformers"),
    *("tokenizers", "safetensors", "numpy", "pydantic", "pyyaml", "aiohttp", "psutil"),
)
# NVIDIA's packages of NCCL carry the CUDA release in their names.
_NCCL = [f"nvidia-nccl-cu{release}" for release in range(11, 20)]
_DRIVER_SECONDS = 60.0


def versions() -> dict:
    """Return the versions by name; a version is None if there is no such thing.

    The names are those of PACKAGES, `python`, `CUDA` (the release that torch is built for), `NCCL` (the one installed
    as a package) and `driver` (of the GPU). `executable` is the path of this Python.
    """
    found = {name: _version(name) for name in PACKAGES}
    nccl = [version for name in _NCCL if (version := _version(name)) is not None]
    found["NCCL"] = nccl[0] if nccl else None
    return {
        **found,
        "CUDA": _cuda(),
        "driver": _driver(),
        "python": platform.python_version(),
        "executable": sys.executable,
    }


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda():
    """Read the CUDA release from the text of torch's version.py, because importing torch from a slow folder takes
    minutes.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (ImportError, OSError, ValueError):
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"[0-9]+(\.[0-9]+)*", ended.stdout.strip())
    return found.group(0) if found and ended.returncode == 0 else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(versions()) + "\n")
