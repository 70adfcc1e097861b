"""Routed experts out of a server's answer: every number, in the smallest type, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.rollout.client import completion


def text_of(numbers) -> str:
    return base64.b64encode(np.asarray(numbers, "<i4").tobytes()).decode()


@given(st.integers(0, 200), st.sampled_from([4, 256, 257, 1024]), st.integers(0, 10**6))
def test_numbers_come_through(count, num_experts, seed):
    numbers = np.random.default_rng(seed).integers(0, num_experts, count)
    found = completion.decode_routes(text_of(numbers), num_experts)
    assert found.dtype == (np.uint8 if num_experts <= 256 else np.int16)
    np.testing.assert_array_equal(found, numbers)


@pytest.mark.parametrize("count", [3 * 2**14 - 1, 3 * 2**14, 3 * 2**14 + 1, 7 * 2**14])
def test_blocks_join(count):
    numbers = np.arange(count) % 251
    np.testing.assert_array_equal(completion.decode_routes(text_of(numbers).encode(), 251), numbers)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text[:-1], "characters"),
        (lambda text: text[:-4] + "A\nAA", "base64 of int32"),
        (lambda text: text[:100] + "====" + text[104:], "base64 of int32"),
        (lambda text: text[: completion._ROUTES_BLOCK - 1] + "=" + text[completion._ROUTES_BLOCK :], "base64 of int32"),
        (lambda text: text[:-4] + "AAé", "base64 of int32"),
        (lambda text: text[:-4], "base64 of int32"),
        (lambda text: text_of([0, 300]), "from 0 to 300; 0 to 255 exist"),
        (lambda text: text_of([-1, 3]), "from -1 to 3; 0 to 255 exist"),
        (lambda text: text_of([256]), "from 256 to 256; 0 to 255 exist"),
    ],
)
def test_what_is_wrong_is_said(spoil, says):
    good = text_of(np.zeros(3 * 2**14 + 7))
    with pytest.raises(ValueError, match=says):
        completion.decode_routes(spoil(good), 256)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_routes_are_cut_out_of_the_json_alone(separators):
    says = 'a text with "routed_experts":"AAAA" in it \\'
    report = {"text": says, "meta_info": {"a": 1, "routed_experts": text_of([1, 2, 3]), "finish_reason": {"b": says}}}
    rest, found = completion.cut_routes(json.dumps(report, separators=separators).encode())
    assert bytes(found.text).decode() == report["meta_info"]["routed_experts"]
    report["meta_info"]["routed_experts"] = ""
    assert json.loads(rest) == report


@pytest.mark.parametrize(
    "event", [b'{"meta_info":{}}', b'{"meta_info":{"routed_experts":null}}', b'{"routed_experts":"A']
)
def test_a_report_without_routes_stays_as_it_is(event):
    assert completion.cut_routes(event) == (event, None)


def test_decoding_is_not_the_event_loops_work(monkeypatch):
    seen = []

    def decode(text, num_experts):
        seen.append(threading.current_thread())
        return np.zeros(1, np.uint8)

    monkeypatch.setattr(completion, "decode_routes", decode)
    report = {"meta_info": {"routed_experts": completion.EncodedRoutes(memoryview(b"AAAA"))}}
    asyncio.run(completion.decode_routes_of(report, 4))
    asyncio.run(completion.decode_routes_of({"meta_info": {"routed_experts": "AAAA"}}, 4))
    asyncio.run(completion.decode_routes_of([1], 4))
    assert len(seen) == 1 and seen[0] is not threading.main_thread()
    assert isinstance(report["meta_info"]["routed_experts"], np.ndarray)
