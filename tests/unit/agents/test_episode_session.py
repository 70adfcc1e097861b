"""A session's turns with a policy that says what the test wants: tokens, limits, branches, turns at the same time."""

from __future__ import annotations

import asyncio
import threading

import chat_templates as families
import pytest
from session_support import USER, Params, Said, in_loop, side_of

from gspo_mega.agents.protocol import ContextFull, TooManyTurns
from gspo_mega.agents.session import Conversation, EpisodeSession
from gspo_mega.agents.turn import Limits
from gspo_mega.base.episodes import check_episode
from gspo_mega.base.errors import DataError, RolloutError

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
TOOL = {"role": "tool", "tool_call_id": "c0000t000", "name": "calculator", "content": "4"}
MORE = {"role": "user", "content": "And 5? <|im_end|>"}


def tokens_of(side, text):
    return side.tokenizer.encode(text, add_special_tokens=False)


@in_loop
async def test_a_turn_is_sampled_behind_exactly_what_was_sampled_before(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, Said("It is", server_id="server-1"), "4", tools=())
    first = await side.session.turn([USER])
    assert first == {"role": "assistant", "content": "It is"}
    second = await side.session.answer([USER, first, MORE])
    assert (second.number, second.message["content"], second.finish_reason) == (1, "4", "stop")

    one, two = side.sampler.calls
    assert one.token_ids == list(side.prompt.token_ids) and (one.request_id, one.prefer) == ("e", None)
    assert (two.request_id, two.prefer, two.name) == ("e-t001", "server-1", "p:0")
    sampled = [*tokens_of(side, "It is"), side.tokenizer.eos_token_id]
    assert two.token_ids[: len(one.token_ids) + len(sampled)] == one.token_ids + sampled
    # What the user wrote is characters: the only ends of turns are the template's and the policy's.
    end = side.tokenizer.eos_token_id
    whole = side.rule._encoder.render([USER, first, MORE])
    assert two.token_ids == side.rule._encoder.encode(whole) and two.token_ids.count(end) == 3
    assert second.num_context_tokens == len(two.token_ids)

    (row,) = side.episode().rows()
    assert [row.response_token_ids[a:b] for a, b in row.turns] == [sampled, [*tokens_of(side, "4"), end]]
    assert sum(row.response_mask) == side.episode().num_sampled_tokens
    assert list(second.log_probs) == row.rollout_log_probs[-2:]
    check_episode(side.episode())


@in_loop
async def test_what_caches_had_is_counted_of_prompts_and_of_histories(tmp_path):
    """The second turn is requested twice, once with only the prompt as history; a server that does not say it counts nowhere."""
    said = (Said("It is", num_cached_tokens=2), Said("4", num_cached_tokens=9), Said("It", num_cached_tokens=5), "Oh")
    side = side_of(tmp_path, families.QUICKSTART, *said, tools=())
    first = await side.session.turn([USER])
    second = await side.session.turn([USER, first, MORE])
    await side.session.turn([USER])
    await side.session.turn([USER, first, MORE, second, MORE])
    counts, calls = side.session.counts, side.sampler.calls
    prompt = len(side.prompt.token_ids)
    assert (counts["num_prompt_tokens_read"], counts["num_prompt_tokens_cached"]) == (2 * prompt, 2 + 5)
    assert (counts["num_history_tokens_read"], counts["num_history_tokens_cached"]) == (len(calls[1].token_ids), 9)


@in_loop
async def test_a_call_reaches_the_agent_and_its_answer_the_policy(tmp_path):
    side = side_of(tmp_path, families.THINKING, CALL, "<tool_call>{oh</tool_call>")
    message = await side.session.turn([USER])
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "2+2"}'}
    assert message["content"] == ""
    broken = await side.session.turn([USER, message, TOOL])
    assert "tool_calls" not in broken and broken["content"] == "<tool_call>{oh</tool_call>"
    assert side.session.counts["num_broken_calls"] == 1
    assert "# Tools: " in side.tokenizer.decode(side.sampler.calls[0].token_ids)
    (row,) = side.episode().rows()
    assert len(row.turns) == 2 and side.episode().num_branches == 0


@in_loop
async def test_an_agent_may_bring_tools_of_its_own(tmp_path):
    side = side_of(tmp_path, families.THINKING, CALL, CALL)
    own = [{"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}]
    await side.session.answer([USER], tools=own)
    await side.session.answer([USER], tools=[])
    shown, none = (side.tokenizer.decode(call.token_ids) for call in side.sampler.calls)
    assert "search" in shown and "calculator" not in shown and "# Tools" not in none
    assert [node.parent for node in side.session.nodes if not node.is_sampled] == [-1, -1], "another root"


@in_loop
async def test_the_last_turns_have_what_room_is_left(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "1234", "5", tools=(), params=Params(8))
    first = await side.session.turn([USER])
    history = [USER, first, {"role": "user", "content": "x"}]
    context = len(side.rule._encoder.encode(side.rule._encoder.render(history)))
    side.session._limits = Limits(8, context + 3)
    await side.session.answer(history, max_new_tokens=7)
    assert [call.max_new_tokens for call in side.sampler.calls] == [8, 3], "of the context's 3, not the agent's 7"
    side.session._limits = Limits(8, context)
    with pytest.raises(
        ContextFull, match=rf"turn 2 has a context of {context} tokens; an episode may have at most {context}"
    ):
        await side.session.turn([*history[:2], {"role": "user", "content": "y"}])
    assert len(side.sampler.calls) == 2 and side.session.limit == "context_full"


@in_loop
async def test_an_agent_may_ask_for_fewer_tokens_and_not_for_none(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "1", "2", tools=())
    await side.session.answer([USER], max_new_tokens=5)
    assert side.sampler.calls[0].max_new_tokens == 5
    with pytest.raises(DataError, match="max_new_tokens is 0; at least 1"):
        await side.session.answer([USER], max_new_tokens=0)


@in_loop
async def test_an_episode_has_so_many_turns_and_no_more(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "1", "2", "3", tools=(), max_turns=2)
    await side.session.turn([USER])
    await side.session.turn([USER])
    with pytest.raises(TooManyTurns, match=r"its 2 turns \(episodes.max_turns\)"):
        await side.session.turn([USER])
    assert (side.session.limit, len(side.sampler.calls)) == ("too_many_turns", 2)


@in_loop
async def test_a_turn_cut_by_length_is_closed_by_the_next_context(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, Said("123456", "length"), "ok", tools=(), params=Params(4))
    cut = await side.session.answer([USER])
    assert (cut.finish_reason, cut.message["content"], len(cut.token_ids)) == ("length", "1234", 4)
    await side.session.turn([USER, cut.message, MORE])
    context = side.session.nodes[2]
    assert context.token_ids[0] == side.tokenizer.eos_token_id, "which the policy did not sample"
    (row,) = side.episode().rows()
    assert row.response_mask[: 4 + 1] == [1, 1, 1, 1, 0]
    check_episode(side.episode())


@in_loop
async def test_an_empty_turn_is_one_token(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "", "1", tools=())
    empty = await side.session.answer([USER])
    assert empty.message["content"] == "" and list(empty.token_ids) == [side.tokenizer.eos_token_id]
    await side.session.turn([USER, empty.message, MORE])
    (row,) = side.episode().rows()
    assert len(row.turns) == 2


@in_loop
async def test_edited_history_begins_a_branch_and_no_token_is_trained_twice(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "one", "two", "three", tools=())
    first = await side.session.turn([USER])
    await side.session.turn([USER, first, MORE])
    await side.session.turn([USER, {"role": "assistant", "content": "else"}, MORE])
    episode = side.episode()
    assert episode.num_branches == 1 and "edited" in [node.cause for node in episode.nodes]
    rows = episode.rows()
    assert sum(sum(row.response_mask) for row in rows) == episode.num_sampled_tokens
    assert sum(row.weight for row in rows) == pytest.approx(1)


@in_loop
async def test_a_template_that_rewrites_history_begins_a_branch(tmp_path):
    side = side_of(tmp_path, families.THINKING, "<think>\nhm\n</think>\n\nYes", "No")
    first = await side.session.turn([USER])
    assert first["reasoning_content"] == "hm"
    await side.session.turn([USER, first, MORE])
    episode = side.episode()
    assert [node.cause for node in episode.nodes if node.cause] == ["template"]
    assert "hm" not in side.tokenizer.decode(side.sampler.calls[1].token_ids)
    assert sum(sum(row.response_mask) for row in episode.rows()) == episode.num_sampled_tokens


@in_loop
async def test_turns_at_the_same_time_are_numbered_as_they_were_asked_for(tmp_path):
    gate = asyncio.Event()
    side = side_of(tmp_path, families.QUICKSTART, Said("slow", gate=gate), "fast", tools=())
    slow = asyncio.ensure_future(side.session.answer([USER]))
    fast = asyncio.ensure_future(side.session.answer([{"role": "user", "content": "other"}]))
    assert (await fast).number == 1 and not slow.done()
    gate.set()
    assert (await slow).number == 0 and (await slow).message["content"] == "slow"
    assert [turn.text for turn in side.episode().turns] == ["fast", "slow"], "recorded as they ended"
    assert [side.session.record_index(number) for number in (0, 1, 2, -1)] == [1, 0, -1, -1]
    side.session.set_reward(0, 0.5)
    side.session.set_reward(-1, 2)
    assert {turn.text: turn.reward for turn in side.episode().turns} == {"slow": 0.5, "fast": 2.0}
    assert len(side.episode().rows()) == 2


@in_loop
async def test_one_context_asked_for_twice_at_the_same_time_is_one_node(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "a", "b", tools=())
    await asyncio.gather(side.session.turn([USER]), side.session.turn([USER]))
    kinds = [(node.kind, node.parent, node.cause) for node in side.session.nodes]
    assert kinds == [("context", -1, ""), ("sampled", 0, ""), ("sampled", 0, "resampled")]


@in_loop
async def test_rewards_of_turns_are_numbers_of_turns_that_were(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "a", tools=())
    with pytest.raises(IndexError, match="no turn yet"):
        side.session.set_reward(-1, 1.0)
    await side.session.turn([USER])
    with pytest.raises(IndexError, match="there was no turn 1; the episode has had 1"):
        side.session.set_reward(1, 1.0)
    with pytest.raises(ValueError, match="finite"):
        side.session.set_reward(0, float("nan"))
    with pytest.raises(TypeError, match="a number was expected"):
        side.session.set_reward(0, "1")
    assert side.session.nodes[1].reward is None


@in_loop
async def test_what_an_agent_does_to_its_messages_stays_its_own(tmp_path):
    side = side_of(tmp_path, families.THINKING, CALL, "4")
    asked = [dict(USER)]
    message = await side.session.turn(asked)
    asked[0]["content"] = "changed"
    message["tool_calls"][0]["function"]["name"] = "changed"
    assert side.session.nodes[0].messages == [USER]
    assert side.session.nodes[1].messages[0]["tool_calls"][0]["function"]["name"] == "calculator"


@in_loop
async def test_a_template_that_refuses_ends_the_turn_and_not_the_session(tmp_path):
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}" + families.QUICKSTART
    side = side_of(tmp_path, refusing, "yes", tools=())
    with pytest.raises(DataError, match="not this"):
        await side.session.turn([{"role": "user", "content": "no"}])
    assert (await side.session.turn([USER]))["content"] == "yes"
    assert side.session.num_turns == 2 and side.episode().num_turns == 1


@in_loop
async def test_a_run_without_servers_is_the_runs_error(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, Said("", error=RolloutError("no server")), tools=())
    with pytest.raises(RolloutError, match="no server"):
        await side.session.turn([USER])
    assert side.episode().num_turns == 0


@in_loop
async def test_no_template_runs_on_the_event_loop(tmp_path):
    side = side_of(tmp_path, families.THINKING, CALL, "4")
    threads = []
    encoder = side.rule._encoder
    render = encoder.render

    def noted(*given, **more):
        threads.append(threading.current_thread().name)
        return render(*given, **more)

    encoder.render = noted
    message = await side.session.turn([USER])
    await side.session.turn([USER, message, TOOL])
    assert threads and all(name.startswith("chat-template") for name in threads)


@in_loop
async def test_a_group_renders_its_prompt_once(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, *"abcd", tools=())
    calls = []
    first = side.rule.first
    side.conversation._rule_and_format(())[0].first = lambda messages: calls.append(1) or first(messages)
    more = [
        EpisodeSession(side.conversation, f"e{n}", side.prompt, side.sampler, Params(), Limits(1, 99)) for n in range(4)
    ]
    await asyncio.gather(*(session.turn([USER]) for session in more))
    assert len(calls) == 1


@in_loop
async def test_one_turn_is_sampled_behind_the_prompts_own_tokens(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "4", tools=())
    plain = Conversation(lambda ids: " ".join(map(str, ids)))
    session = EpisodeSession(plain, "e", side.prompt, side.sampler, Params(), Limits(1, 999))
    message = await session.turn([USER])
    assert side.sampler.calls[0].token_ids == list(side.prompt.token_ids)
    assert message == {"role": "assistant", "content": " ".join(map(str, tokens_of(side, "4")))}


@in_loop
async def test_a_listener_hears_what_the_turn_follows_and_then_its_tokens(tmp_path):
    side = side_of(tmp_path, families.OPENED_THINKING, "hm</think>4", tools=())
    heard = []
    answer = await side.session.answer(
        [USER], on_begin=lambda *told: heard.append(told), on_tokens=lambda place, ids: heard.append((place, list(ids)))
    )
    assert heard[0][0].endswith("<think>\n") and heard[0][1] == answer.num_context_tokens
    assert heard[1:] == [(0, list(answer.token_ids))]
    assert answer.message == {"role": "assistant", "content": "4", "reasoning_content": "hm"}
