"""A guarded process that runs users' code, as its parent sees it: start, send, receive, end.

This module has the process, its pipes and its environment. What to tell a process, and what a missing reply means, is
decided by `pool.py` for reward functions, `agents/pooled_worker.py` for episodes and `agents/external_agent.py` for
foreign agents; `scoring_worker.py`, `agents/episode_worker.py` and `agents/agent_worker.py` run inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.network import no_proxy_variables, proxy_variables_for_user_code
from gspo_mega.base.user_functions import last_place
from gspo_mega.config.validate_rewards import MOST_ATTEMPTS
from gspo_mega.rewards.blame import is_killed_by_others

# Importing a user's module may mean importing a large library from a slow disk.
START_DEADLINE_SECONDS = 120.0
# A reply that came in time may be read late, when this process's own event loop was busy.
_LATE_LOOP_SECONDS = 0.05
# A process whose pipe has ended is about to end, unless a function closed the pipe.
_EXIT_SECONDS = 10.0
# The log of the starting process shows this much of what one process's functions print.
MOST_OUTPUT_BYTES = 1024 * 1024
# The guard ends everything well within this time, except a process that is blocked in the kernel.
_END_SECONDS = 10.0

# The environment variables that a user's function sees. All others, such as credentials and addresses of the run, are
# hidden; `reward.environment` and `episodes.environment` name further ones that a function needs.
ENVIRONMENT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "TEMP",
    "TMP",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONHASHSEED",
    "PYTHONUTF8",
    "PYTHONIOENCODING",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True)
class ProcessKind:
    """What runs inside, and how messages refer to it.

    `module`: `python -m module PARENT_PID` speaks JSON lines, of which the first says `{"ready": true, ...}` or
    `{"load_error": text}`. `name`: what to call such a process. `section`: the section of the configuration whose
    `environment` names further variables. `error`: the exception for a user's mistakes. `longest_reply_bytes`: the
    limit of one line. `own_variables`: environment variables that the module itself needs.
    """

    module: str
    name: str
    section: str
    error: type[GspoMegaError]
    longest_reply_bytes: int = 1024 * 1024
    own_variables: Mapping[str, str] = field(default_factory=dict)


class GuardedProcess:
    """A running process that has loaded its functions. The child of this process is its guard (`guard.py`), in a
    process group of its own.

    Attributes:
        ready: the first line that the process said.
    """

    def __init__(self, kind: ProcessKind, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.ready: dict[str, Any] = {}
        self._kind = kind
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self._ended = False
        self._showing = asyncio.create_task(_show(process.stderr, kind.name))

    @classmethod
    async def start(cls, kind: ProcessKind, setup: dict[str, Any], loads: str, variables: Sequence[str] = ()) -> Self:
        """Start a process and have it load what `setup` names (`kind.module` defines the format), from the places in
        which this process looks (`base/user_functions.py`). One that somebody else kills meanwhile is started again.

        `loads`: what is loaded, in words. `variables`: environment variables that the functions get besides
        `ENVIRONMENT`. Raises `kind.error` if one of them is not set, a function cannot be loaded, or the process ends
        or hangs while loading.
        """
        attempt = 0
        while True:
            attempt += 1
            process = cls(
                kind,
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    kind.module,
                    str(os.getpid()),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=environment_of(kind, variables) | dict(kind.own_variables),
                    start_new_session=True,
                    limit=kind.longest_reply_bytes,
                ),
            )
            try:
                await process._load({**setup, "modules_dir": last_place()}, loads)
                return process
            except BaseException as error:
                is_killed = isinstance(error, kind.error) and is_killed_by_others(process.exit_code or 0)
                await process.end()
                if not is_killed or attempt == MOST_ATTEMPTS:
                    raise

    async def _load(self, setup: dict[str, Any], loads: str) -> None:
        self.send(setup)
        try:
            reply = await self.receive(START_DEADLINE_SECONDS)
        except TimeoutError:
            raise self._kind.error(f"{loads}: loading took longer than {START_DEADLINE_SECONDS:g} s") from None
        if reply is None:
            raise self._kind.error(
                f"{loads}: the {self._kind.name} ended while it loaded them ({await self.exit_text()})"
            )
        if "load_error" in reply:
            raise self._kind.error(reply["load_error"])
        self.ready = reply

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message; a process that is gone is noticed by `receive`."""
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        """Queue a message that is already JSON, as `send` does."""
        self._requests.write(line + b"\n")

    async def receive(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        """Return the next reply; None when the process is gone or its output is no reply. Raises TimeoutError when no
        reply comes in time; with a timeout of None, wait forever.
        """
        try:
            try:
                async with asyncio.timeout(None if timeout_seconds is None else max(timeout_seconds, 0)):
                    line = await self._replies.readline()
            except TimeoutError:
                async with asyncio.timeout(_LATE_LOOP_SECONDS):
                    line = await self._replies.readline()
        except ValueError:  # a line over the limit: not a reply
            return None
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):  # nothing, or torn: the end of the pipe; or nested too deep
            return None
        return reply if isinstance(reply, dict) else None

    @property
    def is_gone(self) -> bool:
        return self._process.returncode is not None

    @property
    def may_speak(self) -> bool:
        """Whether its pipe is open. If so after `receive` returned None, its output was no reply."""
        return not self._replies.at_eof()

    @property
    def exit_code(self) -> int | None:
        """The exit code, as in `Popen.returncode`; None while it runs. Read it after `exit_text`."""
        return self._process.returncode

    async def exit_text(self) -> str:
        """Return how the process ended, in words. Call it after its pipe has ended."""
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its pipes"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def end(self) -> None:
        """End the process and everything that it started, and wait for it. A second call does nothing."""
        if self._ended:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # the process and its group are gone
                os.killpg(self._process.pid, number)
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await self._process.wait()
                break
            except TimeoutError:  # its guard was stopped, or waits for a process that is blocked in the kernel
                continue
        # From here on its pid may belong to another process.
        self._ended = True
        self._requests.close()
        await asyncio.wait([self._showing], timeout=_LATE_LOOP_SECONDS)
        self._showing.cancel()


def environment_of(kind: ProcessKind, variables: Sequence[str]) -> dict[str, str]:
    """Return the part of this process's environment that such a process gets. Raises `kind.error` if one of `variables`
    is not set.
    """
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise kind.error(
            f"{kind.section}.environment: {', '.join(missing)} is not set in the environment of this command"
        )
    named = {name: os.environ[name] for name in (*ENVIRONMENT, *variables) if name in os.environ}
    return proxy_variables_for_user_code() | named | no_proxy_variables()


async def _show(output: asyncio.StreamReader, name: str) -> None:
    """Copy what functions print to our standard error, up to `MOST_OUTPUT_BYTES`; read and drop the rest.

    Drop all of it where standard error cannot be written to: a pipe that nobody reads would block the functions.
    """
    left = MOST_OUTPUT_BYTES
    while chunk := await output.read(64 * 1024):
        if left > 0:
            shown, left = chunk[:left], left - len(chunk)
            if left <= 0:
                cut = f"(a {name} printed more than {MOST_OUTPUT_BYTES} bytes; what follows is not shown)"
                shown += f"\n{cut}\n".encode()
            try:
                os.write(2, shown)
            except OSError:
                left = 0
