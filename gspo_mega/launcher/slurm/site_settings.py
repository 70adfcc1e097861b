"""The settings of a cluster that launch/slurm/site.sh exports: GPUs per node, containers, Pythons, network.

Owns the names and meaning of these variables. A container is one line: options of srun if it begins with `--` (pyxis:
`--container-image=... --container-mounts=...`), else words before the command (`apptainer exec --nv IMAGE`).
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gspo_mega.base.errors import ConfigError

_NUMBERS = {"GSPO_GPUS_PER_NODE": 0, "GSPO_CPUS_PER_TASK": 1, "GSPO_SIGNAL_SECONDS": 0, "GSPO_PREFLIGHT_SECONDS": 600}


@dataclass(frozen=True)
class Environment:
    """The environment of one kind of process: `container` as in the site's file, and the `python` inside it."""

    container: tuple[str, ...]
    python: str

    @property
    def srun_options(self) -> list[str]:
        return list(self.container) if self._is_options else []

    def command(self, *words: str) -> list[str]:
        """`words` for this environment's Python, inside its container."""
        return [*([] if self._is_options else self.container), self.python, *words]

    @property
    def _is_options(self) -> bool:
        return bool(self.container) and self.container[0].startswith("--")


@dataclass(frozen=True)
class Site:
    """`gpus_per_node`: 0 for none. `cpus_per_task`: for each rank and server. `network`: interfaces of gloo and NCCL,
    or None for their own choice. `signal_seconds`: time from Slurm's signal to the time limit, 0 for the plan's value.
    `preflight`: run the doctor on every node first; `preflight_seconds`: its time limit.
    """

    gpus_per_node: int
    cpus_per_task: int
    network: str | None
    signal_seconds: int
    preflight_seconds: int
    preflight: bool
    trainer: Environment
    server: Environment

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Site:
        """The settings in the environment. Raises ConfigError for a bad number or an open quote."""
        values = {name: environment.get(name) or str(default) for name, default in _NUMBERS.items()}
        wrong = [f"{name}={text}" for name, text in values.items() if not text.isdecimal()]
        if wrong:
            raise ConfigError(f"launch/slurm/site.sh: {', '.join(wrong)}: not a number")
        gpus, cpus, signal_seconds, preflight_seconds = (int(values[name]) for name in _NUMBERS)
        return cls(
            gpus,
            max(cpus, 1),
            environment.get("GSPO_NETWORK") or None,
            signal_seconds,
            preflight_seconds,
            environment.get("GSPO_PREFLIGHT", "1") != "0",
            trainer=_environment(environment, "TRAINER"),
            server=_environment(environment, "SERVER"),
        )

    @property
    def ranks_use_this_python(self) -> bool:
        """Whether what this process can import is what ranks can: no container, and no Python of their own."""
        return not self.trainer.container and Path(self.trainer.python).absolute() == Path(sys.executable).absolute()

    def with_server_python(self, python: str | None) -> Site:
        """The site with the Python of `server.python` instead of GSPO_SERVER_PYTHON, where that key is set."""
        return self if python is None else replace(self, server=replace(self.server, python=python))

    def with_preflight_seconds(self, seconds: float | None) -> Site:
        """The site with `cluster.preflight_seconds` instead of GSPO_PREFLIGHT_SECONDS, where that key is set."""
        return self if seconds is None else replace(self, preflight_seconds=math.ceil(seconds))

    def network_variables(self) -> dict[str, str]:
        return {} if self.network is None else {"GLOO_SOCKET_IFNAME": self.network, "NCCL_SOCKET_IFNAME": self.network}


def _environment(environment: Mapping[str, str], kind: str) -> Environment:
    container = words_of(environment, f"GSPO_{kind}_CONTAINER")
    return Environment(tuple(container), environment.get(f"GSPO_{kind}_PYTHON") or sys.executable)


def words_of(environment: Mapping[str, str], name: str) -> list[str]:
    """The words of a variable, quoted as in a shell. Raises ConfigError for an open quote."""
    text = environment.get(name, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"launch/slurm/site.sh: {name}={text}: {error}; put words with spaces in one pair of quotes"
        ) from None
