"""One scoring process as its parent sees it: start, send, receive, end.

Owns the process and its pipes. Which request goes where, and what a missing reply means, is `pool.py`'s; what
happens inside is `worker.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from gspo_mega.errors import RewardError

# Importing a user's module may mean importing a large library from a slow disk.
START_DEADLINE_SECONDS = 120.0
# A reply that came in time may be found late, when this process's own event loop was held up.
_LATE_LOOP_SECONDS = 0.05
# A process whose pipe has ended is ending itself, unless a function closed the pipe.
_EXIT_SECONDS = 10.0
_LONGEST_REPLY_BYTES = 1024 * 1024


class ScoringProcess:
    """A running scoring process that has loaded its functions. It leads a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self._ended = False

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> ScoringProcess:
        """Start a process and have it load the functions of `setup` (`worker.py` has the format).

        Raises RewardError: a function cannot be loaded, or the process ends or hangs while it tries.
        """
        process = cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gspo_mega.reward.worker", str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True, limit=_LONGEST_REPLY_BYTES,
            )
        )  # fmt: skip
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
            raise RewardError(f"rewards {names}: the scoring process ended while it loaded them ({await self.exit_text()})")
        if "load_error" in reply:
            raise RewardError(reply["load_error"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message; a process that is gone is noticed by `receive`."""
        self._requests.write(json.dumps(message).encode() + b"\n")

    async def receive(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next reply; None when the process is gone or talks nonsense. Raises TimeoutError when there is none in time."""
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
        """How the process ended, in words, once its pipe has."""
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its pipes"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def end(self) -> None:
        """Kill the process and everything in its group, and wait for it. A second call does nothing."""
        if self._ended:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it is gone, and so is its group
        await self._process.wait()
        # From here on its number may be another process's.
        self._ended = True
        self._requests.close()
