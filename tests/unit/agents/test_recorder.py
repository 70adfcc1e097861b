"""The tree that an agent's histories make: by hand, and for any agent (hypothesis), checked against every path."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.agents.recorder import Recorder
from gspo_mega.agents.turn import Turn
from gspo_mega.base.episodes import Episode, check_episode
from gspo_mega.base.errors import DataError
from gspo_mega.base.records import Prompt
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.data.templates import Rendered

USER = {"role": "user", "content": "2+2?"}
MORE = {"role": "user", "content": "And 5?"}
TOOL = {"role": "tool", "tool_call_id": "c0000t000", "content": "4"}
SAID = {"role": "assistant", "content": "4"}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "hm"}


def calling(arguments, name="calculator", call_id="c0000t000", **more):
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


class Agent:
    """Asks for turns as a session does, without template or server: every context and turn has tokens of its own."""

    def __init__(self, routes=False):
        self.recorder = Recorder()
        self.routes = routes
        self.number = 0
        self.causes: list[str] = []

    def turn(self, messages, message=SAID, *, tools=None, rewrites=False, finish_reason="stop"):
        recorder = self.recorder
        place = recorder.locate(messages, tools)
        if rewrites and place.node >= 0 and recorder.nodes[place.node].is_sampled:
            place = place.rewritten()
        node, cause = place.node, place.cause
        if node < 0 or recorder.nodes[node].is_sampled:
            text = f"<{len(recorder.nodes)}>"
            rendered = Rendered([1000 + self.number, 7], text)
            node, cause = recorder.add_context(place, rendered, tools), ""
        self.number += 1
        tokens = [self.number * 10, self.number * 10 + 1, 2]
        versions = [3] * 3
        num_behind = len(recorder.tokens(node)) + 3 - 1
        routes = np.arange(num_behind, dtype=np.int32).reshape(-1, 1, 1) if self.routes else None
        turn = Turn(tokens, [-0.5] * 3, versions, finish_reason, routes, "server-1")
        made = recorder.add_sampled(node, message, turn, message["content"], cause)
        self.causes.append(place.cause)
        return made

    @property
    def episode(self):
        return Episode("e", 0, Prompt("p:0", "p", (), ""), self.recorder.nodes)


def test_a_conversation_is_one_path():
    agent = Agent()
    first = agent.turn([USER], calling('{"expression": "2+2"}'))
    second = agent.turn([USER, calling('{"expression": "2+2"}'), TOOL])
    assert [node.parent for node in agent.recorder.nodes] == [-1, 0, 1, 2] and (first, second) == (1, 3)
    assert agent.recorder.nodes[2].messages == [TOOL]
    assert agent.episode.num_branches == 0 and agent.causes == ["", ""]
    assert agent.recorder.tokens(3) == [1000, 7, 10, 11, 2, 1001, 7, 20, 21, 2]
    gaps = [(one.sampled, one.gap, one.stop_token) for one in agent.recorder.history(3)]
    assert gaps == [(False, "", None), (True, "<0>", 2), (False, "", None), (True, "<2>", 2)]


@pytest.mark.parametrize(
    "handed_back",
    [
        calling('{"expression":"2+2"}'),
        calling({"expression": "2+2"}),
        calling('{\n"expression": "2+2"}', content=None, refusal=None, audio=None, function_call=None),
        calling('{"expression": "\\u0032+2"}', call_id="call_another", annotations=[]),
        {key: value for key, value in calling('{"expression": "2+2"}').items() if key != "content"},
        calling('{"expression": "2+2"}', content=[{"type": "text", "text": ""}]),
        calling('{"expression": "2+2"}', reasoning_content="let me"),
        calling('{"expression": "2+2"}', reasoning_content=None),
    ],
)
def test_what_clients_hand_back_continues(handed_back):
    agent = Agent()
    agent.turn([USER], calling('{"expression": "2+2"}', reasoning_content="let me"))
    place = agent.recorder.locate([USER, handed_back, TOOL])
    assert (place.node, place.new, place.cause) == (1, [TOOL], "")


@pytest.mark.parametrize(
    "handed_back",
    [
        calling('{"expression": "2+3"}', reasoning_content="let me"),
        calling('{"expression": "2+2"}', name="other"),
        calling('{"expression": "2+2"}', content="x"),
        calling('{"expression": "2+2"}', reasoning_content="other"),
        calling('{"expression": "2+2"}', reasoning_content=""),
        calling('{"expression": "2+2"'),
        {"role": "assistant", "content": ""},
        SAID,
    ],
)
def test_what_an_agent_changes_branches(handed_back):
    agent = Agent()
    agent.turn([USER], calling('{"expression": "2+2"}', reasoning_content="let me"))
    place = agent.recorder.locate([USER, handed_back, TOOL])
    assert (place.node, place.cause) == (-1, "edited") and len(place.new) == 3


def test_causes_by_hand():
    agent = Agent()
    agent.turn([USER])
    agent.turn([USER, SAID, MORE])
    agent.turn([USER, SAID, MORE])
    agent.turn([USER, SAID, {"role": "user", "content": "And 6?"}])
    agent.turn([MORE])
    agent.turn([USER, SAID, {"role": "assistant", "content": "by hand"}, MORE])
    agent.turn([USER, {"role": "assistant", "content": "by hand"}, MORE])
    agent.turn([USER], tools=[{"type": "function"}])
    assert agent.causes == ["", "", "resampled", "edited", "edited", "not_ours", "edited", "edited"]
    assert agent.episode.branch_causes == ["resampled", "edited", "edited", "not_ours", "edited", "edited"]


def test_a_turn_that_was_never_asked_of_the_policy_is_not_ours():
    agent = Agent()
    agent.turn([USER, TOOL, MORE])
    place = agent.recorder.locate([USER, SAID, MORE])
    assert (place.node, place.cause) == (-1, "not_ours")
    first = Agent()
    first.turn([USER, SAID, MORE])  # few-shot examples are no branch
    assert first.causes == [""]


def test_a_template_that_rewrites_makes_a_root_that_is_gone_on_with():
    agent = Agent()
    agent.turn([USER], THOUGHT)
    agent.turn([USER, THOUGHT, MORE], THOUGHT, rewrites=True)
    assert [node.parent for node in agent.recorder.nodes] == [-1, 0, -1, 2]
    place = agent.recorder.locate([USER, SAID, MORE, SAID, MORE])
    assert (place.node, place.new) == (3, [MORE]), "thinking that a client drops is still there"
    assert agent.episode.branch_causes == ["template"]


def test_the_agent_lets_it_speak_again():
    agent = Agent()
    agent.turn([USER])
    agent.turn([USER, SAID])
    agent.turn([USER, SAID])
    nodes = agent.recorder.nodes
    assert [node.parent for node in nodes] == [-1, 0, 1, 2, 2] and nodes[2].messages == []
    assert agent.episode.branch_causes == ["resampled"]


def test_turns_that_said_the_same_are_told_apart_by_the_ids_of_their_calls_and_then_by_who_is_free():
    agent = Agent()
    one, two = calling("{}", call_id="c0000t000"), calling("{}", call_id="c0001t000")
    agent.turn([USER], one)
    agent.turn([USER], two)
    assert agent.recorder.locate([USER, one, TOOL]).node == 1
    assert agent.recorder.locate([USER, two, TOOL]).node == 2
    agent.turn([USER, calling("{}", call_id="unknown"), TOOL])  # the last one of them
    assert agent.recorder.nodes[3].parent == 2
    assert agent.recorder.locate([USER, calling("{}", call_id="unknown"), MORE]).node == 1, "nothing follows it yet"


def test_the_same_context_twice_is_one_node_and_an_unused_one_makes_no_branch():
    agent = Agent()
    recorder = agent.recorder
    place = recorder.locate([USER])
    first = recorder.add_context(place, Rendered([1, 2], "a"))
    assert recorder.add_context(recorder.locate([USER]).rewritten(), Rendered([1, 2], "a")) == first
    agent.turn([USER])
    agent.turn([MORE])
    assert recorder.nodes[2].cause == "edited"
    recorder.add_context(recorder.locate([TOOL]), Rendered([5], "b"))  # its turn was refused
    assert agent.episode.branch_causes == ["edited"] and agent.episode.num_branches == 1


def test_turns_that_are_asked_for_at_the_same_time_are_told_apart():
    recorder = Recorder()
    places = [recorder.locate([USER]) for _ in range(2)]
    nodes = [recorder.add_context(place, Rendered([1], "a")) for place in places]
    turn = Turn([5, 2], [-1.0, -1.0], [0, 0], "stop")
    made = [recorder.add_sampled(node, SAID, turn, "4", place.cause) for node, place in zip(nodes, places, strict=True)]
    assert (nodes, made) == ([0, 0], [1, 2])
    assert [node.cause for node in recorder.nodes] == ["", "", "resampled"]


def test_routes_are_cut_to_the_nodes_own():
    agent = Agent(routes=True)
    agent.turn([USER])
    agent.turn([USER, SAID, MORE])
    agent.turn([USER, SAID, MORE])
    check_episode(agent.episode)
    for row in agent.episode.rows():
        assert row.routed_experts[:, 0, 0].tolist() == list(range(row.num_tokens - 1))
    assert agent.recorder.nodes[3].routed_experts.base is None, "the whole context's does not stay in memory"


def test_what_was_recorded_is_the_recorders_own():
    agent = Agent()
    messages, said = [dict(USER)], dict(SAID)
    agent.turn(messages, said)
    messages[0]["content"] = said["content"] = "changed"
    assert agent.recorder.nodes[0].messages == [USER] and agent.recorder.nodes[1].messages == [SAID]
    assert agent.recorder.locate([USER, SAID, MORE]).node == 1


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", 'message 1 is not of the form {"role"'),
        ({"content": "x"}, "message 1 is not of the form"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls that are no list"),
        ({"role": "assistant", "tool_calls": [3]}, "a tool call that is not of the form"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "without the name of its function"),
        ({"role": "user", "content": json.loads("[" * 500 + "]" * 500)}, "nests deeper than 64 levels"),
    ],
)
def test_what_is_no_message_is_refused(message, error):
    with pytest.raises(DataError, match=error):
        Recorder().locate([USER, message])


def respelt(draw, message):
    """An assistant's message as a client hands it back."""
    if message["role"] != "assistant":
        return message
    message = copy.deepcopy(message)
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = draw(
            st.sampled_from([json.dumps(json.loads(call["function"]["arguments"]), indent=1), '{"x":1}'])
            if call["function"]["arguments"] == '{"x": 1}'
            else st.just(call["function"]["arguments"])
        )
    if not message["content"]:
        message["content"] = draw(st.sampled_from([None, "", []]))
    if draw(st.booleans()):
        message |= {"refusal": None, "reasoning_content": None}
    return message


@st.composite
def asked(draw, told):
    """A history: one that was told, cut, edited, extended; or a new one."""
    users = st.sampled_from([USER, MORE, TOOL])
    strangers = st.sampled_from([USER, MORE, TOOL, SAID, THOUGHT, {"role": "assistant", "content": "by hand"}])
    history = list(draw(st.sampled_from(told))) if told and draw(st.integers(0, 4)) else [draw(users)]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(history)))
        change = draw(st.sampled_from(["cut", "replace", "insert", "drop"]))
        if change == "cut":
            history = history[: max(1, place)]
        elif change == "insert":
            history.insert(place, draw(strangers))
        elif place < len(history) and (change == "replace" or len(history) > 1):
            history[place : place + 1] = [draw(strangers)] if change == "replace" else []
    return [respelt(draw, message) for message in [*history, *draw(st.lists(users, max_size=2))]]


answers = st.sampled_from([SAID, {**SAID, "content": ""}, THOUGHT, calling('{"x": 1}'), calling("{}"), calling("no")])
TOOL_LISTS = [None, [], [{"type": "function", "function": {"name": "f"}}]]


@settings(deadline=None)
@given(st.data())
def test_every_sampled_token_is_in_exactly_one_row_whatever_an_agent_hands_back(data):
    agent = Agent(routes=data.draw(st.booleans()))
    told: list[list[dict]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        history = data.draw(asked(told))
        tools = data.draw(st.sampled_from(TOOL_LISTS))
        place = agent.recorder.locate(history, tools)
        assert place == agent.recorder.locate(copy.deepcopy(history), tools)
        assert continues_as_deep_as_can_be(agent.recorder, place, history, tools)
        answer = data.draw(answers)
        made = agent.turn(
            history,
            answer,
            tools=tools,
            rewrites=data.draw(st.booleans()),
            finish_reason=data.draw(st.sampled_from(["stop", "length"])),
        )
        told.append([*history, answer])
        if data.draw(st.booleans()):  # what was just said goes on where it was said
            after = agent.recorder.locate([*told[-1], MORE], tools)
            assert (
                len(after.new) == 1 and agent.recorder.nodes[after.node].messages == agent.recorder.nodes[made].messages
            )
    episode = agent.episode
    check_episode(episode)
    rows = episode.rows()
    trained = [
        token for row in rows for token, mask in zip(row.response_token_ids, row.response_mask, strict=True) if mask
    ]
    assert sorted(trained) == sorted(token for node in episode.turns for token in node.token_ids)
    assert len({token for token in trained if token != 2}) == 2 * agent.number
    assert len(rows) == 1 + len(episode.branch_causes) and all(episode.branch_causes)
    assert sum(row.weight for row in rows) == pytest.approx(1)
    for row in rows:
        path = episode.tokens(row.turn_nodes[-1])
        assert [*row.prompt.token_ids, *row.response_token_ids] == path


def continues_as_deep_as_can_be(recorder, place, history, tools):
    """No other turn has more of the history before it, by the words of the messages alone."""

    def words(messages):
        return [(one["role"], one.get("content") or "", repr(calls(one))) for one in messages]

    def calls(message):
        found = message.get("tool_calls") or []
        return [(one["function"]["name"], "".join(one["function"]["arguments"].split())) for one in found]

    def matched(node):
        told = [message for one in recorder._path(node) for message in one.messages]
        return len(told) if words(history)[: len(told)] == words(told) else -1

    here = len(history) - len(place.new)
    if place.node >= 0 and matched(place.node) != here:
        return False
    return all(
        matched(node) <= here
        or recorder._tools[recorder._path(node)[0].node_id] != json.dumps(tools or [], sort_keys=True)
        for node, one in enumerate(recorder.nodes)
        if one.is_sampled and thinking_is_kept(recorder, node, history)
    )


def thinking_is_kept(recorder, node, history):
    told = [message for one in recorder._path(node) for message in one.messages]
    return all(
        given.get("reasoning_content") in (None, recorded.get("reasoning_content"))
        for given, recorded in zip(history, told, strict=False)
    )


def test_each_turn_brings_its_own_sampling_masks():
    recorder, masks = Recorder(), [SamplingMasks.of([[5, 9], [2]]), SamplingMasks.of([[6, 7, 8], [2, 3]])]
    said = []
    for number, own in enumerate(masks):
        node = recorder.add_context(recorder.locate([USER, *said]), Rendered([1, 1], "a"))
        turn = Turn([5 + number, 2], [-1.0, -1.0], [0, 0], "stop", sampling_masks=own)
        recorder.add_sampled(node, SAID, turn, "4")
        said += [SAID, MORE]
    episode = Episode("e", 0, Prompt("p:0", "p", (), ""), recorder.nodes)
    check_episode(episode)
    (row,) = episode.rows()
    assert row.sampling_masks == SamplingMasks.join([masks[0], SamplingMasks.none(2), masks[1]])
