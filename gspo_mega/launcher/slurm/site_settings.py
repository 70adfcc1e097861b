"""What a site's cluster is like, as launch/slurm/site.sh exports it: GPUs a node, containers, Pythons, network.

Owns the names of those variables and their meaning. A container is one line: options for srun when it begins with `--`
(pyxis: `--container-image=... --container-mounts=...`), else words put before the command (`apptainer exec --nv
IMAGE`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gspo_mega.errors import ConfigError

_NUMBERS = {"GSPO_GPUS_PER_NODE": 0, "GSPO_CPUS_PER_TASK": 1, "GSPO_SIGNAL_SECONDS": 0, "GSPO_PREFLIGHT_SECONDS": 600}


@dataclass(frozen=True)
class Environment:
    """Where one kind of process runs: `container` as in the site's file, `python` inside of it."""

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
    """`gpus_per_node` 0: none. `cpus_per_task`: of every rank and server. `network`: interfaces of gloo and NCCL, or
    None for their own choice. `signal_seconds`: how long before the time limit Slurm says so, 0 for as long as the plan
    asks for. `preflight`: run the doctor first, on every node; `preflight_seconds`: what it may take there.
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
        """Raises ConfigError naming every variable that is no number, or that holds an open quote."""
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

    def with_server_python(self, python: str | None) -> Site:
        """The site with the Python that `server.python` names in place of GSPO_SERVER_PYTHON, where it names one."""
        return self if python is None else replace(self, server=replace(self.server, python=python))

    def network_variables(self) -> dict[str, str]:
        return {} if self.network is None else {"GLOO_SOCKET_IFNAME": self.network, "NCCL_SOCKET_IFNAME": self.network}


def _environment(environment: Mapping[str, str], kind: str) -> Environment:
    container = words_of(environment, f"GSPO_{kind}_CONTAINER")
    return Environment(tuple(container), environment.get(f"GSPO_{kind}_PYTHON") or sys.executable)


def words_of(environment: Mapping[str, str], name: str) -> list[str]:
    """The words of a variable that holds several, quoted as in a shell. Raises ConfigError where a quote is left
    open.
    """
    text = environment.get(name, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"launch/slurm/site.sh: {name}={text}: {error}; words with spaces stand in one pair of quotes"
        ) from None
