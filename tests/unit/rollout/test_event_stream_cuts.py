"""A stream of events reads the same however the network cuts it, with large events among small ones."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.rollout.client.completion import NonsenseAnswer
from gspo_mega.rollout.client.http_stream import _LARGE_EVENT_BYTES, read_events


def read(body: bytes, cuts: list[int]) -> list:
    async def chunks():
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
            yield body[start:end]

    response = SimpleNamespace(
        headers={}, content_type="text/event-stream", content=SimpleNamespace(iter_any=lambda: chunks())
    )

    async def run():
        return [report async for report in read_events(response, 2 * len(body))]

    return asyncio.run(run())


def body_of(reports: list) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in [*reports]) + b"data: [DONE]\n\n"


@given(st.data(), st.lists(st.sampled_from([0, 10, _LARGE_EVENT_BYTES - 20, _LARGE_EVENT_BYTES + 20]), max_size=4))
def test_however_it_is_cut(data, sizes):
    reports = [{"number": number, "text": "x" * size} for number, size in enumerate(sizes)]
    body = b": a comment\n\n" + body_of(reports)
    ends = [place + shift for place in range(len(body)) if body[place : place + 2] == b"\n\n" for shift in (0, 1, 2)]
    cuts = sorted(data.draw(st.lists(st.sampled_from(ends) | st.integers(0, len(body)), max_size=6)))
    assert read(body, cuts) == reports


def test_routes_of_a_large_event_are_whole():
    text = "AAAA" * _LARGE_EVENT_BYTES
    (found,) = read(body_of([{"meta_info": {"routed_experts": text}}]), [100, 2 * _LARGE_EVENT_BYTES])
    assert bytes(found["meta_info"]["routed_experts"].text) == text.encode()


def test_a_single_newline_ends_no_event():
    assert read(b"data: {\n}\n\ndata: [DONE]\n\n", [8]) == [{}]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'data: {"a": 1}\n\n', "without its"),
        (body_of([]) + b"data: 1\n\n", "after the end"),
        (b"event: x\n\n", "not an event: b'event: x'"),
        (b"data: " + b"x" * 2 * _LARGE_EVENT_BYTES + b"\n\n", "not JSON: b'data: xxx"),
    ],
)
def test_nonsense_is_named(body, says):
    with pytest.raises(NonsenseAnswer, match=says):
        read(body, [])
