"""An answer must be the answer to this request, and no larger than such an answer can be."""

from __future__ import annotations

import asyncio
import copy
import resource
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from collector_support import Stream, check_whole
from fake_answers import gzip_bomb

from gspo_mega.rollout.client.http_stream import read_body, read_events


def of_another(answer):
    """A well-formed answer with the same prompt length, but sampled for another request."""
    other = copy.deepcopy(answer)
    other["meta_info"]["id"] = "0123456789abcdef"
    return other


def other_prompt(answer):
    answer["meta_info"]["prompt_tokens"] += 1
    return answer


FAULTS = [
    "swap",
    "late",
    of_another,
    other_prompt,
    "same twice",
    "after done",
    "no done",
    "plain json",
    "gzip",
    "giant",
    "endless",
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault if isinstance(fault, str) else fault.__name__)
def test_what_is_not_this_requests_answer_is_refused(fakes, collect, fault):
    """Each wrong answer is one failed request, of its kind, and the prompt is sampled again."""
    bad, _good = fakes("server-0", delay=0.01), fakes("server-1")
    bad.fault = lambda call, ids: fault if call in (2, 3) else None
    stream = Stream()
    collector, pool = collect(stream=stream, max_concurrent_requests=8, progress_deadline_seconds=5.0)
    pool.wait_ready(2, 60)
    batch = collector.take(0)
    check_whole(batch, stream)
    wrong = batch.counts["num_request_failures_nonsense"]
    assert wrong == batch.counts["num_request_failures"] and (
        wrong == 2 or (fault in ("swap", "same twice") and wrong > 0)
    )


def test_every_request_has_an_id_that_begins_no_other(fakes, collect):
    server = fakes("server-0")
    collector, _ = collect()
    collector.take(0)
    collector.take(0)  # the same names once more
    ids = [body["rid"] for path, body in server.calls if path == "/generate"]
    assert len(ids) == 48 == len(set(ids))
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)


def test_a_bomb_of_zeros_is_not_unpacked(fakes, collect):
    bad, _good = fakes("server-0", delay=0.01), fakes("server-1")
    bad.fault = lambda call, ids: "gzip bomb" if call < 3 else None
    stream = Stream()
    collector, pool = collect(stream=stream, progress_deadline_seconds=20.0)
    pool.wait_ready(2, 60)
    gzip_bomb()  # made before the measurement
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batch = collector.take(0)
    check_whole(batch, stream)
    assert batch.counts["num_request_failures_nonsense"] == batch.counts["num_request_failures"] == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB; one of them is 200 MB


def test_a_control_answer_without_end_is_bounded(fakes, pools, monkeypatch):
    from aiohttp import web

    from gspo_mega.base.errors import PublishError

    monkeypatch.setattr("gspo_mega.rollout.client.server_client._MOST_CONTROL_BYTES", 10_000)
    server = fakes("server-0")
    server.control = lambda path, body: web.Response(text="x" * 20_000)
    (control,) = pools().controls()
    with pytest.raises(PublishError, match="/model_info: the body has more than 10000 bytes"):
        control.weight_version(deadline_seconds=5)


@pytest.mark.parametrize("read", [read_body, lambda response, most: anext(read_events(response, most))])
def test_a_connection_that_ends_between_two_reads_is_a_failure_of_the_server(read):
    """aiohttp's reader raises a plain RuntimeError then, which would end the run."""

    async def read_on():
        loop = asyncio.get_running_loop()
        content = aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop)  # its protocol has no connection
        await read(SimpleNamespace(headers={}, content_type="text/event-stream", content=content), 100)

    with pytest.raises(aiohttp.ClientConnectionError, match="Connection closed"):
        asyncio.run(read_on())
