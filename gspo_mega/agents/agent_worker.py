"""The process that runs one foreign agent: `python -m gspo_mega.agents.agent_worker PARENT_PID`.

It runs the agent's command as a child with bounds, and keeps the end of the output, which nobody else reads. It speaks
JSON lines over the pipes that it was started with as stdin and stdout:

    in   once: {"command": [text, ...], "environment": {name: text}, "memory_bytes": n, "file_bytes": n}
    out  {"ready": true}  or  {"load_error": text}
    in   {"tell": true}
    out  {"output": the end of what it printed so far}
    out  {"exit": code, or minus the number of the signal that ended it, "output": the end of what it printed}

All that the command started ends with it, because a guard (`rewards/guard.py`) is around this process. Deadlines are
enforced from outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from typing import IO, Any

from gspo_mega.rewards.guard import begin, leave, limit

SHOWN_BYTES = 4096
"""How much of the end of an agent's output is kept."""
_LAST_WORDS_SECONDS = 0.5


def main() -> None:
    requests, replies, setup = begin()
    speaking = threading.Lock()

    def reply(message: dict[str, Any]) -> None:
        with speaking:
            replies.write(json.dumps(message).encode() + b"\n")
            replies.flush()

    limit(setup["memory_bytes"], setup["file_bytes"])
    try:
        agent = subprocess.Popen(
            setup["command"],
            env={**os.environ, **setup["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except (OSError, ValueError) as error:
        reply({"load_error": f"{setup['command'][0]!r} cannot be started: {error}"})
        leave()
    reply({"ready": True})
    assert agent.stdout is not None
    output = Tail(agent.stdout)
    output.start()

    def tell() -> None:
        for _ in requests:
            reply({"output": output.text})

    threading.Thread(target=tell, daemon=True).start()
    code = agent.wait()
    output.join(_LAST_WORDS_SECONDS)  # a process that the agent left behind may hold the pipe open
    reply({"exit": code, "output": output.text})
    leave()


class Tail(threading.Thread):
    """Reads all output, so that the writer never waits, and keeps the end of it."""

    def __init__(self, output: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._output = output
        self._end = b""

    def run(self) -> None:
        while chunk := os.read(self._output.fileno(), 64 * 1024):
            self._end = (self._end + chunk)[-SHOWN_BYTES:]

    @property
    def text(self) -> str:
        return self._end.decode("utf-8", "replace").strip()


if __name__ == "__main__":
    main()
