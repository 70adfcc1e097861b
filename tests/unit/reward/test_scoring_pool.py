"""The pool with real processes and real user functions that do what such functions do."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import gspo_mega
from gspo_mega.config.schema import Reward, RewardFunction
from gspo_mega.errors import RewardError
from gspo_mega.records import Prompt, Trajectory
from gspo_mega.reward import process
from gspo_mega.reward.pool import FAILURE_KINDS, MAX_RESPONSE_CHARACTERS, ScoringPool, check_reward

USER_FUNCTIONS = '''
import os, subprocess, sys, time
from pathlib import Path

def behave(*, prompt, response, answer, metadata, **options):
    """Does what the response says."""
    return eval(response, globals() | {"prompt": prompt, "answer": answer, "metadata": metadata, "options": options})

def length(*, response, **_):
    return len(response)

def pid(**_):
    return os.getpid()

def parts(*, response, **_):
    return {"reward": 0.5, "format": 1, "length": len(response)}

def loud(*, response, **_):
    print("to stdout", response)
    os.write(1, b'{"id": 1, "value": 9, "parts": {}}\\n')
    sys.stderr.write("to stderr\\n")
    subprocess.run(["echo", "from a child"])
    return 1 if sys.stdin.read() == "" else 0

def stuck(**_):
    while True:
        time.sleep(1000)

def leave_a_child(*, response, **_):
    child = subprocess.Popen(["sleep", "1000"])
    Path(response).write_text(str(child.pid))
    time.sleep(1000)

def fork_and_return_twice(**_):
    os.fork()
    return 1

def close_everything(**_):
    os.closerange(3, 100)
    time.sleep(1000)

def raise_(text):
    raise ValueError(text)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with the user's module beside it, as where a run is started."""
    (tmp_path / "user_rewards.py").write_text(USER_FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(gspo_mega.__file__).parents[1]))
    return tmp_path


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert left == []


def settings(*functions, **changes):
    entries = tuple(entry if isinstance(entry, RewardFunction) else RewardFunction(function=entry) for entry in functions)
    return Reward(functions=entries, **({"num_workers": 1} | changes))


def trajectory(response, *, answer=None, source="data", text="x", **metadata):
    prompt = Prompt("data:0", source, (1,), text, answer, metadata)
    return Trajectory("0", 0, prompt, [1], [1], [0.0], [0], "stop", response_text=response)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def score(reward, *responses, source_rewards=None, inside=None):
    """Score responses (or trajectories) at once; returns the trajectories and the pool."""
    trajectories = [r if isinstance(r, Trajectory) else trajectory(r) for r in responses]

    async def run():
        async with ScoringPool(reward, source_rewards) as pool:
            await asyncio.gather(*(pool.score(t) for t in trajectories))
            if inside is not None:
                await inside(pool)
        return pool

    return trajectories, asyncio.run(run())


BEHAVE = settings("user_rewards:behave", deadline_seconds=20.0)


def test_a_reward_is_filled_in():
    [t], pool = score(BEHAVE, trajectory("len(prompt) + answer + metadata['level'] + len(options)", answer=10, text="abc", level=100))
    assert (t.reward, t.reward_parts, t.reward_error) == (113.0, {"user_rewards:behave": 113.0}, None)
    assert pool.num_scored == 1 and pool.failure_counts == dict.fromkeys(FAILURE_KINDS, 0)


@pytest.mark.parametrize(
    ("response", "value"),
    [("True", 1.0), ("7", 7.0), ("-0.25", -0.25), ("__import__('numpy').float32(0.5)", 0.5), ("__import__('fractions').Fraction(1, 4)", 0.25)],
)
def test_any_real_number_will_do(response, value):
    [t], _ = score(BEHAVE, response)
    assert t.reward == value and type(t.reward) is float and t.reward_error is None


FAILURES = [
    ("raise_('bad\\n answer')", "exception", "user_rewards:behave: ValueError: bad answer (user_rewards.py:"),
    ("sys.exit(3)", "exception", "SystemExit: 3"),
    ("raise_('x' * 10_000)", "exception", "ValueError: xxx"),
    ("float('nan')", "not_finite", "the result is nan"),
    ("-float('inf')", "not_finite", "the result is -inf"),
    ("10 ** 400", "not_finite", "too large"),
    ("None", "wrong_type", "the result is None (NoneType); a number was expected"),
    ("'1'", "wrong_type", "the result is '1' (str)"),
    ("{'format': 1}", "wrong_type", "without 'reward'; it has 'format'"),
    ("{'reward': 1, 'format': 'x'}", "wrong_type", "'format' is 'x' (str)"),
    ("bytearray(10**12)", "memory", "MemoryError"),
    ("os._exit(7)", "crash", "the scoring process ended (exit code 7)"),
    ("os.kill(os.getpid(), 11)", "crash", "the scoring process ended (signal SIGSEGV)"),
]


@pytest.mark.parametrize(("response", "kind", "why"), FAILURES)
def test_a_failure_is_that_trajectorys_alone(response, kind, why):
    trajectories, pool = score(BEHAVE, "1", response, "2")
    assert [t.reward for t in trajectories] == [1.0, 0.0, 2.0]
    assert why in trajectories[1].reward_error and len(trajectories[1].reward_error) < 700
    assert trajectories[0].reward_error is None and trajectories[2].reward_error is None
    assert pool.failure_counts == dict.fromkeys(FAILURE_KINDS, 0) | {kind: 1}


def test_a_hang_is_ended_from_outside_and_costs_nobody_else():
    reward = settings("user_rewards:behave", deadline_seconds=1.5)
    start = time.monotonic()
    trajectories, pool = score(reward, *["1"] * 20, "stuck()", *["2"] * 20)
    assert [t.reward for t in trajectories] == [1.0] * 20 + [0.0] + [2.0] * 20
    assert trajectories[20].reward_error == "user_rewards:behave: no result within 1.5 s"
    assert pool.failure_counts["deadline"] == 1
    assert time.monotonic() - start < 30


def test_a_hang_that_no_signal_but_the_kill_ends():
    reward = settings("user_rewards:behave", deadline_seconds=1.5)
    masked = "[__import__('signal').signal(s, __import__('signal').SIG_IGN) for s in (2, 15)] and stuck()"
    [t, after], _ = score(reward, masked, "1")
    assert "no result within" in t.reward_error and after.reward == 1.0


def test_what_a_function_prints_disturbs_nothing(capfd):
    trajectories, _ = score(settings("user_rewards:loud"), *"abc")
    assert [(t.reward, t.reward_error) for t in trajectories] == [(1.0, None)] * 3
    out, err = capfd.readouterr()
    assert out == ""
    assert "to stdout b" in err and "to stderr" in err and "from a child" in err


def test_a_functions_child_goes_with_it(folder):
    path = folder / "pid"
    score(settings("user_rewards:leave_a_child", deadline_seconds=1.5), str(path))
    deadline = time.monotonic() + 30
    while alive(int(path.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(path.read_text()))


def test_a_fork_that_returns_twice_is_noticed():
    trajectories, pool = score(settings("user_rewards:fork_and_return_twice"), "a", "b", "c")
    assert pool.failure_counts["crash"] >= 1 and all(t.reward in (0.0, 1.0) for t in trajectories)


def test_a_function_that_closes_our_pipes(monkeypatch):
    monkeypatch.setattr(process, "_EXIT_SECONDS", 0.5)
    [t], _ = score(settings("user_rewards:close_everything", deadline_seconds=20.0), "a")
    assert "it closed its pipes" in t.reward_error


def test_several_functions_are_a_weighted_sum_with_their_parts():
    functions = (
        RewardFunction(function="user_rewards:length", weight=0.5),
        RewardFunction(function="user_rewards:parts", weight=2.0),
        RewardFunction(function="exact_match"),
        RewardFunction(function="exact_match", weight=-1.0, options={"ignore_case": True}),
    )
    [t], _ = score(settings(*functions), trajectory("Paris", answer="paris"))
    assert t.reward == 0.5 * 5 + 2.0 * 0.5 + 0.0 - 1.0
    assert t.reward_parts == {
        "user_rewards:length": 5.0,
        "user_rewards:parts": 0.5,
        "user_rewards:parts/format": 1.0,
        "user_rewards:parts/length": 5.0,
        "exact_match": 0.0,
        "exact_match#2": 1.0,
    }


def test_one_failing_function_makes_the_reward_zero_and_keeps_the_other_part():
    [t], pool = score(settings("user_rewards:length", "user_rewards:behave"), "raise_('no')")
    assert t.reward == 0.0 and t.reward_parts == {"user_rewards:length": 12.0}
    assert t.reward_error.startswith("user_rewards:behave: ValueError: no")
    assert sum(pool.failure_counts.values()) == 1


def test_a_sum_that_overflows_is_a_failure():
    [t], pool = score(settings(RewardFunction(function="user_rewards:behave", weight=1e300)), "1e300")
    assert t.reward == 0.0 and "weighted sum" in t.reward_error and pool.failure_counts["not_finite"] == 1


def test_a_source_may_have_its_own_reward():
    reward = settings(RewardFunction(function="exact_match", options={"ignore_case": True}), "user_rewards:length")
    own = {"lengths": "user_rewards:length", "strict": "exact_match"}
    trajectories, _ = score(
        reward,
        trajectory("PARIS", answer="paris", source="data"),
        trajectory("PARIS", answer="paris", source="lengths"),
        trajectory("PARIS", answer="paris", source="strict"),
        source_rewards=own,
    )
    assert [t.reward for t in trajectories] == [6.0, 5.0, 0.0]
    assert list(trajectories[2].reward_parts) == ["exact_match#2"]


def test_of_a_long_response_the_end_is_judged():
    [t], _ = score(settings("user_rewards:length"), "x" * (MAX_RESPONSE_CHARACTERS + 5))
    assert t.reward == MAX_RESPONSE_CHARACTERS
    [t], _ = score(settings("arithmetic"), trajectory("x" * 10**6 + "#7", answer="7"))
    assert t.reward == 1.0


def test_a_process_is_replaced_after_its_share():
    trajectories, _ = score(settings("user_rewards:pid", recycle_after=4), *["x"] * 12)
    pids = [t.reward for t in trajectories]
    assert sorted(pids.count(pid) for pid in set(pids)) == [4, 4, 4]


def test_memory_is_bounded_beyond_what_loading_took():
    reward = settings("user_rewards:behave", memory_bytes=128 * 1024**2)
    trajectories, pool = score(reward, "len(bytearray(32 * 2**20)) > 0", "len(bytearray(512 * 2**20)) > 0", "1")
    assert [t.reward for t in trajectories] == [1.0, 0.0, 1.0]
    assert pool.failure_counts["memory"] == 1


def test_a_batch_costs_milliseconds():
    async def run():
        async with ScoringPool(settings("gsm8k", num_workers=2)) as pool:
            batch = [trajectory(f"so it is {k}\n#### {k}", answer="#### 7") for k in range(256)]
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                await asyncio.gather(*(pool.score(t) for t in batch))
                seconds.append(time.perf_counter() - start)
            assert [t.reward for t in batch] == [float(k == 7) for k in range(256)]
            return seconds

    seconds = asyncio.run(run())
    assert min(seconds) < 0.25, seconds


def test_slow_functions_are_spread_over_the_processes():
    reward = settings("user_rewards:behave", num_workers=4)
    seconds = {}

    async def timed(pool):
        start = time.monotonic()
        await asyncio.gather(*(pool.score(trajectory("time.sleep(0.5) or 1")) for _ in range(8)))
        seconds["slow"] = time.monotonic() - start

    score(reward, *["1"] * 100, inside=timed)
    # Four processes take 1 s, one would take 4 s.
    assert seconds["slow"] < 3


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
