"""What a guarded process says just behind a deadline: its reply counts, and what is no reply is the process's fault."""

import asyncio

import pytest

from gspo_mega.rewards import guarded_process
from gspo_mega.rewards.guarded_process import GuardedProcess


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However late this machine is, what it has to do counts as done in time."""
    monkeypatch.setattr(guarded_process, "_LATE_LOOP_SECONDS", 60.0)


def received(said: bytes):
    """What `receive` makes of bytes that come a moment after its deadline."""

    async def play():
        process = GuardedProcess.__new__(GuardedProcess)  # its pipe alone
        process._replies = asyncio.StreamReader(limit=100)
        asyncio.get_running_loop().call_later(0.11, process._replies.feed_data, said)
        return await process.receive(0.1)

    return asyncio.run(play())


def test_a_reply_is_taken():
    assert received(b'{"id": 1}\n') == {"id": 1}


def test_a_line_over_the_limit_is_none():
    assert received(b"x" * 1000) is None
