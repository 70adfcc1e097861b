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

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import RewardFunction
from gspo_mega.rewards.pool import ScoringPool, check_reward

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
    check_reward(settings("gsm8k", "user_rewards:length"), {"other": (RewardFunction(function="user_rewards:parts"),)})
    with pytest.raises(RewardError, match="no function 'lenght'; did you mean 'length'"):
        check_reward(settings("gsm8k", "user_rewards:lenght"))
    with pytest.raises(RewardError, match="did you mean 'arithmetic'"):
        check_reward(settings("gsm8k"), {"sums": (RewardFunction(function="aritmetic"),)})
    (folder / "crashing.py").write_text("import os; os._exit(4)")
    with pytest.raises(
        RewardError, match="rewards crashing:f: the scoring process ended while it loaded them .exit code 4"
    ):
        check_reward(settings("crashing:f"))


@pytest.mark.parametrize(("times", "is_loaded"), [(2, True), (3, False)])
def test_a_process_that_somebody_else_kills_while_it_loads_is_started_again(folder, times, is_loaded):
    (folder / "killed.py").write_text(
        "import os, signal\nfrom pathlib import Path\n"
        "begun = Path('begun')\nbegun.write_text(begun.read_text() + 'x' if begun.exists() else 'x')\n"
        f"if len(begun.read_text()) <= {times}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "def f(**_): return 1\n"
    )
    if is_loaded:
        check_reward(settings("killed:f"))
    else:
        with pytest.raises(RewardError, match=r"ended while it loaded them \(signal SIGKILL\)"):
            check_reward(settings("killed:f"))
    assert len((folder / "begun").read_text()) == 3


def test_a_pool_whose_functions_cannot_be_loaded_leaves_nothing():
    async def run():
        async with ScoringPool(settings("user_rewards:none", num_workers=3)):
            pass

    with pytest.raises(RewardError, match="no function 'none'"):
        asyncio.run(run())


SESSIONS = "[subprocess.Popen(['sleep', '60'], start_new_session=True).pid for _ in range(5)]"
KEEP_PIDS = f"Path('pids').write_text(' '.join(map(str, {SESSIONS}))) and 1"


def none_lives(pids):
    """Within half a minute; asked as often as is needed."""
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "after", ["", " and stuck()", " and os._exit(3)", " and os.kill(os.getpid(), 9)", " and os.killpg(0, 9)"]
)
def test_children_in_sessions_of_their_own_end_with_the_pool(folder, after):
    """However the scoring that started them ends: with a result, at its deadline, or with its process."""
    [t], _ = score(settings("user_rewards:behave", deadline_seconds=2.0), KEEP_PIDS + after)
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 5 and (t.reward == 1.0) == (after == "")
    assert none_lives(pids)


def test_children_in_sessions_of_their_own_end_when_their_process_is_replaced(folder):
    ended = "not any(Path(f'/proc/{pid}').exists() for pid in Path('pids').read_text().split())"
    trajectories, _ = score(settings("user_rewards:behave", recycle_after=1), KEEP_PIDS, ended)
    assert [t.reward for t in trajectories] == [1.0, 1.0]


def test_children_in_sessions_of_their_own_end_with_the_pools_parent(folder):
    """The parent is killed without a chance to clean up."""
    (folder / "parent.py").write_text(
        "import asyncio, sys, time\nfrom gspo_mega.config.schema import Reward, RewardFunction\nfrom gspo_mega.base.records"
        " import Prompt\nfrom gspo_mega.base.episodes import one_turn_episode\nfrom gspo_mega.rewards.pool import ScoringPool\nasync def main():\n    pool ="
        " ScoringPool(Reward(functions=(RewardFunction(function='user_rewards:behave'),), num_workers=1))\n    await"
        " pool.start()\n    t = one_turn_episode('0', 0, Prompt('p', 's', (), '', None), [], [], [], 'stop',"
        f" {KEEP_PIDS!r})\n    await pool.score(t)\n    print(t.reward, flush=True)\n   "
        " time.sleep(1000)\nasyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "parent.py"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "1.0\n"
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 5 and all(alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert none_lives(pids)


def test_processes_die_with_their_parent_even_inside_a_function(folder):
    """The parent is killed without a chance to clean up while one process hangs and another is idle."""
    (folder / "parent.py").write_text(
        "import asyncio, sys\n"
        "from gspo_mega.config.schema import Reward, RewardFunction\n"
        "from gspo_mega.base.episodes import one_turn_episode\n"
        "from gspo_mega.base.records import Prompt\n"
        "from gspo_mega.rewards.pool import ScoringPool\n"
        "async def main():\n"
        "    pool = ScoringPool(Reward(functions=(RewardFunction(function='user_rewards:stuck'),), num_workers=2))\n"
        "    await pool.start()\n"
        "    print(*(slot.process.pid for slot in pool._slots), flush=True)\n"
        "    await pool.score(one_turn_episode('0', 0, Prompt('p', 's', (), '', None), [], [], [], 'stop'))\n"
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
        [sys.executable, "-m", "gspo_mega.rewards.scoring_worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    worker.stdin.write(b'{"functions": {}, "memory_bytes": 1000000000, "file_bytes": 1000, "network": true}\n')
    worker.stdin.flush()
    assert worker.stdout.readline() == b'{"ready": true}\n'
    worker.stdin.close()
    assert worker.wait(timeout=120) == 0
    worker.stdout.close()
