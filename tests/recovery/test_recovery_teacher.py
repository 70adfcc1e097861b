"""A teacher in whole replayed runs: killed and continued they end as if they had not been."""

from __future__ import annotations

import json

import numpy as np
import pytest
from recovery_support import KILLED, outcome
from test_recovery_correction import rewrite

from gspo_mega.base.episodes import Node
from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.served_scores import ServedScores
from gspo_mega.data.journal.journal import Journal
from gspo_mega.verify.certify.program import make_random_folder

SHAPE = "configs/models/certify_dense.json"


@pytest.mark.parametrize("compared", ["", ", divergence: top_k, top_k: 9"])
def test_a_run_with_a_teacher_that_is_killed_ends_as_if_it_had_not_been(ranks, tmp_path_factory, compared):
    """The advantages of sampled tokens under GSPO, and a loss of distributions. The teacher has other random weights."""
    teacher = make_random_folder(SHAPE, tmp_path_factory.mktemp("teacher") / "model", seed=8)
    keys, name = f"teacher={{path: {teacher}, reward_weight: 0.5{compared}}}", f"taught{len(compared)}"
    assert ranks.train(name, "", keys) == [0], ranks.log(name)
    want = outcome(ranks.folder(name))
    killed = f"{name}-killed"
    assert ranks.train(killed, "point=save.latest.rename.after,hit=1", keys) == [KILLED], ranks.log(killed)
    assert ranks.train(killed, "", keys) == [0], ranks.log(killed)
    assert "resumed from step_00000001" in ranks.console(killed) and "teacher: " in ranks.console(killed)
    got = outcome(ranks.folder(killed))
    assert want.keys() == got.keys()
    for part in want:
        assert want[part] == got[part], part
    lines = [json.loads(line) for line in ranks.folder(killed).metrics_file.read_text().splitlines()]
    acted = "teacher/divergence" if compared else "teacher/advantage_share"
    assert all(line[acted] > 0 and "teacher/reverse_kl" in line for line in lines)

    with pytest.raises(ConfigError, match="teacher.reward_weight: now 0.25, the run has 0.5"):
        ranks.train(killed, "", keys.replace("reward_weight: 0.5", "reward_weight: 0.25"))


def test_teachers_by_source_say_how_many_tokens_have_one(ranks, tmp_path_factory):
    """All recorded rows are of one source, which a model teaches; the other's server is not asked."""
    teacher = make_random_folder(SHAPE, tmp_path_factory.mktemp("teacher") / "model", seed=8)
    sources = (
        "data.path=null",
        "data.sources=[{name: train, path: recorded.jsonl}, {name: other, path: recorded.jsonl}]",
    )
    entries = f"[{{source: train, path: {teacher}}}, {{source: other, url: 'http://127.0.0.1:9'}}]"
    keys = (*sources, "train.num_steps=1", "teacher={by_source: " + entries + "}")
    assert ranks.train("by_source", "", *keys) == [0], ranks.log("by_source")
    (line,) = (json.loads(line) for line in ranks.folder("by_source").metrics_file.read_text().splitlines())
    assert line["teacher/token_fraction"] == 1.0 and line["teacher/advantage_share"] > 0


NUM_TOP = 3
SERVED = (
    "teacher={url: 'http://127.0.0.1:9', reward_weight: 0.5}",  # nobody is there: the scores are in the recording
    f"teacher={{url: 'http://127.0.0.1:9', divergence: top_k, top_k: {NUM_TOP}, coefficient: 0.3}}",
)


@pytest.fixture(scope="module")
def scored(ranks, tmp_path_factory):
    """Folder of the recording with what a teacher's server said of each token and of 3 more."""
    folder = tmp_path_factory.mktemp("scored") / "recorded"
    rng = np.random.default_rng(4)

    def change(step: int, row: int, turn: Node) -> None:
        count = len(turn.token_ids)
        ids = np.array([rng.permutation(500)[:NUM_TOP] for _ in range(count)], np.int32)
        masses = np.sort(rng.dirichlet(np.ones(NUM_TOP + 1), count)[:, :NUM_TOP])[:, ::-1]
        own = rng.uniform(-8, -4, count).astype(np.float32)
        turn.teacher = ServedScores(own, ids, np.log(masses).astype(np.float32))

    rewrite(RunFolder(ranks.config_file.parent / "recorded"), RunFolder(folder), change)
    return folder


@pytest.mark.parametrize("keys", SERVED, ids=["advantages", "most likely tokens"])
def test_scores_of_a_server_are_in_the_journal_and_nobody_is_asked_again(ranks, scored, keys):
    overrides = (keys, f"train.from_rollouts={scored}", "journal.keep_last=10")
    name = f"served{len(keys)}"
    assert ranks.train(name, "", *overrides) == [0], ranks.log(name)
    want = outcome(ranks.folder(name))
    killed = f"{name}-killed"
    assert ranks.train(killed, "point=step.optimizer,hit=3", *overrides) == [KILLED], ranks.log(killed)
    assert ranks.train(killed, "", *overrides) == [0], ranks.log(killed)
    got = outcome(ranks.folder(killed))
    assert {key for key in got.keys() | want.keys() if got.get(key) != want.get(key)} == set()

    # The run's own journal has them as well, and they matter.
    own = f"train.from_rollouts={ranks.folder(name).path}"
    assert ranks.train(f"{name}-replayed", "", keys, own, "journal.keep_last=10") == [0], ranks.log(f"{name}-replayed")
    again = outcome(ranks.folder(f"{name}-replayed"))
    weights = {key for key in want if key.startswith("hf/") and key.endswith(".safetensors")}
    assert weights and all(again[key] == want[key] for key in weights)
    lines = [json.loads(line) for line in ranks.folder(name).metrics_file.read_text().splitlines()]
    assert all("teacher/reverse_kl" in line and ("teacher/divergence" in line) == ("top_k" in keys) for line in lines)
    stronger = keys.replace("reward_weight: 0.5", "reward_weight: 0.4").replace("coefficient: 0.3", "coefficient: 0.4")
    assert ranks.train(f"{name}-other", "", stronger, *overrides[1:]) == [0]
    other = outcome(ranks.folder(f"{name}-other"))
    assert all(other[key] != want[key] for key in weights)


def test_a_recording_without_scores_is_refused_by_name(ranks):
    assert ranks.train("unscored", "", SERVED[0]) == [3], ranks.log("unscored")
    assert "has no scores of a teacher's server, and `teacher.url` needs them" in str(ranks.error("unscored"))


def test_the_policy_with_a_solved_example_teaches_itself_and_is_not_asked_again(live):
    """SDFT with a real server: killed after its first batch it goes on from the journal, and ends where a replay does."""
    keys = "teacher={policy: true, context: '{prompt}{answer} {prompt}', max_prompt_tokens: 96, reward_weight: 0}"
    overrides = (keys, "train.num_steps=2")
    assert live.train("sdft", "point=step.optimizer,hit=2", *overrides) == [KILLED], live.ranks.log("sdft")
    assert live.train("sdft", "", *overrides) == [0], live.ranks.log("sdft")
    folder = live.ranks.folder("sdft")
    assert "trajectories are in the journal and are not sampled again" in live.ranks.console("sdft")
    steps = [Journal(folder.journal_dir).read(step) for step in range(2)]
    rows = [row for step in steps for row in step.batch.trajectories]
    assert all(row.teacher is not None for row in rows)
    gaps = np.concatenate([row.teacher.log_probs - np.array(row.rollout_log_probs) for row in rows])
    assert np.abs(gaps).max() > 1e-3, "the same weights say other things of the tokens, because they read the answer"

    replayed = ("train.num_steps=2", f"train.from_rollouts={folder.path}")
    assert live.train("sdft-replay", "", keys, *replayed) == [0], live.ranks.log("sdft-replay")
    want, got = outcome(live.ranks.folder("sdft-replay")), outcome(folder)
    weights = [name for name in want if name.startswith("hf/") and name.endswith(".safetensors")]
    assert weights and all(want[name] == got[name] for name in weights)
    lines = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    assert all(line["teacher/advantage_share"] == 1.0 for line in lines), "only the teacher teaches"
