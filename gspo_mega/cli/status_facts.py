"""`gspo-mega status --json`: what the folder says of a run as numbers, names and times, for programs.

Times are unix seconds, None stands for what is not known. The same in words is `status.py`'s.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from gspo_mega.base.errors import RolloutError
from gspo_mega.base.guarded_files import read_text
from gspo_mega.base.run_folder import Attempt, DamagedFileError, RunFolder, read_json
from gspo_mega.launcher.attempt_state import RunState, read_state
from gspo_mega.launcher.restarts import last_line, last_restart, starts_again
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.rollout.server.reward_server import reward_folder, reward_names

_STEP = re.compile(r"step_([0-9]+)")


def facts_of(folder: RunFolder, now: float) -> dict[str, Any]:
    """The facts by name. `now`: unix seconds. The folder has an attempt, or the log of a job that began none."""
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    last = last_line(folder.metrics_file) or {}
    checkpoint = _text(folder)
    found = _STEP.fullmatch(checkpoint or "")
    restart = last_restart(folder)
    return {
        "run": str(folder.path),
        "time": now,
        "state": _state(attempt, state, now),
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
        "servers": None if attempt is None else _servers(attempt),
        "reward_models": {} if attempt is None else _reward_models(attempt),
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


def _state(attempt: Attempt | None, state: RunState | None, now: float) -> str:
    if attempt is None:
        return "no_attempt"
    if state is None:
        return "starting"
    return "lost" if state.is_silent(now) else state.state


def _servers(attempt: Attempt) -> dict[str, Any]:
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


def _reward_models(attempt: Attempt) -> dict[str, Any]:
    return {name: _servers(reward_folder(attempt, name)) for name in reward_names(attempt)}


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


def _text(folder: RunFolder) -> str | None:
    try:
        return read_text(folder.latest_checkpoint_file, errors="replace").strip()
    except FileNotFoundError:
        return None
