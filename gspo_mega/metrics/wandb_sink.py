"""The sink `wandb`: a run of Weights & Biases, online or offline. The package is an optional extra (`wandb`).

Every start of the run continues the same W&B run. Its id is in the sink's folder; offline, each start has a folder
there, and `wandb sync` sends them all. The API key is W&B's own business (WANDB_API_KEY, `wandb login`).
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any, Literal, get_args

from gspo_mega.guarded_files import read_text
from gspo_mega.metrics.sinks import SinkRun
from gspo_mega.run_folder import atomic_write_text

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbSink:
    """`mode`: when absent, WANDB_MODE or online. The other options are those of `wandb.init`.

    `last_step`: the last step that W&B holds of this run: its files say so offline, its server online. W&B's own
    process buffers rows, so a killed run's last ones are given again. Rows cannot be taken back: after a return to an
    older checkpoint, steps that W&B holds are not given again; a continued run computes the same.
    """

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
        # `console`, code and git: only what the run says of itself goes out.
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
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
        self.last_step: int | None = _last_offline_step(run.folder)
        if self._run.resumed:
            self.last_step = max(self._run.starting_step - 1, self.last_step or 0)
        self._given = self.last_step

    def write(self, step: int, time: float, metrics: dict[str, float]) -> None:
        if self._given is not None and step <= self._given:
            # A second line of a step, such as an evaluation at the end: W&B takes no more of it than the summary.
            self._run.summary.update(metrics)
            return
        self._run.log({**metrics, "time": time}, step=step, commit=True)
        self._given = step

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()


def _run_id(folder: Path) -> str:
    path = folder / "run_id"
    if not path.exists():
        atomic_write_text(path, secrets.token_hex(4) + "\n")
    return read_text(path).strip()


def _last_offline_step(folder: Path) -> int | None:
    """The largest step in the offline files of this run; None without one. A file that a killed run left may end
    anywhere: what comes before counts.
    """
    steps = [step for file in folder.glob("wandb/offline-run-*/run-*.wandb") for step, _ in offline_rows(file)]
    return max(steps, default=None)


def offline_rows(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, the values' JSON texts by name) of the rows of an offline file, up to where it was cut off."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store, rows = DataStore(), []
    try:
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record: Any = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append((record.history.step.num, items))
    except Exception as error:  # an AssertionError, among others, where the file ends within a record
        logger.info("%s is read up to where it was cut off: %s", file, error)
    return rows
