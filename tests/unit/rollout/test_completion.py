"""What makes an answer nonsense: every field is checked against the others and against the request."""

from __future__ import annotations

import base64
import copy
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from fake_answers import EOS, VOCAB, good_answer, part_of
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.rollout.client.completion import (
    NonsenseAnswer,
    PartialResponse,
    RefusedAnswer,
    RoutingShape,
    SamplingParams,
    StreamedAnswer,
)

PARAMS = SamplingParams(6, 1.0, 1.0, -1, (EOS,))
ROUTING = RoutingShape(num_layers=2, experts_per_token=2, num_experts=4)


def reader(params=PARAMS, routing=None, prompt=3, weight_version=None):
    return StreamedAnswer(
        request_id="the-request",
        num_prompt_tokens=prompt,
        params=params,
        vocab_size=VOCAB,
        routing=routing,
        weight_version=weight_version,
    )


def parse(*reports, params=PARAMS, routing=None, prompt=3):
    answer = reader(params, routing, prompt)
    for report in reports:
        answer.add(report)
    return answer.completion


def answer_of(ids, finish="length", **meta):
    return {
        "output_ids": ids,
        "meta_info": {
            "id": "the-request",
            "finish_reason": {"type": finish},
            "prompt_tokens": 3,
            "completion_tokens": len(ids),
            "weight_version": "7",
            "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            **meta,
        },
    }


SIX = [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("said", "found"),
    [({"cached_tokens": 2}, 2), ({"cached_tokens": 0}, 0), ({}, None)]
    # Nothing is trained on it: what cannot be true of a prompt of three tokens is not counted, and refuses nothing.
    + [({"cached_tokens": value}, None) for value in (4, -1, True, 2.0, "2", None)],
)
def test_what_the_prefix_cache_had_of_the_prompt(said, found):
    assert parse(answer_of(SIX, **said)).num_cached_tokens == found
    begun = reader()
    begun.add(answer_of([5, 6], **{"finish_reason": None, **said}))
    assert begun.so_far().num_cached_tokens == found


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
    assert completion.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(completion.routed_experts.ravel(), flat)


def test_weight_version_spans_are_expanded_per_token():
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 6}]
    assert parse(answer_of(SIX, weight_versions=spans)).weight_versions == [7, 7, 8, 8, 8, 8]


@given(st.integers(0, 10**6), st.data())
def test_reports_add_up_to_the_answer_however_it_is_cut(seed, data):
    answer = good_answer([3, 4, 5], PARAMS.as_json(), "9", random.Random(seed), (2, 2, 4))
    total = len(answer["output_ids"])
    cuts = sorted(data.draw(st.lists(st.integers(0, total - 1), max_size=4)))
    reader_ = reader(routing=ROUTING)
    counts = [reader_.add(part_of(answer, start, end)) for start, end in zip([0, *cuts], [*cuts, total])]
    whole = parse(answer, routing=ROUTING)
    assert sum(counts) == total
    assert replace(reader_.completion, routed_experts=None) == replace(whole, routed_experts=None)
    np.testing.assert_array_equal(reader_.completion.routed_experts, whole.routed_experts)


@given(st.integers(0, 10**6))
def test_a_response_in_parts_has_the_records_it_was_sampled_with(seed):
    """Each part continues the earlier ones; the earlier tokens keep the experts that the earlier part returned."""
    rng = random.Random(seed)
    long = SamplingParams(24, 1.0, 1.0, -1, (EOS,))
    prompt, response = [3, 4, 5], PartialResponse(3, long, True)
    token_ids, log_probs, rows = [], [], []
    while response.whole.finish_reason == "abort":
        left = long.after(len(token_ids))
        answer = good_answer([*prompt, *token_ids], left.as_json(), "9", rng, (2, 2, 4))
        total = len(answer["output_ids"])
        end = rng.randint(0, total)
        finish = None if end == total else {"type": "abort", "message": "m"}
        part = parse(part_of(answer, 0, end, finish), params=left, routing=ROUTING, prompt=3 + len(token_ids))
        assert response.add(part)
        token_ids += part.token_ids
        log_probs += part.log_probs
        if part.token_ids:
            rows += list(part.routed_experts[len(rows) :])
    assert response.whole.token_ids == token_ids and response.whole.log_probs == log_probs
    assert response.whole.weight_versions == [9] * len(token_ids)
    assert response.whole.finish_reason == ("stop" if token_ids[-1] == EOS else "length")
    np.testing.assert_array_equal(response.whole.routed_experts, np.array(rows))
    assert len(response.whole.routed_experts) == 3 + len(token_ids) - 1


def test_a_part_whose_experts_are_not_known_is_not_taken():
    response = PartialResponse(3, PARAMS, True)
    part = parse(answer_of([5, 6], "abort"), routing=ROUTING)
    assert part.routed_experts is None and not response.add(part) and len(response) == 0
    assert PartialResponse(3, PARAMS, False).add(part)


def test_a_part_that_was_cut_at_its_very_end_is_whole():
    for token_ids, reason in (([5, 6, EOS], "stop"), (SIX, "length")):
        response = PartialResponse(3, PARAMS, False)
        assert response.add(parse(answer_of(token_ids, "abort"))) and response.whole.finish_reason == reason


def test_an_aborted_answer_carries_its_tokens_so_far():
    first = part_of(answer_of([5, 6, 7, 8, 9, 10]), 0, 2)
    completion = parse(
        first, answer_of([7], "abort", completion_tokens=3, weight_versions=[{"version": "7", "start": 0, "end": 3}])
    )
    assert (completion.finish_reason, completion.token_ids, completion.weight_versions) == ("abort", [5, 6, 7], [7] * 3)
    # Cut short while it waits in the queue again: no prompt, the last token a second time, every log-prob once more.
    queued = answer_of([6], "abort", completion_tokens=2, output_token_logprobs=[[-0.5, 5, None], [-0.5, 6, None]])
    del queued["meta_info"]["prompt_tokens"], queued["meta_info"]["weight_versions"]
    assert parse(first, queued).token_ids == [5, 6]
    nothing = {
        "output_ids": [],
        "meta_info": {"id": "the-request", "finish_reason": {"type": "abort"}, "completion_tokens": 0},
    }
    assert parse(nothing).token_ids == []


def test_what_the_server_refuses_is_in_its_words():
    with pytest.raises(RefusedAnswer, match="too long"):
        parse({"error": {"message": "too long", "code": 400}})
    with pytest.raises(RefusedAnswer, match="503: queue full"):
        parse(answer_of([], finish_reason={"type": "abort", "status_code": 503, "message": "queue full"}))


def test_tokens_so_far_are_there_without_an_end():
    answer = reader()
    answer.add(part_of(answer_of(SIX), 0, 4))
    assert answer.completion is None
    assert (answer.so_far().token_ids, answer.so_far().weight_versions) == (SIX[:4], [7] * 4)


def test_rounding_of_a_certain_token_is_no_nonsense():
    entries = [[1e-7, t, None] for t in SIX]
    assert parse(answer_of(SIX, output_token_logprobs=entries)).log_probs == [1e-7] * 6


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "meta_info"),
        ([], "meta_info"),
        ({"output_ids": SIX}, "meta_info"),
        (answer_of(SIX, finish_reason="stop"), "finish_reason 'stop'"),
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
        (answer_of(SIX, id="another-request"), "the answer is to request 'another-request'"),
        (answer_of(SIX, id=None), "the answer is to request None"),
        (answer_of(SIX, weight_version="default"), "weight_version 'default'"),
        (answer_of(SIX, completion_tokens=5), "completion_tokens 5"),
        (answer_of(SIX, output_token_logprobs=[[-1.0, 5, None]]), "1 log-probs for 6 tokens"),
        (answer_of(SIX, output_token_logprobs=None), "output_token_logprobs"),
        (answer_of(SIX, output_token_logprobs=[[-0.5, t + 1, None] for t in SIX]), "position 0, where the token is 5"),
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
)
def test_nonsense_is_named(answer, says):
    with pytest.raises(NonsenseAnswer) as error:
        parse(answer)
    assert says in str(error.value)


def test_reports_that_do_not_follow_each_other_are_nonsense():
    first = part_of(answer_of(SIX), 0, 2)
    for second, says in (
        (first, "completion_tokens 2 after 2 token ids and 2 more"),
        (part_of(answer_of(SIX), 3, 6), "completion_tokens 6 after 2"),
        (part_of(answer_of(SIX, id="b"), 2, 6), "request 'b'"),
    ):
        with pytest.raises(NonsenseAnswer, match=says):
            parse(first, second)
    with pytest.raises(NonsenseAnswer, match="went on after its end"):
        parse(answer_of(SIX), answer_of(SIX))


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
    found = parse(
        answer_of(SIX, routed_experts=base64.b64encode(flat.tobytes()).decode()), routing=shape
    ).routed_experts
    assert (found[:, 0] == 0).all() and (found[:, 1] == [1, 3]).all()


def test_all_tokens_is_said_by_leaving_top_k_out():
    assert "top_k" not in PARAMS.as_json()
    assert SamplingParams(6, 0.5, 0.9, 20, (EOS, 3)).as_json()["top_k"] == 20


@pytest.mark.parametrize("reported, certain", [("7788", 4), ("8888", 0), ("7777", 6), ("7877", 2)])
def test_tokens_so_far_end_where_their_version_is_not_certain(reported, certain):
    """A report names the version of its own time, and some of its tokens may be older."""
    answer = reader(weight_version=7)
    for place, (start, version) in enumerate(zip((0, 2, 4, 5), reported, strict=True)):
        report = part_of(answer_of([*SIX, 11]), start, (2, 4, 5, 6)[place])
        report["meta_info"]["weight_version"] = version
        answer.add(report)
    assert answer.completion is None
    assert (answer.so_far().token_ids, answer.so_far().weight_versions) == (SIX[:certain], [7] * certain)


def test_an_answer_that_is_cut_short_without_spans_ends_where_its_versions_are_not_certain():
    reports = [part_of(answer_of(SIX), 0, 2), answer_of(SIX[2:4], "abort", completion_tokens=4, weight_version="8")]
    with_spans = copy.deepcopy(reports)
    del reports[1]["meta_info"]["weight_versions"]
    cut = reader(weight_version=7)
    assert [cut.add(report) for report in reports] == [2, 2]
    assert (cut.completion.token_ids, cut.completion.weight_versions) == (SIX[:2], [7, 7])
    assert len(cut.completion.log_probs) == 2
    with_spans[1]["meta_info"]["weight_versions"] = [
        {"version": "7", "start": 0, "end": 3},
        {"version": "8", "start": 3, "end": 4},
    ]
    whole = reader(weight_version=7)
    for report in with_spans:
        whole.add(report)
    assert (whole.completion.token_ids, whole.completion.weight_versions) == (SIX[:4], [7, 7, 7, 8])


# --- sampling masks ----------------------------------------------------------------------------------------------------

KEPT = SamplingParams(6, 1.0, 0.8, 20, (EOS,), min_p=0.05)


def kept_answer(ids, sets, log_probs, finish="length"):
    return answer_of(ids, finish, output_token_sampling_mask=sets, output_token_sampling_logprobs=log_probs)


def test_masks_come_with_their_log_probs_in_place_of_the_plain_ones():
    sets = [[9, 5], [6], [7, 63, 0], [8, 1], [9, 2], [10, 3]]
    whole = parse(kept_answer(SIX, sets, [-0.25, 0.0, -0.75, -0.5, -0.5, -0.5]), params=KEPT)
    assert whole.log_probs == [-0.25, 0.0, -0.75, -0.5, -0.5, -0.5]
    assert whole.sampling_masks == SamplingMasks.of([sorted(one) for one in sets])
    assert parse(answer_of(SIX)).sampling_masks is None


def test_a_request_asks_for_masks_where_top_k_is_finite_and_says_min_p():
    assert KEPT.has_masks and not PARAMS.has_masks and not replace(KEPT, top_k=1).has_masks
    assert KEPT.as_json()["min_p"] == 0.05 and "min_p" not in PARAMS.as_json()


@given(st.integers(0, 10**6), st.data())
def test_masks_of_reports_add_up_however_the_answer_is_cut(seed, data):
    answer = good_answer([3, 4, 5], KEPT.as_json(), "9", random.Random(seed))
    total = len(answer["output_ids"])
    cut, end = (data.draw(st.integers(0, total)) for _ in range(2))
    cut, end = sorted((cut, end))
    finish = None if end == total else {"type": "abort", "message": "m"}
    read = reader(KEPT)
    for start, stop, how in [(0, cut, None), (cut, end, finish)][cut == total :] if cut < total else [(0, total, None)]:
        read.add(part_of(answer, start, stop, how))
    whole = parse(answer, params=KEPT)
    got = read.completion
    assert got.sampling_masks == whole.sampling_masks.between(0, len(got.token_ids))
    assert read.so_far().sampling_masks == got.sampling_masks
    response = PartialResponse(3, KEPT, False)
    assert response.add(got)
    if response.whole.finish_reason == "abort":
        rest = good_answer([3] * (3 + len(got.token_ids)), KEPT.after(len(got.token_ids)).as_json(), "9")
        part = parse(rest, params=KEPT.after(len(got.token_ids)), prompt=3 + len(got.token_ids))
        assert response.add(part)
        assert response.whole.sampling_masks == SamplingMasks.join([got.sampling_masks, part.sampling_masks])
    assert len(response.whole.sampling_masks) == len(response.whole.token_ids)


def test_the_last_report_of_an_aborted_request_repeats_a_token_and_its_mask():
    read = reader(KEPT)
    first = kept_answer([5, 6], [[5], [6, 7]], [0.0, -0.5])
    first["meta_info"]["finish_reason"] = None
    read.add(first)
    last = kept_answer([6], [[6, 7]], [-0.5], "abort")
    last["meta_info"] |= {"completion_tokens": 2, "weight_versions": [{"version": "7", "start": 0, "end": 2}]}
    read.add(last)
    assert read.completion.sampling_masks == SamplingMasks.of([[5], [6, 7]])


@pytest.mark.parametrize(
    ("sets", "log_probs", "said"),
    [
        ([[5]], [0.0], "1 sampling masks and 1 of their log-probs for 2 tokens"),
        ([[5], [6]], [0.0], "2 sampling masks and 1"),
        ([[5], [7]], [0.0, 0.0], "token 6 is 0 times in its sampling mask"),
        ([[5], [6, 6]], [0.0, 0.0], "token 6 is 2 times"),
        ([[5], [6, 7, 7]], [0.0, 0.0], "one id twice"),
        ([[5], [6, VOCAB]], [0.0, 0.0], "other things than token ids"),
        ([[5], [6, True]], [0.0, 0.0], "other things than token ids"),
        ([[5], [6, -1]], [0.0, 0.0], "other things than token ids"),
        ([[5], [6.0]], [0.0, 0.0], "other things than token ids"),
        ([[5], 6], [0.0, 0.0], "sampling masks"),
        ([[], [6]], [0.0, 0.0], "token 5 is 0 times"),
        ([[5], [6]], [0.0, 0.5], "log-prob 0.5 over the kept tokens at position 1"),
        ([[5], [6]], [0.0, None], "log-prob None over the kept tokens"),
        (None, [0.0, 0.0], "no output_token_sampling_mask"),
    ],
)
def test_masks_that_cannot_be_are_nonsense(sets, log_probs, said):
    params = replace(KEPT, max_new_tokens=2)
    with pytest.raises(NonsenseAnswer, match=re.escape(said)):
        parse(kept_answer([5, 6], sets, log_probs), params=params)


def test_ties_that_overflow_are_refused_with_the_keys():
    message = "Sampling support exceeds --sampling-mask-max-tokens=4096, commonly because of cutoff ties."
    report = answer_of([], "abort")
    report["meta_info"]["finish_reason"] |= {"status_code": 400, "message": message}
    with pytest.raises(RefusedAnswer, match=r"cutoff ties\. \(rollout\.top_k; server\.options\.sampling_mask_max_tok"):
        parse(report, params=KEPT)
