"""Finds the class of a sink by its name in the configuration, and checks it before a run. Also holds the sink
`tensorboard`.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.user_functions import import_function
from gspo_mega.config.schema import Metrics, MetricsSink
from gspo_mega.metrics import wandb_sink
from gspo_mega.metrics.sinks import SampleRow, SinkMaker, SinkRun


def tensorboard_problem() -> str | None:
    """Why the sink `tensorboard` cannot be made with the installed packages, or None."""
    if importlib.util.find_spec("tensorboard") is None:
        return "the package tensorboard is not installed here; pip install tensorboard, or leave the sink out"
    return None


class TensorBoardSink:
    """Writes events to the run folder's `tensorboard/`. Imports torch when it is made.

    TensorBoard itself hides what was written of steps that come again (`purge_step`).
    """

    def __init__(self, run: SinkRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(run.run.tensorboard_dir), purge_step=run.first_step)

    def write(self, step: int, time: float, metrics: dict[str, float]) -> None:
        measured = int(metrics.get("eval/measured_step", step))
        for name, value in metrics.items():
            self._events.add_scalar(name, value, measured if name.startswith("eval/") else step, walltime=time)
        self._events.flush()

    def write_samples(self, step: int, rows: list[SampleRow]) -> None:
        self._events.add_text("samples", "\n\n".join(map(_as_markdown, rows)), step)

    def close(self) -> None:
        self._events.close()


def _as_markdown(row: SampleRow) -> str:
    """A row for TensorBoard's text page, which renders Markdown: texts as code, so that they look as they are."""
    head = ", ".join(
        f"{name} {value:.3f}"
        for name, value in (("reward", row.reward), ("advantage", row.advantage))
        if value is not None
    )
    texts = ("\n".join("    " + line for line in text.splitlines() or [""]) for text in (row.prompt, row.response))
    return "\n\n".join([f"**{head or 'not scored'}**", *texts])


BUILTINS: dict[str, type] = {"tensorboard": TensorBoardSink, "wandb": wandb_sink.WandbSink}
# For each built-in sink a function that says why it cannot be made with the installed packages.
_PROBLEMS: dict[str, Callable[[], str | None]] = {
    "tensorboard": tensorboard_problem,
    "wandb": wandb_sink.problem,
}
# metrics.jsonl itself, which every run has. The configuration may name it, but there is no class for it.
RECORD = "jsonl"


def sink_makers(metrics: Metrics) -> list[SinkMaker]:
    """A maker for each sink of `metrics.sinks` except metrics.jsonl. Raises ConfigError for a sink that cannot be made;
    the message begins with its key.
    """
    seen: set[str] = set()
    for number, one in enumerate(metrics.sinks):
        try:
            _check(one, seen)
        except ConfigError as error:
            raise ConfigError(f"metrics.sinks.{number}: {error}") from error
    return [SinkMaker(one.sink, load_sink(one)) for one in metrics.sinks if one.sink != RECORD]


def _check(one: MetricsSink, seen: set[str]) -> None:
    if one.sink in seen:
        raise ConfigError(f"metrics sink {one.sink!r} is named twice; name each once")
    seen.add(one.sink)
    if one.sink != RECORD:
        load_sink(one)
    elif one.options:
        raise ConfigError(f"metrics sink {RECORD!r} takes no options; it is metrics.jsonl, which every run has")


def load_sink(settings: MetricsSink) -> Callable[..., Any]:
    """The class of a sink with its options bound. Raises ConfigError if there is no such sink, module or class, if an
    import fails, if the class lacks a method or cannot be made with these options, or if the package of a built-in sink
    is not installed, is too old or is broken.
    """
    name = settings.sink
    if ":" in name:
        made = import_function(name, "metrics sink", ConfigError)
    elif name in BUILTINS:
        made = BUILTINS[name]
    else:
        near = difflib.get_close_matches(name, [RECORD, *BUILTINS], n=1)
        raise ConfigError(
            f"metrics sink {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}valid:"
            f" {', '.join([RECORD, *BUILTINS])}, or package.module:Class"
        )
    if inspect.isclass(made):
        missing = [method for method in ("write", "close") if not callable(getattr(made, method, None))]
        if missing:
            raise ConfigError(f"metrics sink {name!r}: {made.__name__} has no method {' and no '.join(missing)}")
    try:
        inspect.signature(made).bind("run", **settings.options)
    except TypeError as error:
        raise ConfigError(f"metrics sink {name!r}: cannot be made with a run and these options: {error}") from error
    # No rank runs on a machine without torch, such as a login node, so the package may be missing there.
    if name in _PROBLEMS and importlib.util.find_spec("torch") and (problem := _PROBLEMS[name]()) is not None:
        raise ConfigError(f"metrics sink {name!r}: {problem}")
    return partial(made, **settings.options)
