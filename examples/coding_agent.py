"""A small coding agent that knows only Anthropic's Messages API (ANTHROPIC_BASE_URL, _API_KEY and _MODEL).

    python examples/coding_agent.py "Make the tests pass."     # works in the current folder

It gives the model three tools (read a file, write a file, run the tests of the folder) and stops when the model answers
without a call. There is nothing of gspo_mega in it, and nothing but the standard library: it stands for any agent that
lets its address be set. `examples/coding_task.py` trains a policy through it.

Without ANTHROPIC_BASE_URL it is tried against a model that is written here, and repairs one function.
"""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.request

MAX_TURNS = 12
MAX_RESULT_CHARACTERS = 2000
TEST_SECONDS = 60
SYSTEM = "You repair programs. Read the files, change them, and run the tests until they pass. Then say what you did."
TOOLS = [
    {
        "name": "read_file",
        "description": "Read a file of the folder.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
    {
        "name": "write_file",
        "description": "Write a whole file of the folder.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            "required": ["path", "text"],
        },
    },
    {
        "name": "run_tests",
        "description": "Run the tests of the folder and return the end of their output.",
        "input_schema": {"type": "object", "properties": {}},
    },
]


def ask(messages: list[dict]) -> dict:
    """Return the model's next message."""
    body = {
        "model": os.environ["ANTHROPIC_MODEL"],
        "max_tokens": 4096,
        "system": SYSTEM,
        "tools": TOOLS,
        "messages": messages,
    }
    headers = {
        "content-type": "application/json",
        "x-api-key": os.environ["ANTHROPIC_API_KEY"],
        "anthropic-version": "2023-06-01",
    }
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def use(name: str, given: dict) -> str:
    """Return what a tool says. Raises OSError, ValueError and KeyError for a call that cannot be answered."""
    if name == "run_tests":
        command = [sys.executable, "-m", "unittest", "-q"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TEST_SECONDS, check=False
        )
        return f"{done.stdout[-MAX_RESULT_CHARACTERS:]}\nexit code {done.returncode}"
    if name not in ("read_file", "write_file"):
        raise ValueError(f"there is no tool {name}")
    path = pathlib.Path(given["path"])
    if not path.resolve().is_relative_to(pathlib.Path.cwd()):
        raise ValueError(f"{path} is outside of the folder")
    if name == "read_file":
        return path.read_text(encoding="utf-8")[:MAX_RESULT_CHARACTERS]
    path.write_text(given["text"], encoding="utf-8")
    return "written"


def work(task: str) -> int:
    """Work on the task until the model calls no tool. Return the number of turns."""
    messages: list[dict] = [{"role": "user", "content": task}]
    for turn in range(1, MAX_TURNS + 1):
        answer = ask(messages)
        messages.append({"role": "assistant", "content": answer["content"]})
        results = []
        for block in answer["content"]:
            if block["type"] == "tool_use":
                try:
                    told, is_error = use(block["name"], block["input"]), False
                except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
                    told, is_error = f"{type(error).__name__}: {error}", True
                results.append(
                    {"type": "tool_result", "tool_use_id": block["id"], "content": told, "is_error": is_error}
                )
        if answer["stop_reason"] != "tool_use":
            return turn
        messages.append({"role": "user", "content": results})
    return MAX_TURNS


class WrittenModel(http.server.BaseHTTPRequestHandler):
    """A model without weights: it reads, repairs, tests, and says so, whatever it is asked."""

    calls = (
        ("read_file", {"path": "double.py"}),
        ("write_file", {"path": "double.py", "text": "def double(x):\n    return 2 * x\n"}),
        ("run_tests", {}),
    )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        content: list[dict] = [{"type": "text", "text": "The function doubles now."}]
        if turn < len(self.calls):
            name, given = self.calls[turn]
            content = [{"type": "tool_use", "id": f"c{turn}", "name": name, "input": given}]
        reason = "tool_use" if turn < len(self.calls) else "end_turn"
        body = json.dumps({"role": "assistant", "content": content, "stop_reason": reason}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def try_it() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WrittenModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "written",
        "no_proxy": "127.0.0.1",
    }
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pathlib.Path("double.py").write_text("def double(x):\n    return x\n")
        pathlib.Path("test_double.py").write_text(
            "import unittest\nfrom double import double\n\n\nclass Test(unittest.TestCase):\n"
            "    def test_it(self):\n        self.assertEqual(double(3), 6)\n"
        )
        turns = work("Make the tests pass.")
        print(f"{turns} turns; then {use('run_tests', {}).splitlines()[-1]}")
        os.chdir("/")
    server.shutdown()


if __name__ == "__main__":
    if "ANTHROPIC_BASE_URL" in os.environ:
        print(f"{work(' '.join(sys.argv[1:]))} turns")
    else:
        try_it()
