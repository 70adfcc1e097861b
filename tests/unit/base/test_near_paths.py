"""What is offered in place of a path at which nothing is."""

import pytest

from gspo_mega.base.errors import ConfigError, RewardError
from gspo_mega.base.hub import missing_hint
from gspo_mega.base.near_paths import did_you_mean, near_path
from gspo_mega.base.user_functions import import_function
from gspo_mega.launcher.prepare import configuration_of


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in ("mytask/train.jsonl", "mytask/heldout.jsonl", "runs/models/smollm2/config.json", "my_run.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".my_rn.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("mytask/trian.jsonl", "mytask/train.jsonl"),
        ("mytsk/train.jsonl", "mytask/train.jsonl"),
        ("runs/modles/smollm2/config.json", "runs/models/smollm2/config.json"),
        ("runs/models/smollm", "runs/models/smollm2"),
        ("my_rn.yaml", "my_run.yaml"),  # not the dot file, which is nearer
        ("mytask/train.json", "mytask/train.jsonl"),
        ("mytask/other.jsonl", None),  # the ending alone does not make names alike
        ("mytsk/other.jsonl", None),  # the folder is near, and there is nothing in it by that name
        ("mytask/train.jsonl", None),  # is there
        ("nowhere/at/all", None),
        ("mytask/train.jsonl/x", None),
        ("x" * 5000, None),
        ("a\0b", None),
    ],
)
def test_the_nearest_name_that_exists_is_offered(here, wrong, near):
    assert near_path(wrong) == near
    assert did_you_mean(wrong) == ("" if near is None else f"; did you mean {near}?")


def test_an_absolute_path_stays_absolute(here):
    assert near_path(here / "my_rn.yaml") == str(here / "my_run.yaml")


def test_the_hub_is_named_only_where_the_first_folder_is_not_there(here):
    assert missing_hint("mytask/trian.jsonl", "dataset") == "; did you mean mytask/train.jsonl?"
    assert missing_hint("mytask/other.jsonl", "dataset") == ""
    inside = missing_hint("openai/gsm8k/main/train-00000-of-00001.parquet", "dataset")
    assert "run hf download openai/gsm8k --repo-type dataset," in inside and "`data.revision: main`" in inside
    assert missing_hint("Qwen/Qwen3-0.6B/more") == "", "a model is a whole repository"
    assert missing_hint("/openai/gsm8k/train.parquet", "dataset") == missing_hint("./a/b/c", "dataset") == ""
    assert missing_hint("mytask/deeper/train.jsonl", "dataset") == "", "its first folder exists"
    hub = missing_hint("Qwen/Qwen3-0.6B")
    assert "hf download Qwen/Qwen3-0.6B," in hub and "did you mean" not in hub


def test_a_run_that_is_not_there_is_no_yaml_file(here):
    (here / "runs/nice").mkdir()
    with pytest.raises(ConfigError) as caught:
        configuration_of("runs/nise", "train")
    assert str(caught.value) == (
        "gspo-mega train: runs/nise is neither a YAML file nor the folder of a run: nothing is there; did you mean"
        " runs/nice? `gspo-mega ls` lists the runs"
    )
    with pytest.raises(ConfigError, match="nothing is there; `gspo-mega ls` lists the runs"):
        configuration_of("runs/zzz", "train")
    assert configuration_of("other.yaml", "train")[1] == []  # whoever reads it says that it is not there


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("./alpha_reward.py:score", "alpha_reward:score"),
        ("alpha_reward.py:score", "alpha_reward:score"),
        ("alfa_reward:score", "alpha_reward:score"),
        ("inner/beta.py:score", "inner.beta:score"),
    ],
)
def test_a_function_of_a_file_is_written_as_one_of_a_module(here, monkeypatch, written, meant):
    (here / "inner").mkdir()
    for name in ("alpha_reward.py", "inner/beta.py"):
        (here / name).write_text("def score(): ...\n")
    monkeypatch.syspath_prepend(here)
    with pytest.raises(RewardError, match=f"; did you mean {meant}[?]$"):
        import_function(written, "reward", RewardError)


@pytest.mark.parametrize("written", ["/a/b.py:score", "../b.py:score", "no_such_module:score", "a b:c"])
def test_no_module_is_offered_that_the_name_does_not_say(here, written):
    with pytest.raises(RewardError) as caught:
        import_function(written, "reward", RewardError)
    assert "did you mean" not in str(caught.value)
