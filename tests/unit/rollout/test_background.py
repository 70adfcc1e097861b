"""A failure in the background must be reported, and must not leave a batch waiting for ever."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import time

import pytest
from collector_support import Stream, check_whole
from waiting import until

from gspo_mega.base import untrusted
from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout.pooled_server import LoopThread


@pytest.fixture
def failing_reads(monkeypatch):
    """Reading a registration fails with these errors, one after another; then it works again."""
    errors: list[int] = []

    def opened(path, most_bytes=None, real=untrusted.open_regular):
        if pathlib.Path(path).parent.name == "servers" and errors:
            number = errors.pop()
            raise OSError(number, os.strerror(number), str(path))
        return real(path, most_bytes)

    monkeypatch.setattr(untrusted, "open_regular", opened)
    return errors


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
def test_a_registration_that_cannot_be_read_for_a_while_stops_nothing(fakes, collect, failing_reads, number, caplog):
    server = fakes("server-0", delay=0.01)
    stream = Stream()
    collector, pool = collect(stream=stream)
    pool.wait_ready(1, 60)
    with caplog.at_level(logging.WARNING):
        failing_reads += [number] * 3
        collector.start(0)
        until(lambda: not failing_reads)
        batch = collector.take(0)
        check_whole(batch, stream)
    said = [r.getMessage() for r in caplog.records if "cannot be read" in r.getMessage()]
    assert len(said) == 1 and os.strerror(number) in said[0] and "server-0.json" in said[0]
    assert pool.num_registration_errors == 3
    assert server.num_generated == 24  # its requests were not taken from it meanwhile
    later = fakes("server-1")  # and the watch goes on
    pool.wait_ready(2, 60)
    assert later.num_generated == 0


def test_a_folder_among_the_registrations_stops_nothing(fakes, collect, attempt, caplog):
    (attempt.servers_dir / "server-9.json").mkdir(parents=True)
    fakes("server-0")
    stream = Stream()
    collector, pool = collect(stream=stream)
    pool.wait_ready(1, 60)
    check_whole(collector.take(0), stream)
    until(lambda: pool.num_registration_errors >= 3)
    assert sum("server-9.json: cannot be read: is a folder, not a file" in r.getMessage() for r in caplog.records) == 1
    fakes("server-1")
    pool.wait_ready(2, 60)


def test_registrations_that_are_never_readable_end_the_wait_by_name(fakes, pools, monkeypatch):
    monkeypatch.setattr("gspo_mega.rollout.pool.STALE_SECONDS", 0.3)
    fakes("server-0")
    pool = pools(no_server_deadline_seconds=0.3)
    pool.wait_ready(1, 60)

    def unreadable(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr("os.listdir", unreadable)
    until(lambda: pool.controls() == [])
    with pytest.raises(RolloutError, match="no server could take a request for 0.3 s.*Stale file handle"):
        pool.loop.run(pool.acquire())


def test_readings_that_failed_are_counted_with_the_batch(fakes, collect, failing_reads):
    fakes("server-0", delay=0.4)
    collector, _ = collect()
    failing_reads.append(errno.EIO)
    assert collector.take(0).counts["num_registration_errors"] == 1
    assert collector.take(1).counts["num_registration_errors"] == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_a_watch_that_ends_is_the_batchs_error(fakes, collect, monkeypatch, error):
    """Whatever ends it, the batch fails at once with that error, whether or not it waits for a server."""
    server = fakes("server-0")
    server.fault = lambda call, ids: "hang"
    collector, pool = collect(progress_deadline_seconds=600.0, no_server_deadline_seconds=600.0)
    pool.wait_ready(1, 60)
    collector.start(0)

    def broken(self):
        raise error

    monkeypatch.setattr("gspo_mega.rollout.pool.Roster.read", broken)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=type(error).__name__) as raised:
        collector.take(0)
    assert raised.value.__cause__ is error
    assert time.monotonic() - started < 60  # ten times less than any deadline of the batch
    with pytest.raises(RolloutError, match=type(error).__name__):
        pool.wait_ready(2, 600)


def test_a_loop_that_has_ended_answers_nobody_and_says_so():
    loop = LoopThread("rollout")

    async def exit():
        raise SystemExit("out")

    with pytest.raises((SystemExit, RolloutError)):
        loop.run(exit())
    until(lambda: not loop._thread.is_alive())
    with pytest.raises(RolloutError, match="the thread 'rollout' has ended: SystemExit"):
        loop.run(exit())
    loop.close()
