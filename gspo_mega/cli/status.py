"""Show the state of a run from its folder alone: state, step, speed, last error, place of the logs.

Works on every machine that sees the folder, also on a login node. Starts nothing and asks neither Slurm nor the run's
processes, but with `--stacks`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ConfigError, RolloutError
from gspo_mega.base.guarded_files import read_text
from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.cli.stacks_of_run import ask_for_stacks
from gspo_mega.cli.status_facts import error_of, facts_of
from gspo_mega.launcher.attempt_state import RunState, read_state
from gspo_mega.launcher.restarts import WINDOW_SECONDS, last_line, last_restart, starts_again
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.rollout.server.reward_server import reward_folder, reward_names

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
        from gspo_mega.cli.status_watch import watch  # which takes as long to load as all of the report

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
