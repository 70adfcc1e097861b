"""The coding agent of examples/, which knows only ANTHROPIC_BASE_URL, as a foreign process on a task with hidden tests."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import chat_templates as families
import pytest
from run_configs import make_config
from session_support import Params, side_of

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.external_agent import ForeignAgents
from gspo_mega.agents.turn import Limits
from gspo_mega.base.episodes import check_episode

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TASK = {
    "files": {
        "double.py": "def double(x):\n    return x\n",
        "test_double.py": "import unittest\nfrom double import double\n\nclass Test(unittest.TestCase):\n"
        "    def test_it(self):\n        self.assertEqual(double(3), 6)\n",
    },
    "hidden": {
        "test_hidden.py": "import unittest\nfrom double import double\n\nclass Test(unittest.TestCase):\n"
        "    def test_five(self):\n        self.assertEqual(double(5), 10)\n"
        "    def test_text(self):\n        self.assertEqual(double('a'), 'aa')\n"
    },
}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write(body):
    return call("write_file", path="double.py", text=f"def double(x):\n    return {body}\n")


@pytest.mark.parametrize(
    ("said", "reward", "told"),
    [
        ([f"<think>\nlook\n</think>\n\n{call('read_file', path='double.py')}", write("2 * x")], 1.0, "return x"),
        ([write("6"), call("read_file", path="../../secret")], 0.0, "ValueError: ../../secret is outside"),
        ([write("6 if x == 3 else x + 5"), call("no_tool")], 0.5, "there is no tool no_tool"),
    ],
)
def test_an_agent_that_knows_only_anthropics_address_repairs_a_program(tmp_path, said, reward, told):
    """What the policy says reaches the agent as calls of tools; what these say reaches the policy."""
    turns = [*said, call("run_tests"), "Done."]
    side = side_of(tmp_path, families.THINKING, *turns, tools=())
    prompt = replace(side.prompt, metadata=TASK)
    command = [sys.executable, str(EXAMPLES / "coding_task.py"), sys.executable, str(EXAMPLES / "coding_agent.py")]
    config = make_config(
        rollout=dict(episode=dict(function="foreign", options=dict(command=command, reward="file"))),
        episodes=dict(turn_deadline_seconds=300, deadline_seconds=300),
        data=dict(chat_template=True),
    )

    async def act():
        agents = ForeignAgents(config.episodes, config.rollout, side.tokenizer.decode)
        driver = EpisodeDriver(side.conversation, Limits(12, 8192), agents)
        await driver.start()
        try:
            return await driver.run(prompt, 0, "e", side.sampler, Params(max_new_tokens=512))
        finally:
            await driver.close()

    episode = asyncio.run(act())
    assert episode.failure is None, episode.failure
    assert episode.reward_parts == {"episode": reward, "episode/agent_exit_code": 0.0}
    check_episode(episode)
    assert (episode.num_turns, episode.num_branches, episode.counts) == (len(turns), 0, {})
    for turn, text in zip(episode.turns, turns, strict=True):
        assert list(turn.token_ids[:-1]) == side.tokenizer.encode(text, add_special_tokens=False)
    results = "".join(side.tokenizer.decode(node.token_ids) for node in episode.nodes if not node.is_sampled)
    assert told in results and "exit code 0" in results
    assert episode.nodes[0].messages[0]["content"].startswith("You repair programs.")
