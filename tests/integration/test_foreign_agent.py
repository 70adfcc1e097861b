"""A program that speaks OpenAI's API, over the real SGLang: its record is that of the same episode in a worker.

The model has learnt a few sums by heart, so that it calls its tool; at temperature 0 it does the same every time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_support import REPOSITORY
from safetensors.torch import save_file
from servers import Serve, run_config, trust

from gspo_mega.agents.tools import load_tool
from gspo_mega.base.records import Prompt
from gspo_mega.config import load_config
from gspo_mega.data.prompts import encoder_of
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.sampler import Sampler
from gspo_mega.train.rollouts import episode_driver

CALCULATOR = "gspo_mega.data.calculator:calculator"
SCHEMA = load_tool(CALCULATOR).schema
EPISODES = {"max_turns": 4, "max_tokens": 160, "tool_format": "brackets", "num_workers": 1}
ROLLOUT = {"max_new_tokens": 16, "temperature": 1.0}
NUM_SUMS = 3


def learn_by_heart(folder: Path, rows: list[dict]) -> None:
    """Train the model of `folder` on the demonstrations until it follows them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def rendered(messages: list[dict]) -> str:
        return tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False)

    asks = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    whole = [rendered([*ask, *row["response"]]) for ask, row in zip(asks, rows)]
    batch = tokenizer(whole, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for line, ask in enumerate(asks):
        labels[line, : len(tokenizer(rendered(ask), add_special_tokens=False)["input_ids"])] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(400):
        loss = model(**batch, labels=labels).loss
        if loss.item() < 0.03:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1, loss
    names = {name for name in model.state_dict() if name != "lm_head.weight" or not model.config.tie_word_embeddings}
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items() if name in names},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


@pytest.fixture(scope="module")
def calculating(tmp_path_factory):
    """(folder, rows, serve): a real server of a model that calls its calculator."""
    folder = tmp_path_factory.mktemp("calculating")
    make = [sys.executable, str(REPOSITORY / "tools/make_quickstart.py"), str(folder / "made"), "--task", "calculator"]
    subprocess.run([*make, "--num-train", "8", "--num-heldout", "2"], check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "made/data/train.jsonl").read_text().splitlines()][:NUM_SUMS]
    learn_by_heart(folder / "made/model", rows)
    serve = Serve(configured(folder, "tool_loop", tools=[CALCULATOR]), folder / "run", forked=True)
    try:
        serve.wait_for("ready")
        yield folder, rows, serve
    finally:
        serve.stop()


def configured(folder: Path, function: str, options: dict | None = None, tools=()) -> Path:
    episode = {"function": function, "options": options or {}}
    return run_config(
        folder,
        folder / "made/model",
        data={"chat_template": True, "max_prompt_tokens": 96},
        episodes=EPISODES,
        rollout={**ROLLOUT, "episode": episode, "tools": list(tools)},
        server={"start_deadline_seconds": 1200.0},
    )


def episodes_of(calculating, function: str, options: dict | None = None, tools=()):
    """One episode of each sum, one request at a time at temperature 0."""
    from transformers import AutoTokenizer

    folder, rows, serve = calculating
    config = load_config(configured(folder, function, options, tools)).config
    spec = read_model_spec(folder / "made/model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "made/model")
    encoder = encoder_of(config.data, tokenizer)
    params = SamplingParams(16, 0.0, 1.0, -1, tuple(spec.eos_token_ids))
    prompts = []
    for number, row in enumerate(rows):
        messages = encoder.messages_of(row["prompt"])
        text, token_ids = encoder.encode_prompt(row["prompt"], [SCHEMA])
        metadata = {"tools": [SCHEMA]}
        prompts.append(Prompt(f"sum:{number}", "sum", tuple(token_ids), text, row["answer"], metadata, tuple(messages)))

    def decode(token_ids):
        return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    with ServerPool(config.rollout, spec, serve.attempt) as pool:
        pool.wait_ready(1, 60)
        trust(pool)
        sampler = Sampler(config.rollout, pool)

        async def run_all():
            driver = episode_driver(config, tokenizer, spec.eos_token_ids, decode)
            await driver.start()
            try:
                return [
                    await driver.run(prompt, number, f"e{number}", sampler, params)
                    for number, prompt in enumerate(prompts)
                ]
            finally:
                await driver.close()

        return pool.loop.run(run_all())


@pytest.fixture(scope="module")
def in_a_worker(calculating):
    return episodes_of(calculating, "tool_loop", tools=[CALCULATOR])


def test_the_episode_in_a_worker_uses_its_tool(calculating, in_a_worker):
    _, rows, _ = calculating
    for row, episode in zip(rows, in_a_worker):
        assert episode.failure is None
        turns = [node.messages[0] for node in episode.nodes if node.is_sampled]
        assert len(turns) == len(row["response"]) // 2 + 1 >= 2
        assert all(turn.get("tool_calls") for turn in turns[:-1])
        assert turns[-1]["content"] == f"#{row['answer']}"


@pytest.mark.parametrize("way", ["whole", "stream", "messages", "responses"])
def test_a_foreign_agent_leaves_the_record_of_the_episode_in_a_worker(calculating, in_a_worker, way):
    """Tokens, masks, weight versions and the tree are equal, log-probs within 1e-5."""
    command = [sys.executable, str(Path(__file__).with_name("foreign_agent.py")), way]
    foreign = episodes_of(calculating, "foreign", {"command": command})
    counts = [{name: n for name, n in one.counts.items() if "_tokens_" not in name} for one in foreign]
    assert counts == [{}] * NUM_SUMS, "no refusal, no retry, no turn that nobody heard"
    for one, other in zip(foreign, in_a_worker):
        assert one.failure is None, one.failure
        assert [(node.kind, node.parent, node.cause) for node in one.nodes] == [
            (node.kind, node.parent, node.cause) for node in other.nodes
        ]
        (row,), (expected,) = one.rows(), other.rows()
        assert row.prompt.token_ids == expected.prompt.token_ids
        assert row.response_token_ids == expected.response_token_ids
        assert row.response_mask == expected.response_mask and 0 in row.response_mask
        assert row.weight_versions == expected.weight_versions
        np.testing.assert_allclose(row.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-5)


STOPPING = """
import json, os
from openai import OpenAI
task = json.load(open(os.environ["GSPO_MEGA_TASK_FILE"]))
asked = dict(model=os.environ["OPENAI_MODEL"], messages=task["messages"], tools=task["metadata"]["tools"])
(choice,) = OpenAI().chat.completions.create(stop=["*", "+", "-"], **asked).choices
assert choice.finish_reason == "stop" and not choice.message.tool_calls
assert choice.message.content.startswith("[") and choice.message.content[-1].isdigit(), choice
choices = OpenAI().chat.completions.create(n=2, **asked).choices
first, second = (choice.message.tool_calls[0] for choice in choices)
assert first.function == second.function and first.id != second.id
"""


def test_a_stop_string_ends_a_turn_at_its_token_and_several_answers_are_branches(calculating, in_a_worker):
    """At temperature 0 the policy says the beginning of what it says without the stop string, as often as it is asked."""
    foreign = episodes_of(calculating, "foreign", {"command": [sys.executable, "-c", STOPPING]})
    for one, other in zip(foreign, in_a_worker):
        assert one.failure is None, one.failure
        own = {name: count for name, count in one.counts.items() if "_tokens_" not in name}
        assert own == {"num_stop_strings": 1, "num_broken_calls": 1}, "the call lacks its end"
        cut, *whole = one.turns
        said = next(node for node in other.nodes if node.is_sampled)
        end = len(cut.token_ids)
        assert cut.finish_reason == "stop_string" and 1 < end < len(said.token_ids)
        assert list(cut.token_ids) == list(said.token_ids)[:end]
        np.testing.assert_allclose(cut.log_probs, said.log_probs[:end], rtol=0, atol=1e-5)
        assert list(cut.weight_versions) == list(said.weight_versions)[:end]
        assert [list(node.token_ids) for node in whole] == [list(said.token_ids)] * 2
        assert [node.cause for node in one.turns] == ["", "resampled", "resampled"]


def test_an_agent_that_fails_is_that_episodes_failure(calculating):
    first, *rest = episodes_of(
        calculating, "foreign", {"command": [sys.executable, "-c", "raise SystemExit('no such tool')"]}
    )
    assert first.failure.startswith("exception: e0 (prompt sum:0): the agent ended with exit code 1")
    assert "no such tool" in first.failure
    assert len(rest) == NUM_SUMS - 1
