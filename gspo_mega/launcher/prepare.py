"""Prepare an attempt before a process starts: its run folder, its record of software, its GPUs, ports and variables.

`new_attempt` decides whether a run folder may be continued with a configuration, moves aside what an earlier start of
another configuration recorded there, and makes the attempt. It deletes no record of a run; `lease.py` keeps other
supervisors out. `versions_text` and `commit` describe the software of the run. The last part finds GPUs and free ports,
and sets for a rank the variables that torchrun or srun would set. Nothing here starts a process of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import ConfigError, FolderError, PlanError
from gspo_mega.base.near_paths import missing_run_hint
from gspo_mega.base.run_folder import Attempt, RunFolder, atomic_write_text
from gspo_mega.base.untrusted import read_text
from gspo_mega.config import Config, LoadedConfig, load_config, render_config
from gspo_mega.config.derived import command_name
from gspo_mega.config.precision import wheel_folder
from gspo_mega.config.schema.section import may_change
from gspo_mega.models.low_rank import ADAPTER_FOLDER
from gspo_mega.rollout.registration import give_turn

PACKAGES = (
    "gspo_mega",
    "torch",
    "megatron-core",
    "transformer-engine",
    "sglang",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "aiohttp",
)
_GIT_SECONDS = 30.0
# Below the kernel's range for outgoing connections, and outside the servers' range.
_PORTS = range(14_000, 20_000)
_CHOSEN: list[socket.socket] = []  # what keeps the ports that this process chose
_ABSENT: Any = object()


def new_attempt(
    folder: RunFolder, loaded: LoadedConfig, command: str, say: Callable[[str], None] = lambda line: None
) -> Attempt:
    """Make a new attempt of `command` in `folder`, which the caller holds, and write config.resolved.yaml there.

    A folder with a checkpoint is continued. It must be of the same command, and its configuration may differ only in
    keys that the schema marks `may_change`; ConfigError names every other key that differs. A folder without a
    checkpoint has nothing to continue: its run starts over, and its published weights are withdrawn, so that no server
    starts with them. Recorded rollouts stay if the configuration is the same. Otherwise they move to a subfolder
    `old-NNNN`, which `--from-rollouts` and `gspo-mega inspect` accept, and `say` names it. Raises FolderError if the
    folder cannot be written.
    """
    with _disk_errors_named(folder):
        return _new_attempt(folder, loaded, command, say)


def _new_attempt(folder: RunFolder, loaded: LoadedConfig, command: str, say: Callable[[str], None]) -> Attempt:
    check_same_run(folder, loaded, command)
    if not folder.latest_checkpoint_file.exists():
        if not _is_same_start(folder, loaded, command):
            _move_aside(folder, say)
        folder.current_weights_file.unlink(missing_ok=True)
    atomic_write_text(folder.config_file, render_config(loaded.config))
    attempt = folder.new_attempt()
    if loaded.config.cluster.colocated and command in ("train", "sft"):
        give_turn(attempt, "ranks")  # before any server of the attempt could start
    atomic_write_text(attempt.command_file, command + "\n")
    if _is_text(started_in := os.getcwd()):
        atomic_write_text(attempt.started_in_file, started_in + "\n")
    return attempt


def _is_text(path: str) -> bool:
    """Whether a path has only characters that a text file can have. Names of files may be any bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def configuration_of(target: str, command: str, overrides: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """The YAML file and the overrides with which `command` starts, or continues, what the user names.

    `target`: a YAML file, or the folder of a run of `command`. For a folder this process moves to the working directory
    in which the run was started, if there still is one, because its relative paths refer to it. The run stays in its
    folder, which may have moved, so `overrides` (the user's) may not name another. Raises ConfigError for any other
    folder.
    """
    name = command_name(command)
    if not Path(target).is_dir():
        if not os.path.lexists(target) and Path(target).suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"gspo-mega {name}: {target} is neither a YAML file nor the folder of a run: nothing is there"
                f"{missing_run_hint(target)}"
            )
        return Path(target), []
    folder = RunFolder(Path(target).resolve())
    for override in overrides:
        if override.partition("=")[0].strip() in ("run", "run.dir", "run.name"):
            raise ConfigError(f"gspo-mega {name}: {override} names another folder than {target}; leave it out")
    started = last_command(folder)
    if not folder.config_file.is_file() or started is None:
        raise ConfigError(f"gspo-mega {name}: {target} is not a run's folder; give a YAML file, or a folder of a run")
    if started != command:
        raise ConfigError(
            f"gspo-mega {name}: {target} is a run of `gspo-mega {command_name(started)}`; continue it with"
            f" gspo-mega {command_name(started)} {target}"
        )
    for attempt in reversed(folder.attempts()):
        if attempt.started_in_file.is_file():
            started_in = read_text(attempt.started_in_file, errors="replace").removesuffix("\n")
            if "\0" not in started_in and os.path.isdir(started_in) and os.access(started_in, os.X_OK):
                os.chdir(started_in)
            break
    own = load_config(folder.config_file).config.run.name
    if own != folder.path.name:
        raise ConfigError(
            f"gspo-mega {name}: {target} is a copy of the run {own}, or was renamed; a run keeps its name: call the"
            f" folder {own}, in another place if need be"
        )
    return folder.config_file, [f"run.dir={yaml_string(str(folder.path.parent))}", f"run.name={own}"]


def yaml_string(text: str) -> str:
    """`text` as a quoted string of YAML, for an override."""
    return json.dumps(text, ensure_ascii=False)


def check_same_run(folder: RunFolder, loaded: LoadedConfig, command: str) -> None:
    """Raise ConfigError if `folder` holds checkpoints that this configuration of `command` cannot continue."""
    if folder.latest_checkpoint_file.exists():
        _check_same_run(folder, loaded, command)


@contextlib.contextmanager
def _disk_errors_named(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"run folder {folder.path} cannot be written: {error.strerror}") from error


def _move_aside(folder: RunFolder, say: Callable[[str], None]) -> None:
    """Move the records of another configuration to a subfolder. If this process dies during the move, the next start
    moves the rest.
    """
    recorded = [
        folder.journal_dir,
        folder.metrics_file,
        folder.superseded_metrics_file,
        folder.tensorboard_dir,
        folder.sinks_dir,
        folder.evaluations_dir,
        folder.profile_dir,
        folder.huggingface_dir,
        folder.huggingface_steps_dir,
        folder.huggingface_dir.with_name(ADAPTER_FOLDER),
    ]
    found = [path for path in recorded if path.exists()]
    if not found:
        return
    old = next(path for number in range(1, 10_000) if not (path := folder.path / f"old-{number:04d}").exists())
    old.mkdir()
    if folder.config_file.exists():
        atomic_write_text(old / folder.config_file.name, read_text(folder.config_file))
    for path in found:
        os.rename(path, old / path.name)
    for touched in (old, folder.path):
        atomic_io.sync(touched)
    names = ", ".join(path.name for path in found)
    say(
        f"notice   {folder.path} was recorded with another configuration and has no checkpoint to continue: {names}"
        f" moved to {old}"
    )


def _is_same_start(folder: RunFolder, loaded: LoadedConfig, command: str) -> bool:
    same_command = last_command(folder) == command
    return (
        same_command
        and folder.config_file.exists()
        and not differing_keys(load_config(folder.config_file).config, loaded.config)
    )


def last_command(folder: RunFolder) -> str | None:
    """The last command that was started in this folder; None if there is none. (An attempt that `gspo-mega serve` made
    by hand has no command.)
    """
    files = [attempt.command_file for attempt in folder.attempts() if attempt.command_file.exists()]
    return read_text(files[-1], errors="replace").strip() if files else None


def _check_same_run(folder: RunFolder, loaded: LoadedConfig, command: str) -> None:
    before = last_command(folder)
    if before not in (None, command):
        raise ConfigError(
            f"run folder {folder.path} holds a `gspo-mega {command_name(before)}` run. Choose another run.name for"
            f" {command_name(command)}"
        )
    if not folder.config_file.exists():
        raise ConfigError(
            f"run folder {folder.path} holds checkpoints but no {folder.config_file.name}. Choose another run.name"
        )
    before_config = load_config(folder.config_file).config
    differing = differing_keys(before_config, loaded.config)
    if differing:
        lines = [f"run folder {folder.path} holds checkpoints of another configuration:"]
        for key, (before, now) in differing.items():
            lines += [
                f"{loaded.where(key)}: {inner}: now {_yaml(one)}, the run has {_yaml(two)}"
                for inner, (one, two) in _differences(key, now, before).items()
            ]
        lines.append("choose another run.name, or continue this run with its values of these keys")
        raise ConfigError("\n".join(lines))


def continuation_problems(before: Config, now: Config) -> list[str]:
    """Return why a run with the configuration `before` cannot be continued with `now`, one line per key; empty if it
    can.
    """
    problems = []
    for key, (old, new) in differing_keys(before, now).items():
        problems += [
            f"{inner}: now {_yaml(one)}, the run has {_yaml(two)}"
            for inner, (one, two) in _differences(key, new, old).items()
        ]
    return problems


def changed_keys(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Return every dotted key whose value differs, with both values, also of keys that may change."""
    flat_before, flat_now = _flatten(before.model_dump()), _flatten(now.model_dump())
    keys = sorted(flat_before.keys() | flat_now.keys())
    return {key: pair for key in keys if len(set(map(repr, pair := (flat_before.get(key), flat_now.get(key))))) > 1}


def differing_keys(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values, except for keys that may change in a continued run."""
    flat_before, flat_now = _flatten(before.model_dump()), _flatten(now.model_dump())
    keys = sorted(flat_before.keys() | flat_now.keys())
    return {
        key: (flat_before.get(key), flat_now.get(key))
        for key in keys
        if flat_before.get(key) != flat_now.get(key) and not may_change(Config, key)
    }


def _differences(key: str, now: Any, before: Any) -> dict[str, tuple[Any, Any]]:
    """(now, before) of each difference between two values, by key; of lists and sections, only the differing
    entries.
    """
    if isinstance(now, (list, tuple)) and isinstance(before, (list, tuple)):
        found = {}
        for index in range(max(len(now), len(before))):
            one, two = (value[index] if index < len(value) else _ABSENT for value in (now, before))
            if one != two:
                found |= _differences(f"{key}.{index}", one, two)
        return found
    if isinstance(now, dict) and isinstance(before, dict):
        keys = [name for name in {**now, **before} if now.get(name, _ABSENT) != before.get(name, _ABSENT)]
        parts = [_differences(f"{key}.{name}", now.get(name, _ABSENT), before.get(name, _ABSENT)) for name in keys]
        return {name: both for part in parts for name, both in part.items()}
    return {key: (now, before)}


def _yaml(value: Any) -> str:
    """A value as a configuration has it, on one line."""
    if value is _ABSENT:
        return "nothing"
    plain = json.loads(json.dumps(value, default=str))  # tuples are lists there
    if isinstance(plain, dict) and "function" in plain:  # a reward: leave out the fields at their defaults
        plain = {name: one for name, one in plain.items() if one not in (None, [], {}, 1.0)}
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def versions_text() -> str:
    """One line per package of this process's environment, with `-` for a missing package."""
    lines = [f"python {platform.python_version()}", f"commit {commit() or '-'}"]
    return "\n".join([*lines, *(f"{package} {version or '-'}" for package, version in versions().items())]) + "\n"


def versions() -> dict[str, str | None]:
    """The version of each package in this process's environment; None where it is missing."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    if package == "transformer-engine":  # on a machine without a GPU it is on no import path
        for found in metadata.distributions(name=package, path=[str(wheel_folder())]):
            return found.version
    return None


def commit(folder: Path | None = None) -> str | None:
    """The commit of this process's sources, with `-dirty` appended if they differ from it; None if they are not part of
    a repository, as in an installed package. `folder`: that of another package, with an `__init__.py`.
    """
    folder = folder or Path(__file__).parents[1]
    # An environment may lie inside somebody's repository, whose commit says nothing about the installed packages.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40")


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that children may use, as values for CUDA_VISIBLE_DEVICES. Does not ask the driver."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    found = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in devices.iterdir())
    return [str(number) for number in sorted(int(match.group(1)) for match in found if match)]


def device_here() -> Literal["cpu", "gpu"]:
    """The kind of device that ranks on this machine use."""
    return "gpu" if visible_gpus(os.environ) else "cpu"


def task_of_step(environment: Mapping[str, str] | None = None) -> int | None:
    """The number of this process in its Slurm step; None outside of a step."""
    number = (os.environ if environment is None else environment).get("SLURM_PROCID", "")
    return int(number) if number.isdigit() else None


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that is free, and that no other process can choose in this way before this one ends.

    It stays bound, without listening and with SO_REUSEADDR, so that a process that sets this option too, as servers
    do, can listen on it seconds later. Raises PlanError if there is none.
    """
    candidates = random.Random(os.urandom(8)).sample(_PORTS, len(_PORTS))
    for port in candidates:
        chosen = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            chosen.bind((host, port))
        except OSError:
            chosen.close()
            continue
        chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _CHOSEN.append(chosen)
        return port
    raise PlanError(f"no free port of {host} between {_PORTS.start} and {_PORTS.stop}")


def rank_environments(num_ranks: int, gpus: list[str], threads: int = 1) -> list[dict[str, str]]:
    """One environment per rank of a single machine, as torchrun or srun would set it.

    `gpus`: one per rank, or empty on a machine without GPUs. `threads`: OMP_NUM_THREADS on such a machine, where ranks
    that each use all cores slow each other down.
    """
    port = free_port()
    common = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    if gpus:
        common["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        common["OMP_NUM_THREADS"] = str(threads)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def reward_gpus(gpus: list[str], needs: list[int]) -> tuple[list[str], list[list[str]]]:
    """Divide `gpus` between ranks and policy servers, which get the first, and the servers of reward models. `needs`:
    the number of GPUs that each of the latter needs.

    Returns (the GPUs of ranks and policy servers, the GPUs of each reward server), which are empty without GPUs. Raises
    PlanError if there are too few.
    """
    if not gpus:
        return [], [[] for _ in needs]
    rest = len(gpus) - sum(needs)
    if rest < 0:
        raise PlanError(
            f"the servers of reward.model need {sum(needs)} GPUs, and {len(gpus)} are visible. Lower num_servers or"
            " tensor there"
        )
    shares, first = [], rest
    for need in needs:
        shares.append(gpus[first : first + need])
        first += need
    return gpus[:rest], shares


def share_gpus(
    gpus: list[str], num_ranks: int, num_servers: int, tensor: int, colocated: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Divide `gpus`, in their order, between the ranks and the servers (`tensor` GPUs each). With `colocated` the
    servers use the ranks' GPUs.

    Returns (the GPUs of the ranks, the GPUs of each server), which are empty without GPUs. Raises PlanError if there
    are GPUs but too few.
    """
    servers = [[] for _ in range(num_servers)]
    if not gpus:
        return [], servers
    first = 0 if colocated else num_ranks
    needed = max(num_ranks, first + num_servers * tensor)
    if needed > len(gpus):
        raise PlanError(
            f"{num_ranks} ranks and {num_servers} servers of server.tensor {tensor} need {needed} GPUs,"
            f" and {len(gpus)} are visible. Lower cluster.ranks_per_node, server.num_servers or server.tensor"
        )
    shares = [gpus[first + k * tensor : first + (k + 1) * tensor] for k in range(num_servers)]
    return gpus[:num_ranks], shares
