"""Scoring with real processes and real user functions that do what such functions do."""

import asyncio
import os
import signal
import time

import pytest
from scoring_support import BEHAVE, alive, score, settings, trajectory

from gspo_mega.config.schema import RewardFunction
from gspo_mega.rewards import guarded_process
from gspo_mega.rewards.pool import FAILURE_KINDS, MAX_RESPONSE_CHARACTERS, ScoringPool

pytestmark = pytest.mark.usefixtures("folder", "no_process_is_left")


def test_a_reward_is_filled_in():
    [t], pool = score(
        BEHAVE, trajectory("len(prompt) + answer + metadata['level'] + len(options)", answer=10, text="abc", level=100)
    )
    assert (t.reward, t.reward_parts, t.reward_error) == (113.0, {"user_rewards:behave": 113.0}, None)
    assert pool.num_scored == 1 and pool.failure_counts == dict.fromkeys(FAILURE_KINDS, 0)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("True", 1.0),
        ("7", 7.0),
        ("-0.25", -0.25),
        ("__import__('numpy').float32(0.5)", 0.5),
        ("__import__('numpy').True_", 1.0),
        ("__import__('fractions').Fraction(1, 4)", 0.25),
    ],
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
    ("{'reward': 1, 'correct': 0.5}", "wrong_type", "'correct' is 0.5; True or False"),
    ("bytearray(10**12)", "memory", "MemoryError"),
    ("os._exit(7)", "crash", "the scoring process ended (exit code 7)"),
    ("os.kill(os.getpid(), 11)", "crash", "the scoring process ended (signal SIGSEGV)"),
]


@pytest.mark.parametrize(("response", "kind", "why"), FAILURES)
def test_a_failure_is_that_trajectorys_alone(response, kind, why):
    trajectories, pool = score(BEHAVE, "1", response, "2")
    assert [t.reward for t in trajectories] == [1.0, None, 2.0]
    assert [t.is_scored for t in trajectories] == [True, False, True]
    assert why in trajectories[1].reward_error and len(trajectories[1].reward_error) < 700
    assert trajectories[0].reward_error is None and trajectories[2].reward_error is None
    assert pool.failure_counts == dict.fromkeys(FAILURE_KINDS, 0) | {kind: 1}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("name", "times", "reward"), [("once", 1, 1.0), ("always", 3, None)])
def test_a_function_whose_process_somebody_else_kills_is_called_again(number, name, times, reward, folder):
    called, one, killed = folder / name, trajectory(str(folder / name)), set()

    async def run():
        async with ScoringPool(settings("user_rewards:wait_once", deadline_seconds=50.0)) as pool:
            scoring = asyncio.create_task(pool.score(one))
            while not scoring.done():
                await asyncio.sleep(0.02)
                pids = called.read_text().split(" ")[:-1] if called.exists() else []
                for pid in {*pids[:times]} - killed:
                    os.kill(int(pid), number)
                    killed.add(pid)
        return pool

    pool = asyncio.run(run())
    assert one.reward == reward and len(killed) == times
    if reward is None:
        assert f"(signal {number.name}) (tried 3 times)" in one.reward_error
    assert pool.failure_counts["crash"] == (reward is None)


def test_a_hang_is_ended_from_outside_and_costs_nobody_else():
    reward = settings("user_rewards:behave", deadline_seconds=1.5)
    start = time.monotonic()
    trajectories, pool = score(reward, *["1"] * 20, "stuck()", *["2"] * 20)
    assert [t.reward for t in trajectories] == [1.0] * 20 + [None] + [2.0] * 20
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
    assert pool.failure_counts["crash"] >= 1 and all(t.reward in (None, 1.0) for t in trajectories)


def test_a_function_that_closes_our_pipes(monkeypatch):
    monkeypatch.setattr(guarded_process, "_EXIT_SECONDS", 0.5)
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


def test_one_failing_function_leaves_no_reward_and_keeps_the_other_part():
    [t], pool = score(settings("user_rewards:length", "user_rewards:behave"), "raise_('no')")
    assert t.reward is None and t.reward_parts == {"user_rewards:length": 12.0}
    assert t.reward_error.startswith("user_rewards:behave: ValueError: no")
    assert sum(pool.failure_counts.values()) == 1


def test_a_sum_that_overflows_is_a_failure():
    [t], pool = score(settings(RewardFunction(function="user_rewards:behave", weight=1e300)), "1e300")
    assert t.reward is None and "weighted sum" in t.reward_error and pool.failure_counts["not_finite"] == 1


def test_a_source_may_have_its_own_reward():
    reward = settings(RewardFunction(function="exact_match", options={"ignore_case": True}), "user_rewards:length")
    own = {
        "lengths": (RewardFunction(function="user_rewards:length"),),
        "strict": (RewardFunction(function="exact_match"),),
    }
    trajectories, _ = score(
        reward,
        trajectory("PARIS", answer="paris", source="data"),
        trajectory("PARIS", answer="paris", source="lengths"),
        trajectory("PARIS", answer="paris", source="strict"),
        source_rewards=own,
    )
    assert [t.reward for t in trajectories] == [6.0, 5.0, 0.0]
    assert list(trajectories[2].reward_parts) == ["exact_match#2"]


def test_a_sources_own_reward_may_be_a_sum_with_options_names_and_conditions():
    reward = settings("exact_match")
    own = (
        RewardFunction(function="exact_match", options={"ignore_case": True}),
        RewardFunction(function="user_rewards:length", weight=0.1, name="size", only_if=("exact_match",)),
    )
    trajectories, _ = score(
        reward,
        trajectory("PARIS", answer="paris", source="data"),
        trajectory("PARIS", answer="paris", source="own"),
        trajectory("Rome", answer="paris", source="own"),
        source_rewards={"own": own, "same": own},
    )
    assert [t.reward for t in trajectories] == [0.0, 1.5, 0.0]
    # The sum of all sources has the name `exact_match` already, for another function.
    assert trajectories[1].reward_parts == {"exact_match#2": 1.0, "size": 5.0, "size/counted": 1.0}
    assert trajectories[2].reward_parts == {"exact_match#2": 0.0, "size/counted": 0.0}


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
    assert [t.reward for t in trajectories] == [1.0, None, 1.0]
    assert pool.failure_counts["memory"] == 1


def test_a_large_batch_is_scored_one_by_one():
    batch = [trajectory(f"so it is {k}\n#### {k}", answer="#### 7") for k in range(256)]
    score(settings("gsm8k", num_workers=2), *batch)
    assert [t.reward for t in batch] == [float(k == 7) for k in range(256)]


def test_slow_functions_are_spread_over_the_processes():
    trajectories, _ = score(settings("user_rewards:behave", num_workers=4), *["time.sleep(0.5) or os.getpid()"] * 8)
    assert len({t.reward for t in trajectories}) == 4


@pytest.mark.parametrize(
    ("functions", "response", "correct"),
    [
        (("exact_match",), "right", True),
        (("exact_match",), "wrong", False),
        (("exact_match", "user_rewards:penalty"), "right", True),
        (("exact_match", "user_rewards:penalty"), "wrong", False),
        (("user_rewards:penalty",), "right", None),
        (("user_rewards:judge",), "right", True),
        (("user_rewards:judge",), "wrong", False),
        (("exact_match", "user_rewards:judge"), "right", True),
        (("exact_match", "user_rewards:judge"), "right!", False),
        (("exact_match", "user_rewards:none"), "right", None),
    ],
)
def test_what_is_correct_is_declared_and_not_read_off_the_reward(folder, functions, response, correct):
    source = (folder / "user_rewards.py").read_text()
    (folder / "user_rewards.py").write_text(
        source + "\ndef penalty(**_): return -0.1\ndef none(**_): return None\n"
        "def judge(*, response, **_): return {'reward': -3, 'correct': response[:5] == 'right', 'style': 2}\n"
    )
    [t], _ = score(settings(*functions), trajectory(response, answer="right"))
    assert t.correct is correct
    assert not any("correct" in name for name in t.reward_parts)


def test_a_sum_is_the_same_in_any_order_and_zero_where_it_cancels():
    def reward_of(*weights):
        functions = [RewardFunction(function="user_rewards:behave", weight=weight) for weight in weights]
        [t], _ = score(settings(*functions), "1")
        return t.reward

    assert reward_of(0.1, 0.2, 0.3) == reward_of(0.3, 0.2, 0.1) == reward_of(0.2, 0.3, 0.1)
    assert reward_of(0.1, 0.2, -0.3) == 0.0
    assert reward_of(1.0, -1.0 + 1e-6) == pytest.approx(1e-6)
