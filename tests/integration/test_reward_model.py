"""A reward model from its fitting to the reward of a response: `gspo-mega reward-model`, a real SGLang server, the
scoring pool, and transformers' own forward to compare with.
"""

import asyncio
import json
import subprocess
import sys

import pytest
import torch
from run_configs import smallest_yaml
from safetensors.torch import load_file
from servers import START_SECONDS, Serve, run_config
from tiny_models import make_model

from gspo_mega.base.episodes import one_turn_episode
from gspo_mega.base.records import Prompt
from gspo_mega.config.schema import ModelReward, Reward, RewardFunction
from gspo_mega.rewards.pool import ScoringPool
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.rollout.server.reward_server import RewardServers, reward_folder

CONTEXT, TOLERANCE = 200, 1e-4


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A reward model, fitted on right and wrong sums."""
    folder = tmp_path_factory.mktemp("reward_model")
    rows = [
        {"prompt": f"{a}+{b}=", "response": f"#{a + b + wrong}", "label": int(not wrong)}
        for a in range(8)
        for b in range(8)
        for wrong in (0, 1)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(folder / "model", moe=False)
    words = ["--out", str(folder / "fitted"), "--epochs", "4", "--lr", "1e-3", "--held-out", "0"]
    command = [sys.executable, "-m", "gspo_mega", "reward-model", str(model), str(folder / "sums.jsonl"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "epoch 4/4  loss 0." in done.stdout, done.stdout + done.stderr
    return folder / "fitted"


@pytest.fixture(scope="module")
def attempt(fitted, tmp_path_factory):
    """An attempt with a supervised server of it, `gspo-mega serve --reward-model sums`."""
    folder = tmp_path_factory.mktemp("served")
    reward = {
        "functions": [{"function": "sums"}],
        "model": [{"name": "sums", "path": str(fitted), "dtype": "fp32", "context_tokens": CONTEXT}],
    }
    config = run_config(folder, fitted.parent / "model", reward=reward)
    serve = Serve(config, folder / "run", words=("--reward-model", "sums"), forked=True)
    attempt, serve.attempt = serve.attempt, reward_folder(serve.attempt, "sums")
    try:
        serve.wait_for("ready")
        yield attempt
    finally:
        serve.stop()


def test_what_is_written_is_a_classifier_with_a_bias_of_zero(fitted):
    report = json.loads((fitted / "reward_model.json").read_text())
    assert report["losses"][-1] < report["losses"][0] and len(report["losses"]) == 4
    assert report["num_trained"] == 128 and report["accuracy"] is None
    assert load_file(fitted / "model.safetensors")["score.bias"].tolist() == [0.0]
    assert json.loads((fitted / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]


def test_the_served_reward_is_that_of_transformers(fitted, attempt):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pairs = [("3+4=", "#7"), ("3+4=", "#8"), ("", "x"), ("Ünicode 5+5=", "#10" * 40), ("long", "y" * 2 * CONTEXT)]
    pairs += [(f"{a}+1=", f"#{a + 1}") for a in range(20)]
    reward = Reward(
        functions=(RewardFunction(function="sums", weight=2.0),),
        model=(ModelReward(name="sums", path=str(fitted), retries=0),),
        num_workers=1,
    )

    async def scored():
        episodes = [
            one_turn_episode(
                str(index), 0, Prompt("d:0", "d", (1,), prompt, None, {}), [1], [0.0], [0], "stop", response
            )
            for index, (prompt, response) in enumerate(pairs)
        ]
        async with ScoringPool(reward, None, lambda name: RewardServers(attempt, name, START_SECONDS)) as pool:
            await asyncio.gather(*(pool.score(episode) for episode in episodes))
        return episodes, pool

    episodes, pool = asyncio.run(scored())
    tokenizer = AutoTokenizer.from_pretrained(fitted)
    model = AutoModelForSequenceClassification.from_pretrained(fitted).eval()
    for (prompt, response), episode in zip(pairs, episodes, strict=True):
        if prompt == "long":  # beyond the server's context: this response alone has no reward
            assert episode.reward is None and "status 400" in str(episode.reward_error)
            continue
        with torch.no_grad():
            expected = 2 * model(**tokenizer(prompt + response, return_tensors="pt")).logits.item()
        assert episode.reward == pytest.approx(expected, abs=TOLERANCE), (prompt, response, episode.reward_error)
    assert read_registrations(attempt.servers_dir) == []  # where the pool and a publish look
    assert pool.failure_counts["status"] == 1 and sum(pool.failure_counts.values()) == 1
    assert len({round(episode.reward, 3) for episode in episodes if episode.reward is not None}) > 3


def test_ranks_of_a_layout_fit_one_too(fitted):
    """As a user starts it: two tensor ranks of a run's file, on this machine."""
    from transformers import AutoModelForSequenceClassification

    folder = fitted.parent
    (folder / "run.yaml").write_text(smallest_yaml())
    words = ["--out", str(folder / "by_ranks"), "--epochs", "2", "--lr", "1e-3", "--max-tokens", "64"]
    words += ["--ranks", str(folder / "run.yaml"), "cluster.ranks_per_node=2", "parallel.tensor=2", "precision=fp32"]
    command = [sys.executable, "-m", "gspo_mega", "reward-model", str(folder / "model"), str(folder / "sums.jsonl")]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 2/2  loss 0." in done.stdout and "held-out accuracy" in done.stdout
    report = json.loads((folder / "by_ranks" / "reward_model.json").read_text())
    assert report["losses"][-1] < report["losses"][0] and (report["num_trained"], report["num_held_out"]) == (115, 13)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder / "by_ranks")
    assert loaded.score.weight.shape[0] == 1 and loaded.score.weight.abs().max() > 0
