"""Show the state of a run from the files in its folder: state, step, speed, last error, place of the logs.

    gspo-mega status RUN              a report, one line per fact
    gspo-mega status RUN --json       the same facts for programs: numbers, names, times in unix seconds
    gspo-mega status RUN --watch      the report again and again, with the last steps, until the run ends or Ctrl-C
    gspo-mega status RUN --stacks     what every rank is doing now, one line each, and where the whole stacks are

Works on every machine that sees the folder, also on a login node. Starts nothing, changes nothing of the run, and asks
neither Slurm nor the run's processes. Only --stacks asks the ranks, through a file in the run's folder.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gspo_mega.base.errors import ConfigError, RolloutError
from gspo_mega.base.near_paths import missing_run_hint
from gspo_mega.base.run_folder import Attempt, DamagedFileError, RunFolder, read_json
from gspo_mega.base.untrusted import open_regular, parse_json, printable, read_text
from gspo_mega.config import load_config
from gspo_mega.launcher.attempt_state import SILENCE_SECONDS, RunState, read_state, summary_of
from gspo_mega.launcher.restarts import WINDOW_SECONDS, last_line, last_restart, starts_again
from gspo_mega.launcher.watchdog import StackRequest
from gspo_mega.metrics.writer import progress_line
from gspo_mega.rollout.registration import Registration, read_registrations
from gspo_mega.rollout.server.reward_server import reward_folder, reward_names

_MOST_STEPS_OF_A_RUN = 2**63

# Of each line of the report: its name, and its key in what `describe_run` returns.
_SHOWN = (
    ("run", "run"),
    ("state", "state"),
    ("attempt", "attempt"),
    ("step", "step"),
    ("accuracy", "accuracy"),
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
    parser.add_argument(
        "--watch", action="store_true", help="show it again and again, with the last steps, until the run ends"
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two updates of --watch (default: 2)"
    )
    parser.add_argument(
        "--stacks", action="store_true", help="ask every rank where it is now; the ranks write their stacks to the logs"
    )


def run(args: argparse.Namespace) -> int:
    if args.stacks:
        print("\n".join(ask_for_stacks(RunFolder(args.run))))
        return 0
    if args.watch:
        return watch(RunFolder(args.run), max(args.interval, 0.1))
    if args.json:
        folder, now = RunFolder(args.run), time.time()
        describe_run(folder, now)  # raises ConfigError for a folder that is not a run's
        print(json.dumps(facts_of(folder, now)))
    else:
        print("\n".join(_report_lines(RunFolder(args.run))))
    return 0


def shown_pairs(folder: RunFolder, now: float) -> list[tuple[str, str]]:
    """The report's lines as (name, text), in order. Raises what `describe_run` raises."""
    report = describe_run(folder, now)
    return [(name, report[key]) for name, key in _SHOWN if report[key] is not None]


def _report_lines(folder: RunFolder, only: Sequence[str] | None = None) -> list[str]:
    """The report's lines as text; `only`: those of these names."""
    pairs = shown_pairs(folder, time.time())
    return [f"{name:<11}{text}" for name, text in pairs if only is None or name in only]


def describe_run(folder: RunFolder, now: float) -> dict[str, Any]:
    """The report's texts by key; None for those that do not apply. `now`: unix seconds. Raises ConfigError for a folder
    that is not a run's.
    """
    attempt = folder.latest_attempt()
    if attempt is None:
        if not list(folder.path.glob("slurm-*.log")):
            raise ConfigError(
                f"gspo-mega status: {folder.path} is not a run folder: it has neither attempts/ nor the log of a job"
                f"{missing_run_hint(folder.path)}"
            )
        return dict.fromkeys((key for _, key in _SHOWN), None) | {
            "run": str(folder.path),
            "state": "no attempt yet; the job's log: slurm-*.log",
        }
    state = read_state(attempt)
    last = last_line(folder.metrics_file)
    is_over = state is None or state.is_over or state.is_silent(now)
    try:
        num_steps = num_steps_of(folder, command_of(attempt))
    except ConfigError:  # the rest is still worth showing
        num_steps = None
    return {
        "run": str(folder.path),
        "state": _state(attempt, state, now),
        "attempt": (
            f"{attempt.number}"
            + (f", job {state.slurm_job}" if state is not None and state.slurm_job else "")
            + (f", on {state.host}" if state is not None else "")
        ),
        "step": _step(folder, last, num_steps, now),
        "accuracy": _accuracy(folder, attempt),
        "speed": _speed(last, None if num_steps is None or last is None or is_over else num_steps - last["step"]),
        "servers": _servers(attempt),
        "reward_models": _reward_models(attempt),
        "checkpoint": _latest_checkpoint(folder),
        "error": _error(folder),
        "restarts": _restarts(folder),
        "logs": str(attempt.logs_dir),
    }


def _state(attempt: Attempt, state: RunState | None, now: float) -> str:
    if state is None:
        return "starting"
    if state.is_silent(now):
        return f"lost: no sign of life from its supervisor for {ago(now - state.heartbeat)}"
    age = f"for {ago(now - state.started)}" if not state.is_over else f"{ago(now - state.heartbeat)} ago"
    goes_on = "; another attempt begins" if state.state == "failed" and starts_again(attempt) else ""
    return f"{state.state} {age}{goes_on}" + (f" ({state.note})" if state.note else "")


def command_of(attempt: Attempt | None) -> str | None:
    """The command that an attempt runs; None if it has not said so."""
    known = attempt is not None and attempt.command_file.is_file()
    return read_text(attempt.command_file).strip() if attempt is not None and known else None


def num_steps_of(folder: RunFolder, command: str | None) -> int | None:
    """The number of steps that the run is to make; None if its configuration does not say. Raises ConfigError."""
    if command is None or not folder.config_file.is_file():
        return None
    try:
        config = yaml.safe_load(read_text(folder.config_file))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder.config_file}: no YAML: {error}") from None
    section = config.get(command) if isinstance(config, dict) else None
    found = section.get("num_steps") if isinstance(section, dict) else None
    return found if type(found) is int and 0 <= found < _MOST_STEPS_OF_A_RUN else None


def _accuracy_fact(folder: RunFolder, attempt: Attempt | None) -> Any | None:
    """The accuracy of the last evaluation, also of `gspo-mega eval`, which has no steps."""
    if command_of(attempt) == "eval" and attempt is not None:
        result = read_json(attempt.result_file)
        return result.get("accuracy") if isinstance(result, dict) else None
    return (last_line(folder.metrics_file, "eval/accuracy") or {}).get("eval/accuracy")


def _accuracy(folder: RunFolder, attempt: Attempt) -> str | None:
    accuracy = _accuracy_fact(folder, attempt)
    if type(accuracy) not in (int, float):
        return None
    if command_of(attempt) == "eval":
        return f"{accuracy:.3f}"
    line = last_line(folder.metrics_file, "eval/accuracy") or {}
    return f"{accuracy:.3f}, of the weights of step {line.get('eval/measured_step', line.get('step'))}"


def _step(folder: RunFolder, last: dict[str, Any] | None, num_steps: int | None, now: float) -> str | None:
    if last is None:
        return None
    age = ago(now - folder.metrics_file.stat().st_mtime)
    reward = f", reward {last['reward/mean']:.3f}" if last.get("reward/mean") is not None else ""
    of = "" if num_steps is None else f"/{num_steps}"
    return f"{last['step']}{of}{reward}, {age} ago"


def _speed(last: dict[str, Any] | None, steps_left: int | None) -> str | None:
    """`steps_left`: the steps that a run still has to make; None if it is over or if that is not known."""
    if last is None or "speed/tokens_per_second" not in last:
        return None
    seconds = last["time/step_seconds"]
    left = (
        f"; about {ago(steps_left * seconds)} left at this speed" if steps_left is not None and steps_left > 0 else ""
    )
    return f"{last['speed/tokens_per_second']:.0f} tokens/s, {seconds:.1f} s per step{left}"


def _servers(attempt: Attempt) -> str | None:
    """The number of servers in each state, what they wait for, and why servers gave up, from their registrations."""
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
    preparing = _preparing_server(servers)
    notes = [] if preparing is None else [f"waiting for {preparing.preparation}"]
    retries = [(server.server_id, server.retry) for server in servers if server.retry is not None]
    notes += [retry if len(servers) == 1 else f"{name}: {retry}" for name, retry in retries] + given_up
    text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return text + (f" ({'; '.join(notes)})" if notes else "") or None


def _preparing_server(servers: Sequence[Registration]) -> Registration | None:
    """The server that is furthest with preparing its weights. All that prepare wait for the same copy, and the server
    that makes it knows more of its progress than the others.
    """
    return max((server for server in servers if server.is_preparing), key=lambda s: s.done_bytes, default=None)


def _reward_models(attempt: Attempt) -> str | None:
    """What `_servers` says of each reward model's servers."""
    own = {name: _servers(reward_folder(attempt, name)) or "none has begun" for name in reward_names(attempt)}
    return "; ".join(f"{name}: {text}" for name, text in own.items()) or None


def _error(folder: RunFolder) -> str | None:
    """The error of the newest attempt that has one, in one line."""
    found = error_of(folder)
    return None if found is None else f"{found['summary']} (attempt {found['attempt']})"


def _restarts(folder: RunFolder) -> str | None:
    """The number of automatic restarts, and the decision after the last failure."""
    record = last_restart(folder)
    if record is None:
        return None
    times = f"{len(record.restarted_at)} in {WINDOW_SECONDS / 3600:.0f} h"
    return f"{times}; last: {record.why}; because {record.cause}" if record.restarted_at else record.why


def _latest_checkpoint(folder: RunFolder) -> str | None:
    """The name of the newest checkpoint's folder; None if there is none."""
    try:
        return read_text(folder.latest_checkpoint_file, errors="replace").strip()
    except FileNotFoundError:
        return None


def ago(seconds: float) -> str:
    for unit, size in (("days", 172_800.0), ("h", 7_200.0), ("min", 120.0)):
        if seconds >= size:
            return f"{seconds / {'days': 86_400.0, 'h': 3_600.0, 'min': 60.0}[unit]:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def error_of(folder: RunFolder) -> dict[str, Any] | None:
    """The error of the newest attempt that has one: the supervisor's, else that of the first rank that failed.

    Returns `attempt`, its number; `text`, the whole error; and `summary`, one line of it. None without an error.
    """
    for attempt in reversed(folder.attempts()):
        state = read_state(attempt)
        recorded = state.error if state is not None else None
        text = recorded or _first_rank_error(attempt)
        if text is not None:
            return {"attempt": attempt.number, "summary": summary_of(text), "text": text}
    return None


def _first_rank_error(attempt: Attempt) -> str | None:
    """The earliest error that a rank recorded; None if none did. Raises DamagedFileError."""
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


_STEP = re.compile(r"step_([0-9]+)")


def facts_of(folder: RunFolder, now: float) -> dict[str, Any]:
    """What --json prints, by key. Times are unix seconds, as is `now`; None stands for what is not known. The folder
    must have an attempt, or the log of a job that began none.
    """
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    last = last_line(folder.metrics_file) or {}
    checkpoint = _latest_checkpoint(folder)
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
        "accuracy": _accuracy_fact(folder, attempt),
        "tokens_per_second": last.get("speed/tokens_per_second"),
        "step_seconds": last.get("time/step_seconds"),
        "servers": None if attempt is None else _server_facts(attempt),
        "reward_models": {}
        if attempt is None
        else {name: _server_facts(reward_folder(attempt, name)) for name in reward_names(attempt)},
        "checkpoint": checkpoint,
        "checkpoint_step": int(found[1]) if found else None,
        "error": error_of(folder),
        "num_restarts": len(restart.restarted_at) if restart is not None else 0,
        "last_restart": None
        if restart is None
        else {"why": restart.why, "cause": restart.cause, "again": restart.again},
        "logs": None if attempt is None else str(attempt.logs_dir),
    }


def _state_fact(attempt: Attempt | None, state: RunState | None, now: float) -> str:
    if attempt is None:
        return "no_attempt"
    if state is None:
        return "starting"
    return "lost" if state.is_silent(now) else state.state


def _server_facts(attempt: Attempt) -> dict[str, Any]:
    """`by_state`: the number of servers in each state; `errors`: the error of each server that has one; `preparing`:
    what the servers wait for; `problem`: why the registrations cannot be read.
    """
    try:
        servers = read_registrations(attempt.servers_dir)
    except RolloutError as error:
        return {"by_state": {}, "errors": {}, "preparing": None, "problem": str(error)}
    preparing = _preparing_server(servers)
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


def ask_for_stacks(folder: RunFolder) -> list[str]:
    """Ask all ranks for their stacks and wait until they have answered or had the time to. Returns the lines to show.
    Raises ConfigError if no rank can answer, or if the request cannot be written.
    """
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    if attempt is None or state is None or state.is_over:
        how = "has no attempt yet" if state is None else f"is {state.state}"
        raise ConfigError(f"gspo-mega status --stacks: {folder.path} {how}; only the ranks of a running run answer")
    cluster = load_config(attempt.config_file if attempt.config_file.exists() else folder.config_file).config.cluster
    try:
        request = StackRequest(attempt, cluster.num_nodes * cluster.ranks_per_node)
    except OSError as error:
        raise ConfigError(
            f"gspo-mega status --stacks: {attempt.stacks_request_file} cannot be written: {error.strerror};"
            " --stacks needs the right to write in the run's folder"
        ) from error
    request.wait()
    return [*request.places(), request.text()]


# --watch reads this much of the end of metrics.jsonl and of console.log, and shows this many steps and lines of them.
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


def watch(folder: RunFolder, interval: float, output: TextIO | None = None) -> int:
    """Show the report every `interval` seconds until the run's last attempt ends or Ctrl-C: as a screen on a terminal,
    else as plain lines. `output`: standard output by default. Returns 0. Raises what `describe_run` raises.
    """
    # rich draws with escape sequences, so it writes to the terminal itself, and the texts are made printable here.
    console = Console(file=output or getattr(sys.stdout, "foreign", sys.stdout))
    try:
        if console.is_terminal:
            _watch_on_terminal(folder, interval, console)
        else:
            for line in _plain_lines(folder, interval):
                print(printable(line), file=output or sys.stdout, flush=True)
    except KeyboardInterrupt:
        pass  # this is how the user ends it
    return 0


def _watch_on_terminal(folder: RunFolder, interval: float, console: Console) -> None:
    with Live(screen_of(folder), console=console, auto_refresh=False, transient=False) as live:
        while not _is_over(folder):
            time.sleep(interval)
            live.update(screen_of(folder), refresh=True)
        live.update(screen_of(folder), refresh=True)


def _plain_lines(folder: RunFolder, interval: float) -> Iterator[str]:
    """The report once, a line for each new step, and the state and the error again at the end."""
    lines = _last_metrics(folder)  # read before the report, so that a step that comes after them is shown
    shown = lines[-1]["step"] if lines else 0
    yield from _report_lines(folder)
    while True:
        is_over = _is_over(folder)  # asked first, so that no line that comes before the end is missed
        for line in _last_metrics(folder):
            if line["step"] > shown:
                shown = line["step"]
                yield progress_line(shown, {name: value for name, value in line.items() if value is not None})
        if is_over:
            break
        time.sleep(interval)
    yield from _report_lines(folder, ("state", "error"))


def screen_of(folder: RunFolder) -> RenderableType:
    """What a terminal shows now: the report, the phases of the ranks, the last steps, the end of the console."""
    report = Table.grid(padding=(0, 2))
    for name, text in shown_pairs(folder, time.time()):
        # In a Text, rich takes nothing that a run wrote for markup.
        report.add_row(Text(name, style="bold"), Text(printable(text), style="red" if name == "error" else ""))
    parts: list[RenderableType] = [report]
    attempt = folder.latest_attempt()
    if attempt is not None and (ranks := _phases_of_ranks(attempt)):
        report.add_row(Text("ranks", style="bold"), Text(printable(ranks)))
    if lines := _last_metrics(folder)[-_MOST_STEPS:]:
        parts.append(_steps_table(lines))
    if attempt is not None and (tail := _console_tail(attempt)):
        parts.append(
            Panel(
                Text(printable("\n".join(tail)), overflow="ellipsis", no_wrap=True), title="console", title_align="left"
            )
        )
    parts.append(Text(f"{time.strftime('%H:%M:%S')}   Ctrl-C ends this view, not the run", style="dim"))
    return Group(*parts)


def _steps_table(lines: list[dict[str, Any]]) -> Table:
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


def _phases_of_ranks(attempt: Attempt) -> str:
    """The number of ranks in each phase, from their signs of life; empty without any."""
    records = []
    for path in attempt.beats_dir.glob("rank_*"):
        try:
            records.append(read_json(path))
        except (OSError, ValueError):
            continue  # the rank is writing it; the next update reads it
    phases = Counter(str(record["phase"]) for record in records if isinstance(record, dict) and "phase" in record)
    return ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())


def _last_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The complete lines in the last `_TAIL_BYTES` of metrics.jsonl. Raises DamagedFileError."""
    try:
        with open_regular(folder.metrics_file) as file:
            start = max(0, folder.metrics_file.stat().st_size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # The first line may have lost its beginning.
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


def _is_over(folder: RunFolder) -> bool:
    """Whether the run ended with its newest attempt, or its supervisor shows no sign of life. A run goes on if its job
    was queued again or if its supervisor begins another attempt.
    """
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    if attempt is None or state is None or state.state == "requeued":
        return False
    now = time.time()
    if state.state == "failed" and starts_again(attempt):
        return now - state.heartbeat > SILENCE_SECONDS
    return state.is_over or state.is_silent(now)
