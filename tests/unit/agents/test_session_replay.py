"""An agent that begins again is answered from the record: nothing is sampled twice, and who asks otherwise is told."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import chat_templates as families
import pytest
from session_support import USER, Said, in_loop, side_of

from gspo_mega.agents.session import NotReplayable
from gspo_mega.base.errors import DataError


def said(number):
    return {"role": "user", "content": f"go on {number}"}


async def chain(session, length, answers=None):
    """Ask for `length` turns, each behind the one before; returns the answers."""
    messages, answers = [USER], [] if answers is None else answers
    for number in range(length):
        answers.append(await session.answer(messages))
        messages = [*messages, answers[-1].message, said(number)]
    return answers


@in_loop
async def test_recorded_turns_are_not_sampled_again(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "a", "b", "c", tools=())
    before = await chain(side.session, 2)
    side.session.set_reward(0, 1.0)
    side.session.restart()
    assert side.session.nodes[1].reward is None, "the agent gives it again"
    after = await chain(side.session, 3)
    assert len(side.sampler.calls) == 3 and [a.is_replayed for a in after] == [True, True, False]
    assert [a.message for a in after[:2]] == [a.message for a in before]
    assert [a.number for a in after] == [0, 1, 2] and side.session.counts["num_replayed_turns"] == 2
    assert side.episode().num_branches == 0 and side.session.num_restarts == 1
    side.session.check_replayed()


@in_loop
async def test_memory_grows_with_the_turns_and_not_with_their_square(tmp_path):
    """A turn's whole history is not kept beside the tree: thousands of episodes are in memory at a time."""

    async def bytes_after(length):
        side = side_of(tmp_path, families.QUICKSTART, *["a"] * length, tools=(), max_turns=length, max_tokens=10**6)
        question = {"role": "user", "content": "x" * 2000}
        tracemalloc.start()
        messages = [question]
        for _ in range(length):
            messages += [(await side.session.answer(messages)).message, question]
        side.sampler.calls.clear()  # the test's own
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        few, many = await bytes_after(10), await bytes_after(40)
    finally:
        tracemalloc.stop()
    assert many < 6 * few, "four times as much"


@in_loop
async def test_a_listener_hears_a_replayed_turn_in_one_piece(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "abc", tools=())
    first = await side.session.answer([USER])
    side.session.restart()
    heard = []
    await side.session.answer(
        [USER], on_begin=lambda *told: heard.append(told), on_tokens=lambda place, ids: heard.append((place, ids))
    )
    assert heard == [(side.session._recorder.text(0), first.num_context_tokens), (0, first.token_ids)]


@in_loop
async def test_another_question_in_its_place_is_not_replayable(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "a", "b", "c", tools=())
    await chain(side.session, 2)
    side.session.restart()
    await side.session.answer([USER])
    with pytest.raises(NotReplayable, match="did not ask for its turn 1 as before"):
        await side.session.answer([{"role": "user", "content": "something else"}])


@in_loop
async def test_a_shorter_second_life_is_not_replayable_either(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, "a", "b", tools=())
    await chain(side.session, 2)
    side.session.restart()
    await chain(side.session, 1)
    with pytest.raises(NotReplayable, match="turn 1"):
        side.session.check_replayed()


@in_loop
async def test_a_refusal_is_repeated_and_a_turn_given_up_is_not(tmp_path):
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}" + families.QUICKSTART
    side = side_of(tmp_path, refusing, Said("late", gate=asyncio.Event()), "a", "again", tools=())

    async def agent():
        with pytest.raises(DataError, match="not this"):
            await side.session.answer([{"role": "user", "content": "no"}])
        try:
            async with asyncio.timeout(0.05):
                await side.session.answer([said(7)])
        except TimeoutError:
            pass
        return await side.session.answer([USER])

    first = await agent()
    assert first.message["content"] == "a" and side.session.num_turns == 3
    side.session.restart()
    second = await agent()
    assert second.is_replayed and second.number == first.number
    assert len(side.sampler.calls) == 3, "the turn that was given up is asked for again"
    side.session.check_replayed()


@in_loop
async def test_turns_that_overlapped_may_come_in_another_order(tmp_path):
    gate = asyncio.Event()
    side = side_of(tmp_path, families.QUICKSTART, Said("slow", gate=gate), "fast", "next", tools=())
    slow = asyncio.ensure_future(side.session.answer([USER]))
    fast = await asyncio.create_task(side.session.answer([said(1)]))  # a task begins behind the other one
    gate.set()
    await slow
    side.session.restart()
    # One of the two goes on before the other one has asked again.
    assert (await side.session.answer([said(1)])).number == fast.number
    new = await side.session.answer([said(1), fast.message, said(2)])
    assert not new.is_replayed and new.number == 2
    with pytest.raises(NotReplayable, match="turn 0"):
        side.session.check_replayed()
    assert (await side.session.answer([USER])).message["content"] == "slow"
    side.session.check_replayed()


@in_loop
async def test_no_agent_begins_again_with_a_turn_open(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, Said("a", gate=asyncio.Event()), tools=())
    turn = asyncio.ensure_future(side.session.answer([USER]))
    while not side.sampler.calls:
        await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="1 turns open"):
        side.session.restart()
    turn.cancel()
