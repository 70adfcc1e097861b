"""The endpoint in front of a real session and real chat templates: OpenAI's client leaves the record that the same
episode leaves when it takes its turns itself.
"""

import chat_templates as families
import numpy as np
import openai
import pytest
from session_support import USER, Said, in_loop, side_of

from gspo_mega.agents.endpoint import AgentEndpoint
from gspo_mega.agents.messages import FORMATS
from gspo_mega.base.episodes import check_episode
from gspo_mega.config.schema import Endpoint as Settings

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
# Thinking, a call behind text, a broken call, white space, what no message may end with, and an end by length.
TURNS = (
    f"<think>\nhm\n</think>\n\nI add. {CALL}",
    f"{CALL}\n{CALL}",
    "  I try <tool_call>{oh</tool_call> é😀 ",
    Said("<think>\nmore", finish_reason="length"),
    "It is 4.",
)
OPENERS = sorted({opener for one in FORMATS.values() for opener in one.format.openers})
TEMPLATES = ["THINKING", "OPENED_THINKING", "CALL_OR_CONTENT"]


async def talk(turn):
    """An agent: it hands back what it was given, answers calls, and asks on where there are none."""
    messages = [USER]
    for number in range(len(TURNS)):
        message = await turn(messages)
        messages.append(message)
        calls = message.get("tool_calls") or ()
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "4"})
        if not calls:
            messages.append({"role": "user", "content": f"sure? {number}"})
    return messages


async def put_together(chunks):
    message, calls = {"role": "assistant", "content": ""}, {}
    async for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            if thought := getattr(choice.delta, "reasoning_content", None):
                message["reasoning_content"] = thought
            for call in choice.delta.tool_calls or ():
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls[call.index] = {"id": call.id, "type": "function", "function": function}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


@pytest.mark.parametrize("way", ["whole", "stream", "dropped thinking"])
@pytest.mark.parametrize("template", TEMPLATES)
@in_loop
async def test_a_client_leaves_the_record_of_the_episode_itself(tmp_path, template, way):
    itself = side_of(tmp_path, getattr(families, template), *TURNS)
    await talk(itself.session.turn)

    other = side_of(tmp_path, getattr(families, template), *TURNS)
    tools = list(other.session._tools)
    decode = lambda ids: other.tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    endpoint = AgentEndpoint(Settings(), "policy", decode, OPENERS, [other.tokenizer.eos_token_id])
    await endpoint.start()
    try:
        async with endpoint.open(other.session) as visit:
            client = openai.AsyncOpenAI(base_url=visit.base_url, api_key=visit.api_key, max_retries=0)

            async def turn(messages):
                if way == "stream":
                    chunks = await client.chat.completions.create(
                        model=visit.model, messages=messages, tools=tools, stream=True
                    )
                    return await put_together(chunks)
                answer = await client.chat.completions.create(model=visit.model, messages=messages, tools=tools)
                message = answer.choices[0].message.model_dump()
                if way == "dropped thinking":
                    message = {key: message[key] for key in ("role", "content", "tool_calls")}
                return message

            await talk(turn)
            await client.close()
    finally:
        await endpoint.close()

    assert visit.counts["num_endpoint_errors"] == 0
    one, two = itself.episode(), other.episode()
    check_episode(two)
    assert [call.token_ids for call in other.sampler.calls] == [call.token_ids for call in itself.sampler.calls]
    assert [(node.kind, node.parent, node.cause) for node in two.nodes] == [
        (node.kind, node.parent, node.cause) for node in one.nodes
    ]
    for mine, theirs in zip(two.rows(), one.rows(), strict=True):
        assert mine.response_token_ids == theirs.response_token_ids
        assert mine.response_mask == theirs.response_mask
        assert mine.weight_versions == theirs.weight_versions
        np.testing.assert_allclose(mine.rollout_log_probs, theirs.rollout_log_probs, rtol=0, atol=0)
