"""What makes an answer nonsense: every field against every other and against the request."""

from __future__ import annotations

import base64
import copy
import random
from dataclasses import replace

import numpy as np
import pytest
from fake_server import EOS, VOCAB, good_answer
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.rollout.completion import NonsenseAnswer, RoutingShape, SamplingParams, parse_completion

PARAMS = SamplingParams(6, 1.0, 1.0, -1, (EOS,))
ROUTING = RoutingShape(num_layers=2, experts_per_token=2, num_experts=4)


def parse(answer, params=PARAMS, routing=None, prompt=3):
    return parse_completion(answer, num_prompt_tokens=prompt, params=params, vocab_size=VOCAB, routing=routing)


def answer_of(ids, finish="length", **meta):
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish},
            "prompt_tokens": 3,
            "completion_tokens": len(ids),
            "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            **meta,
        },
    }


SIX = [5, 6, 7, 8, 9, 10]


@given(st.integers(0, 10**6))
def test_a_good_answer_comes_through_whole(seed):
    answer = good_answer([3, 4, 5], PARAMS.as_json(), "9", random.Random(seed), (2, 2, 4))
    completion = parse(copy.deepcopy(answer), routing=ROUTING)
    assert completion.token_ids == answer["output_ids"]
    assert completion.log_probs == [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert completion.weight_versions == [9] * len(completion.token_ids)
    assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    assert completion.routed_experts.shape == (3 + len(completion.token_ids) - 1, 2, 2)
    assert completion.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(completion.routed_experts.ravel(), flat)


def test_weight_version_spans_are_expanded_per_token():
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 6}]
    assert parse(answer_of(SIX, weight_versions=spans)).weight_versions == [7, 7, 8, 8, 8, 8]


def test_an_aborted_answer_carries_nothing():
    completion = parse({"output_ids": [5], "meta_info": {"finish_reason": {"type": "abort", "message": "m"}}})
    assert (completion.finish_reason, completion.token_ids, completion.log_probs) == ("abort", [], [])


def test_rounding_of_a_certain_token_is_no_nonsense():
    entries = [[1e-7, t, None] for t in SIX]
    assert parse(answer_of(SIX, output_token_logprobs=entries)).log_probs == [1e-7] * 6


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "meta_info"),
        ([], "meta_info"),
        ({"output_ids": SIX}, "meta_info"),
        (answer_of(SIX, finish_reason=None), "finish_reason"),
        (answer_of(SIX, finish_reason={"type": "tired"}), "tired"),
        (answer_of(SIX) | {"output_ids": "5"}, "output_ids"),
        (answer_of([5, 6, 7, 8, 9, VOCAB]), f"token {VOCAB} at position 5"),
        (answer_of([5, 6, -1, 8, 9, 9]), "token -1 at position 2"),
        (answer_of([5, 6, 7.0, 8, 9, 9]), "token 7.0"),
        (answer_of([5, 6, True, 8, 9, 9]), "token True"),
        (answer_of([]), "0 tokens"),
        (answer_of([*SIX, 11]), "7 tokens; 1 to 6"),
        (answer_of([5, 6]), "ended for length after 2 tokens of 6"),
        (answer_of([5, 6], "stop"), "stopped at token 6"),
        (answer_of([5, EOS, 7, 8, 9, 10]), "went on after the stop token"),
        (answer_of(SIX, prompt_tokens=4), "4 prompt tokens; 3 were sent"),
        (answer_of(SIX, completion_tokens=5), "completion_tokens 5"),
        (answer_of(SIX, output_token_logprobs=[[-1.0, 5, None]]), "1 log-probs for 6 tokens"),
        (answer_of(SIX, output_token_logprobs=None), "output_token_logprobs"),
        (answer_of(SIX, output_token_logprobs=[[-0.5, t + 1, None] for t in SIX]), "position 0 beside token 5"),
        (answer_of(SIX, output_token_logprobs=[[0.1, t, None] for t in SIX]), "log-prob 0.1"),
        (answer_of(SIX, output_token_logprobs=[[float("nan"), t, None] for t in SIX]), "log-prob nan"),
        (answer_of(SIX, output_token_logprobs=[[float("-inf"), t, None] for t in SIX]), "log-prob -inf"),
        (answer_of(SIX, output_token_logprobs=[[None, t, None] for t in SIX]), "log-prob None"),
        (answer_of(SIX, weight_versions=None), "weight_versions"),
        (answer_of(SIX, weight_versions=[{"version": "default", "start": 0, "end": 6}]), "weight version span"),
        (answer_of(SIX, weight_versions=[{"version": "1", "start": 0, "end": 5}]), "do not tile 6 tokens"),
        (answer_of(SIX, weight_versions=[{"version": "1", "start": 1, "end": 6}]), "do not tile"),
        (answer_of(SIX, weight_versions=[{"version": "1", "start": 0, "end": 7}]), "do not tile"),
    ],
)  # fmt: skip
def test_nonsense_is_named(answer, says):
    with pytest.raises(NonsenseAnswer) as error:
        parse(answer)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (None, "no routed_experts"),
        ("!!!", "base64"),
        (base64.b64encode(b"abc").decode(), "base64 of int32"),
        (base64.b64encode(np.zeros(31, "<i4").tobytes()).decode(), "31 routed experts; (8, 2, 2)"),
        (base64.b64encode(np.full(32, 4, "<i4").tobytes()).decode(), "0 to 3 exist"),
        (base64.b64encode(np.full(32, -1, "<i4").tobytes()).decode(), "from -1"),
    ],
)
def test_wrong_experts_are_named(experts, says):
    with pytest.raises(NonsenseAnswer) as error:
        parse(answer_of(SIX, routed_experts=experts), routing=ROUTING)
    assert says in str(error.value)


def test_layers_without_experts_have_no_routes():
    """SGLang returns an entry of every layer, zeros for those that route nothing."""
    flat = np.stack([np.zeros((8, 2)), np.tile([1, 3], (8, 1))], axis=1).astype("<i4")
    shape = replace(ROUTING, num_dense_layers=1)
    found = parse(answer_of(SIX, routed_experts=base64.b64encode(flat.tobytes()).decode()), routing=shape).routed_experts
    assert (found[:, 0] == -1).all() and (found[:, 1] == [1, 3]).all()


def test_all_tokens_is_said_by_leaving_top_k_out():
    assert "top_k" not in PARAMS.as_json()
    assert SamplingParams(6, 0.5, 0.9, 20, (EOS, 3)).as_json()["top_k"] == 20
