"""Two runs that differ in one thing: `gspo-mega diff` finds it, says since when, and names the cause that follows."""

import json
import shutil

import numpy as np
import pytest
from report_runs import add_metrics, make_run

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli.main import main
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import write_token_gaps
from gspo_mega.report.differences import cause, compare, lines
from gspo_mega.report.run_record import read_run
from gspo_mega.verify.certify.program import make_random_folder

GROUPS = 3


def parted(tmp_path, *, settings=(), change=None, line=None, no_tensors=True):
    """The comparison of a plain run with one that is changed."""
    one = make_run(tmp_path / "one", GROUPS)
    other = make_run(tmp_path / "other", GROUPS, settings=settings, change=change)
    if line is not None:
        add_metrics(one, 13)
        add_metrics(other, 13, **line)
    return compare(read_run(one), read_run(other), tensors=not no_tensors)


def at(step, number, do):
    """A change of one group, whose second episode is given to `do`."""

    def change(here, group):
        if (here, group.group_id) == (step, number):
            do(group, group.episodes[1])

    return change


def rewrite(field, place, value):
    def do(group, episode):
        values = list(getattr(episode.nodes[-1], field))
        values[place] = value
        setattr(episode.nodes[-1], field, values)
        episode._rows = None

    return do


def test_the_same_twice(tmp_path, capsys):
    found = parted(tmp_path)
    assert found.is_same and found.first is None and found.compared == {"steps of rollouts": 2, "steps of metrics": 12}
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other"), "--no-tensors"]) == 0
    assert "same     2 steps of rollouts, 12 steps of metrics compared" in capsys.readouterr().out


def test_one_token(tmp_path):
    found = parted(tmp_path, change=at(1, 2, rewrite("token_ids", 1, 9)))
    first = found.first
    assert (first.stage, first.step, first.place) == ("tokens", 2, "step000001-g00002-s001, token 2")
    assert (first.one, first.other) == ("token 6 at log-prob -0.5", "token 9 at log-prob -0.5")
    assert first.count == "1 of 6 episodes differ" and list(found.found) == ["tokens"]
    assert "SGLang's sampling is not reproducible" in cause(found) and "--from-rollouts" in cause(found)


def test_an_answer_that_ends_earlier(tmp_path):
    def do(group, episode):
        node = episode.nodes[-1]
        node.token_ids, node.log_probs, node.weight_versions = [5], [-1.0], [0]

    first = parted(tmp_path, change=at(0, 0, do)).first
    assert (first.step, first.other) == (1, "(ended)") and first.place.endswith("s001, token 2")


@pytest.mark.parametrize(
    ("settings", "reason"), [((), "versions agree"), (["server.kv_cache=fp8"], "configuration: server.kv_cache")]
)
def test_one_log_prob(tmp_path, settings, reason):
    found = parted(tmp_path, change=at(0, 1, rewrite("log_probs", 1, -0.625)), settings=settings)
    first = found.first
    assert (first.stage, first.step, first.one, first.other) == ("log-probs", 1, "-0.5", "-0.625")
    assert "token 2 (largest gap 0.125 nats)" in first.place and reason in cause(found)


def test_one_weight_version(tmp_path):
    first = parted(tmp_path, change=at(1, 0, rewrite("weight_versions", 0, 7))).first
    assert (first.stage, first.one, first.other) == ("versions", "weight version 1", "weight version 7")


def test_one_row_of_data(tmp_path):
    def do(group, episode):
        for one in (group, *group.episodes):
            one.prompt = one.prompt.__class__(
                **{**{name: getattr(one.prompt, name) for name in one.prompt.__dataclass_fields__}, "text": "2 + 2 ="}
            )

    found = parted(tmp_path, change=at(1, 1, do))
    first = found.first
    assert (first.stage, first.step, first.place) == ("prompts", 2, "group 2")
    assert (first.one, first.other) == ("train:8: 1 + 1 = <b>", "train:8: 2 + 2 =")
    assert first.count == "1 of 3 prompts differ" and "other rows" in cause(found)


def test_one_reward(tmp_path):
    def do(group, episode):
        episode.reward = 0.25

    found = parted(tmp_path, change=at(0, 2, do))
    assert (found.first.stage, found.first.one, found.first.other) == ("rewards", "1", "0.25")
    found.made_by = ["rewards"]
    assert "source of the reward" in cause(found)


def test_the_learning_rate_acts_in_training_and_a_seed_on_prompts(tmp_path):
    found = parted(tmp_path, settings=["optimizer.lr=3e-4", "run.seed=5"], line={"optimizer/grad_norm": 2.0})
    assert [key for key, _, _ in found.configuration] == ["run.seed", "optimizer.lr"]
    assert (found.first.stage, found.first.step, found.first.place) == ("metrics", 13, "optimizer/grad_norm")
    assert (found.first.one, found.first.other) == ("(none)", "2")
    assert cause(found) == "It follows from the configuration: run.seed, optimizer.lr."
    prompts = parted(
        tmp_path / "b", settings=["optimizer.lr=3e-4", "run.seed=5"], change=lambda step, group: move(group)
    )
    assert prompts.first.stage == "prompts" and cause(prompts) == "It follows from the configuration: run.seed."


def test_the_trainers_log_prob_of_one_token(tmp_path):
    """Of the same rollouts: found before the metrics that follow from it."""

    def note(run, gap):
        folder = RunFolder(run).journal_dir
        batch = Journal(folder).read(1).batch
        row = batch.trajectories[1]
        places = len(row.prompt.token_ids) + np.arange(len(row.response_token_ids))
        gaps = np.where(places == places[1], gap, 0.125)
        write_token_gaps(folder, batch, [{"rows": np.full(len(places), 1), "places": places, "gaps": gaps}])

    one, other = (make_run(tmp_path / name, GROUPS) for name in ("one", "other"))
    add_metrics(one, 13)
    add_metrics(other, 13, **{"optimizer/grad_norm": 2.0})
    note(one, 0.25)
    assert compare(read_run(one), read_run(other), tensors=False).first.stage == "metrics", "only one run has them"
    note(other, 0.25)
    assert compare(read_run(one), read_run(other), tensors=False).first.stage == "metrics"
    note(other, 0.5)
    found = compare(read_run(one), read_run(other), tensors=False)
    assert (found.first.stage, found.first.step, found.first.count) == ("trainer", 2, "1 of 6 episodes differ")
    assert found.first.place == "step000001-g00000-s001, token 2"
    assert (found.first.one, found.first.other) == ("+0.25 nats from the server's", "+0.5 nats from the server's")
    assert "what is left is the machine" in cause(found)


def move(group):
    prompt = group.prompt
    values = {name: getattr(prompt, name) for name in prompt.__dataclass_fields__}
    group.prompt = prompt.__class__(**values | {"prompt_id": "train:1000"})


def test_times_and_speeds_are_of_the_machine(tmp_path):
    assert parted(tmp_path, line={"time/step_seconds": 9.0, "speed/tokens_per_second": 1.0}).is_same


def test_one_tensor(tmp_path, capsys):
    runs = [make_run(tmp_path / name, GROUPS) for name in ("one", "other")]
    shape = "configs/models/certify_dense.json"
    make_random_folder(shape, RunFolder(runs[0]).huggingface_dir, seed=1)
    shutil.copytree(RunFolder(runs[0]).huggingface_dir, RunFolder(runs[1]).huggingface_dir)
    assert compare(*map(read_run, runs)).is_same
    shutil.rmtree(RunFolder(runs[1]).huggingface_dir)
    make_random_folder(shape, RunFolder(runs[1]).huggingface_dir, seed=2)
    assert main(["diff", *map(str, runs), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first"]["stage"] == "weights" and found["compared"]["checkpoints"] == 1 and not found["same"]
    assert "numbers differ, by" in found["tensors"][0] and "damaged memory" in found["cause"]
    # Only one: the one that the other run lacks is no difference.
    shutil.rmtree(RunFolder(runs[1]).huggingface_dir)
    assert compare(*map(read_run, runs)).is_same


def test_the_text_begins_with_what_came_first(tmp_path, capsys):
    one = make_run(tmp_path / "one", GROUPS)
    other = make_run(
        tmp_path / "other", GROUPS, settings=["optimizer.lr=3e-4"], change=at(0, 0, rewrite("token_ids", 0, 3))
    )
    add_metrics(other, 13)
    assert main(["diff", str(one), str(other)]) == 1
    text = capsys.readouterr().out.splitlines()
    assert text[2].startswith("parted   in step 1: the sampled tokens, from the same prompts (1 steps of rollouts")
    assert text[3].strip() == "step000000-g00000-s001, token 1; 1 of 6 episodes differ"
    assert text[5].strip() == "other  token 3 at log-prob -1"
    assert any(line.strip().startswith("optimizer.lr: ") and line.endswith(" | 0.0003") for line in text)


def test_other_weights_at_the_start(tmp_path):
    found = parted(tmp_path, change=at(0, 0, rewrite("token_ids", 0, 3)))
    found.made_by = ["weights"]
    assert "start from other weights" in cause(found)
    found.made_by = ["template"]
    assert "What makes an episode is not the same: template" in cause(found)


def test_long_lists_are_cut_in_the_text(tmp_path):
    found = parted(tmp_path, change=at(0, 0, rewrite("token_ids", 0, 3)))
    found.tensors = [f"tensor {number}" for number in range(12)]
    text = lines(found, "a", "b")
    assert "         ... and 2 more (--json has all)" in text and "         tensor 9" in text
