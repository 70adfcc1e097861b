"""The sink `tensorboard`: events in the run folder's `tensorboard/`. Imports torch when it is made."""

from __future__ import annotations

import importlib.util

from gspo_mega.metrics.sinks import SinkRun


def problem() -> str | None:
    """Why the sink cannot be made with what is installed here, or None."""
    if importlib.util.find_spec("tensorboard") is None:
        return "the package tensorboard is not installed here; pip install tensorboard, or leave the sink out"
    return None


class TensorBoardSink:
    """What was written of steps that come again is hidden by TensorBoard itself (`purge_step`)."""

    def __init__(self, run: SinkRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(run.run.tensorboard_dir), purge_step=run.first_step)

    def write(self, step: int, time: float, metrics: dict[str, float]) -> None:
        measured = int(metrics.get("eval/measured_step", step))
        for name, value in metrics.items():
            self._events.add_scalar(name, value, measured if name.startswith("eval/") else step, walltime=time)
        self._events.flush()

    def close(self) -> None:
        self._events.close()
