"""The Python that servers of one machine run in, where `server.python` names another than the ranks'.

Owns the command and the variables of `gspo-mega serve` there, and refusing a Python in which it could not start. Under
Slurm `site_settings.py` says what a server's Python is, in its container, and this key replaces the site's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gspo_mega
from gspo_mega.config import LoadedConfig
from gspo_mega.errors import PlanError

_LOOK_SECONDS = 120.0
# Run by the server's Python: what `gspo-mega serve` and the server import, found and not imported.
_LOOK = """
import importlib.util, json, sys
needed = ["gspo_mega", "sglang", "torch", "pydantic", "yaml", "safetensors", "numpy", "aiohttp", "psutil"]
print(json.dumps([list(sys.version_info[:2]), [name for name in needed if importlib.util.find_spec(name) is None]]))
"""


def serve_command(
    loaded: LoadedConfig, environment: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """`gspo-mega serve` in the servers' Python, and the variables that it needs besides `environment`.

    Raises PlanError, with the place of the key, where `server.python` is no Python that could serve.
    """
    chosen = loaded.config.server.python
    if chosen is None:
        return [sys.executable, "-m", "gspo_mega", "serve"], {}
    variables = _found_there(environment)
    place = f"{loaded.where('server.python')}: server.python: {chosen}"
    found = shutil.which(chosen)
    if found is None:
        raise PlanError(f"{place}: there is no such program; the path of a Python, as /opt/sglang/bin/python")
    try:
        looked = subprocess.run(
            [found, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**environment, **variables},
        )
        version, missing = json.loads(looked.stdout)
    except subprocess.TimeoutExpired:
        raise PlanError(f"{place}: did not answer within {_LOOK_SECONDS:.0f} s") from None
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(f"{place}: is no Python that runs here: {error}") from None
    if tuple(version) < (3, 11):
        raise PlanError(f"{place}: is Python {version[0]}.{version[1]}; 3.11 or newer is needed")
    if missing:
        raise PlanError(
            f"{place}: has no {', '.join(missing)}; what a server needs there is in launch/env/gpu-server.txt"
        )
    return [found, "-m", "gspo_mega", "serve"], variables


def _found_there(environment: Mapping[str, str]) -> dict[str, str]:
    """Where another Python finds this very gspo_mega: its repository. One that is installed among other packages must
    not bring those along; the other Python then has a gspo_mega of its own.
    """
    root = Path(gspo_mega.__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (str(root), environment.get("PYTHONPATH")) if part)}
