"""The scripts of examples/ run, and compute and read what gspo_mega itself does."""

import asyncio
import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from report_runs import make_run

from gspo_mega.agents.pool import EpisodePool
from gspo_mega.agents.protocol import Task, load_episode
from gspo_mega.agents.session import AgentTurn
from gspo_mega.algorithm.advantages import group_advantages
from gspo_mega.algorithm.objective import policy_objective
from gspo_mega.algorithm.terms import ObjectiveSettings
from gspo_mega.base.errors import JournalError
from gspo_mega.config import load_config
from gspo_mega.config.schema import EpisodeFunction, Episodes
from gspo_mega.launcher.inputs import try_rewards
from gspo_mega.plan import plan_run
from gspo_mega.report.run_record import read_run

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    """Where a run is started: `examples.reward` is found there, by this process and by those that it starts."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def run_script(name, *arguments, cwd=ROOT):
    command = [sys.executable, f"{ROOT}/examples/{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_runs(name, tmp_path):
    arguments = {"journal_to_pandas.py": [make_run(tmp_path / "run")], "own_task.py": [tmp_path / "rows"]}.get(name, [])
    done = run_script(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


# own_task.py


@pytest.mark.parametrize(
    ("response", "reward", "correct"),
    [
        ("1. oak\n2. elm\n3. fir", 1.0, True),
        (" 1. oak\n\n2. elm \n3. fir\n", 1.0, True),
        ("Here is the list:\n1. oak\n2. elm\n3. fir", 0.5 - 0.05, False),
        ("1. oak\n2. fir\n3. elm", 0.5 / 3 - 2 * 0.05, False),
        ("1. elm\n2. fir\n3. oak", 0.0, False),
        ("2. elm\n1. oak\n3. fir", 0.5, False),
        ("", 0.0, False),
    ],
)
def test_the_task_of_ones_own_rewards_part_of_a_list(response, reward, correct):
    from examples.own_task import score

    judged = score(prompt="", response=response, answer="1. oak\n2. elm\n3. fir", metadata={})
    assert judged["reward"] == pytest.approx(reward) and judged["correct"] is correct


def test_the_task_of_ones_own_is_ready_to_run_as_its_text_says(tmp_path):
    assert run_script("own_task.py", tmp_path).returncode == 0
    train, held_out = (
        [json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (len(set(train)), len(set(held_out))) == (400, 100) and not set(train) & set(held_out)
    from examples import own_task

    text = (own_task.__doc__ or "").replace("\\\n", " ")
    (command,) = re.findall(r"gspo-mega train (\S+) (.*)", text)
    overrides = command[1].replace("runs/list-data", str(tmp_path)).split()
    loaded = load_config(ROOT / command[0], [*overrides, f"run.dir={tmp_path}"])
    scores: list[str] = []
    assert try_rewards(loaded, "train", scores) == []
    assert scores[0].endswith("0 for an empty response, 1 for the row's answer as the response")


# gspo_loss.py


@pytest.mark.parametrize("spread", [0.0, 1e-4, 1e-3, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_and_its_gradient_are_those_of_the_policy_objective(spread, dtype):
    from examples.gspo_loss import gspo_loss

    torch.manual_seed(int(spread * 1e6))
    num_groups, group_size, width = 6, 4, 33
    num = num_groups * group_size
    lengths = torch.randint(1, width + 1, (num,))
    mask = torch.arange(width) < lengths[:, None]
    rewards = torch.randint(0, 3, (num,)) / 2
    rewards[:group_size] = 0.1  # a group without a signal
    old = -torch.rand(num, width, dtype=dtype)
    moved = torch.where(mask, old + spread * torch.randn(num, 1, dtype=dtype), float("nan"))  # padding holds anything

    padded = moved.clone().requires_grad_()
    loss = gspo_loss(padded, old, mask, rewards, group_size)
    loss.backward()

    packed = moved[mask].clone().requires_grad_()
    group_ids = torch.arange(num_groups).repeat_interleave(group_size)
    output = policy_objective(
        ObjectiveSettings(),
        log_probs=packed,
        old_log_probs=old[mask],
        mask=torch.ones(len(packed)),
        segment_ids=torch.arange(num).repeat_interleave(lengths),
        num_sequences=num,
        advantages=group_advantages(rewards, group_ids),
        lengths=lengths,
        denominator=float(num),
    )
    output.loss.backward()

    clipped = int((output.clipped_high | output.clipped_low).sum())
    assert (clipped > 0) == (spread >= 1e-3), "the cases are on both sides of the clip"
    torch.testing.assert_close(loss, output.loss, rtol=1e-12, atol=1e-12)
    assert padded.grad is not None and packed.grad is not None
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(padded.grad[mask], packed.grad, rtol=tolerance, atol=tolerance * 1e-3)
    assert not padded.grad[~mask].any() and not padded.grad[:group_size].any()


def test_the_clip_range_is_the_papers():
    from examples.gspo_loss import gspo_loss

    defaults = {name: one.default for name, one in inspect.signature(gspo_loss).parameters.items()}
    settings = ObjectiveSettings()
    assert (defaults["clip_low"], defaults["clip_high"]) == (settings.clip_low, settings.clip_high)


# reward.py


def test_the_reward_is_named_in_the_yaml_and_scored_as_a_run_does():
    from examples.reward import rewards_of

    overrides = ["reward=examples.reward:score", "reward.num_workers=1"]
    assert load_config("configs/gsm8k.yaml", overrides).config.reward.functions[0].function == "examples.reward:score"
    long = "x" * 1000 + " 21"
    assert asyncio.run(rewards_of(["so it is 21.", "210", "", long], "21", overrides)) == [1.0, 0.0, 0.0, 0.9]


def test_the_reward_script_says_where_it_is_started(tmp_path):
    done = run_script("reward.py", cwd=tmp_path)
    assert done.returncode == 1 and f"start it from {ROOT}" in done.stderr


# episode.py


@dataclass
class Guesses:
    """A session whose policy says these texts."""

    texts: list[str]
    seen: list[str] = field(default_factory=list)

    async def answer(self, messages, *, max_new_tokens=None):
        self.seen.append(messages[-1]["content"])
        return AgentTurn(len(self.seen) - 1, {"role": "assistant", "content": self.texts.pop(0)}, "stop", 0)

    def set_reward(self, turn, value):
        raise AssertionError("the episode gives its turns no rewards")

    def restart(self):
        raise AssertionError("nothing was lost")


@pytest.mark.parametrize(
    ("texts", "reward", "hints"),
    [
        (["37"], 1.0, []),
        (["I say 12", "no idea", "90", "it is 37!"], 0.25, ["Too low.", "Answer with a number.", "Too high."]),
        (["1", "2", "3", "4"], 0.0, ["Too low."] * 3),
    ],
)
def test_the_episode_is_played_in_a_worker_as_in_a_run(texts, reward, hints):
    function = EpisodeFunction(function="examples.episode:guess", options={"tries": 4})
    load_episode(function.function, function.options)
    task = Task([{"role": "user", "content": "Guess."}], 37)
    session = Guesses(list(texts))

    async def play():
        async with EpisodePool(Episodes(num_workers=1), function) as pool:
            return await pool.run(task, session, "numbers:0")

    ended = asyncio.run(play())
    assert ended.failure is None, ended.failure
    assert ended.outcome.reward == reward and ended.outcome.correct is (reward > 0)
    assert session.seen == ["Guess.", *hints]


# journal_to_pandas.py


def test_the_journal_is_one_row_per_episode(tmp_path, monkeypatch):
    from examples.journal_to_pandas import rows, table

    run = make_run(tmp_path / "run", num_groups=3)
    found = list(rows(run))
    assert len(found) == 2 * 3 * 2, "steps, groups, samples"
    assert [row["step"] for row in found] == [1] * 6 + [2] * 6
    assert found[1] | {"response": ""} == {
        "step": 1,
        "prompt_id": "train:7",
        "episode_id": "step000000-g00000-s001",
        "reward": 1.0,
        "correct": None,
        "failure": None,
        "num_turns": 1,
        "num_tokens": 2,
        "is_truncated": False,
        "log_prob_mean": -0.75,
        "weight_version": 0,
        "response": "",
    }
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed
    assert table(run) == found


def test_a_step_that_is_being_sampled_is_left_out_and_damage_is_an_error(tmp_path):
    from report_runs import add_trajectories

    from examples.journal_to_pandas import rows

    run = make_run(tmp_path / "run")
    add_trajectories(run, 2, consumed=False)
    assert {row["step"] for row in rows(run)} == {1, 2}
    file = run / "journal" / "step_00000001"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(JournalError, match="damaged at byte"):
        list(rows(run))


# README.md


@pytest.mark.parametrize(("model", "overrides"), [("qwen3_4b", []), ("qwen3_30b_a3b", ["parallel.expert=2"])])
def test_the_sections_of_the_readme_make_a_run(model, overrides, tmp_path):
    sections = re.search(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    own = yaml.safe_load((ROOT / "configs/gsm8k.yaml").read_text()) | yaml.safe_load(sections.group(1))
    (tmp_path / "my_run.yaml").write_text(yaml.safe_dump(own))
    loaded = load_config(tmp_path / "my_run.yaml", overrides, "train")
    assert plan_run(loaded, model=f"configs/models/{model}.json").layout.data == 4


# docs/api.md


def test_the_code_of_the_page_on_the_api_runs(tmp_path, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/api.md").read_text(), re.MULTILINE | re.DOTALL)
    objective, planning, reading = blocks
    exec(objective, {})
    assert "0.2500" in capsys.readouterr().out
    exec(planning, {})
    assert "fits" in capsys.readouterr().out
    exec(reading.replace("runs/quickstart/train", str(make_run(tmp_path / "run"))), {})
    assert capsys.readouterr().out.endswith("gspo [(1, 'failed'), (2, 'finished')]\n")


def test_a_run_is_read_as_the_page_on_the_api_says(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    assert len(run.steps) == len(run.times) == len(run.series["reward/mean"]) == 12
    assert dict(zip(run.steps, run.series["reward/mean"]))[12] == pytest.approx(0.63)
    assert run.settings["objective.clip_low"] == 0.003
    assert [attempt.state for attempt in run.attempts] == ["failed", "finished"]
