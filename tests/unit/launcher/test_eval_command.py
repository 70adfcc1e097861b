import json

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.cli import eval as command
from gspo_mega.cli.main import main
from gspo_mega.config import load_config, render_config

CONFIG = "configs/quickstart.yaml"
MEASURED = {
    "accuracy": 0.5,
    "standard_error": 0.02,
    "reward_mean": 0.51,
    "num_prompts": 256,
    "num_samples": 512,
    "truncated_fraction": 0.0125,
    "response_tokens_mean": 24.25,
    "num_reward_failures": 0,
    "num_left_out": 0,
    "turns_mean": 1.0,
    "pass_at": {},
    "majority": None,
}
RESULT = {**MEASURED, "sets": {"held_out": MEASURED}}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "my run: 1")
    folder.path.mkdir()
    atomic_write_text(folder.config_file, render_config(load_config(CONFIG).config))
    return folder


@pytest.fixture
def launched(monkeypatch):
    """What the command asks to be launched; the launch itself is stood in for, and 'measures' RESULT."""
    calls = []

    def launch(loaded, name, say):
        calls.append((loaded.config, name))
        folder = RunFolder(f"{loaded.config.run.dir}/{loaded.config.run.name}")
        attempt = folder.new_attempt()
        atomic_write_json(attempt.result_file, RESULT)
        (attempt.path / "responses.jsonl").write_text('{"response": "4"}\n')
        say("progress")
        return 0

    monkeypatch.setattr(command, "launch", launch)
    return calls


def make_hf(folder, weight_version=0):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps({"weight_version": weight_version}))
    return folder


def publish(run, weight_version):
    folder = make_hf(run.weights_version_dir(weight_version), weight_version)
    atomic_write_json(run.current_weights_file, {"weight_version": weight_version, "path": str(folder)})
    return folder


def save(run, step, weight_version):
    folder = run.checkpoint_dir(step)
    folder.mkdir(parents=True)
    atomic_write_json(folder / "state.json", {"state": {"step": step, "weight_version": weight_version}})
    atomic_write_text(run.latest_checkpoint_file, folder.name)


def test_a_finished_run_is_its_result_on_one_rank(run, launched, capsys):
    make_hf(run.huggingface_dir)
    assert main(["eval", str(run.path), "eval.num_prompts=7"]) == 0
    ((config, name),) = launched
    assert name == "eval"
    assert config.model.path == str(run.huggingface_dir)
    assert (config.cluster.ranks_per_node, config.parallel.expert) == (1, 1)
    assert (config.run.dir, config.run.name) == (str(run.path), "eval")
    assert config.eval.num_prompts == 7
    out = capsys.readouterr().out
    assert "0.5000 +- 0.0200" in out and "1.25%" in out and "24.2 tokens" in out and "not scored" not in out


def test_an_unfinished_run_is_what_it_published_last(run, launched):
    published = publish(run, 3)
    main(["eval", str(run.path)])
    assert launched[0][0].model.path == str(published)


def test_a_run_that_was_continued_is_what_it_published_since(run):
    make_hf(run.huggingface_dir, 4)
    save(run, 4, 4)
    assert command.find_target(run.path, None).model == run.huggingface_dir
    publish(run, 4)
    assert command.find_target(run.path, None).model == run.huggingface_dir, "of the same weights the result"
    newer = publish(run, 7)
    save(run, 6, 6)
    assert command.find_target(run.path, None).model == newer
    exported = make_hf(run.huggingface_step_dir(8), 8)
    assert command.find_target(run.path, None).model == exported


def test_published_weights_that_were_removed_are_not_taken(run):
    make_hf(run.huggingface_dir, 4)
    run.weights_dir.mkdir()
    atomic_write_json(run.current_weights_file, {"weight_version": 5, "path": str(run.weights_version_dir(5))})
    assert command.find_target(run.path, None).model == run.huggingface_dir


def test_weights_that_no_server_can_load_are_not_passed_over(run):
    """Published by broadcast: the run has trained on, and nothing newer than its old result is on the disk."""
    make_hf(run.huggingface_dir, 4)
    save(run, 6, 6)
    with pytest.raises(
        ConfigError,
        match=r"trained to weight version 6 .its last checkpoint.*/hf, are of version 4\. Convert the checkpoint",
    ):
        command.find_target(run.path, None)


def test_a_run_without_weights_is_refused(run):
    with pytest.raises(ConfigError, match="none of its published weights are left"):
        command.find_target(run.path, None)


def test_a_hugging_face_folder_needs_a_configuration(tmp_path, launched, monkeypatch, capsys):
    hf = make_hf(tmp_path / "hf")
    assert main(["eval", str(hf)]) == 2
    assert "--config" in capsys.readouterr().err
    assert main(["eval", str(hf), "--config", CONFIG, f"run.dir={tmp_path}"]) == 0
    config, _ = launched[0]
    assert (config.model.path, config.run.name) == (str(hf), "train-eval")


def test_a_configuration_is_its_own_model(tmp_path, launched):
    assert main(["eval", CONFIG, f"run.dir={tmp_path}"]) == 0
    assert launched[0][0].model.path == load_config(CONFIG).config.model.path


def test_what_is_none_of_these_is_said(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        command.find_target(tmp_path / "nowhere", None)
    with pytest.raises(ConfigError, match="neither config.resolved.yaml"):
        command.find_target(tmp_path, None)


def test_json_alone_is_on_standard_output(run, launched, capsys):
    make_hf(run.huggingface_dir)
    assert main(["eval", str(run.path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"model": str(run.huggingface_dir), **RESULT}
    assert "progress" in err


def test_failed_scorings_are_shown():
    def shown(**changes):
        return command.render_result({"model": "m", "sets": {"held_out": MEASURED | changes}})

    assert "3 samples" in shown(num_reward_failures=3)
    assert not any(word in shown() for word in ("left out", "turns", "pass@", "majority", "set"))
    assert "mean turns   2.5" in shown(turns_mean=2.5)
    assert "5 prompts, longer than" in shown(num_left_out=5)


def test_each_set_has_its_lines():
    sets = {
        "aime": MEASURED | {"pass_at": {"1": [0.5, 0.02], "4": [0.75, 0.1]}, "majority": [0.6, 0.05]},
        "b": MEASURED,
    }
    text = command.render_result({"model": "m", "sets": sets})
    assert text.count("model ") == 1 and "set          aime" in text and "set          b" in text
    assert "pass@4       0.7500 +- 0.1000" in text and "majority     0.6000 +- 0.0500" in text


def test_every_response_is_written_where_the_user_asks(run, launched, tmp_path, capsys):
    make_hf(run.huggingface_dir)
    assert main(["eval", str(run.path), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert (tmp_path / "out.jsonl").read_text() == '{"response": "4"}\n'
    assert main(["eval", str(run.path), "--out", str(tmp_path / "no" / "out.jsonl")]) == 2
    assert "no is no folder; make it first" in capsys.readouterr().err and len(launched) == 1


def test_an_evaluation_does_not_train_so_that_nothing_is_refused_for_that(run, launched):
    """A quantization that servers can load, and cannot be published to, is fine here."""
    make_hf(run.huggingface_dir, 3)
    assert load_config(CONFIG).config.train is not None
    assert main(["eval", str(run.path), "server.quantization=fp8", "train.num_steps=3"]) == 0
    # The configuration of the cold start trains by `sft`.
    assert main(["eval", "configs/quickstart_sft.yaml", f"run.dir={json.dumps(str(run.path.parent))}"]) == 0
    assert [(config.train, config.sft) for config, _ in launched] == [(None, None)] * 2


@pytest.mark.parametrize("override", ["model.path=other", "model={path: other}", "model.weights=x"])
def test_an_override_cannot_replace_the_model_that_is_asked(tmp_path, capsys, override):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert main(["eval", str(folder), "--config", CONFIG, override]) == 2
    error = capsys.readouterr().err
    assert f"{override} names another model than {folder}" in error and "leave it out" in error
