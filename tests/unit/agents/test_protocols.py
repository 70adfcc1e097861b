"""One conversation in each protocol of the endpoint leaves the record that the episode leaves when it takes its turns
itself; and what only one protocol has: several answers, texts that end a turn, counting, responses that go on by an id.
"""

import contextlib
import json
import struct
from dataclasses import replace

import chat_templates as families
import httpx
import openai
import pytest
from session_support import USER, Said, in_loop, side_of
from test_anthropic_wire import events_of, put_together
from test_endpoint_records import OPENERS, TEMPLATES, TURNS, talk

from gspo_mega.agents.endpoint import AgentEndpoint
from gspo_mega.base.episodes import check_episode
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.config.schema import Endpoint as Settings
from gspo_mega.data.journal.frames import encode_episode


@contextlib.asynccontextmanager
async def visited(side):
    """(visit, client): the session at an endpoint."""
    decode = lambda ids: side.tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    endpoint = AgentEndpoint(Settings(), "policy", decode, OPENERS, [side.tokenizer.eos_token_id])
    await endpoint.start()
    try:
        async with (
            endpoint.open(side.session) as visit,
            httpx.AsyncClient(base_url=visit.base_url, headers={"x-api-key": visit.api_key}) as client,
        ):
            yield visit, client
    finally:
        await endpoint.close()


async def post(client, path, **body):
    answer = await client.post(path, json={"model": "policy"} | body)
    assert answer.status_code == 200, answer.text
    return answer


def anthropic_tools(tools):
    return [
        {"input_schema": function["parameters"], "description": function["description"], "name": function["name"]}
        for function in (tool["function"] for tool in tools)
    ]


async def talk_in_messages(client, visit, tools, way):
    """`talk`, as a client of Anthropic's writes it."""
    messages = [USER]
    for number in range(len(TURNS)):
        body = dict(max_tokens=64, messages=messages, tools=anthropic_tools(tools), stream=way == "stream")
        answer = await post(client, "messages", **body)
        message = put_together(events_of(answer.content)) if way == "stream" else answer.json()
        content = message["content"]
        if way == "dropped thinking":
            content = [block for block in content if block["type"] != "thinking"]
        calls = [block for block in content if block["type"] == "tool_use"]
        assert (message["stop_reason"] == "tool_use") == bool(calls)
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "4"}]}
            for call in calls
        ]
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": "user", "content": results or f"sure? {number}"})


async def talk_in_responses(client, visit, tools, way):
    """`talk`, as OpenAI's client writes it."""
    speaker = openai.AsyncOpenAI(base_url=visit.base_url, api_key=visit.api_key, max_retries=0)
    functions = [{"type": "function", **tool["function"]} for tool in tools]
    items, previous = [USER], None
    for number in range(len(TURNS)):
        more = {"previous_response_id": previous} if previous and way == "by id" else {}
        asked = dict(model="policy", input=items, tools=functions, **more)
        if way == "stream":
            async with speaker.responses.stream(**asked) as events:
                async for event in events:
                    last = event
            response = last.response
        else:
            response = await speaker.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        new = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
        new = new or [{"role": "user", "content": f"sure? {number}"}]
        kept = [item for item in response.output if way != "dropped thinking" or item.type != "reasoning"]
        items = new if way == "by id" else [*items, *(item.to_dict() for item in kept), *new]
        previous = response.id
    await speaker.close()


def with_masks(side):
    """The same side, whose sampler returns the tokens that each token was sampled from."""
    sample = side.sampler.sample

    async def sampled(*given, **named):
        turn = await sample(*given, **named)
        return replace(turn, sampling_masks=SamplingMasks.of([[token, 600, 601] for token in turn.token_ids]))

    side.sampler.sample = sampled
    return side


def fields_of(node):
    columns = (node.token_ids, node.log_probs, node.weight_versions)
    return (node.kind, node.parent, node.cause, node.finish_reason, node.text), [list(column) for column in columns]


def journal_of(episode):
    """The values and the bytes of the arrays of an episode in the journal."""
    frame = encode_episode(episode)
    (length,) = struct.unpack_from("<I", frame, 8)  # after the frame's length and checksum
    return json.loads(frame[12 : 12 + length]), frame[12 + length :]


@pytest.mark.parametrize("way", ["whole", "stream", "dropped thinking", "by id"])
@pytest.mark.parametrize("speak", [talk_in_messages, talk_in_responses])
@pytest.mark.parametrize("template", TEMPLATES)
@in_loop
async def test_a_protocol_leaves_the_record_of_the_episode_itself(tmp_path, template, speak, way):
    """Contexts, sampled tokens, log-probs, masks, tree, rows and the journal. Chat completions have the same test."""
    if way == "by id" and speak is talk_in_messages:
        return
    itself, other = (with_masks(side_of(tmp_path, getattr(families, template), *TURNS)) for _ in range(2))
    await talk(itself.session.turn)
    async with visited(other) as (visit, client):
        await speak(client, visit, list(other.session._tools), way)
    assert visit.counts["num_endpoint_errors"] == 0
    assert [call.token_ids for call in other.sampler.calls] == [call.token_ids for call in itself.sampler.calls]
    assert [fields_of(node) for node in other.session.nodes] == [fields_of(node) for node in itself.session.nodes]
    check_episode(other.episode())
    if way != "dropped thinking":  # with it, a new root's messages are those that the client sent
        assert journal_of(other.episode()) == journal_of(itself.episode())
    for mine, theirs in zip(other.episode().rows(), itself.episode().rows(), strict=True):
        assert mine.response_mask == theirs.response_mask
        assert mine.sampling_masks is not None and mine.sampling_masks == theirs.sampling_masks
        assert mine.response_token_ids == theirs.response_token_ids


# Texts that end a turn.


STOPPED = "Thought: two.\nObservation: four"


@pytest.mark.parametrize("protocol", ["chat/completions", "messages"])
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_stop_string_ends_the_turn_and_all_that_was_sampled_is_trained(tmp_path, protocol, stream):
    side = side_of(tmp_path, families.THINKING, STOPPED, "It is 4.", tools=())
    name = {"chat/completions": "stop", "messages": "stop_sequences"}[protocol]
    whole = side.tokenizer.encode(STOPPED, add_special_tokens=False)
    texts = [side.tokenizer.decode(whole[:n]) for n in range(len(whole) + 1)]
    end = next(n for n, text in enumerate(texts) if "Observa" in text)
    assert texts[end] != "Thought: two.\nObserva", "the string ends inside a token"
    async with visited(side) as (_, client):
        asked = {"messages": [USER], name: ["Observa", "no such"], "stream": stream}
        answer = await post(client, protocol, **asked)
        if protocol == "messages":
            message = put_together(events_of(answer.content)) if stream else answer.json()
            assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Observa")
            said, content = message["content"], message["content"][0]["text"]
        elif stream:
            chunks = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part and "[DONE]" not in part]
            content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            said = content
        else:
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            said = content = answer.json()["choices"][0]["message"]["content"]
        assert content == "Thought: two.\n"
        await post(client, protocol, messages=[USER, {"role": "assistant", "content": said}, USER])
    first = side.session.nodes[1]
    assert list(first.token_ids) == whole[:end], "what was sampled, the end of the last token included"
    assert (first.finish_reason, first.text) == ("stop_string", texts[end])
    assert side.session.counts["num_stop_strings"] == 1
    # The next turn goes on from these tokens: the template's end of the turn comes after them, untrained.
    assert [node.parent for node in side.session.nodes] == [-1, 0, 1, 2]
    assert side.sampler.calls[1].token_ids[: len(side.sampler.calls[0].token_ids) + end][-end:] == whole[:end]
    check_episode(side.episode())
    (row,) = side.episode().rows()
    assert sum(row.response_mask) == end + len(side.session.nodes[3].token_ids)


@in_loop
async def test_several_answers_are_branches(tmp_path):
    side = side_of(tmp_path, families.THINKING, "one", "two", "three", "four", tools=(), max_turns=3)
    async with visited(side) as (_, client):
        answer = (await post(client, "chat/completions", messages=[USER], n=2)).json()
        refused = await client.post("chat/completions", json={"messages": [USER], "n": 2})
    assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [(0, "one"), (1, "two")]
    assert answer["usage"]["completion_tokens"] == sum(len(node.token_ids) for node in side.episode().turns)
    assert refused.status_code == 400 and "the episode has 1 left (episodes.max_turns)" in refused.text
    nodes = [(node.kind, node.parent, node.cause) for node in side.session.nodes]
    assert nodes == [("context", -1, ""), ("sampled", 0, ""), ("sampled", 0, "resampled")]
    check_episode(side.episode())
    assert [sum(row.response_mask) for row in side.episode().rows()] == [
        len(one.token_ids) for one in side.episode().turns
    ]


@in_loop
async def test_several_answers_are_streamed_with_their_index_and_repeated_to_a_retry(tmp_path):
    side = side_of(tmp_path, families.THINKING, "one", "two", tools=())
    async with visited(side) as (visit, _):
        client = openai.AsyncOpenAI(base_url=visit.base_url, api_key=visit.api_key, max_retries=0)
        asked = dict(model="policy", messages=[USER], n=2)
        texts = {0: "", 1: ""}
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        again = await client.chat.completions.create(extra_headers={"x-stainless-retry-count": "1"}, **asked)
        await client.close()
    assert texts == {0: "one", 1: "two"}
    assert [choice.message.content for choice in again.choices] == ["one", "two"] and len(side.sampler.calls) == 2


@in_loop
async def test_the_tokens_of_a_context_are_counted_without_a_turn(tmp_path):
    side = side_of(tmp_path, families.THINKING, Said("hm"), "four")
    body = dict(messages=[USER], tools=anthropic_tools(side.session._tools), system="Add.")
    async with visited(side) as (_, client):
        first = (await post(client, "messages/count_tokens", **body)).json()
        assert side.session.nodes == []
        answer = (await post(client, "messages", max_tokens=9, **body)).json()
        again = (await post(client, "messages/count_tokens", **body)).json()
        body["messages"] = [USER, {"role": "assistant", "content": answer["content"]}, USER]
        later = (await post(client, "messages/count_tokens", **body)).json()
        assert len(side.session.nodes) == 2
        await post(client, "messages", max_tokens=9, **body)
    contexts = [len(call.token_ids) for call in side.sampler.calls]
    assert [one["input_tokens"] for one in (first, again, later)] == [contexts[0], *contexts]
    assert answer["usage"]["input_tokens"] == contexts[0]


@in_loop
async def test_errors_and_keys_are_the_protocols_own(tmp_path):
    side = side_of(tmp_path, families.THINKING, max_tokens=8)
    async with visited(side) as (visit, client):
        wrong = await client.post("messages", json={}, headers={"x-api-key": "wrong"})
        assert wrong.status_code == 401 and wrong.json()["error"]["type"] == "authentication_error"
        bad = await client.post("messages", json={"messages": []})
        assert bad.json()["type"] == "error" and bad.json()["error"]["message"].startswith("messages: missing")
        full = await client.post("messages", json={"messages": [USER]})
        assert full.status_code == 400 and full.json()["error"]["message"].startswith("prompt is too long: turn 0")
        models = (await client.get("models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [model["id"] for model in models["data"]] == ["policy"] and models["has_more"] is False
        one = await client.get("models/policy", headers={"anthropic-version": "2023-06-01"})
        assert one.json() == models["data"][0]
        lost = await client.post("responses", json={"input": "x", "previous_response_id": "resp_x"})
        assert lost.json()["error"]["code"] == "previous_response_not_found"
        visit.num_open = 64
        busy = [await client.post(path, json={}) for path in ("messages", "messages/count_tokens", "responses")]
        assert [one.status_code for one in busy] == [429] * 3
        assert busy[1].json()["error"]["type"] == "rate_limit_error"
        visit.num_open = 0
    assert visit.counts["num_endpoint_errors"] == 6  # a wrong key is not the session's
