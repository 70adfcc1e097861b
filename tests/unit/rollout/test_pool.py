"""The pool: which servers get work, which do not, and the publisher's controls."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from waiting import until

from gspo_mega.base.errors import PublishError, RolloutError
from gspo_mega.rollout.client.server_client import ServerError


def acquire(pool):
    return pool.loop.run(pool.acquire())


def release(pool, entry, error=None):
    pool.loop.run(pool.release(entry, error))


def test_work_goes_to_the_least_loaded(fakes, pools):
    fakes("server-0"), fakes("server-1")
    pool = pools()
    pool.wait_ready(2, 60)
    assert sorted(acquire(pool).server_id for _ in range(6)) == ["server-0"] * 3 + ["server-1"] * 3


def test_a_server_has_no_more_open_than_allowed(fakes, pools):
    fakes("server-0")
    pool = pools(max_concurrent_requests=2)
    held = [acquire(pool), acquire(pool)]
    waiting = pool.loop.submit(pool.acquire())
    time.sleep(0.1)
    assert not waiting.done()
    release(pool, held[0])
    assert waiting.result(timeout=60).server_id == "server-0"


def test_a_place_that_is_given_to_a_request_as_it_ends_goes_to_the_next(fakes, pools):
    """An episode may meet its deadline at the moment in which another one's turn ends."""
    fakes("server-0")
    pool = pools(max_concurrent_requests=1)
    pool.wait_ready(1, 60)

    async def scene():
        server = await pool.acquire()
        ends, waits = (asyncio.ensure_future(pool.acquire()) for _ in range(2))
        await asyncio.sleep(0.05)
        await pool.release(server)
        ends.cancel()
        return await asyncio.wait_for(waits, 2)

    assert pool.loop.run(scene()).server_id == "server-0"


def test_a_server_that_registers_later_is_taken_in(fakes, pools):
    pool = pools()
    waiting = pool.loop.submit(pool.acquire())
    fakes("server-7")
    assert waiting.result(timeout=60).server_id == "server-7"


def test_only_the_committed_version_works_and_the_others_are_behind(fakes, pools):
    fakes("server-0"), fakes("server-1", version=4)
    pool = pools()
    pool.wait_ready(2, 60)
    assert [c.server_id for c in pool.servers_behind()] == ["server-1"]
    assert {acquire(pool).server_id for _ in range(4)} == {"server-0"}
    pool.commit(4, [])
    assert [c.server_id for c in pool.servers_behind()] == ["server-0"]
    assert {acquire(pool).server_id for _ in range(4)} == {"server-1"}


def test_a_server_whose_weights_are_touched_serves_nothing_until_committed(fakes, pools):
    fakes("server-0")
    pool = pools(no_server_deadline_seconds=0.3)
    (control,) = pool.controls()
    control.update_from_disk("/weights/v1", 1, deadline_seconds=60)
    pool.commit(1, [])  # the publish of this server failed its verification
    with pytest.raises(RolloutError, match="holds version None of 1"):
        acquire(pool)
    pool.commit(1, [(control.server_id, control.generation)])
    assert acquire(pool).server_id == "server-0"
    assert control.weight_version(deadline_seconds=60) == 1


def test_a_commit_for_an_earlier_generation_counts_for_nothing(fakes, pools):
    server = fakes("server-0")
    pool = pools()
    (control,) = pool.controls()
    server.die()
    server.start()
    until(lambda: [c.generation for c in pool.controls()] == [2])
    pool.commit(1, [(control.server_id, control.generation)])
    assert [c.generation for c in pool.servers_behind()] == [2]


def test_a_restarted_server_leaves_its_old_handle_and_requests_behind(fakes, pools):
    server = fakes("server-0")
    pool = pools()
    (old,) = pool.controls()
    entry = acquire(pool)

    async def call_that_never_ends():
        await entry.run(asyncio.sleep(3600))

    waiting = pool.loop.submit(call_that_never_ends())
    server.register("restarting")
    with pytest.raises(RolloutError, match="server-0.*went down"):
        waiting.result(timeout=60)
    with pytest.raises(PublishError, match="generation 1 of it is gone"):
        old.pause(deadline_seconds=1)


def test_a_request_that_begins_as_its_server_is_found_gone_fails_like_the_others(fakes, pools):
    fakes("server-0")
    pool = pools()
    client = acquire(pool).client

    async def scene():
        await client.call("/model_info", None, 2, method="GET")
        closing, kinds = asyncio.ensure_future(client.close()), []
        for _ in range(5):
            await asyncio.sleep(0)
            with pytest.raises(ServerError, match="the server is gone") as error:
                await client.call("/model_info", None, 2, method="GET")
            kinds.append(error.value.kind)
        await closing
        return kinds

    assert pool.loop.run(scene()) == ["connection"] * 5


def test_a_silent_server_is_none(fakes, pools):
    server = fakes("server-0")
    server.register("ready", heartbeat=time.time() - 3600)
    pool = pools(no_server_deadline_seconds=0.3)
    assert pool.controls() == []
    with pytest.raises(RolloutError, match="no server could take a request for 0.3 s"):
        acquire(pool)


def test_a_heartbeat_that_goes_on_counts_whatever_the_clocks_say(fakes, pools, monkeypatch):
    server = fakes("server-0")
    server.register("ready", heartbeat=time.time() - 3600)
    pool = pools()
    assert pool.controls() == []
    server.register("ready", heartbeat=time.time() - 3595)
    pool.wait_ready(1, deadline_seconds=60)

    monkeypatch.setattr("gspo_mega.rollout.pool.STALE_SECONDS", 1.0)
    server.register("ready", heartbeat=time.time() + 3600)  # a clock that was set forward, and the server fell silent
    deadline = time.monotonic() + 5
    while pool.controls() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pool.controls() == []
    server.register("ready", heartbeat=time.time())  # set back, and alive
    pool.wait_ready(1, deadline_seconds=60)


def test_failed_servers_are_quoted(fakes, pools):
    fakes("server-0").register("failed", error="no such model")
    pool = pools()
    with pytest.raises(RolloutError, match="server-0 gave up: no such model"):
        acquire(pool)
    with pytest.raises(RolloutError, match="no such model"):
        pool.wait_ready(1, 60)


def test_a_server_that_gave_up_is_not_waited_for(fakes, pools):
    """Nor does it end the wait while another one may still come."""
    gone = fakes("server-1")
    gone.register("failed", error="too often")
    pool = pools()
    assert pool.num_given_up == 1
    with pytest.raises(RolloutError, match="0 of 2 servers ready after 0.2 s"):
        pool.wait_ready(2, 0.2)  # server-0 has not registered yet
    fakes("server-0")
    pool.wait_ready(2, 60)
    assert acquire(pool).server_id == "server-0"
    fakes("server-2").register("stopped", error="node 2 is lost")
    until(lambda: len(pool._roster.registrations) == 3)
    pool.wait_ready(3, 60)


def test_waiting_for_servers_has_an_end_and_a_heartbeat(pools):
    pool = pools()
    waits = []
    with pytest.raises(RolloutError, match="0 of 1 servers ready after 0.3 s; none is registered"):
        pool.wait_ready(1, 0.3, on_wait=lambda: waits.append(1))
    assert len(waits) >= 2


def test_a_file_that_is_no_registration_is_named(attempt, pools):
    pool = pools()
    (attempt.servers_dir / "server-9.json").write_text('{"server_id": 3}')
    with pytest.raises(RolloutError, match="server-9.json: not a server's registration"):
        acquire(pool)


def test_three_nonsense_answers_quarantine_a_server(fakes, pools):
    from gspo_mega.rollout.client.server_client import ServerError

    fakes("server-0")
    pool = pools()
    for _ in range(3):
        release(pool, acquire(pool), ServerError("server-0", "generate", "nonsense", "x"))
    assert [c.server_id for c in pool.servers_behind()] == ["server-0"]
    pool.commit(0, [("server-0", 1)])
    assert pool.servers_behind() == []


def test_controls_answer_from_any_thread_and_name_the_server(fakes, pools):
    server = fakes("server-0", tensor_parallel=2)
    pool = pools()
    (control,) = pool.controls()
    assert (control.server_id, control.generation, control.tensor_parallel) == ("server-0", 1, 2)
    results = []
    threads = [threading.Thread(target=lambda: results.append(control.checksums(deadline_seconds=5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[{"a": "0", "b": "0"}] * 2] * 8
    with pytest.raises(PublishError, match="server-0: /end_weight_update: HTTP 400: no session is open"):
        control.end_update(deadline_seconds=2)
    control.init_group(
        master_address="h",
        master_port=1234,
        rank_offset=1,
        world_size=2,
        group_name="g",
        backend="gloo",
        deadline_seconds=2,
    )
    control.update_from_distributed(["w"], ["float32"], [(2, 3)], "g", deadline_seconds=2)
    sent = dict(server.calls)
    assert sent["/init_weights_update_group"] == {
        "master_address": "h",
        "master_port": 1234,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
    }
    assert sent["/update_weights_from_distributed"]["shapes"] == [[2, 3]]
    server.die()
    with pytest.raises(PublishError, match="server-0"):
        control.pause(deadline_seconds=2)


def test_the_wrong_key_is_refused(fakes, pools, attempt):
    fakes("server-0")
    attempt.api_key_file.write_text("another\n")
    (control,) = pools().controls()
    with pytest.raises(PublishError, match="401"):
        control.pause(deadline_seconds=2)


def test_a_long_publish_is_no_lack_of_servers(fakes, pools):
    """Requests that wait meanwhile do not end the run: the deadline begins when the publish is over."""
    fakes("server-0")
    pool = pools(no_server_deadline_seconds=0.5)
    pool.wait_ready(1, 60)
    pool.hold(True)
    pool.announce(3)  # no server is known to hold it
    waiting = pool.loop.submit(pool.acquire())
    time.sleep(1.5)
    assert not waiting.done()
    pool.hold(False)
    time.sleep(0.2)
    assert not waiting.done()
    with pytest.raises(RolloutError, match="no server could take a request for 0.5 s"):
        waiting.result(timeout=60)
