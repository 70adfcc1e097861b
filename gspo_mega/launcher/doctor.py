"""Check one machine for ranks and servers, and what several machines share.

`check_machine` lists the checks of one machine. `check_together` checks what several machines need: a folder that all
of them see, and an all-reduce between them; one numbered process per machine takes part, and they meet in that folder
and at the first machine's address. All checks of a machine share one deadline.

Standard library only, so that a missing or broken package is a finding. Heavy packages are imported in separate
processes with a deadline, so an import that hangs or crashes does not end the doctor.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from gspo_mega.base import processes, versions
from gspo_mega.base.versions import Finding

# The first import of torch takes minutes if many nodes import it from one shared folder. Ranks wait for each other this
# long at their start.
DEADLINE_SECONDS = 600.0
# A slower import is reported although nothing is wrong, because every start of a rank or server takes as long.
SLOW_SECONDS = 60.0
_LEAST_SECONDS = 1.0
_NEEDED = {
    "trainer": ("torch", "megatron-core", "pydantic", "pyyaml", "safetensors", "transformers", "aiohttp"),
    "server": ("torch", "sglang", "pydantic", "pyyaml", "safetensors"),
}
_TORCH = (
    "import torch; torch.ones(2).sum(); known = torch.distributed.is_available() and"
    " torch.distributed.is_nccl_available();nccl = '.'.join(map(str, torch.cuda.nccl.version())) if known else"
    " None;print(torch.__version__, 'CUDA', torch.version.cuda, 'NCCL', nccl, 'sees', torch.cuda.device_count(),"
    " 'GPUs')"
)
_TORCHVISION = """
import sys
try:
    import torchvision
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}; it is built for another PyTorch, and transformers imports it for Llama"
             " and others. Uninstall torchvision, or install the build for this PyTorch")
print(torchvision.__version__)
"""
_LEAST_FREE_BYTES = 1024**3
_FEW_FREE_BYTES = 50 * 1024**3


class AnswerDeadline:
    """One time limit for all checks of a machine: each check gets the time that the checks before it left."""

    def __init__(self, seconds: float = DEADLINE_SECONDS) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, but at least one, so that a quick check still runs after slow ones."""
        return max(_LEAST_SECONDS, self._deadline - time.monotonic())


def check_machine(
    roles: tuple[str, ...],
    folder: Path,
    gpus: int,
    fp8: bool,
    address: str | None,
    deadline: AnswerDeadline,
    requests: int = 1024,
    software: Mapping[str, versions.Versions] | None = None,
) -> Iterator[Finding]:
    """Check this machine, one finding per check. `roles`: "trainer", "server" or both. `gpus`: the expected number on
    this machine, 0 if none are used. `fp8`: the run uses FP8 layers. `address`: this machine's own, which servers and
    rank 0 bind. `deadline`: the one of these checks and of those that follow. `requests`: concurrent requests to all
    servers together. `software`: the versions in each role's Python; by default those in this Python.
    """
    yield _python()
    if software is None:
        software = dict.fromkeys(roles, versions.own_versions())
    for role in roles:
        yield from _packages(role, software[role])
    yield _imports("torch", _TORCH, deadline)
    if importlib.util.find_spec("torchvision") is not None:
        yield _imports("torchvision", _TORCHVISION, deadline)
    for python in sorted({str(software[role].get("executable")) for role in roles} - {sys.executable}):
        yield _imports("torch", _TORCH, deadline, python)
    if gpus:
        yield _gpus(gpus, deadline)
        if "trainer" in roles:
            yield from _transformer_engine(fp8, deadline)
    yield _descriptors(requests)
    yield _disk("folder", folder)
    yield _disk("temporary", Path(tempfile.gettempdir()))
    if address is not None:
        yield _address(address)
        yield _network(address)


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036  the doctor may run before anything is installed
        return Finding("wrong", "python", f"{found} at {sys.executable}; 3.11 or newer is needed")
    return Finding("ok", "python", f"{found} at {sys.executable}")


def _packages(role: str, software: versions.Versions) -> Iterator[Finding]:
    installed = {name: software.get(name) for name in _NEEDED[role]}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        yield Finding(
            "wrong", "packages", f"a {role} needs {', '.join(missing)}; not installed for {software.get('executable')}"
        )
    else:
        yield Finding(
            "ok", "packages", f"{role}: " + ", ".join(f"{name} {version}" for name, version in installed.items())
        )
    sglang = installed.get("sglang")
    if (too_old := versions.sglang_problem(sglang)) is not None:
        yield Finding("wrong", "sglang", too_old)
    elif sglang not in (None, versions.TESTED_SGLANG):
        yield Finding(
            "note", "sglang", f"version {sglang}; {versions.TESTED_SGLANG} is what this release is tested with"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _imports(what: str, code: str, deadline: AnswerDeadline, python: str = sys.executable) -> Finding:
    """A finding with the output of a fresh interpreter that runs `code`; its level is `wrong` if that fails. Any other
    Python than this process's is named.
    """
    found = _imported(what, code, deadline, python)
    return found if python == sys.executable else replace(found, text=f"{found.text} ({python})")


def _imported(what: str, code: str, deadline: AnswerDeadline, python: str) -> Finding:
    began = time.monotonic()
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=deadline.left)
    except OSError as error:
        return Finding("wrong", what, f"{error.strerror or error}")
    except subprocess.TimeoutExpired as error:
        return Finding(
            "wrong", what, f"its import did not end within {error.timeout:.0f} s (of --patience {deadline.seconds:.0f})"
        )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Finding("wrong", what, lines[-1] if lines else f"its import ended with {done.returncode}")
    took = time.monotonic() - began
    if took > SLOW_SECONDS:
        return Finding(
            "note",
            what,
            f"{done.stdout.strip()}; its import took {took:.0f} s, as every start of a rank or server will. Is it in a"
            " shared folder?",
        )
    return Finding("ok", what, done.stdout.strip())


def _gpus(expected: int, deadline: AnswerDeadline) -> Finding:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=deadline.left)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("wrong", "GPUs", f"{expected} expected; nvidia-smi: {error}")
    found = [line.split(" (UUID")[0] for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    if len(found) < expected:
        return Finding(
            "wrong",
            "GPUs",
            f"{expected} expected, {len(found)} found: {'; '.join(found) or listed.stderr.strip() or 'none'}",
        )
    return Finding("ok", "GPUs", f"{len(found)}: {found[0].partition(': ')[2]}")


def _transformer_engine(fp8: bool, deadline: AnswerDeadline) -> Iterator[Finding]:
    code = (
        "import transformer_engine, transformer_engine.pytorch as te;"
        "from transformer_engine.pytorch.fp8 import check_fp8_support as c;"
        "able, why = c(); print(transformer_engine.__version__, 'FP8' if able else 'no FP8: ' + why)"
    )
    found = _imports("TE", code, deadline)
    lacking = found.level == "wrong" or "no FP8" in found.text
    # Without Transformer Engine, Megatron runs other layers, and silently BF16 although FP8 is configured.
    yield Finding("wrong", "TE", f"precision is fp8: {found.text}") if fp8 and lacking else found
    apex = _version("apex")
    yield Finding("ok", "apex", apex) if apex else Finding("note", "apex", "not installed; Megatron works without it")


def _descriptors(requests: int) -> Finding:
    """The hard limit of open files, which only an administrator can raise. (A run raises the soft limit itself.)"""
    limit = processes.open_file_limit()
    text = (
        f"one process may open {limit} files (ulimit -Hn)"
        if limit != resource.RLIM_INFINITY
        else "one process may open any number of files"
    )
    if not processes.open_file_limit_suffices(requests):
        return Finding(
            "wrong", "files", f"{text}; {requests} concurrent requests need {requests + processes.SPARE_OPEN_FILES}"
        )
    return Finding("ok", "files", text)


def _disk(what: str, folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * 4096)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("wrong", what, f"cannot write in {folder}: {error.strerror or error}")
    text = f"{free / 1024**3:.0f} GiB free in {folder}"
    if free < _LEAST_FREE_BYTES:
        return Finding("wrong", what, text)
    return Finding("note" if free < _FEW_FREE_BYTES else "ok", what, text)


def _address(address: str) -> Finding:
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            return Finding("ok", "address", f"{address} can be bound")
    except OSError as error:
        return Finding("wrong", "address", f"{address} cannot be bound: {error.strerror or error}")


def _network(address: str) -> Finding:
    """Whether others may reach the ports that a run opens at `address`. Torch's stores, gloo and NCCL have no password,
    so the network must keep others out.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        ip = None  # a host name: the user knows its network
    if ip is not None and ip.is_loopback:
        return Finding(
            "ok",
            "network",
            f"{address}: reachable on this machine only, also by its other users (docs/security.md)",
        )
    unprotected = (
        f"anyone who reaches {address} can disturb or steer the ranks: their store, gloo and NCCL have no password"
        " (docs/security.md)"
    )
    if ip is not None and ip.is_global:
        return Finding("note", "network", f"{address} is a public address; {unprotected}")
    return Finding("ok", "network", unprotected)


@dataclass(frozen=True)
class MachinePlace:
    """This machine among `num_machines`. `master`: address and free port of the first machine."""

    index: int
    num_machines: int
    master: tuple[str, int]


def check_together(place: MachinePlace, folder: Path, gpus: int, deadline: AnswerDeadline) -> list[Finding]:
    """Check the shared folder, and then an all-reduce. `folder`: a new folder for this check, on the shared file
    system. `deadline`: the checks of this machine have used part of it; those of another machine may take longer.
    """
    shared = _shared_folder(place, folder, deadline)
    # If a machine is missing, an all-reduce would only wait for it.
    return [shared] if shared.level == "wrong" else [shared, _all_reduce(place, gpus, deadline)]


def _shared_folder(place: MachinePlace, folder: Path, deadline: AnswerDeadline) -> Finding:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"machine-{place.index}").touch()
    until = time.monotonic() + deadline.left
    missing = set(range(place.num_machines))
    while missing and time.monotonic() < until:
        missing -= {index for index in missing if (folder / f"machine-{index}").exists()}
        time.sleep(0.1)
    if missing:
        return Finding(
            "wrong",
            "shared",
            f"{folder} does not show the files of machine {', '.join(map(str, sorted(missing)))} of"
            f" {place.num_machines}",
        )
    return Finding("ok", "shared", f"all {place.num_machines} machines see {folder.parent}")


def _all_reduce(place: MachinePlace, gpus: int, deadline: AnswerDeadline) -> Finding:
    address, port = place.master
    seconds = deadline.left
    command = [
        sys.executable,
        "-m",
        "gspo_mega.launcher.all_reduce_probe",
        "--rank",
        str(place.index),
        "--world",
        str(place.num_machines),
        "--address",
        address,
        "--port",
        str(port),
        "--seconds",
        str(seconds),
        *(["--gpu"] if gpus else []),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding(
            "wrong",
            "network",
            f"an all-reduce with {place.num_machines} machines at {address}:{port} did not end within {seconds:.0f} s",
        )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Finding("wrong", "network", f"all-reduce: {lines[-1] if lines else f'ended with {done.returncode}'}")
    return Finding("ok", "network", done.stdout.strip().splitlines()[-1])
