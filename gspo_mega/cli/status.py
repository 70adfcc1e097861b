"""Show the state of a run from its folder alone: state, step, speed, last error, place of the logs.

Works on every machine that sees the folder, also on a login node. Starts nothing and asks neither Slurm nor the run's
processes, but with `--stacks`.

`gspo-mega status --json`: what the folder says of a run as numbers, names and times, for programs.

Times are unix seconds, None stands for what is not known. The same in words is `status.py`'s.

`gspo-mega status RUN --stacks`: what every rank is doing now, a line each, and where the whole stacks are.

`gspo-mega status RUN --watch`: the same report again and again, as a screen on a terminal, else as plain lines.

Reads the run's folder alone. Ends with the run's last attempt, or with Ctrl-C, and changes nothing of the run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gspo_mega.base.errors import ConfigError, RolloutError
from gspo_mega.base.run_folder import Attempt, DamagedFileError, RunFolder, read_json
from gspo_mega.base.untrusted import open_regular, parse_json, printable, read_text
from gspo_mega.config import load_config
from gspo_mega.launcher.attempt_state import SILENCE_SECONDS, RunState, read_state
from gspo_mega.launcher.restarts import WINDOW_SECONDS, last_line, last_restart, starts_again
from gspo_mega.launcher.watchdog import StackRequest
from gspo_mega.metrics.writer import progress_line
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.rollout.server.reward_server import reward_folder, reward_names

_STEP = re.compile(r"step_([0-9]+)")


def facts_of(folder: RunFolder, now: float) -> dict[str, Any]:
    """The facts by name. `now`: unix seconds. The folder has an attempt, or the log of a job that began none."""
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    last = last_line(folder.metrics_file) or {}
    checkpoint = _text_fact(folder)
    found = _STEP.fullmatch(checkpoint or "")
    restart = last_restart(folder)
    return {
        "run": str(folder.path),
        "time": now,
        "state": _state_fact(attempt, state, now),
        "note": None if state is None else state.note,
        "another_attempt_begins": bool(
            attempt is not None and state is not None and state.state == "failed" and starts_again(attempt)
        ),
        "attempt": None if attempt is None else attempt.number,
        "slurm_job": None if state is None else state.slurm_job,
        "host": None if state is None else state.host,
        "started_time": None if state is None else state.started,
        "last_sign_of_life_time": None if state is None else state.heartbeat,
        "ended_time": state.heartbeat if state is not None and state.is_over else None,
        "step": last.get("step"),
        "step_time": last.get("time"),
        "reward_mean": last.get("reward/mean"),
        "tokens_per_second": last.get("speed/tokens_per_second"),
        "step_seconds": last.get("time/step_seconds"),
        "servers": None if attempt is None else _server_facts(attempt),
        "reward_models": {} if attempt is None else _reward_model_facts(attempt),
        "checkpoint": checkpoint,
        "checkpoint_step": int(found[1]) if found else None,
        "error": error_of(folder),
        "num_restarts": len(restart.restarted_at) if restart is not None else 0,
        "last_restart": None
        if restart is None
        else {"why": restart.why, "cause": restart.cause, "again": restart.again},
        "logs": None if attempt is None else str(attempt.logs_dir),
    }


def error_of(folder: RunFolder) -> dict[str, Any] | None:
    """The error of the newest attempt that has one: its supervisor's, else that of the first rank that failed. `text`
    is all of it, `summary` one line.
    """
    for attempt in reversed(folder.attempts()):
        state = read_state(attempt)
        recorded = state.error if state is not None else None
        text = recorded or _first_record(attempt)
        if text is not None:
            return {"attempt": attempt.number, "summary": summary_of(text), "text": text}
    return None


def summary_of(text: str) -> str:
    """An error in one line: what failed, and the cause, which ends it. Of a traceback, its last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    first, last = lines[0], lines[-1]
    return last if first == last or "Traceback" in first else f"{first} {last}"


def _state_fact(attempt: Attempt | None, state: RunState | None, now: float) -> str:
    if attempt is None:
        return "no_attempt"
    if state is None:
        return "starting"
    return "lost" if state.is_silent(now) else state.state


def _server_facts(attempt: Attempt) -> dict[str, Any]:
    """`by_state`: how many are in each; `errors`: of those that have one; `problem`: why the record cannot be read."""
    try:
        servers = read_registrations(attempt.servers_dir)
    except RolloutError as error:
        return {"by_state": {}, "errors": {}, "preparing": None, "problem": str(error)}
    preparing = max((server for server in servers if server.is_preparing), key=lambda s: s.done_bytes, default=None)
    return {
        "by_state": dict(sorted(Counter(server.state for server in servers).items())),
        "errors": {server.server_id: server.error for server in servers if server.error},
        "preparing": None
        if preparing is None
        else {
            "what": preparing.waits_for,
            "done_bytes": preparing.done_bytes,
            "total_bytes": preparing.total_bytes or None,
        },
        "problem": None,
    }


def _reward_model_facts(attempt: Attempt) -> dict[str, Any]:
    return {name: _server_facts(reward_folder(attempt, name)) for name in reward_names(attempt)}


def _first_record(attempt: Attempt) -> str | None:
    records = []
    for path in attempt.errors_dir.glob("rank_*.json"):
        if (record := read_json(path)) is None:
            continue
        if not isinstance(record, dict) or type(record.get("time")) not in (int, float) or "rank" not in record:
            raise DamagedFileError(f"{path}: not the record of a rank's failure")
        records.append(record)
    if not records:
        return None
    first = min(records, key=lambda record: record["time"])
    return f"rank {first['rank']}: {first.get('text') or first.get('type')}"


def _text_fact(folder: RunFolder) -> str | None:
    try:
        return read_text(folder.latest_checkpoint_file, errors="replace").strip()
    except FileNotFoundError:
        return None


def ask_for_stacks(folder: RunFolder) -> list[str]:
    """The lines to show, after all ranks answered or had the time to. Raises ConfigError where no rank can answer."""
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    if attempt is None or state is None or state.is_over:
        how = "has no attempt yet" if state is None else f"is {state.state}"
        raise ConfigError(
            f"gspo-mega status --stacks: {folder.path} {how}; only the ranks of a run that goes on answer"
        )
    cluster = load_config(attempt.config_file if attempt.config_file.exists() else folder.config_file).config.cluster
    try:
        request = StackRequest(attempt, cluster.num_nodes * cluster.ranks_per_node)
    except OSError as error:
        raise ConfigError(
            f"gspo-mega status --stacks: {attempt.stacks_request_file} cannot be written: {error.strerror}; who asks"
            " needs the right to write in the run's folder"
        ) from error
    request.wait()
    return [*request.places(), request.text()]


_TAIL_BYTES = 256 * 1024
_MOST_STEPS = 12
_MOST_LINES = 8
# Columns of the table of steps: heading, metric, format.
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("clip", "policy/clip_fraction", "{:.3f}"),
    ("|grad|", "optimizer/grad_norm", "{:.3g}"),
    ("mismatch", "mismatch/budget_share", "{:.2f}"),
    ("tokens/s", "speed/tokens_per_second", "{:.0f}"),
    ("seconds", "time/step_seconds", "{:.1f}"),
)
Describe = Callable[[RunFolder, float], list[tuple[str, str]]]


def watch(folder: RunFolder, describe: Describe, interval: float, output: TextIO | None = None) -> int:
    """Show `describe`'s (name, text) pairs every `interval` seconds. `output`: standard output by default. Raises what
    `describe` raises for a folder that is not a run's.
    """
    # rich draws with escapes: it gets the terminal itself, and the texts are made printable here.
    console = Console(file=output or getattr(sys.stdout, "foreign", sys.stdout))
    try:
        if console.is_terminal:
            _on_terminal(folder, describe, interval, console)
        else:
            for line in _plain_lines(folder, describe, interval):
                print(printable(line), file=output or sys.stdout, flush=True)
    except KeyboardInterrupt:
        pass  # the way to end it
    return 0


def _on_terminal(folder: RunFolder, describe: Describe, interval: float, console: Console) -> None:
    with Live(screen_of(folder, describe), console=console, auto_refresh=False, transient=False) as live:
        while not _is_over(folder):
            time.sleep(interval)
            live.update(screen_of(folder, describe), refresh=True)
        live.update(screen_of(folder, describe), refresh=True)


def _plain_lines(folder: RunFolder, describe: Describe, interval: float) -> Iterator[str]:
    """The report once, a line per step as it comes, and the state again at the end."""
    yield from (f"{name:<11}{text}" for name, text in describe(folder, time.time()))
    lines = last_lines(folder)
    shown = lines[-1]["step"] if lines else 0
    while True:
        is_over = _is_over(folder)  # before the last look at the lines
        for line in last_lines(folder):
            if line["step"] > shown:
                shown = line["step"]
                yield progress_line(shown, _numbers(line))
        if is_over:
            break
        time.sleep(interval)
    yield from (f"{name:<11}{text}" for name, text in describe(folder, time.time()) if name in ("state", "error"))


def screen_of(folder: RunFolder, describe: Describe) -> RenderableType:
    """What a terminal shows at a moment."""
    report = Table.grid(padding=(0, 2))
    for name, text in describe(folder, time.time()):
        # Text: nothing in a run's words is markup.
        report.add_row(Text(name, style="bold"), Text(printable(text), style="red" if name == "error" else ""))
    parts: list[RenderableType] = [report]
    attempt = folder.latest_attempt()
    if attempt is not None and (ranks := ranks_at_work(attempt)):
        report.add_row(Text("ranks", style="bold"), Text(printable(ranks)))
    if lines := last_lines(folder)[-_MOST_STEPS:]:
        parts.append(_steps(lines))
    if attempt is not None and (tail := _console_tail(attempt)):
        parts.append(
            Panel(
                Text(printable("\n".join(tail)), overflow="ellipsis", no_wrap=True), title="console", title_align="left"
            )
        )
    parts.append(Text(f"{time.strftime('%H:%M:%S')}   Ctrl-C ends this view, not the run", style="dim"))
    return Group(*parts)


def _steps(lines: list[dict[str, Any]]) -> Table:
    columns = [column for column in _COLUMNS if any(line.get(column[1]) is not None for line in lines)]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("step", *(heading for heading, _, _ in columns)):
        table.add_column(heading, justify="right")
    for line in lines:
        values = (line.get(metric) for _, metric, _ in columns)
        table.add_row(
            printable(str(line["step"])),
            *("" if value is None else form.format(value) for value, (_, _, form) in zip(values, columns, strict=True)),
        )
    return table


def ranks_at_work(attempt: Attempt) -> str:
    """The number of ranks in each phase, from their signs of life; empty where there are none."""
    records = []
    for path in attempt.beats_dir.glob("rank_*"):
        try:
            records.append(read_json(path))
        except (OSError, ValueError):
            continue  # it is being written: the next look reads it
    phases = Counter(str(record["phase"]) for record in records if isinstance(record, dict) and "phase" in record)
    return ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())


def last_lines(folder: RunFolder) -> list[dict[str, Any]]:
    """The whole lines at the end of metrics.jsonl."""
    try:
        with open_regular(folder.metrics_file) as file:
            start = max(0, folder.metrics_file.stat().st_size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # The first may be the rest of a line.
    try:
        found = [parse_json(line) for line in lines[1 if start else 0 :] if line.endswith(b"\n")]
    except ValueError as error:
        raise DamagedFileError(f"{folder.metrics_file}: a line at its end is not one of metrics: {error}") from None
    return [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]


def _console_tail(attempt: Attempt) -> list[str]:
    try:
        with open_regular(attempt.console_log) as file:
            file.seek(max(0, attempt.console_log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_MOST_LINES:]


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if value is not None}


def _is_over(folder: RunFolder) -> bool:
    """Whether the run ended with its newest attempt, or the supervisor is silent. A job that is queued again goes on,
    and so does a run whose supervisor begins another attempt.
    """
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    if attempt is None or state is None or state.state == "requeued":
        return False
    now = time.time()
    if state.state == "failed" and starts_again(attempt):
        return now - state.heartbeat > SILENCE_SECONDS
    return state.is_over or state.is_silent(now)


_SHOWN = (
    # name, key of the report
    ("run", "run"),
    ("state", "state"),
    ("attempt", "attempt"),
    ("step", "step"),
    ("speed", "speed"),
    ("servers", "servers"),
    ("rewards", "reward_models"),
    ("checkpoint", "checkpoint"),
    ("error", "error"),
    ("restarts", "restarts"),
    ("logs", "logs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object: numbers, names, times")
    parser.add_argument("--watch", action="store_true", help="again and again, with the last steps, until the run ends")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="with --watch; 2 by default")
    parser.add_argument("--stacks", action="store_true", help="where every rank is now; writes all stacks to its logs")


def run(args: argparse.Namespace) -> int:
    if args.stacks:
        print("\n".join(ask_for_stacks(RunFolder(args.run))))
        return 0
    if args.watch:
        # which takes as long to load as all of the report

        return watch(RunFolder(args.run), shown_pairs, max(args.interval, 0.1))
    if args.json:
        folder, now = RunFolder(args.run), time.time()
        describe_run(folder, now)  # which refuses what is no run folder
        print(json.dumps(facts_of(folder, now)))
    else:
        print("\n".join(f"{name:<11}{text}" for name, text in shown_pairs(RunFolder(args.run), time.time())))
    return 0


def shown_pairs(folder: RunFolder, now: float) -> list[tuple[str, str]]:
    """(name, text) of what the report shows, in order. Raises as `describe_run`."""
    report = describe_run(folder, now)
    return [(name, report[key]) for name, key in _SHOWN if report[key] is not None]


def describe_run(folder: RunFolder, now: float) -> dict[str, Any]:
    """The report's texts by name, None for those that do not apply. `now`: unix seconds. Raises ConfigError for a
    folder that is not a run's.
    """
    attempt = folder.latest_attempt()
    if attempt is None:
        if not list(folder.path.glob("slurm-*.log")):
            raise ConfigError(
                f"gspo-mega status: {folder.path} is not a run folder: it has neither attempts/ nor the log of a job"
            )
        return dict.fromkeys((key for _, key in _SHOWN), None) | {
            "run": str(folder.path),
            "state": "no attempt yet; the job's log: slurm-*.log",
        }
    state = read_state(attempt)
    last = last_line(folder.metrics_file)
    return {
        "run": str(folder.path),
        "state": _state(attempt, state, now),
        "attempt": (
            f"{attempt.number}"
            + (f", job {state.slurm_job}" if state is not None and state.slurm_job else "")
            + (f", on {state.host}" if state is not None else "")
        ),
        "step": _step(folder, last, now),
        "speed": _speed(last),
        "servers": _servers(attempt),
        "reward_models": _reward_models(attempt),
        "checkpoint": _text(folder.latest_checkpoint_file),
        "error": _error(folder),
        "restarts": _restarts(folder),
        "logs": str(attempt.logs_dir),
    }


def _state(attempt: Attempt, state: RunState | None, now: float) -> str:
    if state is None:
        return "starting"
    if state.is_silent(now):
        return f"lost: no sign of life from its supervisor for {_ago(now - state.heartbeat)}"
    age = f"for {_ago(now - state.started)}" if not state.is_over else f"{_ago(now - state.heartbeat)} ago"
    goes_on = "; another attempt begins" if state.state == "failed" and starts_again(attempt) else ""
    return f"{state.state} {age}{goes_on}" + (f" ({state.note})" if state.note else "")


def _step(folder: RunFolder, last: dict[str, Any] | None, now: float) -> str | None:
    if last is None:
        return None
    age = _ago(now - folder.metrics_file.stat().st_mtime)
    reward = f", reward {last['reward/mean']:.3f}" if "reward/mean" in last else ""
    return f"{last['step']}{reward}, {age} ago"


def _speed(last: dict[str, Any] | None) -> str | None:
    if last is None or "speed/tokens_per_second" not in last:
        return None
    return f"{last['speed/tokens_per_second']:.0f} tokens/s, {last['time/step_seconds']:.1f} s per step"


def _servers(attempt: Attempt) -> str | None:
    """The number of servers per state, what they wait for, and why servers gave up, from their registrations."""
    try:
        servers = read_registrations(attempt.servers_dir)
    except RolloutError as error:
        return str(error)
    counts = Counter("given up" if server.state == "failed" else server.state for server in servers)
    given_up = [
        f"{server.server_id}: {(server.error or 'no reason').strip().splitlines()[0]}"
        for server in servers
        if server.state == "failed"
    ]
    # They wait for the same, and its maker's registration is ahead of the others'.
    preparing = max((server for server in servers if server.is_preparing), key=lambda s: s.done_bytes, default=None)
    notes = [] if preparing is None else [f"waiting for {preparing.preparation}"]
    retries = [(server.server_id, server.retry) for server in servers if server.retry is not None]
    notes += [retry if len(servers) == 1 else f"{name}: {retry}" for name, retry in retries] + given_up
    text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return text + (f" ({'; '.join(notes)})" if notes else "") or None


def _reward_models(attempt: Attempt) -> str | None:
    """The same of the servers of each reward model."""
    own = {name: _servers(reward_folder(attempt, name)) or "none has begun" for name in reward_names(attempt)}
    return "; ".join(f"{name}: {text}" for name, text in own.items()) or None


def _error(folder: RunFolder) -> str | None:
    """The error of the newest attempt that has one, in a line."""
    found = error_of(folder)
    return None if found is None else f"{found['summary']} (attempt {found['attempt']})"


def _restarts(folder: RunFolder) -> str | None:
    """The number of automatic restarts, and the decision on the last failure."""
    record = last_restart(folder)
    if record is None:
        return None
    times = f"{len(record.restarted_at)} in {WINDOW_SECONDS / 3600:.0f} h"
    return f"{times}; last: {record.why}; because {record.cause}" if record.restarted_at else record.why


def _text(path: Path) -> str | None:
    try:
        return read_text(path, errors="replace").strip()
    except FileNotFoundError:
        return None


def _ago(seconds: float) -> str:
    for unit, size in (("days", 172_800.0), ("h", 7_200.0), ("min", 120.0)):
        if seconds >= size:
            return f"{seconds / {'days': 86_400.0, 'h': 3_600.0, 'min': 60.0}[unit]:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
