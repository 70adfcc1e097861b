"""attempts/NNNN/state.json: the supervisor's record of its run, for readers who see only the folder.

Owns the record and its heartbeat. `gspo-mega status` reads it; the progress of the ranks is in console.log and
metrics.jsonl.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from gspo_mega.base.run_folder import Attempt, DamagedFileError, atomic_write_json, read_json

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
    """The record of an attempt, or None before there is one. Raises DamagedFileError for another form."""
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
        raise DamagedFileError(f"{attempt.state_file}: not the record of an attempt: a value is of another type")
    return state


def beats(attempt: Attempt, patience_seconds: float) -> bool:
    """Whether the attempt's supervisor lives. Watches for a changing heartbeat up to `patience_seconds`, so no clock is
    compared with another machine's.
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
    """Keep an attempt's record up to date while the `with` block runs.

    The record shows how the block ended: `failed` with the text of an exception, else the last state given to `tell`.
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
        """Record a new state with, if given, its `error`, `note` or `without_progress`."""
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
            # A lost record must not end the run. On a full disk, saving a checkpoint will.
            logger.warning("%s cannot be written: %s", self._attempt.state_file, error.strerror)
