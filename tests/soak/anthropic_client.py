"""Anthropic's own client as a foreign agent: `python tests/soak/anthropic_client.py PYTHON`, where PYTHON has the package
anthropic (a virtual environment of its own: `pip install anthropic`).

The agent below talks to a real endpoint and session; the policy says what is written here. Fails where an answer or an
event has not the types of the client, or where the record has a branch or other turns.
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

AGENT = """
import json, os
import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

client = anthropic.Anthropic(max_retries=0)  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
model = os.environ["ANTHROPIC_MODEL"]
schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
tools = [{"name": "calculator", "description": "Work it out.", "input_schema": schema}]
messages = json.load(open(os.environ["GSPO_MEGA_TASK_FILE"]))["messages"]
asked = dict(model=model, max_tokens=64, tools=tools, system=[{"type": "text", "text": "Add."}])


def checked(message):
    TypeAdapter(Message).validate_python(message.to_dict(), strict=True)
    return message


def answered(message):
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4"} for call in calls]
    messages.append({"role": "user", "content": results or "sure?"})
    return calls


counted = client.messages.count_tokens(model=model, messages=messages, tools=tools, system=asked["system"])
first = checked(client.messages.create(messages=messages, **asked))
assert counted.input_tokens == first.usage.input_tokens, (counted, first.usage)
assert [block.type for block in first.content] == ["thinking", "text", "tool_use"], first
assert first.stop_reason == "tool_use" and first.content[2].input == {"expression": "2+2"}
assert len(answered(first)) == 1

events = []
with client.messages.stream(messages=messages, **asked) as stream:
    for event in stream:
        events.append(event.type)
    second = checked(stream.get_final_message())
assert [block.type for block in second.content] == ["thinking", "tool_use", "tool_use"], second
assert second.usage.input_tokens > first.usage.input_tokens
assert {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_stop"} <= {*events}
assert len(answered(second)) == 2

kinds = []
for event in client.messages.create(messages=messages, stream=True, stop_sequences=["four", "five"], **asked):
    TypeAdapter(RawMessageStreamEvent).validate_python(event.to_dict(), strict=True)
    kinds.append(event.type)
    if event.type == "message_delta":
        assert (event.delta.stop_reason, event.delta.stop_sequence) == ("stop_sequence", "four"), event
assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds

for wrong in (dict(tool_choice={"type": "any"}), dict(extra_body={"temperature": 0.5}), dict(max_tokens=0)):
    try:
        client.messages.create(messages=messages, **(asked | wrong))
        raise SystemExit(f"{wrong} was not refused")
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error", error.body
try:
    anthropic.Anthropic(api_key="wrong", max_retries=0).messages.create(messages=messages, **asked)
    raise SystemExit("a wrong key was not refused")
except anthropic.AuthenticationError:
    pass
assert [one.id for one in client.models.list()] == [model]
print(f"anthropic {anthropic.__version__}")
"""
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
TURNS = (
    f"<think>\nhm\n</think>\n\nI add. {CALL}",
    f"<think>\nagain\n</think>\n\n{CALL}\n{CALL}",
    "It is four, no doubt.",
)


async def main(python: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        side = side_of(Path(folder), families.THINKING, *TURNS, tools=())
        episode = dict(function="foreign", options=dict(command=[python, "-c", AGENT]))
        config = make_config(
            rollout=dict(episode=episode),
            episodes=dict(max_tokens=4096, turn_deadline_seconds=600, deadline_seconds=600),
            data=dict(chat_template=True),
        )
        openers = sorted({opener for one in FORMATS.values() for opener in one.format.openers})
        stops = [side.tokenizer.eos_token_id]
        runner = ForeignAgents(config.episodes, config.rollout, side.tokenizer.decode, openers, stops)
        await runner.start()
        try:
            finished = await runner.run(Task([USER]), side.session, "e")
        finally:
            await runner.close()
        if finished.failure is not None:
            print(finished.failure.text)
            return 1
        check_episode(side.episode())
        nodes = side.session.nodes
        assert [node.parent for node in nodes] == list(range(-1, 5)) and not any(node.cause for node in nodes), nodes
        print(f"{side.episode().num_turns} turns, no branch; refused requests: {side.session.counts}")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(asyncio.run(main(sys.argv[1])))
