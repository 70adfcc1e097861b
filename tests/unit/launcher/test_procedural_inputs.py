"""A run with `data.reasoning_gym`, up to its first reward: the rows are made before anything starts, read as prompts,
and scored.

A Python that has a stand-in of the package is named, as a user names that of the package's own environment.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from procedural_package import write_package

from gspo_mega.base.episodes import one_turn_episode
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.config.prompt_sources import HELD_OUT, eval_sets, source_rewards
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.data.prompts import load_prompts
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.rewards.pool import ScoringPool
from gspo_mega.train.held_out import HeldOut

SHAPE = str(Path(__file__).parents[3] / "configs" / "models" / "quickstart_dense.json")
CONFIG = """\
run: {name: test}
model: {path: m}
batch: {prompts_per_step: 4, group_size: 4, micro_batch_tokens: 256}
optimizer: {lr: 1e-6}
data:
  reasoning_gym: {tasks: {sums: 2, raises: 1}, num_rows: 12, num_held_out: 3, folder: %(folder)s}
  procedural_python: %(python)s
  max_prompt_tokens: 16
reward: {functions: [{function: reasoning_gym, options: {python: %(python)s}}], num_workers: 1}
rollout: {max_new_tokens: 32}
train: {num_steps: 2}
eval: {}
"""


@pytest.fixture
def made(tmp_path):
    """(configuration's file, folder of the rows, Python that has the package)"""
    write_package(tmp_path / "packages")
    python = tmp_path / "gym-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG % {"folder": tmp_path / "made", "python": python})
    return config, tmp_path / "made", python


def planned(config, capsys, *more):
    code = main(["plan", str(config), "--model", SHAPE, *more])
    return code, capsys.readouterr()


def test_the_rows_are_made_where_a_command_reads_them_read_as_prompts_and_scored(made, tmp_path, capsys):
    config_file, folder, _ = made
    code, said = planned(config_file, capsys)
    assert code == 0 and not folder.exists(), "a plan of no command reads nothing"
    code, said = planned(config_file, capsys, "--command", "train")
    line = f"data.reasoning_gym: 2 tasks written to {folder} (reasoning-gym 0.0)"
    assert code == 0 and line in said.out, said
    code, said = planned(config_file, capsys, "--command", "train")
    assert code == 0 and "data.reasoning_gym" not in said.out, "made once"

    config = load_config(config_file, [], "train").config
    (tmp_path / "m").mkdir()
    write_tokenizer(tmp_path / "m")
    tokenizer = load_tokenizer(str(tmp_path / "m"))
    held_out = HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, tokenizer)
    (own,) = held_out.sets
    sums, raises = load_prompts(config.data, tokenizer, held_out.check_of)
    assert [(one.name, len(one)) for one in (sums, raises)] == [("sums", 12), ("raises", 12)]
    assert len(own.prompts) == 6 and {prompt.source for prompt in own.prompts} == {HELD_OUT}
    trained = [prompt for source in (sums, raises) for prompt in source.items(None)]
    assert not {prompt.text for prompt in trained} & {prompt.text for prompt in own.prompts}

    right, wrong = (sums.item(0), f"<answer>{sums.item(0).answer}</answer>"), (sums.item(1), "x")
    asked = [right, wrong, (raises.item(0), "x"), (own.prompts[0], own.prompts[0].answer)]
    episodes = [
        one_turn_episode(f"{number}", number, prompt, [1], [0.0], [0], "stop", response)
        for number, (prompt, response) in enumerate(asked)
    ]

    async def score_all():
        async with ScoringPool(config.reward, source_rewards(config.eval, config.data)) as pool:
            await asyncio.gather(*map(pool.score, episodes))

    asyncio.run(score_all())
    assert [(one.reward, one.correct) for one in episodes] == [(1.0, True), (0.01, False), (None, None), (1.0, True)]
    assert "ValueError: no" in episodes[2].reward_error


def test_what_cannot_be_made_stops_the_command(made, capsys):
    config_file, folder, _ = made
    code, said = planned(config_file, capsys, "--command", "train", "data.reasoning_gym.tasks={sum: 1}")
    assert code == 2 and "data.reasoning_gym.tasks: sum: ValueError: Dataset 'sum' not registered" in said.err
    assert planned(config_file, capsys, "--command", "eval")[0] == 0, "an evaluation reads the held-out rows"
    code, said = planned(config_file, capsys, "--command", "train", "data.reasoning_gym.seed=1")
    assert code == 2 and f"{folder}: its files were made with another data.reasoning_gym.seed" in said.err
    row = json.loads((folder / "sums.train.jsonl").read_text().splitlines()[0])
    del row["answer"]
    (folder / "sums.train.jsonl").write_text(json.dumps(row) + "\n")
    code, said = planned(config_file, capsys, "--command", "train")
    assert (
        code == 2
        and f"{config_file}:6:3: data.reasoning_gym: {folder / 'sums.train.jsonl'}:1: no key 'answer'" in said.err
    )
