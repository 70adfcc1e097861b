"""A teacher on a real SGLang server: it says what the same model says as a Megatron teacher, and which tokenizer it has."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from rank_pool import RankPool

from gspo_mega.base.errors import ModelError
from gspo_mega.config.derived import OneTeacher
from gspo_mega.config.schema import TeacherModel
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.rollout.client.server_client import score_with_top
from gspo_mega.rollout.registration import read_registrations, read_secret
from gspo_mega.rollout.teacher_server import TeacherServer, first_look

NUM_TOP, VOCABULARY = 5, 512


@pytest.fixture(scope="module")
def rank():
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture
def teacher(dense_server):
    """The server's section of a configuration, and the environment that it names."""
    (found,) = [one for one in read_registrations(dense_server.attempt.servers_dir) if one.server_id == "server-0"]
    environment = {"TEACHER": found.address, "KEY": str(read_secret(dense_server.attempt.api_key_file))}
    return OneTeacher("teacher", TeacherModel(url="$TEACHER", api_key_variable="KEY")), environment


def test_it_scores_as_the_same_model_does_in_the_ranks(rank, dense_server, teacher):
    dense_server.restore_weights()
    model = str(dense_server.model)
    scored = rank.run("teacher_jobs:model_scores", folder=model, teacher=model)[0]

    async def ask() -> dict[int, tuple]:
        server = TeacherServer(teacher[0], 4, VOCABULARY, teacher[1])
        found = {}
        for row, (tokens, places, _) in scored.items():
            all_of_them = await score_with_top(server.client, tokens, places[0], VOCABULARY, NUM_TOP, 120.0)
            at = np.array(places) - places[0]
            found[row] = all_of_them.log_probs[at], all_of_them.top_ids[at], all_of_them.top_log_probs[at]
        await server.client.close()
        return found

    said = asyncio.run(ask())
    gaps = np.concatenate([said[row][0] - scored[row][2] for row in scored])
    assert len(gaps) > 100 and np.abs(gaps).max() <= 1e-5

    by_model, by_server = (
        [dict(source=name, **where) for name in "abc"] for where in (dict(path=model), dict(url="$T"))
    )
    for compared in (dict(), dict(divergence="top_k", top_k=NUM_TOP, reward_weight=0.0)):
        # The teacher is not the policy, whose weights are those of another seed.
        policy = dict(folder=str(dense_server.model.parent / "other"), parallel={}, **compared)
        _other_model(Path(policy["folder"]))
        want = rank.run("teacher_jobs:taught_by_several", by_source=by_model, **policy)[0]
        got = rank.run("teacher_jobs:taught_by_several", by_source=by_server, given=said, **policy)[0]
        assert np.abs(got["log_probs"] - want["log_probs"]).max() <= 1e-5
        assert got["sums"] == pytest.approx(want["sums"], rel=1e-4, abs=1e-3)
        for name, reference in want["gradient"].items():
            assert np.linalg.norm(got["gradient"][name] - reference) < 1e-4 * np.linalg.norm(reference), name


def _other_model(folder: Path) -> None:
    from tiny_models import make_model

    if not folder.exists():
        make_model(folder, moe=False, seed=1)


def test_a_server_without_a_tokenizer_is_refused_and_one_that_is_away_is_told(dense_server, teacher):
    """The run's own servers get and give token ids only, and so cannot say what theirs mean."""
    ours = load_tokenizer(str(dense_server.model))
    with pytest.raises(ModelError, match="cannot say what its tokens are .* without --skip-tokenizer-init"):
        asyncio.run(first_look(teacher[0], ours, VOCABULARY, teacher[1]))
    gone = {**teacher[1], "TEACHER": "http://127.0.0.1:9"}
    said = asyncio.run(first_look(teacher[0], ours, VOCABULARY, gone))
    assert said is not None and "the run asks for its tokenizer when it samples" in said


def test_sglangs_own_handlers_say_which_tokenizer_it_is(dense_model, quickstart_files):
    script = Path(__file__).with_name("sglang_tokenizers.py")
    folders = [str(dense_model), str(dense_model), str(quickstart_files / "model")]
    done = subprocess.run([sys.executable, str(script), *folders], check=True, stdout=subprocess.PIPE, text=True)
    same, other = json.loads(done.stdout.splitlines()[-1])
    assert same is None and other.startswith("teacher has another tokenizer than the policy: ")
