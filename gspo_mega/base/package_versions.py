"""The versions of the packages that one Python has, read without importing them.

Standard library alone and nothing of this project: `versions.py` runs this file's text in another Python, too.

    python gspo_mega/base/package_versions.py        prints them as JSON
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
    """Version of each of PACKAGES, of `python`, of `CUDA` that torch is built for, of `NCCL` that is installed as a
    package, and of the GPU's `driver`; None where there is none. `executable`: this Python.
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
    """What torch says of itself in its version.py, which is text: importing torch takes minutes from a slow folder."""
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
        told = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"[0-9]+(\.[0-9]+)*", told.stdout.strip())
    return found.group(0) if found and told.returncode == 0 else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(versions()) + "\n")
