"""What makes a run's trajectories, as fingerprints: the weights, the rewards with their source, the settings of
sampling.

They stand in the journal beside what was sampled, so that a restarted step takes over what it would sample and score
the same way again, and nothing else. Nothing of a reward is imported here: its source is found, read and hashed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from gspo_mega.config.prompt_sources import sources_of
from gspo_mega.config.schema import Config
from gspo_mega.records import RolloutBatch
from gspo_mega.reward.functions import BUILTINS

# What each kind says of records that are not taken over.
REASONS = {
    "weights": "other weights sampled them",
    "rewards": "another reward scored them: its source or its options are not the same",
    "sampling": "they were sampled with other settings",
    "recorded rollouts": "they are of another recording",
}
# Of each file of weights, at its beginning, middle and end: enough to tell two trainings of one model apart.
_SAMPLE_BYTES = 64 * 1024


def made_by(config: Config) -> dict[str, str]:
    """The fingerprints of a run that samples and scores, the weights' apart, which change with every step."""
    return {
        "rewards": reward_fingerprint(config),
        "sampling": _digest(
            {"rollout": config.rollout.model_dump(include=set(_SAMPLING)), "precision": config.precision}
        ),
    }


_SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "filter_constant_groups", "return_routed_experts")


def first_weights(config: Config) -> str:
    """A fingerprint of the weights that a fresh run starts from: config.json, and size and samples of every file of
    weights.
    """
    folder = Path(config.model.weights or config.model.path)
    files = sorted(
        path
        for pattern in ("config.json", "*.safetensors", "*.distcp", "megatron/*.distcp")
        for path in folder.glob(pattern)
    )
    return _digest([[str(path.relative_to(folder)), path.stat().st_size, _samples(path)] for path in files])


def next_history(history: str, batch: RolloutBatch, checksums: Mapping[str, int]) -> str:
    """The fingerprint of the weights after a step that trains on `batch`, from weights of the fingerprint `history`."""
    return _digest([history, sorted((one.trajectory_id, checksums[one.trajectory_id]) for one in batch.trajectories)])


def reward_fingerprint(config: Config) -> str:
    """Of every reward function: name, weight, options, and the source of its module and of what that imports of the
    user's own.
    """
    functions = [
        [one.function, one.weight, one.options, source_digest(one.function)] for one in config.reward.functions
    ]
    of_sources = [
        [source.name, source.reward, source_digest(source.reward)]
        for source in sources_of(config.data)
        if source.reward is not None
    ]
    return _digest([functions, of_sources])


def source_digest(function: str) -> str:
    """Of the files that a reward function's name stands for, in any place; a module that is not found has none."""
    module = (
        function.partition(":")[0]
        if ":" in function
        else BUILTINS[function].__module__
        if function in BUILTINS
        else function
    )
    return _digest(
        sorted((name, hashlib.sha256(path.read_bytes()).hexdigest()) for name, path in _own_modules(module).items())
    )


def _own_modules(module: str) -> dict[str, Path]:
    """The file of `module`, of the packages around it, and of what these import: of the same package, or of none that
    is installed.
    """
    found: dict[str, Path] = {}
    waiting, top = [module], module.partition(".")[0]
    while waiting:
        name = waiting.pop()
        for part in _with_packages(name):
            if part in found or (spec := _spec(part)) is None or spec.origin is None or not os.path.isfile(spec.origin):
                continue
            if part.partition(".")[0] != top and _is_installed(spec.origin):
                continue
            found[part] = Path(spec.origin)
            waiting += _imports(
                found[part], part if spec.submodule_search_locations is not None else part.rpartition(".")[0]
            )
    return found


def _with_packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is, found without running it or the packages around it."""
    path: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in _with_packages(name):
        try:
            # An editable installation may be known to a finder of its own, which is asked for top-level names alone:
            # others it would import.
            spec = PathFinder.find_spec(part, path) or (importlib.util.find_spec(part) if "." not in part else None)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _is_installed(file: str) -> bool:
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(
        Path(os.path.realpath(file)).is_relative_to(os.path.realpath(place)) for place in places
    ) or file.startswith(str(Path(__file__).parents[1]))


def _imports(file: Path, package: str) -> Iterator[str]:
    """Names that a source file may import, modules and what might be one."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # its import will fail, and say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names) if base else ()


def _samples(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
