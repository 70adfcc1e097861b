"""The Python of the servers on one machine: `server.python`, else the variable GSPO_SERVER_PYTHON, else this Python.

`serve_command` gives the command and the variables of `gspo-mega serve` in that Python, and refuses a Python in which
it cannot start. `check_same_software` refuses one to which the ranks could not publish; `base/versions.py` compares the
two. Under Slurm, `slurm/size.py` reads the same variable, and the key replaces it. Importing this module
needs only the standard library, because the doctor imports it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import gspo_mega
from gspo_mega.base import versions
from gspo_mega.base.errors import PlanError

if TYPE_CHECKING:
    from gspo_mega.config import LoadedConfig

SERVER_PYTHON = "GSPO_SERVER_PYTHON"
# Runs in the servers' Python: finds the packages that `gspo-mega serve` and the server import, without importing them.
_FIND_PACKAGES = """
import importlib.metadata, importlib.util, json, sys
needed = ["gspo_mega", "sglang", "torch", "pydantic", "yaml", "safetensors", "numpy", "aiohttp", "psutil"]
missing = [name for name in needed if importlib.util.find_spec(name) is None]
try:
    sglang = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    sglang = None
print(json.dumps([list(sys.version_info[:2]), missing, sglang]))
"""


def server_python_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """The Python that GSPO_SERVER_PYTHON names; None if it is unset or empty."""
    return environment.get(SERVER_PYTHON) or None


def serve_command(
    loaded: LoadedConfig, environment: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """The command `gspo-mega serve` in the servers' Python, and the variables that it needs besides `environment`.

    Raises PlanError, with the place of the key or the name of the variable, if that Python cannot serve.
    """
    key, chosen = f"{loaded.where('server.python')}: server.python", loaded.config.server.python
    if chosen is None:
        key, chosen = SERVER_PYTHON, server_python_variable(environment)
    if not chosen:
        return [sys.executable, "-m", "gspo_mega", "serve"], {}
    from gspo_mega.config.deadlines import preflight_seconds  # here because it needs pydantic

    variables, seconds = _import_path(environment), preflight_seconds(loaded.config.cluster)
    place = f"{key}: {chosen}"
    found = shutil.which(chosen)
    if found is None:
        raise PlanError(f"{place}: no such program. Give the path of a Python, such as /opt/sglang/bin/python")
    try:
        done = subprocess.run(
            [found, "-c", _FIND_PACKAGES],
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env={**environment, **variables},
        )
        version, missing, sglang = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"{place}: did not answer within {seconds:g} s (cluster.preflight_seconds). Is it in a slow shared folder?"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(f"{place}: is not a Python that runs on this machine: {error}") from None
    if tuple(version) < (3, 11):
        raise PlanError(f"{place}: is Python {version[0]}.{version[1]}; 3.11 or newer is needed")
    if missing:
        raise PlanError(
            f"{place}: has no {', '.join(missing)}; launch/env/gpu-server.txt lists what a server needs there"
        )
    if too_old := versions.sglang_problem(sglang):
        raise PlanError(f"{place}: {too_old}")
    return [found, "-m", "gspo_mega", "serve"], variables


def _import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH, with which another Python finds this gspo_mega in its repository. Empty if gspo_mega is installed:
    its folder would bring other packages along, so the other Python must have a gspo_mega of its own.
    """
    root = Path(gspo_mega.__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (str(root), environment.get("PYTHONPATH")) if part)}


def check_same_software(
    loaded: LoadedConfig, python: str, variables: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> None:
    """For a run on GPUs: raises PlanError if weights go to the servers' `python` through NCCL, and its PyTorch or NCCL
    differ from those of this Python. `variables`: those of the servers, besides `environment`.
    """
    if loaded.config.publish.method != "distributed" or versions.is_this_python(python):
        return
    from gspo_mega.config.deadlines import preflight_seconds  # here because it needs pydantic

    place = f"{loaded.where('publish.method')}: publish.method: distributed"
    try:
        server = versions.versions_of(python, preflight_seconds(loaded.config.cluster), {**environment, **variables})
    except ValueError as error:
        raise PlanError(f"{place}: {error}") from None
    if different := versions.differences(versions.own_versions(), server):
        raise PlanError("\n".join([f"{place}: {different[0]}", *different[1:]]))
