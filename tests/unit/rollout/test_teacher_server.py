"""A teacher on a server: what is asked and recorded, and what happens if it is another, is away or answers nonsense."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from run_configs import smallest_yaml
from teacher_stand_in import LetterTokenizer, StandInTeacher, log_prob

from gspo_mega.base.episodes import Episode, Node, one_turn_episode
from gspo_mega.base.errors import GspoMegaError, ModelError, RolloutError
from gspo_mega.base.records import Prompt
from gspo_mega.config import load_config
from gspo_mega.launcher.prepare import free_port
from gspo_mega.rollout.client.server_client import ServerClient
from gspo_mega.rollout.teacher_server import TeacherServers

PROMPT = Prompt("math:0", "math", (5, 6), "?", answer="4")


def episode(source: str = "math", reward: float | None = 1.0, name: str = "e") -> Episode:
    prompt = Prompt(f"{source}:0", source, (5, 6), "?")
    found = one_turn_episode(name, 0, prompt, [7, 8, 9], [-1.0] * 3, [0] * 3, "stop")
    found.reward = reward
    return found


@pytest.fixture
def teacher():
    with StandInTeacher() as server:
        yield server


@pytest.fixture
def score(tmp_path):
    """Score episodes as a run with these overrides does; returns the lines that the user was told."""

    def run(
        overrides, *episodes, tokenizer=None, environment=None, vocab_size=26, encoder=None, pool=None, when_told=None
    ):
        (file := tmp_path / "c.yaml").write_text(smallest_yaml())
        config = load_config(file, overrides).config
        servers = TeacherServers(
            config.teacher,
            config.rollout,
            tokenizer or LetterTokenizer(),
            vocab_size,
            environment or {},
            encoder=encoder,
            pool=pool,
        )
        said: list[str] = []

        def tell(line: str) -> None:
            said.append(line)
            if when_told is not None and len(said) == 1:
                when_told()

        servers.tell = tell

        async def all_of_them() -> None:
            await servers.start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for one in episodes:
                        tasks.create_task(servers.score(one))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            finally:
                await servers.close()

        asyncio.run(all_of_them())
        return said

    return run


def test_what_is_asked_and_recorded(teacher, score):
    one = episode()
    score([f"teacher={{url: '{teacher.url}'}}"], one)
    (body,) = teacher.requests
    assert body["input_ids"] == [5, 6, 7, 8, 9] and body["logprob_start_len"] == 1
    assert body["sampling_params"]["max_new_tokens"] == 0 and "top_logprobs_num" not in body
    (row,) = one.rows()
    assert row.teacher is not None and row.teacher.num_top == 0
    assert row.teacher.log_probs.tolist() == [log_prob(token) for token in (7, 8, 9)]


def test_most_likely_tokens(teacher, score):
    one = episode()
    score([f"teacher={{url: '{teacher.url}', divergence: top_k, top_k: 2}}"], one)
    scores = one.rows()[0].teacher
    assert teacher.requests[0]["top_logprobs_num"] == 2 and scores is not None
    assert scores.top_ids.tolist() == [[1, 2]] * 3 and scores.top_log_probs.tolist() == [[-0.5, -1.5]] * 3


def test_each_turn_of_a_branching_episode(teacher, score):
    """Two branches are two requests; the shared turn is taken from the first, which trains it."""
    nodes = [
        Node(0, -1, "context", [], [5, 6]),
        Node(1, 0, "sampled", [{}], [7, 8], [-1.0] * 2, [0] * 2, finish_reason="stop"),
        Node(2, 1, "context", [], [9]),
        Node(3, 2, "sampled", [{}], [10], [-1.0], [0], finish_reason="stop"),
        Node(4, 2, "sampled", [{}], [11], [-1.0], [0], finish_reason="stop"),
    ]
    tree = Episode("e", 0, PROMPT, nodes, reward=1.0)
    tree.rows()  # the reward has read the rows before
    score([f"teacher={{url: '{teacher.url}'}}"], tree)
    assert [body["input_ids"] for body in teacher.requests] == [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11]]
    found = {node.node_id: node.teacher for node in tree.turns}
    assert [found[1].log_probs.tolist(), found[4].log_probs.tolist()] == [[log_prob(7), log_prob(8)], [log_prob(11)]]
    assert all(row.teacher is not None for row in tree.rows())


def test_only_what_is_trained_is_asked(teacher, score):
    failed = episode(reward=None)
    failed.reward_error = "no verdict"
    score([f"teacher={{url: '{teacher.url}'}}"], failed)
    assert not teacher.requests and failed.nodes[1].teacher is None


def test_teachers_by_source(teacher, score):
    data = "data={sources: [{name: math, path: a}, {name: code, path: b}, {name: chat, path: c}], max_prompt_tokens: 8}"
    with StandInTeacher() as other:
        by_source = f"[{{source: math, url: '{teacher.url}'}}, {{source: code, url: '{other.url}'}}]"
        taught = [episode("math"), episode("code"), episode("code"), episode("chat")]
        score([data, f"teacher={{by_source: {by_source}}}"], *taught)
        assert (len(teacher.requests), len(other.requests)) == (1, 2)
    assert [one.nodes[1].teacher is not None for one in taught] == [True, True, True, False]


class Encoder:
    """Encodes the letters of a text (`taught_prompt` needs no more where there is no chat)."""

    def encode_prompt(self, prompt, tools=None):
        return prompt, LetterTokenizer().encode(prompt, add_special_tokens=False)


CONTEXT = "context: 'z{metadata.worked}{prompt}', max_prompt_tokens: 64"


def with_column() -> Episode:
    one = episode()
    one.prompt = Prompt("math:0", "math", (5, 6), "fg", metadata={"worked": "abc"})
    return one


def test_a_teacher_may_read_another_prompt(teacher, score):
    """The response is the same, and so is the place of its scores."""
    one = with_column()
    score([f"teacher={{url: '{teacher.url}', {CONTEXT}}}"], one, encoder=Encoder())
    (body,) = teacher.requests
    assert body["input_ids"] == [25, 0, 1, 2, 5, 6, 7, 8, 9] and body["logprob_start_len"] == 5
    assert one.rows()[0].teacher.log_probs.tolist() == [log_prob(token) for token in (7, 8, 9)]
    assert one.rows()[0].prompt.token_ids == (5, 6)


class Pool:
    """The run's servers: `clients` are those of which one is free, in turn."""

    def __init__(self, *clients):
        self.clients, self.released = list(clients), []

    async def acquire(self, avoid=frozenset(), num_tokens=0, prefer=None):
        found, self.client = self, self.clients.pop(0)
        self.asked = num_tokens
        return found

    async def run(self, call):
        return await call

    async def release(self, server, error=None, num_tokens=0):
        self.released.append(error)


def test_the_policys_own_servers_score_with_what_they_hold(teacher, score):
    """A failing server is given back with its failure, and the next that is free is asked."""
    dead = ServerClient("server-0", f"http://127.0.0.1:{free_port()}", "k", vocab_size=26)
    alive = ServerClient("server-1", teacher.url, "k", vocab_size=26, adapter="policy")
    pool, one = Pool(dead, alive), with_column()
    score([f"teacher={{policy: true, {CONTEXT}}}"], one, encoder=Encoder(), pool=pool)
    assert len(pool.released) == 2 and pool.released[0].kind == "connection" and pool.released[1] is None
    (body,) = teacher.requests
    assert body["input_ids"] == [25, 0, 1, 2, 5, 6, 7, 8, 9] and body["lora_path"] == "policy" and pool.asked == 9
    assert one.rows()[0].teacher is not None and one.counts["num_teacher_retries"] == 1


def test_no_more_requests_at_a_time_than_allowed(teacher, score):
    score([f"teacher={{url: '{teacher.url}', concurrency: 2}}"], *[episode(name=str(n)) for n in range(8)])
    assert len(teacher.requests) == 8 and teacher.most_open == 2


class Swapped(LetterTokenizer):
    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces=False):
        return super().decode([{3: 4, 4: 3}.get(one, one) for one in token_ids], skip_special_tokens=False)


class Spaced(LetterTokenizer):
    """Its token 25 is a comma after a space, which a clean-up removes."""

    def __init__(self, cleans):
        super().__init__()
        self._cleans = cleans

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces=None):
        cleans = self._cleans if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        text = super().decode(token_ids, skip_special_tokens=False)
        return text.replace("z", "," if cleans else " ,")


class Pairs(LetterTokenizer):
    def encode(self, text, *, add_special_tokens):
        return super().encode(text, add_special_tokens=False)[::2]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            Swapped(),
            "teacher.url: models/teacher has another tokenizer than the policy: id 3 is 'd' here and 'e' there",
        ),
        (Pairs(), 'it splits "The quick brown fox jumps over the lazy dog." otherwise'),
    ],
)
def test_another_tokenizer_is_refused_by_name(score, theirs, words):
    with StandInTeacher(theirs) as server, pytest.raises(ModelError, match=words):
        score([f"teacher={{url: '{server.url}'}}"], episode())
    assert not server.requests, "nothing was scored with it"


@pytest.mark.parametrize("ours", [False, True])
def test_another_default_of_cleaning_up_is_no_other_tokenizer(score, ours):
    with StandInTeacher(Spaced(not ours)) as server:
        one = episode()
        score([f"teacher={{url: '{server.url}'}}"], one, tokenizer=Spaced(ours))
    assert one.rows()[0].teacher is not None


def test_a_server_that_is_away_is_named_and_the_run_stops(score):
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RolloutError, match=r"teacher.url: /model_info: .*no answer for 0.3 s"):
        score(
            [
                f"teacher={{url: '{dead}'}}",
                "server.start_deadline_seconds=0.1",
                "rollout.no_server_deadline_seconds=0.3",
            ],
            episode(),
        )


def test_a_server_that_comes_back_is_asked_again(score):
    """It starts when the user has been told that it is away."""
    port = free_port()
    one, back = episode(), StandInTeacher(port=port)
    try:
        said = score([f"teacher={{url: 'http://127.0.0.1:{port}'}}"], one, when_told=back.__enter__)
    finally:
        back.__exit__()
    assert one.rows()[0].teacher is not None
    assert len(said) == 2 and "it is asked again" in said[0] and "answers again" in said[1]


def _without_last(answer):
    answer["meta_info"]["input_token_logprobs"].pop()
    return answer


def _without_top(answer):
    answer["meta_info"]["input_top_logprobs"][-1].pop()
    return answer


def _beyond(answer):
    answer["meta_info"]["input_top_logprobs"][-1] = [[-0.5, 1], [-1.5, 26]]
    return answer


def _twice(answer):
    answer["meta_info"]["input_top_logprobs"][-1] = [[-0.5, 1], [-1.5, 1]]
    return answer


def _unsorted(answer):
    answer["meta_info"]["input_top_logprobs"][-1] = [[-1.5, 1], [-0.5, 2]]
    return answer


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_last, "3 log-probs of prompt tokens; 4 expected"),
        (_without_top, "1 most likely tokens at scored place 2; 2 were asked for"),
        (_beyond, "ids from 0 to 25 expected"),
        (_twice, "a most likely token is there twice at scored place 2"),
        (_unsorted, "not sorted"),
        (lambda answer: [], "no input_token_logprobs"),
    ],
)
def test_nonsense_is_asked_again_and_then_ends_the_run(teacher, score, spoil, words):
    teacher.spoil = spoil
    one = episode()
    with pytest.raises(RolloutError, match=words) as raised:
        score(
            [f"teacher={{url: '{teacher.url}', divergence: top_k, top_k: 2}}", "rollout.max_attempts=2"],
            one,
        )
    assert len(teacher.requests) == 2 and "rollout.max_attempts" in str(raised.value)
    assert one.nodes[1].teacher is None and one.counts["num_teacher_retries"] == 2


def test_a_refusal_is_no_outage(teacher, score):
    teacher.status = 400
    with pytest.raises(RolloutError, match="HTTP 400: not now"):
        score([f"teacher={{url: '{teacher.url}'}}", "rollout.max_attempts=1"], episode())


def test_address_and_key_come_from_variables_and_are_not_shown(teacher, score):
    teacher.key = "sesame"
    keys = ["teacher={url: $TEACHER, api_key_variable: TEACHER_KEY}", "rollout.max_attempts=1"]
    one = episode()
    score(keys, one, environment={"TEACHER": teacher.url, "TEACHER_KEY": "sesame"})
    assert one.rows()[0].teacher is not None
    with pytest.raises(RolloutError, match="HTTP 401") as raised:
        score(keys, episode(), environment={"TEACHER": teacher.url, "TEACHER_KEY": "wrong"})
    assert "wrong" not in str(raised.value) and str(teacher.port) not in str(raised.value)
    dead = {"TEACHER": f"http://127.0.0.1:{free_port()}", "TEACHER_KEY": "k"}
    with pytest.raises(RolloutError) as raised:
        score(
            [*keys, "server.start_deadline_seconds=0.1", "rollout.no_server_deadline_seconds=0.2"],
            episode(),
            environment=dead,
        )
    assert "127.0.0.1" not in str(raised.value)
    for environment in ({}, {"TEACHER": "nowhere", "TEACHER_KEY": "k"}):
        with pytest.raises(GspoMegaError, match="teacher.url: the environment variable TEACHER"):
            score(keys, episode(), environment=environment)


def test_log_probs_are_recorded_to_the_last_bit_of_fp32(teacher, score):
    value = float(np.float32(-1.2345678))
    teacher.spoil = lambda answer: (
        answer
        | {
            "meta_info": answer["meta_info"]
            | {
                "input_token_logprobs": [
                    answer["meta_info"]["input_token_logprobs"][0],
                    *([value, entry[1], None] for entry in answer["meta_info"]["input_token_logprobs"][1:]),
                ]
            }
        }
    )
    one = episode()
    score([f"teacher={{url: '{teacher.url}'}}"], one)
    assert one.nodes[1].teacher.log_probs.tolist() == [value] * 3
