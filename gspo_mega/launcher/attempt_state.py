"""How an attempt stands, and why it failed.

`StateKeeper` writes attempts/NNNN/state.json with a heartbeat, for readers who see only the folder; `read_state` reads
it, as `gspo-mega status` does. (The progress of the ranks is in console.log and metrics.jsonl.)

`closing_line` says of a stopped attempt what is saved and how to continue.

`describe_failure` then names the one cause of a failed attempt: one failure breaks the collectives of every rank, so it
chooses among all error records, logs and exit codes. It only reads files.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from gspo_mega.base.errors import GspoMegaError, RankError, RolloutError
from gspo_mega.base.machine_faults import RAN_OUT_OF_MEMORY
from gspo_mega.base.run_folder import Attempt, DamagedFileError, atomic_write_json, read_json
from gspo_mega.base.untrusted import read_text
from gspo_mega.launcher.children import Child

logger = logging.getLogger(__name__)
State = Literal["running", "stopping", "requeued", "stopped", "finished", "failed"]
HEARTBEAT_SECONDS = 5.0
# Shared folders show a change late, some by half a minute.
SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class RunState:
    """`heartbeat`, `started`: unix seconds. `error`: why the attempt failed; `note`: a remark on the state.
    `without_progress`: the job was requeued for its time limit and had saved no new checkpoint.
    """

    state: State
    started: float
    heartbeat: float
    host: str
    pid: int
    slurm_job: str | None = None
    error: str | None = None
    note: str | None = None
    without_progress: bool = False

    @property
    def is_over(self) -> bool:
        return self.state not in ("running", "stopping")

    def is_silent(self, now: float) -> bool:
        """Whether an expected heartbeat is missing: the supervisor or its machine died."""
        return not self.is_over and now - self.heartbeat > SILENCE_SECONDS


def read_state(attempt: Attempt) -> RunState | None:
    """The record of an attempt; None if it has none yet. Raises DamagedFileError if the file is not such a record."""
    record = read_json(attempt.state_file)
    if record is None:
        return None
    try:
        state = RunState(**record)
    except TypeError as error:
        raise DamagedFileError(f"{attempt.state_file}: not the record of an attempt: {error}") from None
    numbers, texts = (state.started, state.heartbeat), (state.slurm_job, state.error, state.note)
    if (
        any(type(number) not in (int, float) or not abs(number) < 2**63 for number in numbers)
        or not all(isinstance(text, str | None) for text in texts)
        or state.state not in get_args(State)
        or not isinstance(state.host, str)
        or type(state.pid) is not int
    ):
        raise DamagedFileError(f"{attempt.state_file}: not the record of an attempt: a value has the wrong type")
    return state


def beats(attempt: Attempt, patience_seconds: float) -> bool:
    """Whether the attempt's supervisor lives. Watches for up to `patience_seconds` whether the heartbeat changes, so
    that no machine's clock is compared with another's.
    """
    before = read_state(attempt)
    deadline = time.monotonic() + patience_seconds
    while before is not None and not before.is_over and time.monotonic() < deadline:
        time.sleep(min(0.5, HEARTBEAT_SECONDS / 2))
        now = read_state(attempt)
        if now is not None and now.heartbeat != before.heartbeat:
            return not now.is_over
    return False


class StateKeeper:
    """Keeps an attempt's record up to date while the `with` block runs.

    Afterwards the record says how the block ended: `failed` with the text of an exception, else the last state that
    `tell` recorded.
    """

    def __init__(self, attempt: Attempt, slurm_job: str | None = None) -> None:
        now = time.time()
        self._attempt = attempt
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._state = RunState("running", now, now, socket.gethostname(), os.getpid(), slurm_job)

    def __enter__(self) -> StateKeeper:
        self._write()
        threading.Thread(target=self._beat, name="state", daemon=True).start()
        return self

    def __exit__(self, _type: Any, error: BaseException | None, _trace: Any) -> None:
        if error is not None:
            self.tell("failed", error=str(error) or type(error).__name__)
        self._over.set()

    def tell(self, state: State, **more: str | bool | None) -> None:
        """Record a new state. `more`: its `error`, `note` or `without_progress`."""
        with self._lock:
            self._state = replace(self._state, state=state, **more)
            self._write_locked()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        with self._lock:
            if not self._over.is_set():
                self._write_locked()

    def _write_locked(self) -> None:
        self._state = replace(self._state, heartbeat=time.time())
        try:
            atomic_write_json(self._attempt.state_file, asdict(self._state))
        except OSError as error:
            # A lost record must not end the run. (If the disk is full, the next save of a checkpoint will.)
            logger.warning("%s cannot be written: %s", self._attempt.state_file, error.strerror)


_TAIL_LINES = 20
_TAIL_BEGINS = "\nend of "
# What installed packages say of themselves at every start, also of one that ends well. The second line of a warning is
# the indented line of code that gave it.
_PACKAGE_WARNING = re.compile(r"\S*/(?:site|dist)-packages/\S+:\d+: \w*Warning: ")
_PACKAGE_INFO = re.compile(r"\S+ \S+ INFO megatron\.")
_NAMES_ERROR = re.compile(r"\b(?:\w*Error|\w*Exception|error|fatal)\b")
_SIGKILL_HINT = ". The usual reason for a SIGKILL from outside is that the machine ran out of memory"
# srun's lines about ended tasks, one or several (`task 3`, `tasks 0-1,4`), in the order in which they ended.
_TASK_END = re.compile(r"^srun: error: (\S+): tasks? (\d+)\S*: (.+)$", re.MULTILINE)
_KILLED = (
    "Killed",
    "Out Of Memory",
    "Segmentation fault",
    "Bus error",
    "Aborted",
    "Illegal instruction",
    "Floating point exception",
)


def closing_line(attempt: Attempt, how: str = "Stopped in order") -> str:
    """The last line of an attempt that was stopped: after which step, what is saved, and how to go on."""
    folder = attempt.run_folder
    command = read_text(attempt.command_file).strip() if attempt.command_file.exists() else "train"
    try:
        result = read_json(attempt.result_file)
    except (OSError, DamagedFileError):
        result = {}
    if not isinstance(result, dict):
        result = {}
    reason = result.get("stopped") or attempt.stop_reason()
    after = (f" after step {result['step']}" if "step" in result else "") + (f" ({reason})" if reason else "")
    if command not in ("train", "sft"):
        return f"{how}{after}. Nothing is saved; the same command begins again."
    try:
        saved = f"checkpoint {read_text(folder.latest_checkpoint_file).strip()} in {folder.path}"
    except OSError:
        saved = f"no checkpoint yet; what was sampled is in {folder.path} and is not sampled again"
    due = result.get("to_measure")
    more = f", which first measures the weights of step {', '.join(map(str, due))}" if due else ""
    return f"{how}{after}. Saved: {saved}. To continue: gspo-mega {command} {shlex.quote(str(folder.path))}{more}"


def what_now(attempt: Attempt, why_it_ends: str, error: GspoMegaError) -> str:
    """The last lines of a run that failed for good, after its error: why it does not start again, what to do."""
    lines = [f"failed   {why_it_ends}"]
    if _SIGKILL_HINT in str(error) or f"failed: {RAN_OUT_OF_MEMORY}" in str(error):
        lines.append(
            "         `gspo-mega plan` shows the memory that the run needs. Less of it: lower batch.micro_batch_tokens"
            " or server.memory_fraction, or run fewer ranks, and nothing else on the machine"
        )
    return "\n".join([*lines, f"         {closing_line(attempt, 'Failed')}"])


def describe_failure(failed: Sequence[Child], attempt: Attempt) -> RankError:
    """The error of the run.

    `failed`: the children, at least one, that ended unexpectedly before anything was asked to end. The cause is the
    first of these that exists: a rank killed by a signal (it leaves no record, and its peers' records are
    consequences), the earliest error record, a rank without a record, a server that gave up. The returned error has the
    `exit_code` of the cause.
    """
    ranks = [child for child in failed if child.spec.kind == "rank"]
    records = sorted(_error_records(attempt), key=lambda record: record["time"])
    recorded = {record["rank"] for record in records}
    silent = [child for child in ranks if child.spec.index not in recorded]
    killed = [child for child in silent if (child.exit_code or 0) < 0]
    if killed:
        return _from_log(killed[0], attempt)
    steps = [child for child in failed if child.spec.kind == "ranks"]
    if steps and (killed_task := _killed_task(steps[0], recorded)) is not None:
        return _rank_error(killed_task + _tail(steps[0].spec.log), RankError.exit_code)
    if records:
        return _from_record(records[0], attempt)
    if steps:
        return _from_log(steps[0], attempt)
    if silent:
        return _from_log(silent[0], attempt)
    return _from_server(failed[0], attempt)


def _error_records(attempt: Attempt) -> list[dict]:
    """The records that can be read: what ended the ranks may be the disk on which they are."""
    records = (_read(path) for path in sorted(attempt.errors_dir.glob("rank_*.json")))
    return [record for record in records if isinstance(record, dict)]


def _read(path: Path) -> Any | None:
    try:
        return read_json(path)
    except (OSError, DamagedFileError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return None


def _killed_task(step: Child, recorded: set[int]) -> str | None:
    """The text about the rank of a Slurm step that ended first, if a signal killed it; such a rank leaves no record."""
    try:
        output = step.spec.log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    first = _TASK_END.search(output)
    if first is None or int(first[2]) in recorded or not first[3].startswith(_KILLED):
        return None
    node, rank, how = first.groups()
    text = f"rank {rank} on {node} ended without an error report: {how}"
    if how.startswith("Killed"):
        text += _SIGKILL_HINT
    return text


def _from_record(record: dict, attempt: Attempt) -> RankError:
    rank = record["rank"]
    if record["is_user_error"]:
        return _rank_error(record["text"], record["exit_code"])
    log = attempt.rank_log(rank)
    if (fault := record.get("machine_fault")) is not None:
        return _rank_error(f"rank {rank} failed: {fault}\n(where, and all of its output: {log})", record["exit_code"])
    return _rank_error(
        f"rank {rank} failed:\n\n{record['traceback'].rstrip()}\n\n(all of its output: {log})", record["exit_code"]
    )


def _from_log(child: Child, attempt: Attempt) -> RankError:
    text = f"{child.name} {child.end_described} without an error report"
    if child.exit_code == -9:
        text += _SIGKILL_HINT
    return _rank_error(text + _tail(child.spec.log), RankError.exit_code)


def _from_server(child: Child, attempt: Attempt) -> RankError:
    # A reward model's server registers elsewhere; the end of its log says why it ended.
    is_of_policy = child.spec.kind == "server"
    registration = (_read(attempt.server_file(f"server-{child.spec.index}")) or {}) if is_of_policy else {}
    reason = registration.get("error")
    text = f"server {child.spec.index} gave up: {reason}" if reason else f"{child.name} {child.end_described}"
    # A reason of several lines already contains the end of the log.
    text += f"\n(all of its output: {child.spec.log})" if reason and "\n" in reason else _tail(child.spec.log)
    code = child.exit_code
    return _rank_error(text, code if code is not None and code > 0 else RolloutError.exit_code)


def _rank_error(text: str, exit_code: int) -> RankError:
    error = RankError(text)
    error.exit_code = exit_code
    return error


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as error:
        return f"\n(its log {log} cannot be read: {error.strerror})"
    if not lines:
        return f"\n(its log {log} is empty)"
    lines = _without_package_notes(lines)
    if not lines:
        return f"\n(its log {log} has nothing but what packages say when they are imported)"
    return f"{_TAIL_BEGINS}{log}:\n  " + "\n  ".join(lines[-_TAIL_LINES:])


def _without_package_notes(lines: Sequence[str]) -> list[str]:
    """A log without the warnings of installed packages and Megatron's remarks: they hide what the run itself said."""
    kept: list[str] = []
    is_source = False  # whether an indented line belongs to the warning before it
    for line in lines:
        is_source = bool(_PACKAGE_WARNING.match(line)) or (is_source and line.startswith("  "))
        if not is_source and not _PACKAGE_INFO.match(line):
            kept.append(line)
    return kept


def summary_of(text: str) -> str:
    """A recorded error in one line: its first line, which says what failed, and its last, which names the cause. Of a
    traceback, only the last line. Of the end of a log, a line only if it names an error.
    """
    said, tail_begins, _ = text.strip().partition(_TAIL_BEGINS)
    if tail_begins:
        whole = text.strip().splitlines()
        last = whole[-1].strip()
        named = one_line(GspoMegaError(text))
        ends_in_error = named == said and bool(_NAMES_ERROR.search(last)) and "Warning: " not in last
        return f"{named}: {last}" if ends_in_error else named
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return ""
    first, last = lines[0], lines[-1]
    return last if first == last or "Traceback" in first else f"{first} {last}"


def one_line(error: GspoMegaError) -> str:
    """A failure in one line: the first line of its text and, if that holds a traceback, the line that names the error.

    The naming line is indented as far as "Traceback" itself (the end of a log is indented as a whole); frames and
    further lines of a message are indented further.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = lines[0].strip().rstrip(":") if lines else type(error).__name__
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith("Traceback")]
    if not begins:
        return first
    indentation = _indentation(lines[begins[-1]])
    after = [line.strip() for line in lines[begins[-1] + 1 :] if _indentation(line) == indentation]
    named = [line for line in after if not line.startswith("(")]
    return f"{first}: {named[-1]}" if named else first


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
