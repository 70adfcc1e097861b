"""Waiting for the copy of the model that servers start from: what is shown, what extends the wait, and what ends it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from waiting import until

from gspo_mega.base.errors import CheckpointError, RolloutError
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.server import start_weights
from gspo_mega.rollout.server.start_weights import CopyWait, StartCopy

GIB = 1024**3


def registered(attempt, index: int, **fields) -> Registration:
    made = Registration(f"server-{index}", "", 1, "starting", 0, None, time.time())
    made = replace(made, **fields)
    made.write(attempt.servers_dir)
    return made


def preparing(attempt, index: int, done_bytes: int = 0, **fields) -> Registration:
    what = "the copy start-blocks of the model, which server-0 makes"
    return registered(attempt, index, waits_for=what, done_bytes=done_bytes, total_bytes=4 * GIB, **fields)


def test_the_wait_for_servers_goes_on_as_long_as_the_copy_grows(attempt, pools, fakes):
    preparing(attempt, 0)
    pool = pools()

    def grow() -> None:
        for done in range(1, 13):
            time.sleep(0.2)
            preparing(attempt, 0, done_bytes=done)
        fakes("server-0")

    maker = threading.Thread(target=grow)
    maker.start()
    pool.wait_ready(1, 1.5)
    maker.join()


def test_a_start_has_its_whole_time_after_the_copy(attempt, pools, fakes):
    preparing(attempt, 0, done_bytes=1)
    pool = pools()

    def start() -> None:
        time.sleep(1.0)
        registered(attempt, 0)
        time.sleep(1.0)
        fakes("server-0")

    begins = threading.Thread(target=start)
    begins.start()
    pool.wait_ready(1, 1.5)
    begins.join()


def test_a_copy_that_stands_still_ends_the_wait_and_is_named_with_its_maker(attempt, pools):
    """A heartbeat is no progress, nor is a maker that begins again from less."""
    preparing(attempt, 0, done_bytes=GIB)
    preparing(attempt, 1)
    pool, over = pools(), threading.Event()

    def beat() -> None:
        for number in range(10_000):
            preparing(attempt, 0, done_bytes=number % GIB)
            if over.wait(0.1):
                return

    beating = threading.Thread(target=beat)
    beating.start()
    began = time.monotonic()
    with pytest.raises(RolloutError) as error:
        pool.wait_ready(2, 1.0)
    over.set()
    beating.join()
    assert time.monotonic() - began < 10
    assert "0 of 2 servers ready after 1 s" in str(error.value)
    assert "server-1: starting, waits for the copy start-blocks of the model, which server-0 makes: 0.0 of 4.0 GiB" in (
        str(error.value)
    )


def test_a_restart_without_a_copy_extends_nothing(attempt, pools):
    """Only a copy does: servers that start again and again have the deadline that they had."""
    registered(attempt, 0)
    pool, over = pools(), threading.Event()

    def restart() -> None:
        number = 0
        while not over.wait(0.1):
            number += 1
            registered(attempt, 0, state=("starting", "restarting")[number % 2], generation=number)

    restarting = threading.Thread(target=restart)
    restarting.start()
    with pytest.raises(RolloutError, match="0 of 1 servers ready after 1 s"):
        pool.wait_ready(1, 1.0)
    over.set()
    restarting.join()


# --- a server's own wait -------------------------------------------------------------------------------------


@pytest.fixture
def waiting(attempt, tmp_path):
    """A server that waits for the copy of server-0."""
    return CopyWait(StartCopy(tmp_path / "start-blocks", None), attempt, 0.5)


def test_a_waiting_server_shows_what_the_maker_says(attempt, waiting, tmp_path):
    assert waiting.look() == (0, 0), "the maker has not come yet"
    preparing(attempt, 0, done_bytes=GIB)
    assert waiting.look() == (GIB, 4 * GIB)
    (tmp_path / "start-blocks").mkdir()
    registered(attempt, 0, state="failed", error="of something else")
    assert waiting.look() is None, "a whole copy is taken, whatever became of its maker"


@pytest.mark.parametrize("state", ["failed", "stopped", "draining"])
def test_a_maker_that_is_gone_is_named_at_once(attempt, waiting, state):
    preparing(attempt, 0, state=state, error="CheckpointError: no room\nmore" if state == "failed" else None)
    why = "CheckpointError: no room" if state == "failed" else state
    with pytest.raises(CheckpointError, match=f"server-0, which makes it, has ended: {why}"):
        waiting.look()


def test_a_maker_that_is_silent_is_named(attempt, waiting, monkeypatch):
    monkeypatch.setattr(start_weights, "SILENCE_SECONDS", 0.2)
    preparing(attempt, 0, done_bytes=GIB)
    waiting.look()
    time.sleep(0.3)
    with pytest.raises(CheckpointError, match=r"server-0, which makes it, is silent for 0.* s"):
        waiting.look()


def test_a_maker_that_stands_still_or_never_comes_is_named(attempt, waiting, tmp_path):
    def error_of(waiting: CopyWait) -> str:
        with pytest.raises(CheckpointError) as error:
            until(lambda: waiting.look() is None, 10)
        return str(error.value)

    text = error_of(waiting)
    assert f"{tmp_path / 'start-blocks'}: server-0, which makes it, got no further for 0.5 s" in text
    assert "server.start_deadline_seconds" in text and "at 0.0 MiB" in text
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            preparing(attempt, 0, done_bytes=GIB)

    beating = threading.Thread(target=beat)
    beating.start()
    text = error_of(CopyWait(StartCopy(tmp_path / "start-blocks", None), attempt, 0.5))
    stop.set()
    beating.join()
    assert "at 1.0 of 4.0 GiB" in text
