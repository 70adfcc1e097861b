"""Prompt log-probs: what is taken of SGLang's answer, and what is refused as nonsense."""

from __future__ import annotations

import asyncio

import pytest

from gspo_mega.rollout.client.completion import NonsenseAnswer
from gspo_mega.rollout.client.server_client import ServerError, read_scores, score_tokens

TOKENS, VOCABULARY = [5, 7, 0, 9], 10


def answer(entries, prompt_tokens=4):
    return {"meta_info": {"prompt_tokens": prompt_tokens, "input_token_logprobs": entries}}


WHOLE = [[None, 5, None], [-1.5, 7, None], [-0.25, 0, None], [-3, 9, None]]


def test_the_first_token_has_no_log_prob():
    assert read_scores(answer(WHOLE), TOKENS, 1, VOCABULARY).tolist() == [-1.5, -0.25, -3.0]


def test_scores_from_a_later_token_on():
    assert read_scores(answer(WHOLE[2:]), TOKENS, 3, VOCABULARY).tolist() == [-3.0]


def test_the_last_token_of_the_vocabulary_is_shown_as_0():
    shown = [*WHOLE[:3], [-3.0, 0, None]]
    assert read_scores(answer(shown), TOKENS, 1, VOCABULARY).tolist() == [-1.5, -0.25, -3.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no input_token_logprobs"),
        ({"meta_info": {"prompt_tokens": 4}}, "no input_token_logprobs"),
        (answer(WHOLE, prompt_tokens=5), "5 prompt tokens; 4 were sent"),
        (answer(WHOLE[:3]), "3 log-probs of prompt tokens; 4 expected"),
        (answer([*WHOLE[:2], [-0.25, 8, None], WHOLE[3]]), "at token 2; token id 0 was sent"),
        (answer([*WHOLE[:3], [float("nan"), 9, None]]), "log-prob nan of token 9 at place 3"),
        (answer([*WHOLE[:3], [None, 9, None]]), "log-prob None of token 9"),
        (answer([*WHOLE[:3], "text"]), "'text' at token 3"),
    ],
)
def test_nonsense_is_refused(given, words):
    with pytest.raises(NonsenseAnswer, match=words):
        read_scores(given, TOKENS, 1, VOCABULARY)


class Client:
    """Answers every request alike and keeps its body."""

    server_id = "server-0"

    def __init__(self, given, adapter=None):
        self.given, self.adapter, self.body = given, adapter, None

    async def call_object(self, path, body, deadline_seconds, *, what):
        self.body = body
        return self.given


def test_a_request_asks_for_nothing_but_scores():
    client = Client(answer(WHOLE[1:]))
    assert asyncio.run(score_tokens(client, TOKENS, 2, VOCABULARY, 1.0)).tolist() == [-0.25, -3.0]
    assert client.body["logprob_start_len"] == 1 and client.body["sampling_params"]["max_new_tokens"] == 0


def test_scores_are_under_the_adapters_that_responses_are_sampled_with():
    for adapter in (None, "policy"):
        client = Client(answer(WHOLE[1:]), adapter)
        asyncio.run(score_tokens(client, TOKENS, 2, VOCABULARY, 1.0))
        assert client.body.get("lora_path") == adapter


def test_nonsense_names_the_server():
    with pytest.raises(ServerError, match="server-0: score: 3 log-probs") as raised:
        asyncio.run(score_tokens(Client(answer(WHOLE[:3])), TOKENS, 1, VOCABULARY, 1.0))
    assert raised.value.kind == "nonsense"
