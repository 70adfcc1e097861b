"""Demonstrated conversations as tokens: what the assistant says is learned, what others say is not, and every token is
one that an episode would have recorded.
"""

import asyncio
import itertools

import chat_templates as families
import pytest
from chat_templates import TOOLS, call_of, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.agents.demonstrated import DemonstrationEncoder
from gspo_mega.agents.messages import format_of
from gspo_mega.agents.session import Conversation, EpisodeSession
from gspo_mega.agents.turn import Limits, Turn
from gspo_mega.base.episodes import Episode
from gspo_mega.base.errors import DataError
from gspo_mega.base.records import Prompt
from gspo_mega.data import calculator
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.templates import SuffixRule

ENDS = ("<|im_end|>", "<|endoftext|>")
PROMPT = [{"role": "user", "content": "47*86+39="}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [call_of({"expression": "2+2"})]}
RESULT = {"role": "tool", "content": "4"}


@pytest.fixture
def conversation(tmp_path):
    def make(template, tool_format, *, turns=8, tokens=2000, turn=500, tools=TOOLS):
        tokenizer = tokenizer_with(tmp_path, template)
        rule = SuffixRule(
            PromptEncoder(tokenizer, chat_template=True), tokenizer.convert_tokens_to_ids(list(ENDS)), tools
        )
        made = DemonstrationEncoder(
            rule,
            format_of(tool_format, template, tools),
            Limits(turns, tokens),
            turn,
        )
        return tokenizer, made

    return make


def learned(tokenizer, row):
    """The texts of the runs with mask 1, and those between them."""
    runs = []
    for token, active in zip(row.response_token_ids, row.response_mask, strict=True):
        if not runs or runs[-1][0] != active:
            runs.append((active, []))
        runs[-1][1].append(token)
    return [(active, tokenizer.decode(tokens)) for active, tokens in runs]


def test_the_calculators_demonstrations(conversation):
    tokenizer, encode = conversation(calculator.CHAT_TEMPLATE, "brackets")
    [row] = encode(PROMPT, calculator.demonstrate(calculator.Problem(47, 86, "+", 39)))
    assert tokenizer.decode(row.prompt_token_ids) == (
        "<|im_start|>system\ntools: calculator(expression)<|im_end|>\n<|im_start|>user\n47*86+39=<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    between = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert learned(tokenizer, row) == [
        (1, "[47*86]<|im_end|>"),
        (0, between.format("4042")),
        (1, "[4042+39]<|im_end|>"),
        (0, between.format("4081")),
        (1, "#4081<|im_end|>"),
    ]


def test_calls_in_openai_form(conversation):
    tokenizer, encode = conversation(families.THINKING, "hermes")
    [row] = encode(
        PROMPT, [{**CALLED, "reasoning_content": "Two and two."}, RESULT, {"role": "assistant", "content": "4"}]
    )
    first, second, third = learned(tokenizer, row)
    assert first == (
        1,
        '<think>\nTwo and two.\n</think>\n\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n'
        "</tool_call><|im_end|>",
    )
    assert second[0] == 0 and "<tool_response>\n4\n</tool_response>" in second[1]
    assert third[0] == 1 and third[1].endswith("4<|im_end|>")


def test_a_template_that_drops_thinking_makes_a_row_for_each_way_and_learns_each_turn_once(conversation):
    tokenizer, encode = conversation(families.THINKING, "hermes", tools=None)
    said = [{"role": "assistant", "content": f"{n}", "reasoning_content": f"thought {n}"} for n in range(2)]
    first, second = encode(PROMPT, [said[0], {"role": "user", "content": "And?"}, said[1]])
    assert [text for active, text in learned(tokenizer, first)] == ["<think>\nthought 0\n</think>\n\n0<|im_end|>"]
    assert [text for active, text in learned(tokenizer, second)] == ["<think>\nthought 1\n</think>\n\n1<|im_end|>"]
    assert "thought" not in tokenizer.decode(second.prompt_token_ids)
    assert "And?" in tokenizer.decode(second.prompt_token_ids)


def test_what_no_rollout_could_produce_is_too_long(conversation):
    demonstration = calculator.demonstrate(calculator.Problem(47, 86, "+", 39))

    def rows(**limits):
        return conversation(calculator.CHAT_TEMPLATE, "brackets", **limits)[1](PROMPT, demonstration)

    [row] = rows()
    longest = len("[4042+39]") + 1  # characters are tokens here, and the end token is one
    assert rows(turns=3, tokens=row.num_tokens, turn=longest) == (row,)
    for too_little in (
        dict(turns=2),
        dict(tokens=row.num_tokens - 1),
        dict(turn=longest - 1),
    ):
        assert rows(**too_little) is None


@pytest.mark.parametrize(
    ("template", "tool_format", "messages", "said"),
    [
        (
            families.THINKING,
            "hermes",
            [CALLED, RESULT, RESULT, {"role": "assistant", "content": "4"}],
            "message 1 has 1 tool calls, and 2 results of tools follow it",
        ),
        (
            families.THINKING,
            "hermes",
            [{"role": "assistant", "content": "I know."}, RESULT, {"role": "assistant", "content": "4"}],
            "message 1 has 0 tool calls, and 1 results",
        ),
        (
            families.THINKING,
            "hermes",
            [{"role": "assistant", "content": "<tool_call>{</tool_call>"}],
            "message 1: the run would not read its tool calls (episodes.tool_format: hermes; read: none; broken: 1)",
        ),
        (
            calculator.CHAT_TEMPLATE,
            "brackets",
            [CALLED, RESULT, {"role": "assistant", "content": "4"}],
            "the chat template has no place for the calls of an assistant's message",
        ),
    ],
)
def test_what_no_rollout_could_bring_about_is_refused(conversation, template, tool_format, messages, said):
    _, encode = conversation(template, tool_format)
    with pytest.raises(DataError) as caught:
        encode(PROMPT, messages)
    assert said in str(caught.value)


class Scripted:
    """Samples what it is told to."""

    def __init__(self, turns):
        self.turns = list(turns)

    async def sample(self, name, token_ids, params, request_id, prefer=None, on_tokens=None):
        tokens = list(self.turns.pop(0))
        return Turn(tokens, [-1.0] * len(tokens), [3] * len(tokens), "stop")


class Params:
    max_new_tokens = 10_000
    temperature, top_p, top_k, min_p = 1.0, 1.0, -1, 0.0

    def at_most(self, num_tokens):
        return self


def recorded(tokenizer, template, tool_format, tools, prompt, messages, sampled):
    """The rows of an episode in which the policy samples `sampled` and an agent says the rest of `messages`."""
    rule = SuffixRule(PromptEncoder(tokenizer, chat_template=True), tokenizer.convert_tokens_to_ids(list(ENDS)))
    chat = Conversation(tokenizer.decode, rule, tool_format=tool_format, template=template)
    task = Prompt("p", "s", (), "", messages=tuple(prompt))
    session = EpisodeSession(chat, "e", task, Scripted(sampled), Params(), Limits(100, 100_000), tools)

    async def act():
        history, calls = list(prompt), []
        for message in messages:
            if message["role"] == "assistant":
                history.append(await session.turn(history))
                calls = list(history[-1].get("tool_calls") or [])
            elif message["role"] == "tool":
                call = calls.pop(0)
                history.append({**message, "tool_call_id": call["id"], "name": call["function"]["name"]})
            else:
                history.append(message)

    try:
        asyncio.run(act())
    finally:
        chat.close()
    return Episode("e", 0, task, session.nodes).rows()


PIECES = st.sampled_from([*"ab1 \n", "é", "漢", "<|im_end|>", "<", "["])
SAID = st.lists(PIECES, max_size=6).map("".join).map(str.strip)
EXPRESSION = st.from_regex(r"[1-9]{1,2}[-+*][1-9]", fullmatch=True)


@st.composite
def dialogues(draw, in_brackets):
    """A prompt, and what follows it. Calls are text in brackets, or in OpenAI's form with thinking beside them."""
    messages = []
    num_turns = draw(st.integers(1, 4))
    for number in range(num_turns):
        said = draw(SAID.filter(lambda text: "[" not in text)) or "x"
        message = {"role": "assistant", "content": said}
        calls = draw(st.lists(EXPRESSION, max_size=2))
        if in_brackets:
            message["content"] += "".join(f"[{call}]" for call in calls)
        else:
            if calls:
                message["tool_calls"] = [call_of({"expression": call}) for call in calls]
            if draw(st.booleans()):
                message["reasoning_content"] = draw(SAID) or "hm"
        messages.append(message)
        if number < num_turns - 1:
            results = [{"role": "tool", "content": draw(SAID)} for _ in calls]
            messages += results or [{"role": "user", "content": draw(SAID) or "go on"}]
    return [{"role": "user", "content": draw(SAID) or "?"}], messages


@pytest.mark.parametrize(
    ("template", "tool_format", "in_brackets"),
    [(calculator.CHAT_TEMPLATE, "brackets", True), (families.THINKING, "hermes", False)],
    ids=["calculator", "thinking"],
)
def test_a_demonstrations_tokens_are_those_of_an_episode_that_samples_its_texts(
    conversation, template, tool_format, in_brackets
):
    tokenizer, encode = conversation(template, tool_format, turns=100, tokens=100_000, turn=10_000)
    num_rows = []

    @given(dialogues(in_brackets))
    @settings(max_examples=25, deadline=None)
    def check(dialogue):
        prompt, messages = dialogue
        rows = encode(prompt, messages)
        num_rows.append(len(rows))
        sampled = [tokens for row in rows for tokens in runs_of(row)]
        episode = recorded(tokenizer, template, tool_format, TOOLS, prompt, messages, sampled)
        assert [(row.prompt.token_ids, tuple(row.response_token_ids), tuple(row.response_mask)) for row in episode] == [
            (row.prompt_token_ids, row.response_token_ids, row.response_mask) for row in rows
        ]
        assert sum(row.num_learned for row in rows) == sum(map(len, sampled))

    check()
    # Only the template with thinking writes earlier turns in another way.
    assert max(num_rows) == 1 if in_brackets else max(num_rows) > 1


def runs_of(row):
    """The tokens of each turn that a row learns; two turns are never next to each other."""
    groups = itertools.groupby(zip(row.response_token_ids, row.response_mask, strict=True), lambda pair: pair[1])
    return [[token for token, _ in run] for active, run in groups if active]
