"""The scoring pool's own life: late loops, closing, functions that vanish, parents that die."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from scoring_support import alive, score, settings, trajectory

from gspo_mega.errors import RewardError
from gspo_mega.reward.pool import ScoringPool, check_reward

pytestmark = pytest.mark.usefixtures("folder", "no_process_is_left")


def test_a_reply_that_came_in_time_counts_even_if_our_loop_was_late():
    async def held_up():
        async with ScoringPool(settings("user_rewards:length", deadline_seconds=0.3)) as pool:
            t = trajectory("abc")
            scoring = asyncio.create_task(pool.score(t))
            await asyncio.sleep(0.02)
            time.sleep(1.5)
            await scoring
            return t

    t = asyncio.run(held_up())
    assert (t.reward, t.reward_error) == (3.0, None)


def test_closing_ends_a_hanging_process_and_what_waits():
    async def run():
        pool = ScoringPool(settings("user_rewards:behave", num_workers=2))
        await pool.start()
        scorings = [asyncio.create_task(pool.score(trajectory("stuck()"))) for _ in range(6)]
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await pool.close()
        assert time.monotonic() - start < 30
        outcomes = await asyncio.gather(*scorings, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["the scoring pool is closed"] * 6
        with pytest.raises(RewardError, match="closed"):
            await pool.score(trajectory("1"))
        await pool.close()

    asyncio.run(run())


def test_scoring_that_nobody_waits_for_any_more_is_forgotten():
    async def run():
        async with ScoringPool(settings("user_rewards:behave")) as pool:
            abandoned = [asyncio.create_task(pool.score(trajectory("time.sleep(0.2)"))) for _ in range(50)]
            await asyncio.sleep(0.1)
            for task in abandoned:
                task.cancel()
            t = trajectory("1")
            start = time.monotonic()
            await pool.score(t)
            assert t.reward == 1.0 and time.monotonic() - start < 30

    asyncio.run(run())


def test_a_pool_that_was_not_started():
    with pytest.raises(RewardError, match="not started"):
        asyncio.run(ScoringPool(settings("gsm8k")).score(trajectory("1")))


def test_functions_that_vanish_during_a_run_stop_it(folder):
    async def run():
        async with ScoringPool(settings("user_rewards:behave")) as pool:
            (folder / "user_rewards.py").unlink()
            scorings = [pool.score(trajectory(response)) for response in ("os._exit(1)", "1", "2")]
            return await asyncio.gather(*scorings, return_exceptions=True)

    first, *others = asyncio.run(run())
    assert first is None
    assert all(isinstance(error, RewardError) and "there is no module 'user_rewards'" in str(error) for error in others)


def test_check_reward_finds_it_before_the_run(folder):
    check_reward(settings("gsm8k", "user_rewards:length"), {"other": "user_rewards:parts"})
    with pytest.raises(RewardError, match="no function 'lenght'; did you mean 'length'"):
        check_reward(settings("gsm8k", "user_rewards:lenght"))
    with pytest.raises(RewardError, match="did you mean 'arithmetic'"):
        check_reward(settings("gsm8k"), {"sums": "aritmetic"})
    (folder / "crashing.py").write_text("import os; os._exit(4)")
    with pytest.raises(RewardError, match="rewards crashing:f: the scoring process ended while it loaded them .exit code 4"):
        check_reward(settings("crashing:f"))


def test_a_pool_whose_functions_cannot_be_loaded_leaves_nothing():
    async def run():
        async with ScoringPool(settings("user_rewards:none", num_workers=3)):
            pass

    with pytest.raises(RewardError, match="no function 'none'"):
        asyncio.run(run())


def test_processes_die_with_their_parent_even_inside_a_function(folder):
    """The parent is killed without a chance to clean up while one process hangs and another is idle."""
    (folder / "parent.py").write_text(
        "import asyncio, sys\n"
        "from gspo_mega.config.schema import Reward, RewardFunction\n"
        "from gspo_mega.records import Prompt, Trajectory\n"
        "from gspo_mega.reward.pool import ScoringPool\n"
        "async def main():\n"
        "    pool = ScoringPool(Reward(functions=(RewardFunction(function='user_rewards:stuck'),), num_workers=2))\n"
        "    await pool.start()\n"
        "    print(*(slot.process.pid for slot in pool._slots), flush=True)\n"
        "    await pool.score(Trajectory('0', 0, Prompt('p', 's', (), '', None), [], [], [], [], 'stop'))\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "parent.py"], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def test_a_process_ends_with_its_stdin():
    worker = subprocess.Popen(
        [sys.executable, "-m", "gspo_mega.reward.worker", str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    worker.stdin.write(b'{"functions": {}, "memory_bytes": 1000000000}\n')
    worker.stdin.flush()
    assert worker.stdout.readline() == b'{"ready": true}\n'
    worker.stdin.close()
    assert worker.wait(timeout=10) == 0
    worker.stdout.close()
