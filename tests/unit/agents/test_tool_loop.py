"""The loop of tools: every call is answered before the next turn, the first turn without one ends it, a limit ends it."""

import asyncio
import json
from pathlib import Path

import pytest

from gspo_mega.agents.demonstrated import demonstration_encoder
from gspo_mega.agents.driver import tool_loop
from gspo_mega.agents.protocol import Outcome, Task, TooManyTurns, load_episode, runs_in_worker
from gspo_mega.agents.turn import Turn
from gspo_mega.base.records import Prompt
from gspo_mega.config import load_config
from gspo_mega.data.calculator import CHAT_TEMPLATE, Problem, demonstrate
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.train.rollouts import episode_driver

REPOSITORY = Path(__file__).parents[3]


def call(number, expression):
    return {"id": f"c{number}", "type": "function", "function": {"name": "calculator", "arguments": expression}}


class Policy:
    """Says what it is told to, and then is refused; keeps what it was shown."""

    def __init__(self, *says):
        self.says = list(says)
        self.shown = []

    async def turn(self, messages, *, max_new_tokens=None):
        self.shown.append([*messages])
        if not self.says:
            raise TooManyTurns("no turn left")
        return self.says.pop(0)


class Echo:
    """Answers each call with its arguments."""

    async def answer(self, message):
        return [
            {"role": "tool", "tool_call_id": one["id"], "content": one["function"]["arguments"]}
            for one in message["tool_calls"]
        ]


ASKED = [{"role": "user", "content": "47*86+39="}]
TWO = {"role": "assistant", "content": "", "tool_calls": [call(0, "a"), call(1, "b")]}
ONE = {"role": "assistant", "content": "", "tool_calls": [call(2, "c")]}
LAST = {"role": "assistant", "content": "#4081"}


def test_calls_are_answered_until_a_turn_has_none():
    policy = Policy(TWO, ONE, LAST, LAST)
    task = Task([*ASKED])
    assert asyncio.run(tool_loop(task, policy, Echo())) == Outcome()
    results = [{"role": "tool", "tool_call_id": f"c{number}", "content": "abc"[number]} for number in range(3)]
    assert policy.shown == [ASKED, [*ASKED, TWO, *results[:2]], [*ASKED, TWO, *results[:2], ONE, results[2]]]
    assert task.messages == ASKED


def test_a_first_turn_without_calls_is_the_last():
    policy = Policy(LAST, LAST)
    assert asyncio.run(tool_loop(Task(ASKED), policy, Echo())) == Outcome()
    assert policy.shown == [ASKED]


def test_a_limit_is_not_caught():
    with pytest.raises(TooManyTurns):
        asyncio.run(tool_loop(Task(ASKED), Policy(TWO, ONE), Echo()))


def test_it_is_built_in_takes_no_options_and_runs_where_the_tools_are():
    assert load_episode("tool_loop", {}) is tool_loop and runs_in_worker("tool_loop")


class Scripted:
    """Samples the turns that it is given, as tokens."""

    def __init__(self, turns):
        self.turns = list(turns)

    async def sample(self, name, token_ids, params, request_id, prefer=None, on_tokens=None):
        tokens = self.turns.pop(0)
        return Turn(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")


class Params:
    max_new_tokens = 16
    temperature, top_p, top_k, min_p = 1.0, 1.0, -1, 0.0

    def at_most(self, num_tokens):
        return self


def test_with_the_calculator_in_its_worker_an_episode_has_the_tokens_of_the_demonstration(tmp_path):
    write_tokenizer(tmp_path, CHAT_TEMPLATE)
    tokenizer = load_tokenizer(str(tmp_path))
    config = load_config(REPOSITORY / "configs/calculator.yaml", [], "train").config
    shape = json.loads((REPOSITORY / "configs/models/quickstart_dense.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"eos_token_id": tokenizer.eos_token_id}))
    spec = read_model_spec(tmp_path)
    driver = episode_driver(config, tokenizer, spec.eos_token_ids, tokenizer.decode)
    problem = Problem(47, 86, "+", 39)
    prompt = Prompt("p", "s", (), "", messages=({"role": "user", "content": problem.text},))
    turns = [
        [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
        for message in demonstrate(problem)
        if message["role"] == "assistant"
    ]

    async def run():
        await driver.start()
        try:
            encode = demonstration_encoder(config, tokenizer, [tokenizer.eos_token_id], driver.runner.tool_schemas)
            demonstrated = encode(list(prompt.messages), demonstrate(problem))
            return await driver.run(prompt, 0, "e", Scripted(turns), Params()), demonstrated
        finally:
            await driver.close()

    episode, (demonstrated,) = asyncio.run(run())
    assert episode.failure is None
    assert [(call.turn, call.name, call.arguments, call.result) for call in episode.tool_calls] == [
        (0, "calculator", {"expression": "47*86"}, "4042"),
        (1, "calculator", {"expression": "4042+39"}, "4081"),
    ]
    (row,) = episode.rows()
    assert row.response_text == "#4081"
    assert row.prompt.token_ids == demonstrated.prompt_token_ids
    assert tuple(row.response_token_ids) == demonstrated.response_token_ids
    assert tuple(row.response_mask) == demonstrated.response_mask
