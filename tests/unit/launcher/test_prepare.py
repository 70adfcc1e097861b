import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.config import load_config
from gspo_mega.launcher.lease import hold
from gspo_mega.launcher.prepare import configuration_of, differing_keys, new_attempt

CONFIG = "configs/quickstart.yaml"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "demo").mkdir()
    return RunFolder(tmp_path / "demo")


def with_checkpoint(folder, command="train", overrides=()):
    attempt = new_attempt(folder, load_config(CONFIG, overrides, command), command)
    folder.checkpoints_dir.mkdir()
    atomic_write_text(folder.latest_checkpoint_file, "step_00000001")
    return attempt


def test_the_folder_holds_the_resolved_configuration_and_what_was_started(folder):
    loaded = load_config(CONFIG, ["train.num_steps=3"], "train")
    attempt = new_attempt(folder, loaded, "train")
    assert load_config(folder.config_file).config == loaded.config
    assert attempt.command_file.read_text() == "train\n"


def test_the_lock_is_held_against_other_processes_and_let_go_after(folder):
    code = f"""
from gspo_mega.base.errors import ConfigError
from gspo_mega.launcher.lease import hold
from gspo_mega.base.run_folder import RunFolder
try:
    with hold(RunFolder({str(folder.path)!r})):
        print("held")
except ConfigError as error:
    print(error)
"""

    def other():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    import os

    with hold(folder):
        assert "in use by another run" in other() and str(os.getpid()) in other()
    assert other() == "held\n"


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir"), hold(RunFolder(tmp_path / "file" / "demo")):
        pass


def test_a_longer_run_continues(folder):
    with_checkpoint(folder)
    more = load_config(CONFIG, ["train.num_steps=500", "checkpoint.every_steps=5", "server.num_servers=2"], "train")
    assert new_attempt(folder, more, "train").number == 2
    assert load_config(folder.config_file).config.train.num_steps == 500


def test_another_configuration_is_refused_by_key_and_place_and_changes_nothing(folder):
    with_checkpoint(folder)
    before = folder.config_file.read_bytes()
    other = load_config(CONFIG, ["optimizer.lr=2e-4", "batch.group_size=16"], "train")
    with pytest.raises(ConfigError) as caught:
        new_attempt(folder, other, "train")
    text = str(caught.value)
    assert "override 'batch.group_size=16': batch.group_size: now 16, the run has 8" in text
    assert "optimizer.lr: now 0.0002, the run has 0.0001" in text
    assert "num_steps" not in text
    assert folder.config_file.read_bytes() == before
    assert len(folder.attempts()) == 1


def test_lists_and_sections_that_differ_are_told_by_their_parts(folder):
    """As a YAML file has them: no tuple and no dictionary of Python."""
    with_checkpoint(folder)
    base = load_config(CONFIG, [], "train").config.reward.functions[0].function
    changes = [
        f"reward.functions=[{{function: {base}, weight: 2.0}}, {{function: length, options: {{longest: 9, soft: 3}}}}]",
        "data.answer_keys=[a, b]",
    ]
    with pytest.raises(ConfigError) as caught:
        new_attempt(folder, load_config(CONFIG, changes, "train"), "train")
    text = str(caught.value)
    assert "reward.functions.0.weight: now 2.0, the run has 1.0\n" in text
    new = "reward.functions.1: now {function: length, options: {longest: 9, soft: 3}}, the run has nothing\n"
    assert new in text and "data.answer_keys.1: now b, the run has nothing\n" in text
    assert not any(mark in text for mark in ("('", "{'", "()", "None")), text


def test_another_command_is_refused(folder):
    both = [
        "sft.max_steps=5",
        "sft.sequences_per_step=8",
        "sft.eval_every_steps=1",
        "sft.stop_accuracy_low=0.1",
        "sft.stop_accuracy_high=0.2",
    ]
    with_checkpoint(folder, "sft", both)
    with pytest.raises(ConfigError, match="holds a `gspo-mega sft` run"):
        new_attempt(folder, load_config(CONFIG, both, "train"), "train")


def test_checkpoints_of_unknown_origin_are_refused(folder):
    with_checkpoint(folder)
    folder.config_file.unlink()
    with pytest.raises(ConfigError, match="no config.resolved.yaml"):
        new_attempt(folder, load_config(CONFIG, (), "train"), "train")


def test_without_a_checkpoint_a_run_starts_over_with_any_configuration(folder):
    new_attempt(folder, load_config(CONFIG, (), "train"), "train")
    folder.weights_dir.mkdir()
    atomic_write_json(folder.current_weights_file, {"weight_version": 3, "path": "/nowhere"})
    new_attempt(folder, load_config(CONFIG, ["optimizer.lr=2e-4"], "train"), "train")
    assert not folder.current_weights_file.exists(), "a server would start with the weights of a run that is no more"


def test_with_a_checkpoint_the_published_weights_stay(folder):
    with_checkpoint(folder)
    folder.weights_dir.mkdir()
    atomic_write_json(folder.current_weights_file, {"weight_version": 3, "path": "/somewhere"})
    new_attempt(folder, load_config(CONFIG, (), "train"), "train")
    assert folder.current_weights_file.exists()


def test_lists_and_sections_are_compared_whole():
    base = load_config(CONFIG).config
    other = load_config(CONFIG, ["reward.functions.0.weight=2.0"]).config
    assert set(differing_keys(base, other)) == {"reward.functions"}
    assert differing_keys(base, base) == {}


def record(folder, text="recorded"):
    folder.journal_dir.mkdir(exist_ok=True)
    (folder.journal_dir / "step_00000000").write_text(text)
    folder.metrics_file.write_text(text)


def test_rollouts_of_the_same_start_stay(folder):
    new_attempt(folder, load_config(CONFIG, (), "train"), "train")
    record(folder)
    new_attempt(folder, load_config(CONFIG, ["train.num_steps=2"], "train"), "train")
    assert (folder.journal_dir / "step_00000000").exists(), "the crashed start's rollouts are this one's"
    folder.new_attempt()  # as a server has that is started by hand
    new_attempt(folder, load_config(CONFIG, (), "train"), "train")
    assert (folder.journal_dir / "step_00000000").exists(), "a server in between changes nothing"
    assert not list(folder.path.glob("old-*"))


@pytest.mark.parametrize("rollouts_only", ["train.rollouts_only=true", "train.rollouts_only=false"])
def test_what_another_configuration_recorded_is_moved_aside_and_said(folder, rollouts_only):
    said = []
    before = load_config(CONFIG, [rollouts_only], "train")
    new_attempt(folder, before, "train", said.append)
    for number, temperature in enumerate((0.9, 0.8), start=1):
        record(folder, f"recorded {number}")
        new_attempt(
            folder,
            load_config(CONFIG, [rollouts_only, f"rollout.temperature={temperature}"], "train"),
            "train",
            said.append,
        )
        old = RunFolder(folder.path / f"old-000{number}")
        assert (old.journal_dir / "step_00000000").read_text() == f"recorded {number}" == old.metrics_file.read_text()
        assert not folder.journal_dir.exists() and not folder.metrics_file.exists()
        assert (
            said.pop()
            == f"notice   {folder.path} was recorded with another configuration and has no checkpoint to continue:"
            f" journal, metrics.jsonl moved to {old.path}"
        )
    assert load_config(RunFolder(folder.path / "old-0001").config_file).config == before.config, (
        "it can be read as a run folder"
    )
    new_attempt(folder, load_config(CONFIG, [rollouts_only], "train"), "train", said.append)
    assert said == [], "there is nothing to move"


def test_another_command_moves_the_record_as_well(folder):
    both = [
        "sft.max_steps=5",
        "sft.sequences_per_step=8",
        "sft.eval_every_steps=1",
        "sft.stop_accuracy_low=0.1",
        "sft.stop_accuracy_high=0.2",
    ]
    new_attempt(folder, load_config(CONFIG, both, "train"), "train")
    record(folder)
    new_attempt(folder, load_config(CONFIG, both, "sft"), "sft")
    assert (folder.path / "old-0001/journal/step_00000000").read_text() == "recorded"


def test_another_layout_continues_but_not_another_form_of_the_optimizers_state(folder):
    one = ["cluster.ranks_per_node=1", "parallel.expert=1"]
    with_checkpoint(folder, overrides=["cluster.ranks_per_node=2", "parallel.expert=2"])
    new_attempt(folder, load_config(CONFIG, one, "train"), "train")
    before = folder.config_file.read_bytes()
    with pytest.raises(ConfigError, match="optimizer.distributed: now false, the run has true"):
        new_attempt(folder, load_config(CONFIG, [*one, "optimizer.distributed=false"], "train"), "train")
    assert folder.config_file.read_bytes() == before


def test_a_file_is_a_configuration_and_a_runs_folder_is_its_own(folder, tmp_path, monkeypatch):
    assert configuration_of(CONFIG, "train") == (Path(CONFIG), [])
    repository = Path.cwd()
    with_checkpoint(folder, "train", ["run.dir=runs", "run.name=demo"])
    moved = tmp_path / 'moved, to: "here"'
    moved.mkdir()
    folder.path.rename(moved / "demo")
    monkeypatch.chdir(moved)
    config, overrides = configuration_of("demo", "train")
    assert Path.cwd() == repository, "where the run was started"
    loaded = load_config(config, overrides, "train").config
    assert (loaded.run.dir, loaded.run.name) == (str(moved), "demo")


def test_a_run_whose_first_working_directory_is_gone_is_continued_where_the_user_is(folder, tmp_path, monkeypatch):
    attempt = with_checkpoint(folder, overrides=["run.name=demo"])
    attempt.started_in_file.write_text(f"{tmp_path / 'gone'}\n")
    monkeypatch.chdir(tmp_path)
    assert configuration_of("demo", "train")[0] == folder.config_file
    assert Path.cwd() == tmp_path


def test_a_run_made_before_the_working_directory_was_recorded_is_continued(folder, tmp_path, monkeypatch):
    with_checkpoint(folder, overrides=["run.name=demo"]).started_in_file.unlink()
    monkeypatch.chdir(tmp_path)
    assert configuration_of("demo", "train")[0] == folder.config_file


def test_a_folder_of_another_command_or_of_no_run_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="is not a run's folder; give a YAML file, or a folder of a run"):
        configuration_of(str(tmp_path), "train")
    with_checkpoint(folder, overrides=["run.name=demo"]).command_file.write_text("sft\n")
    with pytest.raises(ConfigError, match="is a run of `gspo-mega sft`; continue it with gspo-mega sft"):
        configuration_of(str(folder.path), "train")


@pytest.mark.parametrize("name", ["p\N{GRINNING FACE}", "u\u0308ber\"'", "a: b"])
def test_a_run_is_continued_below_any_name(folder, tmp_path, name):
    with_checkpoint(folder, "train", ["run.name=demo"])
    (tmp_path / name).mkdir()
    folder.path.rename(tmp_path / name / "demo")
    config, overrides = configuration_of(str(tmp_path / name / "demo"), "train")
    assert load_config(config, overrides, "train").config.run.dir == str(tmp_path / name)


def test_a_renamed_copy_or_another_folders_name_is_refused(folder, tmp_path):
    with_checkpoint(folder, "train", ["run.name=demo"])
    with pytest.raises(ConfigError, match=r"run.name=other names another folder"):
        configuration_of(str(folder.path), "train", ["run.name=other"])
    folder.path.rename(tmp_path / "other")
    with pytest.raises(ConfigError, match="is a copy of the run demo, or was renamed"):
        configuration_of(str(tmp_path / "other"), "train")


def test_a_working_directory_that_is_no_text_or_may_not_be_read_as_text_ends_nothing(folder, tmp_path, monkeypatch):
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/cwd\xff"))
    odd.mkdir()
    loaded = load_config(CONFIG, ["run.name=demo"], "train")
    monkeypatch.chdir(odd)
    attempt = new_attempt(folder, loaded, "train")
    assert not attempt.started_in_file.exists()
    attempt.started_in_file.write_bytes(b"\xff\xfe")
    assert configuration_of(str(folder.path), "train")[0] == folder.config_file
