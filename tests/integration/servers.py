"""Starting and ending `gspo-mega serve` in tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from forks import forked_servers

from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.cpu.sglang_hooks import has_gpu
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.registration import Registration, read_registrations

START_SECONDS = 1200.0
STOP_SECONDS = 120.0
# A server that is started again may take as long as at first.
NO_SERVER_SECONDS = 1500.0


def run_config(folder: Path, model: Path, **sections) -> Path:
    """A run's YAML in `folder` that serves `model`; `sections` are merged into it."""
    config = {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"path": str(model)},
        "precision": "fp32",
        "batch": {"prompts_per_step": 8, "group_size": 4, "micro_batch_tokens": 4096},
        "optimizer": {"lr": 1e-4},
        "train": {"num_steps": 1},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt_tokens": 64},
        "reward": {"functions": [{"function": "exact_match"}]},
        "rollout": {"max_new_tokens": 64, "no_server_deadline_seconds": NO_SERVER_SECONDS},
        "server": {"start_deadline_seconds": START_SECONDS},
    }
    for name, section in sections.items():
        config[name] = {**config[name], **section} if isinstance(section, dict) and name in config else section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


class Serve:
    """One `gspo-mega serve` process of the newest attempt of a run (made if there is none)."""

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        index: int = 0,
        attempt: Attempt | None = None,
        words: tuple[str, ...] = (),
        python: str = sys.executable,
        forked: bool = False,
        **variables: str,
    ) -> None:
        """`words`: further options of the command. `variables`: of the server's environment. `forked`: of a process that
        has imported SGLang already, which saves most of a start's work; `process` then stands for `gspo-mega serve`,
        which is not below it. On a GPU all are started.
        """
        self.attempt = attempt or RunFolder(run_dir).new_attempt()
        self.server_id = f"server-{index}"
        self.output = self.attempt.path / f"serve_{index}{'_'.join(words)}.log"
        self._is_forked = forked and not has_gpu()
        command = forked_servers().command("forked_serve") if self._is_forked else [python, "-m", "gspo_mega", "serve"]
        command += [str(config), "--attempt", str(self.attempt.path)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--index", str(index), *words],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    **variables,
                },
            )

    def registration(self) -> Registration | None:
        found = {r.server_id: r for r in read_registrations(self.attempt.servers_dir)}
        return found.get(self.server_id)

    def wait_for(self, state: str, generation: int = 1, seconds: float = START_SECONDS) -> Registration:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen = self.registration()
            if seen is not None and seen.state == state and seen.generation >= generation:
                return seen
            if self.process.poll() is not None and state not in ("failed", "stopped"):
                break
            time.sleep(0.1)
        raise AssertionError(
            f"{self.server_id} did not become {state}: {self.registration()}\n{self.output.read_text()}\n"
            + "\n".join(self.log().splitlines()[-30:])
        )

    def log(self) -> str:
        path = self.attempt.server_log(int(self.server_id.removeprefix("server-")))
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> dict[int, str]:
        """pid -> command line of serve and all below it, found in /proc by descent (sessions do not hide anything)."""
        parents, commands = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                    commands[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
                    parents[int(entry.name)] = int(stat[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
        family = {self.process.pid}
        if self._is_forked and (seen := self.registration()) is not None:
            family.add(seen.pid)
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        return {pid: commands[pid] for pid in family if pid in commands}

    def sglang_pid(self) -> int:
        """The head of the SGLang server's processes."""
        return next(
            pid
            for pid, command in self.processes().items()
            if "rollout.server.entry" in command and "--spec" in command
        )

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_SECONDS)


@dataclass(frozen=True)
class Unending(SamplingParams):
    """No token ends a response, not the model's end token either: all are as long as asked for, whatever is sampled."""

    stop_token_ids: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"ignore_eos": True}


def trust(pool) -> None:
    """Have the servers of `pool` count as holding version 0, where there is no trainer to publish it."""
    for control in pool.controls():
        control.set_weight_version(0, deadline_seconds=60)
        pool.commit(0, [(control.server_id, control.generation)])
