"""Render a checkpoint's chat template in a separate process with bounds on time and memory.

`ChatTemplate` starts and ends that process, which serves all prompts of a run. `template_worker.py` is the process: it
gives a template its names, and renders the text that Hugging Face would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import DataError

# Bounds for one prompt. Ordinary templates take microseconds and a few megabytes.
CPU_SECONDS, MEMORY_BYTES = 10.0, 512 * 1024**2
_WORKER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """The chat template of a tokenizer. Its process starts with the first prompt, and again if a prompt ended it."""

    def __init__(
        self, template: str, values: dict[str, Any], cpu_seconds: float = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        """`values`: the names that the template can use besides the messages: the tokenizer's special tokens."""
        self._setup = {"template": template, "values": values, "cpu_seconds": cpu_seconds, "memory_bytes": memory_bytes}
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None
        self._lock = threading.Lock()  # one request at a time, because the process answers in order

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, *, opened: bool = True
    ) -> str:
        """The text of the messages, up to where the assistant's answer begins; without that beginning if not `opened`.
        `tools`: schemas of what may be called, for a template that lists them.

        Raises DataError if the template refuses the messages, or takes too much time or memory.
        """
        # A template tests whether `tools` is true. Without tools, Hugging Face gives it None.
        asked = {"messages": list(messages), "tools": list(tools) if tools else None, "open": opened}
        with self._lock:
            return self._render(asked)

    def _render(self, asked: dict[str, Any]) -> str:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # something outside ended it since the last request
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            _write(process, asked)
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise DataError(self._why_ended(process))
        reply = json.loads(line)
        if "text" in reply:
            return reply["text"]
        if reply["error"] is None:
            self.close()  # the process may not release the memory it took
            raise DataError(
                f"the tokenizer's chat template takes more than {self._setup['memory_bytes'] / 2**20:.0f} MiB of memory"
                " for these messages"
            )
        raise DataError(f"the tokenizer's chat template refuses these messages: {reply['error']}")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-P", str(_WORKER), str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._end = weakref.finalize(self, _end, self._process)
            with contextlib.suppress(BrokenPipeError):
                _write(self._process, self._setup)
        return self._process

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # drops what the process has not read yet
        code = process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return f"the tokenizer's chat template takes more than {self._setup['cpu_seconds']:g} s for these messages"
        return (
            "the process that renders the tokenizer's chat template ended with"
            f" {f'signal {-code}' if code < 0 else f'exit code {code}'} at these messages"
        )


def _write(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.kill()
    process.wait()
