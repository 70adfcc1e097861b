"""A child process that is asked in lines of JSON and answers each with one, after a first line that says how it began.

Owns its pipes and how its end is noticed. What lines mean, and bounds on time and memory, are of those who start one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


class LineProcess:
    """A running process. Attributes: greeting, its first line; `{"error": text}` where it ended without one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`environment`: the process's whole one; this process's when absent. Raises OSError: it cannot be started."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environment is None else dict(environment),
        )
        self.greeting = self._receive()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer; `{"error": text}` where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # which the reply says
        return self._receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """As of `Popen.returncode`; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                return {"error": f"its process said what is no JSON: {line[:100]!r}"}
        return {"error": f"its process ended (exit code {self._process.wait()})"}
