"""A language model as a judge, from its prompt to the reward: a real SGLang server's OpenAI route, asked by the scoring
pool. The judge is a small model that was trained to answer two questions: one with a score, one without.
"""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
import torch
from run_configs import make_config
from servers import START_SECONDS
from tiny_models import EOS_TOKEN_ID, make_model

from gspo_mega.base.episodes import one_turn_episode
from gspo_mega.base.records import Prompt
from gspo_mega.config.schema import JudgeReward, Reward, RewardFunction
from gspo_mega.launcher.prepare import free_port
from gspo_mega.rewards.pool import ScoringPool
from gspo_mega.rollout.registration import ensure_secret
from gspo_mega.rollout.server.spec import spec_from_config

TEMPLATE, SYSTEM = "{prompt} {response} ({answer})", "Judge {metadata.topic}."
ANSWERS = {"#7": "I see.\nScore: 9", "#8": "I cannot say."}


def question(response):
    return f"3+4= {response} (7)"


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory):
    """A model whose most likely answer to each question is the one above, by a wide margin."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path_factory.mktemp("judge") / "model", moe=False)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = []
    for response, answer in ANSWERS.items():
        roles = (("system", "Judge sums."), ("user", question(response)))
        messages = [{"role": role, "content": content} for role, content in roles]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rows.append((tokenizer(text).input_ids, [*tokenizer(answer).input_ids, EOS_TOKEN_ID]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(1000):
        losses = []
        for asked, answered in rows:
            logits = model(torch.tensor([asked + answered])).logits[0, len(asked) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answered), reduction="none"))
        if max(loss.max().item() for loss in losses) < 0.1:  # each token has at least 90 % of the probability
            model.save_pretrained(folder)
            return folder
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    raise AssertionError("the judge did not learn its two answers")


@pytest.fixture(scope="module")
def judge_url(judge_model, tmp_path_factory):
    """SGLang as its own command starts it, with a tokenizer; the key is in JUDGE_KEY."""
    folder, port = tmp_path_factory.mktemp("judge_server"), free_port()
    key = ensure_secret(folder / "key")
    spec = spec_from_config(
        make_config(rollout=dict(max_concurrent_requests=4), server=dict(context_tokens=200)),
        model_path=str(judge_model),
        weight_version=None,
        port=port,
        api_key_file=folder / "key",
        attempt="judge",
        index=0,
        generation=1,
        store=folder / "store",
    )
    spec.options["skip_tokenizer_init"] = False
    spec.write(folder / "spec.json")
    entry = [sys.executable, "-m", "gspo_mega.rollout.server.entry", "--spec", str(folder / "spec.json")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*entry, "--parent", str(os.getpid())], stdout=log, stderr=log, env=variables)
    os.environ["JUDGE_KEY"] = str(key)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not is_up(f"{url}/health"):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield f"{url}/v1"
    finally:
        del os.environ["JUDGE_KEY"]
        for process in (*psutil.Process(server.pid).children(recursive=True), server):  # nothing to end in order
            process.kill()
        server.wait(60)


def is_up(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_a_judge_says_a_reward_or_the_scoring_fails(judge_url, judge_model):
    judge = JudgeReward(
        name="helpful",
        url=judge_url,
        api_key_variable="JUDGE_KEY",
        model=str(judge_model),
        prompt=TEMPLATE,
        system_prompt=SYSTEM,
        regex=r"Score:\s*(?P<reward>[0-9]+)",
        lowest=0,
        highest=10,
        max_tokens=40,
        retries=0,
        deadline_seconds=120.0,
    )
    short = judge.model_copy(update={"name": "short", "max_tokens": 3})
    bounded = judge.model_copy(update={"name": "bounded", "highest": 5.0})
    foreign = judge.model_copy(update={"name": "foreign", "api_key_variable": None})

    async def scored(one, *responses):
        reward = Reward(functions=(RewardFunction(function=one.name, weight=0.5),), judge=(one,), num_workers=1)
        prompt = Prompt("d:0", "d", (1,), "3+4=", 7, {"topic": "sums"})
        episodes = [
            one_turn_episode(str(index), 0, prompt, [1], [0.0], [0], "stop", response)
            for index, response in enumerate(responses)
        ]
        async with ScoringPool(reward) as pool:
            await asyncio.gather(*(pool.score(episode) for episode in episodes))
        return episodes, pool.failure_counts

    (right, silent), counts = asyncio.run(scored(judge, "#7", "#8"))
    assert (right.reward, right.reward_parts, right.correct) == (4.5, {"helpful": 9}, None), right.reward_error
    # No score is a failed scoring, with what the judge said; never 0.
    assert silent.reward is None and "has nothing that `regex` finds: 'I cannot say.'" in str(silent.reward_error)
    assert counts["malformed"] == 1 and sum(counts.values()) == 1
    ([cut], _), ([outside], _), ([refused], by) = (asyncio.run(scored(one, "#7")) for one in (short, bounded, foreign))
    assert "it ends at max_tokens, 3" in str(cut.reward_error) and cut.reward is None
    assert "says 9, which is not in 0 to 5" in str(outside.reward_error) and outside.reward is None
    assert "status 401" in str(refused.reward_error) and by["status"] == 1
