"""What a run's folder says about the run as a whole: metrics, attempts and configuration, as a `RunRecord` that
`read_run` reads while the run goes on or afterwards. Reads nothing outside the folder, and starts nothing.

`sampled_episodes.py` reads the episodes, and `verdicts.py` says in words what the numbers mean.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from gspo_mega.base.errors import ConfigError, DataError
from gspo_mega.base.near_paths import missing_run_hint
from gspo_mega.base.run_folder import Attempt, RunFolder, read_json
from gspo_mega.base.untrusted import NoRegularFileError, parse_json, read_bytes, read_text
from gspo_mega.config.schema import Config
from gspo_mega.config.strict_yaml import Document, parse
from gspo_mega.launcher.attempt_state import read_state

# A curve shows at most this many points, because it has no more pixels. Longer runs are thinned.
MOST_POINTS = 2_000
# The keys that a configuration must give.
_NEEDED = ("run.name", "model.path", "data.path", "algorithm", "reward.functions")

_MOST_CONFIG_BYTES = 16 * 1024**2

Series = list[float | None]


@dataclass(frozen=True)
class AttemptRecord:
    """One start of the run. Times are unix seconds. `ended`: the last sign of life of its supervisor. `restart`: why
    the attempt was started automatically, if it was.
    """

    number: int
    state: str
    started: float | None = None
    ended: float | None = None
    host: str | None = None
    error: str | None = None
    restart: str | None = None


@dataclass
class RunRecord:
    """What a run's folder says about the run.

    Attributes:
        steps: the steps with metrics, ascending. `times`: the unix seconds at which each was written.
        series: by metric, a value for each of `steps`, None if the step has none.
        every: one of this many steps is kept; 1 up to `MOST_POINTS` steps.
        settings: the resolved configuration by dotted key.
        changed: (key, value, default) of the keys that are not at their defaults.
        problems: what could not be read, as lines for the user.
    """

    path: Path
    name: str
    command: str
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    every: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    changed: list[tuple[str, str, str]] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    versions: str = ""
    layout: str = ""
    problems: list[str] = field(default_factory=list)


def read_run(path: str | Path, now: float | None = None) -> RunRecord:
    """The record of the run in `path`, the folder <run.dir>/<run.name>, whether the run has finished or not. Writes
    nothing. `now`: the unix seconds with which heartbeats are compared; by default those of the clock.

    Raises ConfigError for a folder that is not a run's, DataError for a damaged line of metrics. An unreadable attempt
    or configuration is named in `problems` instead.
    """
    folder = RunFolder(path)
    attempts = folder.attempts()
    if not attempts and not folder.metrics_file.exists():
        raise ConfigError(
            f"{folder.path} is not a run folder: it has neither attempts/ nor metrics.jsonl; valid:"
            f" the folder <run.dir>/<run.name> of a run{missing_run_hint(path)}"
        )
    latest = attempts[-1] if attempts else None
    record = RunRecord(folder.path, _short_name(folder.path), _text_or_empty(latest.command_file) if latest else "")
    _read_metrics(folder.metrics_file, record)
    for attempt in attempts:
        try:
            record.attempts.append(_attempt_record(attempt, time.time() if now is None else now))
        except (ValueError, TypeError, KeyError) as error:  # damaged, or from another release
            record.attempts.append(AttemptRecord(attempt.number, "unknown"))
            record.problems.append(f"{attempt.path}: its record cannot be read: {error}")
    if latest is not None:
        record.versions, record.layout = _text_or_empty(latest.versions_file), _text_or_empty(latest.plan_file)
    try:
        document = parse(read_text(folder.config_file, _MOST_CONFIG_BYTES))
        why = document.problems[0].text if document.problems else None
    except (OSError, ValueError) as error:
        document, why = Document(), str(error)
    if why is None and not isinstance(document.value, dict):
        why = "it is not a mapping"
    if why is None:
        record.settings = flat(document.value)
    else:
        record.problems.append(f"{folder.config_file}: the configuration cannot be read: {why}")
    record.changed = differences(record.settings, schema_defaults())
    return record


def _short_name(path: Path) -> str:
    """The last two parts of the path, because many runs are named `train`."""
    return "/".join(path.parts[-2:])


def _read_metrics(path: Path, record: RunRecord) -> None:
    lines = read_lines(path)
    record.every = math.ceil(len(lines) / MOST_POINTS) or 1
    last = len(lines) - 1
    shown = [line for place, line in enumerate(lines) if place % record.every == 0 or place == last]
    record.steps = [line["step"] for line in shown]
    record.times = [line.get("time", 0.0) for line in shown]
    for name in sorted({name for line in shown for name in line} - {"step", "time"}):
        record.series[name] = [line.get(name) for line in shown]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The metrics of each step, ascending, with the last value of each. Those of an evaluation are in the step whose
    weights it measured. A half-written last line, as of a running or killed run, is left out.

    Raises DataError for a damaged line.
    """
    try:
        lines = read_bytes(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except NoRegularFileError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            value = parse_json(line)
            step = int(value["step"])
            measured = int(value.get("eval/measured_step", step))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise DataError(f'{path}:{number}: is not a line of metrics; valid: one JSON object with "step"') from None
        if measured != step:
            late = {name: value.pop(name) for name in list(value) if name.startswith("eval/")}
            by_step.setdefault(measured, {"step": measured}).update(late)
        by_step.setdefault(step, {}).update(value)
    return [by_step[step] for step in sorted(by_step)]


def _attempt_record(attempt: Attempt, now: float) -> AttemptRecord:
    restart = read_json(attempt.restart_file)
    why = None if restart is None else f"{restart['why']}; because {restart['cause']}"
    state = read_state(attempt)
    if state is None:
        return AttemptRecord(attempt.number, "starting", restart=why)
    shown = "lost" if state.is_silent(now) else state.state
    return AttemptRecord(attempt.number, shown, state.started, state.heartbeat, state.host, state.error, why)


def _text_or_empty(path: Path) -> str:
    try:
        return read_text(path, errors="replace").strip()
    except OSError:
        return ""


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by dotted key. A list is a value."""
    if not isinstance(tree, dict):
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = f"{prefix}.{key}" if prefix else str(key)
        found.update(flat(value, inner) if isinstance(value, dict) and value else {inner: value})
    return found


def differences(settings: dict[str, Any], defaults: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(key, value, default) of the keys whose value differs from the default, in the order of the file. The default is
    "" for a key that has none.
    """
    rows = []
    for key, value in settings.items():
        if (value in ([], {}, None) and key not in defaults) or (
            key.startswith("certify.") and not settings.get("certify.cases")
        ):
            continue  # the configuration gives nothing there
        default = defaults.get(key)
        if key in _NEEDED and key != "algorithm":
            rows.append((key, shown(value), ""))
        elif value != default:
            rows.append((key, shown(value), shown(default) if key in defaults else ""))
    return rows


def shown(value: Any) -> str:
    """A setting as text: a string as it is, and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def schema_defaults() -> dict[str, Any]:
    """Every default of the schema by dotted key, including the keys of sections that are absent by default."""
    found: dict[str, Any] = {}
    _add_defaults(Config, "", found)
    return found


def _add_defaults(model: Any, prefix: str, found: dict[str, Any]) -> None:
    for name, info in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        inner = _section_of(info.annotation)
        if inner is not None:
            _add_defaults(inner, key, found)
        if (inner is None or info.default is None) and not info.is_required():
            default = info.get_default(call_default_factory=True)
            found[key] = json.loads(json.dumps(default, default=_plain))


def _section_of(annotation: Any) -> Any | None:
    """The class of the section that a field holds, or None if the field holds a value."""
    if get_origin(annotation) in (tuple, list, dict):  # a value, also if its items are sections
        return None
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and hasattr(candidate, "model_fields"):
            return candidate
    return None


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)
