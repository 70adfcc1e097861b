"""A user's reward function is tried on a row of the data before anything starts, as the run would call it."""

import json
import sys
from pathlib import Path

import pytest
from run_configs import smallest_yaml

from gspo_mega.base.errors import ConfigError, EpisodeError, RewardError
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.launcher.inputs import check_users_functions, try_rewards

FUNCTIONS = """
import os, sys, time
import numpy as np

def numpy_bool(*, response, answer, **_):
    right = np.float64(len(response)) >= np.float64(len(answer))
    return {"reward": float(right), "correct": right, "short": np.array(not right)}

def seen(*, prompt, response, answer, metadata):
    assert prompt == "What is 3+4?" and response in ("", "7") and answer == "7" and metadata == {"level": 2}
    return 1

def no_empty(*, response, **_):
    return float(response.split()[-1] == "7")

def in_a_library(*, response, answer, **_):
    return float(__import__("json").loads(response or "{}")["x"])

def no_number(**_):
    return np.array([1.0])

def leaves(**_):
    os._exit(3)

def level(*, metadata, **_):
    return metadata["level"]

def one(**_):
    return 1.0

def sometimes(*, response, **_):
    return {"reward": 1.0, "correct": True} if response else 0.0
"""
SHAPE = str(Path(__file__).parents[3] / "configs" / "models" / "quickstart_dense.json")
ROW = {"prompt": "What is 3+4?", "answer": "7", "level": 2}


@pytest.fixture
def load(tmp_path, monkeypatch):
    (tmp_path / "trial_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "p", "answer": "7"}) + "\n")
    (tmp_path / "c.yaml").write_text(
        smallest_yaml(model=SHAPE, data=tmp_path / "train.jsonl", more="train: {num_steps: 2}\n")
    )
    return lambda *overrides: load_config(tmp_path / "c.yaml", overrides)


@pytest.mark.parametrize("name", ["numpy_bool", "seen", "level"])
def test_a_function_that_scores_is_called_and_nothing_is_said(load, name):
    assert try_rewards(load(f"reward=trial_rewards:{name}"), "train") == []


def test_a_built_in_is_not_tried(load):
    assert try_rewards(load("reward=gsm8k"), "train") == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_empty", r"tried on an empty response \(row 1 of .*train.jsonl\): IndexError: .* \(trial_rewards.py:14\)"),
        ("in_a_library", r"an empty response .*KeyError: 'x' \(trial_rewards.py:17\)"),
        ("no_number", r"array\(\[1\.\]\) \(ndarray of shape \(1,\)\); a number was expected"),
        ("leaves", r"its process ended \(exit code 3\)"),
    ],
)
def test_one_that_cannot_score_is_refused_with_the_key_and_the_users_line(load, capsys, name, said):
    loaded = load(f"reward=trial_rewards:{name}")
    with pytest.raises(RewardError, match=said) as caught:
        try_rewards(loaded, "train")
    assert f"reward.functions.0: trial_rewards:{name}: tried on" in str(caught.value)
    assert "reward.try_first: false" in str(caught.value)
    for command in (["plan", "--command", "train"], ["train"], ["train", "--dry-run"]):
        assert main([command[0], str(loaded.path), f"reward=trial_rewards:{name}", *command[1:]]) == 2
        shown = capsys.readouterr()
        assert f"trial_rewards:{name}: tried on" in shown.err and shown.out == "", "no plan of what is refused"


def test_what_each_function_gives_for_the_first_row_is_told_to_who_asks(load):
    scores = []
    assert (
        try_rewards(load("reward.functions=[{function: 'trial_rewards:level'}, {function: gsm8k}]"), "train", scores)
        == []
    )
    own, built_in = scores
    level = "2 for an empty response, 2 for the row's answer as the response"
    assert own.startswith("reward trial_rewards:level on row 1 of /") and own.endswith(f"train.jsonl: {level}")
    assert built_in.startswith("reward gsm8k on row 1 of ") and ": 0 for an empty response, " in built_in


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_a_held_out_set_of_which_nobody_says_what_is_correct_is_refused_before_a_start(load, command):
    """A cold start would notice at its first measurement, after hundreds of steps."""
    evaluation = "eval={path: held_out.jsonl}"
    with pytest.raises(RewardError, match=r"eval: held-out evaluation: no reward function says .*trial_rewards:one"):
        try_rewards(load("reward=trial_rewards:one", evaluation), command)
    with pytest.raises(RewardError, match=r"no reward function says .*json_schema.* set eval.correct_threshold"):
        try_rewards(load("reward={functions: [{function: json_schema, options: {schema: {}}}]}", evaluation), command)
    with pytest.raises(RewardError, match=r"no reward function says .*Tried on an empty response$"):
        try_rewards(load("reward=trial_rewards:sometimes", evaluation), command)
    for good in (
        ["reward=trial_rewards:one", "eval={path: held_out.jsonl, correct_threshold: 0.5}"],
        ["reward=trial_rewards:numpy_bool", evaluation],
        ["reward=gsm8k", evaluation],
        ["reward={functions: [{function: 'trial_rewards:one'}, {function: gsm8k}]}", evaluation],
        ["reward=trial_rewards:one", evaluation, "rollout.episode=own_episode:talk", "episodes.max_tokens=64"],
    ):
        assert try_rewards(load(*good), command) == [], good


FOREIGN = """
async def waits(**_): return 1.0
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def accuracy(completions, **_): return [1.0]
class Scorer:
    def __call__(self, **_): return 1.0
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("foreign:waits", "it is an async function"),
        (
            "foreign:compute_score",
            "Its arguments are verl's: name a function score(*, prompt, response, answer, metadata)",
        ),
        (
            "foreign:accuracy",
            "that calls accuracy(prompts=[prompt], completions=[response], ...)[0]",
        ),
        ("foreign:Scorer", "it is a class; name a function, or an object of the class"),
        ("foreign.py", "did you mean 'foreign:FUNCTION'?"),
        ("foreign.waits", "did you mean 'foreign:waits'?"),
    ],
)
def test_one_of_another_form_is_refused_with_its_key_and_what_to_write(load, name, said):
    loaded = load(f"reward={name}")
    (loaded.path.parent / "foreign.py").write_text(FOREIGN)
    with pytest.raises(RewardError) as caught:
        check_users_functions(loaded)
    place = f"override 'reward={name}': reward.functions.0: reward {name!r}: "
    assert str(caught.value).startswith(place) and said in str(caught.value)


def test_a_library_that_raised_is_named_with_the_users_line(load):
    with pytest.raises(RewardError, match=r"JSONDecodeError: .*\(decoder.py:\d+, called at trial_rewards.py:17\)"):
        (load().path.parent / "trial_rewards.py").write_text(FUNCTIONS.replace('response or "{}"', "response"))
        try_rewards(load("reward=trial_rewards:in_a_library"), "train")


def test_one_that_needs_the_run_is_left_out_and_that_is_said(load):
    loaded = load("reward=trial_rewards:no_empty", "reward.try_first=false")
    assert try_rewards(loaded, "train") == [
        "rewards trial_rewards:no_empty are not tried before a run (reward.try_first: false)"
    ]


def test_services_are_not_asked_and_that_is_said(load):
    loaded = load("reward.functions=[{function: judge}]", "reward.http=[{name: judge, url: 'http://localhost:9/x'}]")
    assert try_rewards(loaded, "train") == [
        "rewards judge are services, judges or reward models: they are not tried before a run"
    ]


def test_each_source_has_a_row_of_its_own(load, tmp_path):
    own = "eval={path: held_out.jsonl, reward: 'trial_rewards:level'}"
    with pytest.raises(
        RewardError, match=r"eval.reward: trial_rewards:level: .*row 1 of held_out.jsonl.*KeyError: 'level'"
    ):
        try_rewards(load("reward=trial_rewards:seen", own), "train")


@pytest.mark.parametrize(
    ("overrides", "error", "key"),
    [
        (["reward=beside_rewards:one"], RewardError, "reward.functions.0.function"),
        (["rollout.episode=beside_rewards:talk", "episodes.max_tokens=64"], EpisodeError, "rollout.episode.function"),
        (["metrics.sinks=['beside_rewards:Sink']"], ConfigError, "metrics.sinks.0.sink"),
    ],
)
def test_a_module_beside_the_configuration_is_found_from_another_folder_and_a_notice_says_so(
    load, tmp_path, monkeypatch, overrides, error, key
):
    (tmp_path / "beside_rewards.py").write_text(BESIDE)
    (tmp_path / "beside_helper.py").write_text("TEXT = ''")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "beside_rewards").mkdir(parents=True)  # a folder without code is no module
    monkeypatch.chdir(elsewhere)
    path = list(sys.path)

    def check(*given: str) -> tuple[str, ...]:
        """As a process does that has imported nothing. Returns the configuration's notices."""
        monkeypatch.setattr(sys, "path", list(path))
        monkeypatch.delitem(sys.modules, "beside_rewards", raising=False)
        loaded = load(*given)
        assert check_users_functions(loaded) == []
        return loaded.notices

    assert f"{key}: {tmp_path}/beside_rewards.py is read (run.modules_dir)" in check(*overrides)
    (elsewhere / "beside_rewards").rmdir()
    with pytest.raises(error, match="there is no module 'beside_rewards'"):
        check(*overrides, f"run.modules_dir={elsewhere}")
    with pytest.raises(error) as caught:
        check(*(text.replace("beside", "absent") for text in overrides))
    assert (
        f"there is no module 'absent_rewards' in {elsewhere} (the working directory), in the folders of PYTHONPATH, among"
        f" the installed packages or in {tmp_path} (run.modules_dir)"
    ) in str(caught.value)
    with pytest.raises(error, match=r"did you mean beside_rewards:\w+\?"):
        check(*(text.replace("beside", "besides") for text in overrides))


def test_a_sink_of_the_working_directory_is_found_by_a_console_script_which_does_not_look_there(
    load, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "sink_of_here.py").write_text(BESIDE.replace("import beside_helper", ""))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert check_users_functions(load("metrics.sinks=['sink_of_here:Sink']")) == []


BESIDE = """
import beside_helper

def one(**_): raise ValueError(beside_helper.TEXT)
async def talk(task, model, tools): return 1.0
class Sink:
    def __init__(self, run): pass
    def write(self, *_): pass
    def close(self): pass
"""


@pytest.mark.parametrize("command", [["plan", "--command", "train"], ["train", "--dry-run"], ["train"]])
def test_commands_call_a_reward_beside_the_configuration_and_that_of_the_working_directory_comes_first(
    load, tmp_path, monkeypatch, capsys, command
):
    file = str(load().path)
    (tmp_path / "beside_rewards.py").write_text(BESIDE)
    (tmp_path / "beside_helper.py").write_text("TEXT = 'called beside it'")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    given = [command[0], file, "reward=beside_rewards:one", f"run.dir={tmp_path}/runs", *command[1:]]
    assert main(given) == 2
    assert "ValueError: called beside it (beside_rewards.py:4)" in capsys.readouterr().err
    Path("beside_rewards.py").write_text("\ndef one(**_): raise ValueError('called here')")
    assert main(given) == 2
    assert "ValueError: called here (beside_rewards.py:2)" in capsys.readouterr().err
    assert not [text for text in load_config(file, given[2:3], "train").notices if "modules_dir" in text]
