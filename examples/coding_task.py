"""A task with tests for a coding agent: it sets up a folder, lets the agent work there, and runs tests that it hides.

    rollout:
      episode:
        function: foreign
        options:
          command: [python, examples/coding_task.py, python, examples/coding_agent.py]
          reward: file
    episodes: {max_turns: 12, max_tokens: 16384, tool_format: auto}
    data: {path: tasks.jsonl, chat_template: true, max_prompt_tokens: 512}

What follows `coding_task.py` is the agent's command. It is started in the folder with the task's text as its last
argument, and finds the policy at ANTHROPIC_BASE_URL (or OPENAI_BASE_URL). A row of `tasks.jsonl` is

    {"prompt": "Make the tests pass.", "files": {"double.py": "...", "test_double.py": "..."},
     "hidden": {"test_hidden.py": "..."}}

The reward is the share of the hidden tests that pass; the agent's own tests do not count. The program runs in the
tests' process, so one that is written to cheat can: it may end the process or change `unittest`. Without a run this is
tried with an agent that repairs the function in one line of Python.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

TEST_SECONDS = 60
# Prints how many tests there are and how many of them failed. Tests that cannot be imported count as one that failed.
COUNT = """
import json, os, sys, unittest
sys.path.insert(0, os.getcwd())
tests = unittest.defaultTestLoader.discover(sys.argv[1], top_level_dir=sys.argv[1])
result = unittest.TestResult()
tests.run(result)
print(json.dumps([result.testsRun, len(result.failures) + len(result.errors)]))
"""

EXAMPLE = {
    "files": {"double.py": "def double(x):\n    return x\n"},
    "hidden": {
        "test_hidden.py": "import unittest\nfrom double import double\n\n\nclass Test(unittest.TestCase):\n"
        "    def test_three(self):\n        self.assertEqual(double(3), 6)\n\n"
        "    def test_text(self):\n        self.assertEqual(double('ab'), 'abab')\n"
    },
}


def share_of_tests(folder: pathlib.Path, hidden: dict[str, str]) -> float:
    """Return the share of the hidden tests that pass on what is in the folder. They are written only now."""
    with tempfile.TemporaryDirectory() as place:
        for name, text in hidden.items():
            (pathlib.Path(place) / name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-P", "-c", COUNT, place]  # -P: a file `unittest.py` of the agent's is not imported
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
            )
            num_run, num_failed = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError, TypeError):
            return 0.0  # the program ended the tests, or never ends
    return max(0.0, (num_run - num_failed) / num_run) if num_run else 0.0


def attempt(agent: list[str], text: str, given: dict) -> dict:
    """Let the agent work on a task, and return its outcome."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        for name, content in given["files"].items():
            (folder / name).write_text(content, encoding="utf-8")
        # The run's own files (the answer, the place of the reward) are no business of the agent's.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GSPO_MEGA_")}
        ended = subprocess.run([*agent, text], cwd=folder, env=environment, check=False)
        reward = share_of_tests(folder, given["hidden"])
    return {"reward": reward, "correct": reward == 1.0, "parts": {"agent_exit_code": float(ended.returncode)}}


def main() -> None:
    if "GSPO_MEGA_TASK_FILE" not in os.environ:
        repair = "open('double.py', 'w').write('def double(x):\\n    return 2 * x\\n')"
        for name, code in (("repairs it", repair), ("does nothing", "pass")):
            outcome = attempt([sys.executable, "-c", code], "Make it double.", EXAMPLE)
            print(f"an agent that {name}: reward {outcome['reward']:.1f}")
        return
    task = json.loads(pathlib.Path(os.environ["GSPO_MEGA_TASK_FILE"]).read_text(encoding="utf-8"))
    # Scripts of the command are named from the folder of the run, and the agent starts in another.
    agent = [os.path.abspath(part) if part.endswith(".py") else part for part in sys.argv[1:]]
    outcome = attempt(agent, task["messages"][-1]["content"], task["metadata"])
    pathlib.Path(os.environ["GSPO_MEGA_RESULT_FILE"]).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main()
