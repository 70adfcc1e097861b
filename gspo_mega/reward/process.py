"""One scoring process as its parent sees it: start, send, receive, end.

Owns the process and its pipes. `scoring_pool.py` decides which request goes where and what a missing reply means;
`scoring_worker.py` is what runs inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from gspo_mega.errors import RewardError

# Importing a user's module may mean importing a large library from a slow disk.
START_DEADLINE_SECONDS = 120.0
# A reply that came in time may be read late, when this process's own event loop was busy.
_LATE_LOOP_SECONDS = 0.05
# A process whose pipe has ended is about to end, unless a function closed the pipe.
_EXIT_SECONDS = 10.0
_LONGEST_REPLY_BYTES = 1024 * 1024
# The log of the starting process shows this much of what one scoring process's functions print.
MOST_OUTPUT_BYTES = 1024 * 1024
# The guard ends everything well within this time, except a process that is blocked in the kernel.
_END_SECONDS = 10.0

# The environment variables that a reward function sees. All others, such as credentials and addresses of the run, are
# hidden; `reward.environment` names further ones that a function needs.
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


class ScoringProcess:
    """A running scoring process that has loaded its functions. The child of this process is its guard (`guard.py`), in
    a process group of its own.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self._ended = False
        self._showing = asyncio.create_task(_show(process.stderr))

    @classmethod
    async def start(cls, setup: dict[str, Any], variables: Sequence[str] = ()) -> ScoringProcess:
        """Start a process and have it load the functions of `setup` (`scoring_worker.py` has the format).

        `variables`: environment variables that the functions get besides `ENVIRONMENT`. Raises RewardError: one of them
        is not set; a function cannot be loaded; or the process ends or hangs while it tries.
        """
        process = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gspo_mega.reward.scoring_worker",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(variables),
                start_new_session=True,
                limit=_LONGEST_REPLY_BYTES,
            )
        )
        try:
            await process._load(setup)
        except BaseException:
            await process.end()
            raise
        return process

    async def _load(self, setup: dict[str, Any]) -> None:
        names = ", ".join(sorted({entry["function"] for entry in setup["functions"].values()}))
        self.send(setup)
        try:
            reply = await self.receive(START_DEADLINE_SECONDS)
        except TimeoutError:
            raise RewardError(f"rewards {names}: loading took longer than {START_DEADLINE_SECONDS:g} s") from None
        if reply is None:
            raise RewardError(
                f"rewards {names}: the scoring process ended while it loaded them ({await self.exit_text()})"
            )
        if "load_error" in reply:
            raise RewardError(reply["load_error"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message; a process that is gone is noticed by `receive`."""
        self._requests.write(json.dumps(message).encode() + b"\n")

    async def receive(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next reply; None when the process is gone or its output is no reply. Raises TimeoutError when no reply
        comes in time.
        """
        try:
            async with asyncio.timeout(max(timeout_seconds, 0)):
                line = await self._replies.readline()
        except TimeoutError:
            async with asyncio.timeout(_LATE_LOOP_SECONDS):
                line = await self._replies.readline()
        except ValueError:  # a line over the limit: not a reply
            return None
        try:
            reply = json.loads(line)
        except ValueError:  # nothing, or torn: the end of the pipe
            return None
        return reply if isinstance(reply, dict) else None

    @property
    def is_gone(self) -> bool:
        return self._process.returncode is not None

    async def exit_text(self) -> str:
        """How the process ended, in words. Call it after its pipe has ended."""
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


def _environment(variables: Sequence[str]) -> dict[str, str]:
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise RewardError(f"reward.environment: {', '.join(missing)} is not set in the environment of this command")
    return {name: os.environ[name] for name in (*ENVIRONMENT, *variables) if name in os.environ}


async def _show(output: asyncio.StreamReader) -> None:
    """Copy what functions print to our standard error, up to `MOST_OUTPUT_BYTES`; read and drop the rest.

    Drop all of it where standard error cannot be written to: a pipe that nobody reads would block the functions.
    """
    left = MOST_OUTPUT_BYTES
    while chunk := await output.read(64 * 1024):
        if left > 0:
            shown, left = chunk[:left], left - len(chunk)
            if left <= 0:
                cut = f"(a scoring process printed more than {MOST_OUTPUT_BYTES} bytes; what follows is not shown)"
                shown += f"\n{cut}\n".encode()
            try:
                os.write(2, shown)
            except OSError:
                left = 0
