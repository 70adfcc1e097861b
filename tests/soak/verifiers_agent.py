"""examples/verifiers_agent.py with the package verifiers: `python tests/soak/verifiers_agent.py PYTHON`, where PYTHON has
the package (launch/env/verifiers.txt).

The example is the agent of one episode, in front of a real endpoint and session; then the same with verifiers' harness
`bash`, whose tool the policy calls. The policy says what is written here. Fails where the record has a branch or
other turns, or the reward is not the environment's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("unit", "unit/agents", "support"))]

import chat_templates as families
from run_configs import make_config
from session_support import USER, side_of

from gspo_mega.agents.external_agent import ForeignAgents
from gspo_mega.agents.messages import FORMATS
from gspo_mega.agents.protocol import Task
from gspo_mega.base.episodes import check_episode

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((47*86))"}}\n</tool_call>'


async def reward_of(python: str, folder: Path, harness: str, *said: str) -> float | None:
    """The reward of an episode in which the policy says this."""
    example = (ROOT / "examples" / "verifiers_agent.py").read_text(encoding="utf-8")
    assert example.count('"null"') == 1
    agent = folder / "verifiers_agent.py"
    agent.write_text(example.replace('"null"', f'"{harness}"'), encoding="utf-8")
    side = side_of(folder, families.THINKING, *said, tools=())
    episode = dict(function="foreign", options=dict(command=[python, str(agent)], reward="file"))
    variables = tuple(name for name in os.environ if name.startswith(("UV_", "SSL_")))
    config = make_config(
        rollout=dict(episode=episode),
        episodes=dict(max_tokens=4096, turn_deadline_seconds=600, deadline_seconds=600, environment=variables),
        data=dict(chat_template=True),
    )
    openers = sorted({opener for one in FORMATS.values() for opener in one.format.openers})
    stops = [side.tokenizer.eos_token_id]
    runner = ForeignAgents(config.episodes, config.rollout, side.tokenizer.decode, openers, stops)
    await runner.start()
    try:
        finished = await runner.run(Task([USER], answer="4042"), side.session, "e")
    finally:
        await runner.close()
    assert finished.outcome is not None, finished.failure
    check_episode(side.episode())
    nodes = side.session.nodes
    assert [node.kind for node in nodes] == ["context", "sampled"] * len(said), nodes
    assert [node.parent for node in nodes] == list(range(-1, len(nodes) - 1)) and not any(node.cause for node in nodes)
    assert len(said) == 1 or "4042" in side.tokenizer.decode(nodes[2].token_ids)
    own = f"{finished.own_seconds:.1f} s of the agent's own"
    print(f"{harness}, {said[-1]!r}: reward {finished.outcome.reward}, {own}", flush=True)
    return finished.outcome.reward


async def main(python: str) -> int:
    rewards = []
    for said in (("It is 4042.",), ("It is 4043.",), (CALL, "It is 4042."), (CALL, "It is 4043.")):
        with tempfile.TemporaryDirectory() as folder:
            harness = "null" if len(said) == 1 else "bash"
            rewards.append(await reward_of(python, Path(folder), harness, *said))
    print(f"rewards of right and wrong answers: {rewards}")
    return 0 if rewards == [1.0, 0.0, 1.0, 0.0] else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(asyncio.run(main(sys.argv[1])))
