"""Every field of a server's answer, with every kind of wrong value: each is nonsense of that answer, and nothing else.

Nothing but NonsenseAnswer or RefusedAnswer comes out, which the client makes a ServerError of; none is believed.
"""

import asyncio
import base64
import copy
import types

import numpy as np
import pytest
from test_completion import ROUTING, SIX, VOCAB, answer_of, parse

from gspo_mega.base.errors import PublishError
from gspo_mega.rollout.client.completion import NonsenseAnswer, RefusedAnswer
from gspo_mega.rollout.client.server_client import _add_report, read_scores
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.rollout.registration import Registration


def deep(depth=1020):
    """As orjson reads it; too deep for repr."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


WRONG = {
    "true": True,
    "false": False,
    "zero as a float": 0.0,
    "a float": 6.0,
    "a half": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "minus one": -1,
    "huge": 2**63,
    "too huge for a float": 10**400,
    "minus huge": -(2**63),
    "null": None,
    "no digits": "seven",
    "other digits": "\u0667",
    "digits with a line": "7\n",
    "a float's digits": "7.0",
    "many digits": "9" * 5000,
    "empty": "",
    "bytes of control": "\x1b[2J",
    "a list": [],
    "a list of it": [[7]],
    "an object": {},
    "nested": {"version": {"version": 7}},
    "deep": deep(),
}
# (path into the answer, values of WRONG that are right there)
FIELDS = [
    (("output_ids",), []),
    (("output_ids", 0), []),
    (("output_ids", 5), []),
    (("meta_info",), []),
    (("meta_info", "id"), []),
    (("meta_info", "finish_reason"), []),
    (("meta_info", "finish_reason", "type"), []),
    (("meta_info", "prompt_tokens"), []),
    (("meta_info", "completion_tokens"), []),
    (("meta_info", "weight_version"), []),
    (("meta_info", "weight_versions"), []),
    (("meta_info", "weight_versions", 0), []),
    (("meta_info", "weight_versions", 0, "version"), []),
    (("meta_info", "weight_versions", 0, "start"), []),
    (("meta_info", "weight_versions", 0, "end"), []),
    (("meta_info", "output_token_logprobs"), []),
    (("meta_info", "output_token_logprobs", 0), []),
    (("meta_info", "output_token_logprobs", 0, 0), ["zero as a float", "minus one", "minus huge"]),
    (("meta_info", "output_token_logprobs", 0, 1), []),
    (("meta_info", "routed_experts"), []),
]


def put(answer, path, value):
    *to, last = path
    for key in to:
        answer = answer[key]
    answer[last] = value


def good():
    routes = base64.b64encode(np.zeros(32, "<i4").tobytes()).decode()
    return answer_of(SIX, routed_experts=routes)


@pytest.mark.parametrize("path", [path for path, _ in FIELDS], ids=lambda path: ".".join(map(str, path)))
def test_a_wrong_value_of_a_field_is_nonsense(path):
    right = dict(FIELDS)[path]
    assert parse(good(), routing=ROUTING) is not None
    for name, value in WRONG.items():
        if path == ("meta_info", "finish_reason") and value is None:  # the response goes on
            continue
        answer = copy.deepcopy(good())
        put(answer, path, value)
        if name in right:
            assert parse(answer, routing=ROUTING) is not None, name
            continue
        with pytest.raises((NonsenseAnswer, RefusedAnswer)) as told:
            parse(answer, routing=ROUTING)
        assert len(str(told.value)) < 2500, name


@pytest.mark.parametrize(
    "path", [path for path, _ in FIELDS if len(path) > 1], ids=lambda path: ".".join(map(str, path))
)
def test_a_missing_field_is_nonsense(path):
    if path[-1] == 5 or path[-1] == 0:
        return  # an item of a list: the others would be one too few, which other fields say
    answer = copy.deepcopy(good())
    put(answer, path, None)
    *to, last = path
    holder = answer
    for key in to:
        holder = holder[key]
    del holder[last]
    if path == ("meta_info", "finish_reason"):
        return
    with pytest.raises(NonsenseAnswer):
        parse(answer, routing=ROUTING)


@pytest.mark.parametrize("name", WRONG)
def test_a_report_or_an_error_that_is_none_is_nonsense(name):
    with pytest.raises((NonsenseAnswer, RefusedAnswer)):
        parse(WRONG[name])
    for error in (WRONG[name], {"message": WRONG[name]}):
        with pytest.raises(RefusedAnswer) as told:
            parse({"error": error})
        assert len(str(told.value)) <= 2000
    aborted = answer_of(
        [], "abort", finish_reason={"type": "abort", "status_code": WRONG[name], "message": WRONG[name]}
    )
    if WRONG[name] is not None:
        with pytest.raises(RefusedAnswer) as told:
            parse(aborted)
        assert len(str(told.value)) < 2500


def test_what_nobody_foresaw_is_nonsense_too():
    class Surprised:
        def add(self, report):
            raise TypeError("slice indices must be integers")

    with pytest.raises(NonsenseAnswer, match="a report that cannot be read: TypeError: slice indices"):
        _add_report(Surprised(), {})


def scores_of(ids):
    return {
        "meta_info": {"prompt_tokens": 3, "input_token_logprobs": [[None, 4, None]] + [[-0.5, i, None] for i in ids]}
    }


@pytest.mark.parametrize(
    ("path", "right"),
    [
        (("meta_info",), []),
        (("meta_info", "prompt_tokens"), []),
        (("meta_info", "input_token_logprobs"), []),
        (("meta_info", "input_token_logprobs", 1), []),
        (("meta_info", "input_token_logprobs", 1, 0), ["zero as a float", "minus one", "minus huge"]),
        (("meta_info", "input_token_logprobs", 1, 1), []),
    ],
)
def test_wrong_scores_are_nonsense(path, right):
    assert read_scores(scores_of([5, 6]), [4, 5, 6], 1, VOCAB).tolist() == [-0.5, -0.5]
    for name, value in WRONG.items():
        answer = scores_of([5, 6])
        put(answer, path, value)
        if name in right:
            read_scores(answer, [4, 5, 6], 1, VOCAB)
            continue
        with pytest.raises(NonsenseAnswer):
            read_scores(answer, [4, 5, 6], 1, VOCAB)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_to_a_publisher_are_its_error(name):
    value = WRONG[name]

    def control(answer):
        async def call_object(*_, **__):
            return answer

        client = types.SimpleNamespace(call_object=call_object, update=call_object)
        one = Registration("server-0", "", 1, "ready", 1, None, 0.0)
        return HttpServerControl(one, client, asyncio.run, lambda: None)

    for answer in ({"weight_version": value}, {}):
        with pytest.raises(PublishError, match="server-0"):
            control(answer).weight_version(deadline_seconds=1)
    for answer in (
        {"ranks": value},
        {"ranks": [value]},
        {"ranks": [{"checksums": value}]},
        {"ranks": [{"checksums": {"a": value}}]},
    ):
        if value in ([], {}) or (isinstance(value, str) and answer["ranks"] != value) or value == "":
            continue  # of no rank, or a text, which is compared with the trainer's
        with pytest.raises(PublishError, match="server-0"):
            control(answer).checksums(deadline_seconds=1)
    for answer in ({"meta_info": value}, {"meta_info": {"input_token_logprobs": [[None, 1], [value, 2]]}}):
        if name in ("zero as a float", "minus one", "minus huge") and "input_token_logprobs" in (
            answer["meta_info"] if isinstance(answer["meta_info"], dict) else ()
        ):
            continue
        with pytest.raises(PublishError, match="server-0"):
            control(answer).log_probs([1, 2], None, deadline_seconds=1)
    with pytest.raises(PublishError, match="server-0"):
        control({"loaded_adapters": value}).load_adapter("p", deadline_seconds=1)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("field", ["server_id", "address", "pid", "state", "generation", "heartbeat", "num_failures"])
def test_a_registration_of_other_types_is_none(field, name):
    whole = {
        "server_id": "server-0",
        "address": "",
        "pid": 1,
        "state": "ready",
        "generation": 1,
        "weight_version": None,
    }
    whole |= {"heartbeat": 1.0}
    assert Registration.from_json(whole).state == "ready"
    value = WRONG[name]
    is_right = (
        isinstance(value, str)
        if field in ("server_id", "address")
        else type(value) in (int, float) and abs(value) < 2**63
        if field == "heartbeat"
        else type(value) is int
        if field != "state"
        else False
    )
    if is_right:
        return
    with pytest.raises(ValueError):
        Registration.from_json(whole | {field: value})


def test_a_registration_with_a_failure_that_is_no_text_is_none():
    whole = {"server_id": "s", "address": "", "pid": 1, "state": "ready", "generation": 1, "weight_version": None}
    with pytest.raises(ValueError, match="recent_failures is not a list of texts"):
        Registration.from_json(whole | {"heartbeat": 1.0, "recent_failures": ["died", 7]})
