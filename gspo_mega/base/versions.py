"""Which versions of packages work together: SGLang's release, and the trainer's Python against the servers'.

Standard library only, because the doctor imports this file before anything else.

- `Finding` and `render`: what the doctor reports.
- `TESTED_SGLANG` is the oldest release that a server may have. `rollout/` uses its arguments, its routes for weights
  (`begin_weight_update`, in-place pauses) and its streamed reports. Older releases differ: in 0.5.17 there is no such
  route, and ServerArgs is another kind of class.
- The rest reads the versions of the packages that this Python or another one has installed, and compares the trainer's
  with the servers'. PyTorch and NCCL matter most. Before the first publish, `sync/servers.py` also compares what the
  processes of a run have loaded.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gspo_mega.base import package_versions
from gspo_mega.base.atomic_io import atomic_write_json
from gspo_mega.base.untrusted import read_json_file

Level = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor found. The levels are `ok`, `note` (it works, but is worth knowing) and `wrong` (a run
    would not start, or would not work as configured).
    """

    level: Level
    what: str
    text: str


def render(findings: Iterable[Finding], machine: str = "") -> str:
    """Return one line per finding: those of level `wrong` first, then `note`, then `ok`."""
    order = {"wrong": 0, "note": 1, "ok": 2}
    prefix = f"{machine}: " if machine else ""
    return "\n".join(
        f"{prefix}{f.level:<5} {f.what:<9} {f.text}" for f in sorted(findings, key=lambda f: order[f.level])
    )


TESTED_SGLANG = "0.5.23"


def sglang_problem(version: str | None) -> str | None:
    """Return why a server of this `version` is refused, with what is valid; None if it is not older than TESTED_SGLANG.

    A version that names no release, such as that of a source tree without tags (0.0.0.dev1), is not refused.
    """
    found = _parsed_release(version)
    if found is None or found >= (_parsed_release(TESTED_SGLANG) or ()):
        return None
    return (
        f"SGLang {version} is older than {TESTED_SGLANG}, and lacks what a run asks of its servers (updates of weights"
        f" as transactions); valid: sglang=={TESTED_SGLANG} (launch/env/gpu-server.txt)"
    )


def _parsed_release(version: str | None) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    numbers = tuple(map(int, found.groups())) if found else ()
    return numbers if any(numbers) else None


Versions = Mapping[str, str | None]

# These must be equal in all members of an NCCL group: NCCL refuses another version of itself, and torch decides what it
# sends.
_EQUAL = ("torch", "NCCL")
# A difference in these is worth knowing, but stops nothing.
_NOTED = ("CUDA", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
_SHOWN = ("torch", "NCCL", "CUDA", "sglang", "safetensors", "transformers")
_RECORD = "machine-"
# NVIDIA's table of minor version compatibility: the oldest driver for each major release of CUDA.
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
_SAME_AGAIN = (
    "launch/setup_gpu.sh makes both from the same pins (launch/env/gpu.txt, launch/env/gpu-server.txt);"
    " `publish.method: disk` does without NCCL between them"
)


def own_versions() -> Versions:
    """Return the versions of this Python, as `package_versions.versions` does."""
    return package_versions.versions()


def versions_of(python: str, seconds: float, environment: Mapping[str, str] | None = None) -> Versions:
    """Return the versions of the program `python`. Raises ValueError, with a text for a person, if it does not report
    them within `seconds`.
    """
    text = Path(package_versions.__file__).read_text(encoding="utf-8")
    try:
        told = subprocess.run(
            [python, "-c", text],
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{python} did not tell its versions within {seconds:.0f} s") from None
    except OSError as error:
        raise ValueError(f"{python} cannot be started: {error.strerror or error}") from None
    try:
        found = json.loads(told.stdout.splitlines()[-1])
        return {str(name): None if version is None else str(version) for name, version in found.items()}
    except (ValueError, IndexError, AttributeError):
        said = told.stderr.strip().splitlines()
        raise ValueError(f"{python} is not a Python that runs here: {said[-1] if said else 'no output'}") from None


def compare(trainer: Versions, server: Versions, by_nccl: bool) -> list[Finding]:
    """Return the findings about the trainer's versions against a server's.

    `by_nccl`: weights go from the trainer to these servers through NCCL, so that a difference of PyTorch or NCCL is an
    error.
    """
    found = [Finding("wrong" if by_nccl else "note", "pythons", text) for text in differences(trainer, server)]
    differing = [name for name in _NOTED if _release(trainer.get(name)) != _release(server.get(name))]
    # It is normal that only one of the two has a package: a server lacks what Megatron needs, a trainer what SGLang
    # needs.
    differing = [name for name in differing if trainer.get(name) and server.get(name)]
    if differing:
        pairs = ", ".join(f"{name} {trainer.get(name)} and {server.get(name)}" for name in differing)
        found.append(Finding("note", "pythons", f"trainer's and servers' differ in: {pairs}"))
    if not found:
        found.append(Finding("ok", "pythons", f"trainer's and servers' agree: {_shown(trainer)}"))
    return found


def record_versions(folder: Path, index: int, role: str, versions: Versions) -> None:
    """Write the versions of a role's Python on machine `index` to `folder`, for `compare_records`."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / f"{_RECORD}{index}-{role}.json", dict(versions))


def compare_records(folder: Path, by_nccl: bool) -> list[Finding]:
    """Compare the recorded Pythons of all servers with that of the first machine's trainer.

    Returns the findings without repetitions; none if there is no record of a trainer or of a server.
    """
    trainers, servers = (
        [read_json_file(path) for path in sorted(folder.glob(f"{_RECORD}*-{role}.json"))]
        for role in ("trainer", "server")
    )
    found = (compare(trainers[0], server, by_nccl) for server in servers) if trainers else ()
    return list(dict.fromkeys(finding for findings in found for finding in findings))


def differences(trainer: Versions, server: Versions) -> list[str]:
    """Return one text for each package that must be equal and is not, with both versions and what to do.

    Builds of one release (`+cu130`) are equal. A version that one of the two does not report is not compared.
    """
    return [
        f"{name} is {trainer[name]} in the trainer's Python ({trainer.get('executable')}) and {server[name]} in the"
        f" servers' ({server.get('executable')}); weights are published between them by NCCL, which needs the same"
        f" version. {_SAME_AGAIN}"
        for name in _EQUAL
        if trainer.get(name) and server.get(name) and _release(trainer[name]) != _release(server[name])
    ]


def driver_problem(versions: Versions) -> str | None:
    """Return why torch of this Python cannot use the GPU's driver; None if it can, or if there is no torch or no
    driver.
    """
    cuda, driver = versions.get("CUDA"), versions.get("driver")
    least = _LEAST_DRIVER.get((cuda or "").partition(".")[0])
    if least is None or not driver or int(driver.partition(".")[0]) >= least:
        return None
    return (
        f"the GPU's driver is {driver}; torch {versions.get('torch')} is built for CUDA {cuda}, which needs {least} or"
        " newer. Update the driver of this machine"
    )


def _shown(versions: Versions) -> str:
    return ", ".join(f"{name} {versions.get(name)}" for name in _SHOWN if versions.get(name))


def _release(version: str | None) -> str | None:
    return version.partition("+")[0] if version else None


def is_this_python(python: str) -> bool:
    """Whether `python` is the program that runs this code."""
    return Path(python).absolute() == Path(sys.executable).absolute()
