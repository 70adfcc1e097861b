"""The paths in a run folder, all in one place.

This file knows names. `atomic_io.py` writes whole files, and the rooms that own checkpoints, published weights, the
journal, server registrations and metrics know what is in them. Standard library only, so that every room may import it.

    <run.dir>/<run.name>/
      config.resolved.yaml
      lock                           held (flock) by the one supervisor of the run
      lease/<8 digits>               the lock for file systems without flock: who holds the run, with a heartbeat
      attempts/0001/                 one start of the run; attempts/latest -> 0001
        api_key                      0600; the servers' key, made anew for every attempt that keeps no servers
        servers/<server_id>.json     written by `gspo-mega serve`
        kept_servers/<server_id>.json   whether a server of the attempt before goes on in this one, or why not
        weight_groups                names of the process groups through which rank 0 sent weights to servers
        software/<server_id>.json    the server's PyTorch and NCCL versions, if weights go through NCCL
        software/machine-<n>-<role>.json   the packages' versions of a node's Python, which its doctor found (Slurm)
        errors/rank_<r>.json         written by a rank that failed
        beats/rank_<r>               the progress of a rank, written every few seconds
        logs/{supervisor,rank_<r>,server_<k>}.log
        logs/stacks_rank_<r>.txt     the stacks of a rank that made no progress for long
        logs/stacks_<n>/             the stacks of all ranks on the n-th request
        console.log                  the progress lines of rank 0
        stop                         a stop request; its text is the reason
        command                      what was started: train, sft or eval
        started_in                   the working directory it was started in, which relative paths refer to
        result.json                  what rank 0's work returned
        state.json                   the supervisor's view of the run, with a heartbeat
        restart.json                 after a failed attempt: whether the supervisor started the run again, and why
        plan.txt versions.txt config.resolved.yaml     the plan, versions and configuration of this start
      weights/v<8 digits>/           one published Hugging Face folder
      weights/current.json           {"weight_version": int, "path": absolute path}
      checkpoints/step_<8 digits>/   checkpoints/latest holds the newest complete folder's name
      journal/step_<8 digits>        the episodes of one step, and those that were sampled ahead during it
      journal/step_<8 digits>.old-NNNN   the file as it was before the step was sampled again
      metrics.jsonl  tensorboard/  hf/  hf_steps/step_<8 digits>/
      metrics.superseded.jsonl       lines of steps that were trained again after a restart
      evaluations/step_<8 digits>.jsonl   some responses of the evaluation of a step's weights
      sinks/<name>.json  sinks/<name>/   how far a sink of metrics has come, and its files
      profile/                       the profiler's traces
      report.html                    what `gspo-mega report` wrote last
      old-NNNN/                      the record of another configuration, itself a run folder to read from
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

from gspo_mega.base.atomic_io import atomic_write_json, atomic_write_text
from gspo_mega.base.errors import FolderError
from gspo_mega.base.untrusted import NoRegularFileError, read_json_file, read_text

__all__ = [
    "CURRENT_WEIGHTS_NAME",
    "EXIT_STOPPED",
    "Attempt",
    "DamagedFileError",
    "RunFolder",
    "atomic_write_json",
    "atomic_write_text",
    "read_json",
    "weight_version_folder",
]

# The exit code of a rank that stopped on request, with a checkpoint (EX_TEMPFAIL: run the same command again).
EXIT_STOPPED = 75

CURRENT_WEIGHTS_NAME = "current.json"

_ATTEMPT_NAME = re.compile(r"\d{4,}")


def weight_version_folder(weights_dir: Path, weight_version: int) -> Path:
    """The folder of one published weight version."""
    return weights_dir / f"v{weight_version:08d}"


def read_json(path: str | os.PathLike[str]) -> Any | None:
    """Return the JSON value in `path`, or None if there is no such file.

    Raises DamagedFileError, naming the path, if it is damaged or not a file, and OSError if it cannot be read.
    """
    try:
        return read_json_file(path)
    except FileNotFoundError:
        return None
    except NoRegularFileError as error:
        raise DamagedFileError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DamagedFileError(f"{path}: not valid JSON: {error}") from None


class DamagedFileError(FolderError, ValueError):
    """A file of a run folder is damaged (its content is not what its writer wrote), or is not a file."""


class Attempt:
    """The folder of one start of a run, `attempts/NNNN`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"Attempt({str(self.path)!r})"

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.path.parent.parent)

    @property
    def api_key_file(self) -> Path:
        return self.path / "api_key"

    @property
    def servers_dir(self) -> Path:
        return self.path / "servers"

    def server_file(self, server_id: str) -> Path:
        return self.servers_dir / f"{server_id}.json"

    @property
    def server_parts_dir(self) -> Path:
        """The orders to the parts of servers on several nodes, and the reports from them."""
        return self.path / "server_parts"

    @property
    def kept_servers_dir(self) -> Path:
        return self.path / "kept_servers"

    def kept_server_file(self, server_id: str) -> Path:
        """What a server of the attempt before said when it was told to go on in this one."""
        return self.kept_servers_dir / f"{server_id}.json"

    def num_kept_servers(self) -> int:
        """Return the number of the policy's servers that this attempt took over from the one before."""
        records = (read_json(path) for path in self.kept_servers_dir.glob("[!.]*.json"))
        return sum(isinstance(record, dict) and record.get("is_kept") is True for record in records)

    @property
    def weight_groups_file(self) -> Path:
        """The names of the groups that servers were asked to join, one per line. A group may have ended since."""
        return self.path / "weight_groups"

    @property
    def software_dir(self) -> Path:
        return self.path / "software"

    @property
    def errors_dir(self) -> Path:
        return self.path / "errors"

    def error_file(self, rank: int) -> Path:
        return self.errors_dir / f"rank_{rank}.json"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def supervisor_log(self) -> Path:
        return self.logs_dir / "supervisor.log"

    def rank_log(self, rank: int) -> Path:
        return self.logs_dir / f"rank_{rank}.log"

    def server_log(self, index: int) -> Path:
        return self.logs_dir / f"server_{index}.log"

    def server_part_log(self, index: int, part: int) -> Path:
        return self.logs_dir / f"server_{index}_part_{part}.log"

    @property
    def beats_dir(self) -> Path:
        return self.path / "beats"

    def beat_file(self, rank: int) -> Path:
        return self.beats_dir / f"rank_{rank}"

    @property
    def standby_dir(self) -> Path:
        return self.path / "standby"

    def standby_log(self, index: int) -> Path:
        return self.logs_dir / f"standby_{index}.log"

    def standby_ready_file(self, rank: int) -> Path:
        """The record of a process that is ready to become `rank` of the next attempt."""
        return self.standby_dir / f"ready_{rank}.json"

    def standby_start_file(self, rank: int) -> Path:
        """What the process that was to become `rank` of this attempt said when it was told to."""
        return self.standby_dir / f"start_{rank}.json"

    def num_standby_ranks(self) -> int:
        """Return the number of ranks of this attempt that started in a process which had waited for it."""
        records = (read_json(path) for path in self.standby_dir.glob("start_*.json"))
        return sum(isinstance(record, dict) and record.get("used") is True for record in records)

    def stacks_file(self, rank: int) -> Path:
        return self.logs_dir / f"stacks_rank_{rank}.txt"

    @property
    def stacks_request_file(self) -> Path:
        return self.path / "stacks"

    def last_stacks_request(self) -> int:
        """Return the number of the last request for the stacks of all ranks, or 0 if there was none."""
        try:
            return int(read_text(self.stacks_request_file))
        except (OSError, ValueError):
            return 0

    def stacks_dir(self, number: int) -> Path:
        """The folder with the answers to request `number`."""
        return self.logs_dir / f"stacks_{number}"

    @property
    def console_log(self) -> Path:
        return self.path / "console.log"

    @property
    def stop_file(self) -> Path:
        return self.path / "stop"

    def request_stop(self, reason: str) -> None:
        """Ask the ranks to end in an orderly way at their next safe point. The reason of the first request stays."""
        if self.stop_reason() is None:
            atomic_write_text(self.stop_file, reason + "\n")

    def stop_reason(self) -> str | None:
        """Return why the ranks should stop, or None if nobody has asked for it."""
        try:
            return read_text(self.stop_file, errors="replace").strip() or "asked by hand"  # `touch stop` is enough
        except FileNotFoundError:
            return None

    @property
    def command_file(self) -> Path:
        return self.path / "command"

    @property
    def started_in_file(self) -> Path:
        return self.path / "started_in"

    @property
    def work_file(self) -> Path:
        """What the ranks of this attempt have to do, if its command says so."""
        return self.path / "work.json"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def restart_file(self) -> Path:
        return self.path / "restart.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.txt"

    @property
    def versions_file(self) -> Path:
        return self.path / "versions.txt"

    @property
    def config_file(self) -> Path:
        return self.path / "config.resolved.yaml"

    def is_newest(self) -> bool:
        """Whether no later attempt exists. If one does, this attempt's supervisor lost the run and must not write."""
        newest = self.run_folder.latest_attempt()
        return newest is None or newest.number <= self.number

    def create(self) -> Attempt:
        """Make the folder with its sub-folders and a new API key. Raises FileExistsError if it exists."""
        self.path.mkdir(parents=True)
        for folder in (self.servers_dir, self.errors_dir, self.logs_dir):
            folder.mkdir()
        atomic_write_text(self.api_key_file, secrets.token_hex(32), mode=0o600)
        return self


class RunFolder:
    """The folder of one run, `<run.dir>/<run.name>`. Constructing it touches nothing on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def config_file(self) -> Path:
        return self.path / "config.resolved.yaml"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def lease_dir(self) -> Path:
        return self.path / "lease"

    @property
    def attempts_dir(self) -> Path:
        return self.path / "attempts"

    @property
    def latest_attempt_link(self) -> Path:
        return self.attempts_dir / "latest"

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.attempts_dir / f"{number:04d}")

    def attempts(self) -> list[Attempt]:
        """Return the attempts on the disk, oldest first."""
        if not self.attempts_dir.is_dir():
            return []
        found = (Attempt(entry) for entry in self.attempts_dir.iterdir() if _ATTEMPT_NAME.fullmatch(entry.name))
        return sorted(found, key=lambda attempt: attempt.number)

    def latest_attempt(self) -> Attempt | None:
        attempts = self.attempts()
        return attempts[-1] if attempts else None

    def num_restarts(self) -> int:
        """Return the number of failed attempts after which the supervisor started the run again by itself."""
        records = (read_json(attempt.restart_file) for attempt in self.attempts())
        return sum(isinstance(record, dict) and record.get("again") is True for record in records)

    def new_attempt(self) -> Attempt:
        """Create the next attempt (its folders and API key), point `attempts/latest` to it, and return it.

        The caller must hold the run's lock. This function does not guard against a second caller.
        """
        latest = self.latest_attempt()
        attempt = self.attempt(latest.number + 1 if latest else 1).create()
        # A symbolic link cannot be overwritten in place, so create it under another name and rename it.
        new_link = self.attempts_dir / f".latest.{attempt.path.name}"
        new_link.symlink_to(attempt.path.name)
        os.replace(new_link, self.latest_attempt_link)
        return attempt

    @property
    def weights_dir(self) -> Path:
        return self.path / "weights"

    def weights_version_dir(self, weight_version: int) -> Path:
        return weight_version_folder(self.weights_dir, weight_version)

    @property
    def current_weights_file(self) -> Path:
        return self.weights_dir / CURRENT_WEIGHTS_NAME

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / f"step_{step:08d}"

    @property
    def latest_checkpoint_file(self) -> Path:
        return self.checkpoints_dir / "latest"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def superseded_metrics_file(self) -> Path:
        """Lines that were in `metrics_file` until a run went on from an earlier step and wrote these steps again."""
        return self.path / "metrics.superseded.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def sinks_dir(self) -> Path:
        return self.path / "sinks"

    @property
    def profile_dir(self) -> Path:
        return self.path / "profile"

    @property
    def journal_dir(self) -> Path:
        return self.path / "journal"

    @property
    def evaluations_dir(self) -> Path:
        return self.path / "evaluations"

    @property
    def huggingface_dir(self) -> Path:
        return self.path / "hf"

    @property
    def huggingface_steps_dir(self) -> Path:
        return self.path / "hf_steps"

    def huggingface_step_dir(self, step: int) -> Path:
        return self.huggingface_steps_dir / f"step_{step:08d}"
