"""The sink `wandb`: a run of Weights & Biases, online or offline. The package is an optional extra (`wandb`), and only
its public interface is used.

Every start of the run continues the same W&B run, whose id is in the sink's folder. Offline, each start has a folder
there, and `wandb sync` sends them all. W&B itself reads the API key (WANDB_API_KEY, `wandb login`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import re
import secrets
import shutil
from pathlib import Path
from typing import Literal, get_args

from gspo_mega.base.run_folder import atomic_write_text
from gspo_mega.base.untrusted import read_text
from gspo_mega.metrics.sinks import SampleRow, SinkRun

logger = logging.getLogger(__name__)

# What pyproject.toml asks for.
LEAST_VERSION = (0, 24)

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbSink:
    """Writes to Weights & Biases. `mode`: WANDB_MODE or online if None. The other options are those of `wandb.init`.

    W&B's own process buffers rows, so a kill may lose the last ones; because of `buffer_seconds` they are given again.
    Rows cannot be taken back. After a return to an older checkpoint, steps that W&B holds for sure are not given again;
    a continued run computes the same values. Online, W&B's server says which steps these are (`last_step`).
    """

    buffer_seconds = 30.0

    def __init__(
        self,
        run: SinkRun,
        project: str = "gspo_mega",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"option mode {mode!r}; valid: {', '.join(get_args(Mode))}")
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        # Send only the run's metrics and configuration: no console output, code or git state.
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        before = _starts(run.folder)
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                name=name or run.run.path.name,
                group=group,
                tags=tags,
                notes=notes,
                mode=mode,
                id=_run_id(run.folder),
                dir=str(run.folder),
                config=run.config,
                resume="allow",
                settings=quiet,
            )
        except BaseException:
            try:
                wandb.teardown()
            except Exception as error:  # W&B may raise anything; the user should see the first failure
                logger.info("W&B's process could not be ended after a start that failed: %s", error)
            for folder in _starts(run.folder) - before:  # nothing was written to it, and the next attempt makes its own
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._given: int | None = None
        if self._run.resumed:
            self.last_step = self._given = self._run.starting_step - 1

    def write(self, step: int, time: float, metrics: dict[str, float]) -> None:
        if self._given is not None and step <= self._given:
            # A second line of a step, such as an evaluation at the end. W&B accepts it only for the summary.
            self._run.summary.update(metrics)
            return
        self._run.log({**metrics, "time": time}, step=step, commit=True)
        self._given = step

    def write_samples(self, step: int, rows: list[SampleRow]) -> None:
        if self._given is not None and step <= self._given:
            return
        table = self._wandb.Table(
            columns=["prompt", "response", "reward", "advantage"],
            data=[[row.prompt, row.response, row.reward, row.advantage] for row in rows],
        )
        self._run.log({"samples": table}, step=step, commit=False)  # the step's line follows

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()


def _run_id(folder: Path) -> str:
    path = folder / "run_id"
    if not path.exists():
        atomic_write_text(path, secrets.token_hex(4) + "\n")
    return read_text(path).strip()


def _starts(folder: Path) -> set[Path]:
    """The folders that W&B made for single starts."""
    return {path for path in folder.glob("wandb/*run-*") if path.is_dir() and not path.is_symlink()}


def problem() -> str | None:
    """Why the sink `wandb` cannot be made with the installed package, or None."""
    least = ".".join(map(str, LEAST_VERSION))
    if importlib.util.find_spec("wandb") is None:
        return "the package is not installed here; pip install 'gspo_mega[wandb]'"
    try:
        found = importlib.metadata.version("wandb")
    except importlib.metadata.PackageNotFoundError:
        return None  # a source checkout has no version; trust its user
    numbers = tuple(map(int, re.findall(r"[0-9]+", found)[:2]))
    if numbers < LEAST_VERSION:
        return f"the package is {found} here, and {least} or newer is needed; pip install 'wandb>={least}'"
    try:
        importlib.import_module("wandb")
    except Exception as error:  # a broken dependency may raise anything
        return f"wandb {found} cannot be imported here: {type(error).__name__}: {error}"
    return None
