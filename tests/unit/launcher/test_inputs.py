"""What `gspo-mega plan --command` finds beside the configuration: data, rewards, recorded rollouts, machines."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from run_configs import smallest_yaml

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import ConfigError, DataError, EpisodeError, JournalError, RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.launcher.inputs import NUM_ROWS_CHECKED, check_inputs

MORE = """\
train: {num_steps: 2}
sft: {max_steps: 1, sequences_per_step: 8, eval_every_steps: 1, stop_accuracy_low: 0.2, stop_accuracy_high: 0.5}
eval: {path: %s}
"""
SHAPE = str(Path(__file__).parents[3] / "configs" / "models" / "quickstart_dense.json")
ROW = {"prompt": "p", "answer": "7", "response": "r"}


@pytest.fixture
def files(tmp_path):
    """(load with overrides, the training file, the held-out file)."""
    train, held_out, config = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl", tmp_path / "c.yaml"
    for path in (train, held_out):
        path.write_text(json.dumps(ROW) + "\n")
    config.write_text(smallest_yaml(data=train, more=MORE % held_out))
    return (lambda *overrides: load_config(config, overrides)), train, held_out


@pytest.mark.parametrize("command", ["train", "sft", "eval", "certify"])
def test_nothing_to_say_where_all_is_there(files, command):
    assert check_inputs(files[0](), command) == []


def test_files_that_are_not_there_are_named_at_their_keys(files):
    load, train, held_out = files
    train.unlink()
    held_out.write_text("\n")
    with pytest.raises(DataError) as caught:
        check_inputs(load(), "train")
    config = load().path
    assert [line.split(" (relative")[0] for line in str(caught.value).splitlines()] == [
        f"{config}:5:8: data.path: {train}: no such file",
        f"{config}:10:8: eval.path: {held_out}: no rows; expected is one JSON object per line",
    ]
    with pytest.raises(DataError, match="held_out"):  # what eval does not read is not looked at
        check_inputs(load(), "eval")
    check_inputs(load(), "certify")


@pytest.mark.parametrize(
    ("command", "row", "said"),
    [
        (
            "train",
            {"promt": "p", "answer": "7"},
            "no key 'prompt'; did you mean 'promt'. .*data.prompt_key chooses the key",
        ),
        ("train", {"prompt": "p"}, "no key 'answer'; .*data.answer_key"),
        ("sft", {"prompt": "p", "answer": "7"}, "no key 'response'; .*data.response_key"),
        (
            "sft",
            {"prompt": "p", "answer": "7", "response": [{"role": "tool", "content": "7"}]},
            "'response' has message 1 from the tool; the first and the last must be the assistant's",
        ),
        ("train", ["p"], "an array where a JSON object was expected"),
    ],
)
def test_rows_without_what_the_command_reads(files, command, row, said):
    load, train, _ = files
    train.write_text(json.dumps(ROW) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"c\.yaml:5:8: data\.path: .*train\.jsonl:3: {said}"):
        check_inputs(load(), command)


def test_only_the_first_rows_are_looked_at(files):
    load, train, _ = files
    good, bad = json.dumps(ROW) + "\n", "{\n"
    train.write_text(good * NUM_ROWS_CHECKED + bad)
    check_inputs(load(), "train")
    train.write_text(good * (NUM_ROWS_CHECKED - 1) + bad * 50)
    with pytest.raises(DataError, match=f"train.jsonl:{NUM_ROWS_CHECKED}: not JSON"):
        check_inputs(load(), "train")


def test_sources_are_named_by_their_place(files, tmp_path):
    load, train, _ = files
    loaded = load("data.path=null", f"data.sources=[{{name: a, path: {train}}}, {{name: b, path: nowhere.jsonl}}]")
    with pytest.raises(DataError, match=r"data\.sources\.1\.path: nowhere\.jsonl: no such file"):
        check_inputs(loaded, "train")


def test_a_reward_that_cannot_be_loaded(files):
    with pytest.raises(RewardError, match="gsm9k"):
        check_inputs(files[0]("reward=gsm9k"), "train")


@pytest.mark.parametrize(
    ("reward", "good", "bad", "said"),
    [
        (
            "math",
            "\\frac{1}{2}",
            "\\frac{1}{",
            r"'answer': the answer '.*frac.1..' cannot be read as LaTeX .reward math",
        ),
        ("{functions: [{function: math}, {function: choice}]}", "B", "Rome and Bern", "neither a letter, such as B"),
        ("code", [{"input": "1", "output": "1"}], "print(1)", r"is no JSON of tests; valid: .*reward code"),
    ],
)
def test_answers_that_a_verifier_cannot_read_are_named_with_file_and_line(files, reward, good, bad, said):
    load, train, held_out = files
    held_out.write_text(json.dumps(ROW | {"answer": good}) + "\n")
    train.write_text(json.dumps(ROW | {"answer": good}) + "\n" + json.dumps(ROW | {"answer": bad}) + "\n")
    with pytest.raises(DataError, match=rf"c\.yaml:5:8: data\.path: .*train\.jsonl:2: .*{said}"):
        check_inputs(load(f"reward={reward}"), "train")
    train.write_text(json.dumps(ROW | {"answer": good}) + "\n")
    check_inputs(load(f"reward={reward}"), "train")


def test_an_episode_or_a_tool_that_cannot_be_loaded(files, tmp_path, monkeypatch):
    (tmp_path / "agents.py").write_text("async def play(task, model, tools): ...\ndef add(a: int): ...\n")
    monkeypatch.chdir(tmp_path)
    longer = ("episodes.max_tokens=4096", "data.chat_template=true")
    assert check_inputs(files[0]("rollout.episode=agents:play", *longer), "train") == []
    with pytest.raises(EpisodeError, match=r": rollout.episode: episode 'agents:plays': .* did you mean 'play'"):
        check_inputs(files[0]("rollout.episode=agents:plays", *longer), "train")
    with pytest.raises(EpisodeError, match=r": rollout.tools: tool 'agents:add' .*agents.py:2.: it has no docstring"):
        check_inputs(files[0]("rollout.episode=agents:play", "rollout.tools=[agents:add]", *longer), "train")


def test_recorded_rollouts_take_the_place_of_data(files, tmp_path):
    load, train, _ = files
    train.unlink()
    with pytest.raises(JournalError, match="train.from_rollouts: .* has no rollouts of step 1"):
        check_inputs(load(f"train.from_rollouts={tmp_path / 'run'}"), "train")


def test_several_machines_are_slurms(files):
    (notice,) = check_inputs(files[0]("cluster.num_nodes=2"), "train")
    assert "2 trainer nodes: `gspo-mega train` itself runs on one machine; submit launch/slurm/train.sbatch" in notice


def test_plan_says_it(files, capsys):
    load, train, _ = files
    arguments = ["plan", str(load().path), "--model", SHAPE]
    assert main([*arguments, "--command", "train", "cluster.num_nodes=2"]) == 0
    assert "notice" in (out := capsys.readouterr().out) and "2 trainer nodes" in out
    train.unlink()
    assert main(arguments) == 0  # the layout alone
    capsys.readouterr()
    assert main([*arguments, "--command", "train"]) == DataError.exit_code == 2
    assert "data.path: " in capsys.readouterr().err


def test_rows_with_unreadable_answers_can_be_left_out_and_the_plan_names_them(files, capsys):
    load, train, held_out = files
    unreadable = json.dumps(ROW | {"answer": "it is prose, and a lemma"}) + "\n"
    train.write_text(json.dumps(ROW) + "\n" + unreadable)
    held_out.write_text(unreadable + json.dumps(ROW) + "\n")
    arguments = ["plan", str(load().path), "--model", SHAPE, "--command", "train", "reward=math"]
    assert main(arguments) == DataError.exit_code
    assert "train.jsonl:2: 'answer': " in (said := capsys.readouterr().err) and "held_out.jsonl:1: " in said
    assert "(data.unreadable_answers: drop leaves such rows out)" in said
    assert main([*arguments, "data.unreadable_answers=drop"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for path, row in ((train, 2), (held_out, 1)):
        assert f"{path}: 1 of the first 100 rows have answers that cannot be read and are left out" in said
        assert f"(data.unreadable_answers: drop): row {row}: 'answer': " in said
    assert main([*arguments, "data.unreadable_answers=skip"]) != 0


def test_no_torch_for_it(files):
    script = (
        "import sys; from gspo_mega.cli.main import main; code = main(sys.argv[1:]); print(code, 'torch' in"
        " sys.modules)"
    )
    arguments = ["plan", str(files[0]().path), "--model", SHAPE, "--command", "train"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize("spelled", ["{runs}/demo", "{runs}/../runs/demo", "{runs}/link"])
def test_a_run_does_not_train_on_its_own_folder(files, tmp_path, spelled):
    runs = tmp_path / "runs"
    (runs / "demo" / "journal").mkdir(parents=True)
    (runs / "demo" / "journal" / "step_00000000").write_bytes(b"recorded")
    (runs / "link").symlink_to("demo")
    loaded = files[0](f"run.dir={runs}", "run.name=demo", f"train.from_rollouts={spelled.format(runs=runs)}")
    with pytest.raises(
        ConfigError,
        match=(
            "train.from_rollouts: .* is this run's own folder, whose journal the run would overwrite. Choose another"
            " run.name"
        ),
    ):
        check_inputs(loaded, "train")


def test_a_record_without_its_routes_does_not_do_for_a_run_that_replays_them(files, tmp_path):
    journal = Journal(RunFolder(tmp_path / "recorded").journal_dir)
    prompt = Prompt("train:0", "train", (1,), "text")
    one = one_turn_row(
        "s0-g0-0", 0, prompt, [1], [1], [-0.5], [0], "stop", reward=1.0, routed_experts=np.zeros((1, 2, 2), np.int32)
    )
    group = Group.from_rows(0, prompt, [one])
    with journal.begin(0, 0, 1, {}) as writer:
        writer.add(group.episodes[0])
        writer.finish(RolloutBatch(0, [group]), {})
    replay = ["train.num_steps=1", f"train.from_rollouts={tmp_path / 'recorded'}", "rollout.return_routed_experts=true"]
    assert check_inputs(files[0](*replay, "moe.routing_replay=R3"), "train") == []
    journal.prune_routes(1)
    with pytest.raises(
        JournalError,
        match=("train.from_rollouts: .* has no routed experts of step 1 .*R3 needs. Use R2 or none"),
    ):
        check_inputs(files[0](*replay, "moe.routing_replay=R3"), "train")
    assert check_inputs(files[0](*replay), "train") == []


def test_an_agents_program_is_looked_for_before_a_run(files):
    load, _, _ = files
    overrides = ["episodes.max_tokens=4096", "data.chat_template=true"]
    with pytest.raises(EpisodeError, match=r"rollout.episode.options.command: no program 'no-such-agent' here"):
        check_inputs(
            load(*overrides, "rollout.episode={function: foreign, options: {command: [no-such-agent]}}"), "train"
        )
