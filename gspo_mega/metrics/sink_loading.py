"""Finding the class of a sink by its name in the configuration, and checking it before a run."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from gspo_mega.base.errors import ConfigError
from gspo_mega.config.schema import Config, MetricsSink
from gspo_mega.metrics import tensorboard_sink, wandb_sink
from gspo_mega.metrics.sinks import SinkMaker
from gspo_mega.rewards.user_functions import import_function

BUILTINS: dict[str, type] = {"tensorboard": tensorboard_sink.TensorBoardSink, "wandb": wandb_sink.WandbSink}
# Why a built-in one cannot be made with the packages that are installed here.
_PROBLEMS: dict[str, Callable[[], str | None]] = {
    "tensorboard": tensorboard_sink.problem,
    "wandb": wandb_sink.problem,
}
# metrics.jsonl itself, which every run has: it may be named, and is no class.
RECORD = "jsonl"


def sink_makers(config: Config) -> list[SinkMaker]:
    """A maker for each sink of `metrics.sinks` but metrics.jsonl. Raises ConfigError for one that cannot be made, with
    the key first.
    """
    seen: set[str] = set()
    for number, one in enumerate(config.metrics.sinks):
        try:
            _check(one, seen)
        except ConfigError as error:
            raise ConfigError(f"metrics.sinks.{number}: {error}") from error
    return [SinkMaker(one.sink, load_sink(one)) for one in config.metrics.sinks if one.sink != RECORD]


def _check(one: MetricsSink, seen: set[str]) -> None:
    if one.sink in seen:
        raise ConfigError(f"metrics sink {one.sink!r} is named twice; name each once")
    seen.add(one.sink)
    if one.sink != RECORD:
        load_sink(one)
    elif one.options:
        raise ConfigError(f"metrics sink {RECORD!r} takes no options; it is metrics.jsonl, which every run has")


def load_sink(settings: MetricsSink) -> Callable[..., Any]:
    """The class, with its options. Raises ConfigError: no such sink, module or class; an import that fails; a class
    that lacks a method, or that cannot be made with these options; a built-in whose package is not installed, is too
    old, or is broken.
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
    # Where there is no torch no rank runs: a login node may do without.
    if name in _PROBLEMS and importlib.util.find_spec("torch") and (problem := _PROBLEMS[name]()) is not None:
        raise ConfigError(f"metrics sink {name!r}: {problem}")
    return partial(made, **settings.options)
