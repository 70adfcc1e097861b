"""Who caused it that a scoring did not end as it should: what a response causes is a score, what we cause is tried again
and in the end a failure. The table of docs/rewards.md, row by row.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time

import psutil
import pytest
from scoring_support import score, settings, trajectory

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import RewardFunction
from gspo_mega.rewards import blame, scoring_worker
from gspo_mega.rewards import code as programs
from gspo_mega.rewards.functions import BUILTINS
from gspo_mega.rewards.pool import ScoringPool

MIB = 1024**2
HEAD = """
import ctypes, fcntl, os, signal, sys, termios, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in numbers])
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
"""
# Each would end, stop or disturb a process outside: its group's, process 1, its parent, a thread of theirs.
SENT = {
    "a kill of its group": "os.kill(0, 9)",
    "an interrupt of process 1": "os.kill(1, 2)",
    "a kill of all": "os.kill(-1, 9)",
    "a stop of its group": "os.kill(0, signal.SIGSTOP)",
    "an end of its group": "os.killpg(0, signal.SIGTERM)",
    "an interrupt of its group by number": "os.killpg(os.getpgrp(), 2)",
    "an end of its parent": "os.kill(os.getppid(), 15)",
    "a signal to every low pid": "[os.kill(pid, 9) for pid in range(1, 30) if pid != os.getpid()]",
    "a high word beside its own pid's": "call(62, (1 << 32), 9)",
    "a thread of its parent": "call(200, os.getppid() or 1, 9)",
    "a thread of process 1": "call(234, 1, 1, 2)",
    "a queued signal": "call(129, os.getppid() or 1, 9, ctypes.create_string_buffer(128))",
    "a queued signal to a thread": "call(297, 1, 1, 9, ctypes.create_string_buffer(128))",
    "a signal by a descriptor": "call(424, call(434, os.getppid() or 1, 0), 9, 0, 0)",
    "a signal by a pipe": "fcntl.fcntl(1, fcntl.F_SETOWN, -os.getpgrp() or -1)",
    "the signal of a pipe": "fcntl.fcntl(1, 10, 9)",
    "its own stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "a stop by the terminal's signal": "os.kill(os.getpid(), signal.SIGTSTP)",
    "its own kill": "os.kill(os.getpid(), 9)",
    "a kill of its own thread": "call(234, os.getpid(), threading.get_native_id(), 9)",
    "keys of the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "a group of its own": "os.setpgid(0, 0)",
    "a session of its own": "os.setsid()",
    "a death signal": "call(157, 1, 9, 0, 0, 0)",
    "a timer's signal": "call(222, 1, 0, ctypes.create_string_buffer(8))",
    "its niceness": "os.nice(5)",
    "its scheduler": "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
    "its processors": "os.sched_setaffinity(0, {0})",
    "another's limits": "call(302, os.getppid() or 1, 7, ctypes.create_string_buffer(16), 0)",
}


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def jail(request):
    options = {"isolation": request.param, "memory_bytes": 256 * MIB, "folder_bytes": 16 * MIB}
    try:
        programs.check_code(**options)
    except RewardError as error:
        pytest.skip(str(error))
    behind = programs._settings(256 * MIB, 16 * MIB, MIB, request.param, False)

    def run(program, seconds=20.0, wall_seconds=60.0, **asked):
        message = {"program": program, "seconds": seconds, "wall_seconds": wall_seconds} | (asked or {"input": ""})
        return programs._ask(message, behind, sys.executable)

    run.server = programs._SERVERS[f"{sys.executable} {behind}"]
    yield run
    assert programs._SERVERS.get(f"{sys.executable} {behind}") is run.server  # the same has survived all of them
    run.server.end()
    programs._SERVERS.clear()


def test_a_signal_of_a_program_ends_at_the_walls(jail):
    for name, act in SENT.items():
        outcome = jail(f"{HEAD}\n{act}\nprint('REACHED')")
        assert outcome["ended"] == "raised" and "REACHED" not in outcome["said"], f"{name}: {outcome}"
        assert jail("print(1)") == {"ended": "done", "said": "1\n"}, name


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("signal.signal(signal.SIGUSR1, lambda *_: print('got it'))\nos.kill(os.getpid(), signal.SIGUSR1)", "got it\n"),
        ("signal.signal(signal.SIGINT, lambda *_: print('got it'))\nsignal.raise_signal(signal.SIGINT)", "got it\n"),
        (
            "signal.signal(signal.SIGALRM, lambda *_: print('late'))\nsignal.setitimer(signal.ITIMER_REAL, .01)\nsignal.pause()",
            "late\n",
        ),
        ("signal.signal(signal.SIGALRM, lambda *_: print('late'))\nsignal.alarm(1)\nsignal.pause()", "late\n"),
        (
            "signal.signal(signal.SIGUSR2, lambda *_: print('got it'))\n"
            "signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)",
            "got it\n",
        ),
        (
            "try:\n  os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\nexcept KeyboardInterrupt: print('caught')",
            "caught\n",
        ),
        ("threading.Thread(target=lambda: print(time.sleep(.05))).start()", "None\n"),
        ("with open('f', 'w') as f: f.write('x'); f.flush(); os.fsync(f.fileno())\nprint(open('f').read())", "x\n"),
    ],
)
def test_an_honest_program_signals_itself(jail, program, said):
    assert jail(HEAD + program) == {"ended": "done", "said": said}


# What a program does, and what its test is called then: never anything that is no score.
DEEDS = {
    "an abort": ("os.abort()", "killed"),
    "a fault of memory": ("ctypes.string_at(0)", "killed"),
    "its own end": ("os.kill(os.getpid(), signal.SIGTERM)", "killed"),
    "an alarm": ("signal.setitimer(signal.ITIMER_REAL, .1)\ntime.sleep(50)", "killed"),
    "closed pipes": ("os.closerange(0, 60)\ntime.sleep(50)", "killed"),
    "exit code 103": ("os._exit(103)", "killed"),
    "exit code 255": ("os._exit(255)", "killed"),
    "descriptors": ("x = [os.dup(0) for _ in range(10**6)]", "raised"),
    "a full folder": ("open('big', 'wb').write(bytes(2**25))", "raised"),
    "deep recursion": ("sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ("killed", "memory", "raised", "time")),
    "computing": ("while True: pass", "time"),
    "computing threads": (
        "import hashlib\nthreading.stack_size(2**18)\nfor _ in range(4): threading.Thread(target=lambda: [hashlib.sha256(bytes(2**22)) for _ in range(9999)]).start()",
        "time",
    ),
    "sleeping": ("time.sleep(1000)", "time"),
    "waiting for itself": ("r, w = os.pipe()\nos.read(r, 1)", "time"),
    "sleeping threads": (
        "threading.stack_size(2**18)\nfor _ in range(4): threading.Thread(target=time.sleep, args=(99,)).start()",
        "time",
    ),
    "syncing": ("f = open('f', 'wb')\nwhile True: f.write(b'x'); f.flush(); os.fsync(f.fileno()); f.seek(0)", "time"),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_whatever_a_program_does_is_a_score(jail, deed):
    act, ended = DEEDS[deed]
    assert jail(HEAD + act, seconds=0.5, wall_seconds=1.2)["ended"] in (ended if isinstance(ended, tuple) else (ended,))


RESULTS = {
    "nested": "x = 1\n  for _ in range(980): x = [x]\n  return x",
    "nested by its own bytes": "os.write(3, b'[' * 5000 + b']' * 5000); os._exit(0)",
    "nested objects": "os.write(3, b'{\"a\":' * 990 + b'1' + b'}' * 990); os._exit(0)",
    "digits": "os.write(3, b'1' * 100000); os._exit(0)",
    "no number": "return float('nan')",
    "no bound": "os.write(3, b'[1e999, -Infinity]'); os._exit(0)",
    "no UTF-8": "os.write(3, b'\\xff\\xfe\\x80'); os._exit(0)",
    "half a character": "return '\\ud800'",
    "nothing": "os._exit(0)",
    "a line of the protocol": 'os.write(3, b\'{"ended": "done", "result": 5}\'); os._exit(0)',
    "lines on every descriptor": (
        'for n in range(60):\n    try: os.write(n, b\'{"ended": "done", "result": 5}\\n{"id": 1, "value": 1}\\n\')\n'
        "    except OSError: pass\n  os._exit(0)"
    ),
    "a flood": "while True: os.write(1, b'x' * 65536)",
    "a flood of results": "while True: os.write(3, b'[' * 65536)",
    "a flood of control characters": "print(chr(0) * 10**6); return 4",
    "a kill of its group": "os.kill(0, 9)",
    "an interrupt of process 1": "os.kill(1, 2)",
    "a stop of its group": "os.kill(0, signal.SIGSTOP)",
}


def test_no_program_chooses_to_have_no_reward(no_process_is_left):
    """Through the pool, in one process after the other: each has 0, as an honest wrong one has."""
    code = RewardFunction(function="code", options={"seconds": 1, "total_seconds": 20})
    answer = [{"input": [], "output": 5, "function": "f"}]
    texts = {name: f"```python\n{HEAD}\ndef f():\n  {body}\n```" for name, body in RESULTS.items()}
    texts |= {"right": "```python\ndef f(): return 5\n```", "wrong": "```python\ndef f(): return 4\n```"}
    episodes, pool = score(
        settings(code, deadline_seconds=60.0), *[trajectory(text, answer=answer) for text in texts.values()]
    )
    found = {name: (one.reward, one.reward_error) for name, one in zip(texts, episodes)}
    assert found == dict.fromkeys(texts, (0.0, None)) | {"right": (1.0, None)}
    assert not any(pool.failure_counts.values())
    parts = {name: one.reward_parts for name, one in zip(texts, episodes)}
    assert parts["a flood"]["code/over_output"] == 1 and parts["right"]["code/killed"] == 0


def test_a_program_that_closes_its_pipes_in_each_test_uses_up_its_time(no_process_is_left):
    """Each costs a second of waiting for its end; all of them cost no more than the tests may."""
    text = "```python\nimport os, time\nos.closerange(0, 60)\ntime.sleep(50)\n```"
    one = trajectory(text, answer=[{"input": "", "output": "5"}] * 40)
    score(settings(RewardFunction(function="code", options={"total_seconds": 2.5}), deadline_seconds=6.0), one)
    assert (one.reward, one.reward_error) == (0.0, None) and one.reward_parts["code/timed_out"] > 0.8


def test_deep_results_are_compared():
    deep = json.loads("[" * 900 + "1" + "]" * 900)
    [right, wrong], _ = score(
        settings(RewardFunction(function="code")),
        *[
            trajectory(
                f"```python\ndef f():\n  x = {leaf}\n  for _ in range(900): x = [x]\n  return x\n```",
                answer=[{"input": [], "output": deep, "function": "f"}],
            )
            for leaf in (1, 2)
        ],
    )
    assert (right.reward_error, wrong.reward_error) == (None, None)
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def _below(pid):
    return psutil.Process(pid).children(recursive=True)


def _scored_while(act, reward, one, after=0.5, reached=lambda processes: True):
    """Score a trajectory and do something to its scoring process and what is below it, `after` seconds on."""

    async def run():
        async with ScoringPool(reward) as pool:
            scoring = asyncio.create_task(pool.score(one))
            await asyncio.sleep(after)
            guard = pool._slots[0].process.pid
            until = time.monotonic() + 60
            while not reached(_below(guard)) and time.monotonic() < until:
                await asyncio.sleep(0.02)
            act(guard)
            await scoring
        return pool

    return asyncio.run(run())


def _slow(answer="5"):
    return trajectory(
        "```python\nimport time\ntime.sleep(0.8)\nprint(5)\n```", answer=[{"input": "", "output": answer}]
    )


CODE = RewardFunction(function="code", options={"seconds": 2, "total_seconds": 2.2})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_scoring_process_that_somebody_kills_is_tried_again(number, no_process_is_left):
    """As the kernel does where the machine's memory is exhausted. The response has the score that it deserves."""
    one = _slow()
    pool = _scored_while(
        lambda guard: os.kill(_below(guard)[0].pid, number), settings(CODE, deadline_seconds=30.0), one
    )
    assert (one.reward, one.reward_error, one.counts) == (1.0, None, {}) and not any(pool.failure_counts.values())


def test_a_scoring_process_that_somebody_stops_is_tried_again(no_process_is_left):
    one = _slow()
    stop = lambda guard: [os.kill(process.pid, signal.SIGSTOP) for process in _below(guard)]  # noqa: E731
    pool = _scored_while(stop, settings(CODE, deadline_seconds=2.5), one)
    assert (one.reward, one.reward_error) == (1.0, None) and not any(pool.failure_counts.values())


def test_a_program_that_somebody_kills_is_tried_again(no_process_is_left):
    """Not the sandbox, only the program in it: 5 processes deep, or 3 without name spaces."""
    one, killed = _slow(), []

    def kill(guard):
        deepest = _below(guard)[-1]
        killed.append(deepest.pid)
        deepest.kill()

    pool = _scored_while(
        kill, settings(CODE, deadline_seconds=30.0), one, reached=lambda below: len(below) >= 5 and below[-1].pid > 0
    )
    assert killed and (one.reward, one.reward_error) == (1.0, None) and not any(pool.failure_counts.values())


def test_a_program_that_the_machine_holds_up_is_not_late(jail):
    """Stopped from outside for longer than all that it may take: its own time has not passed."""

    def hold_up():
        time.sleep(0.4)
        program = psutil.Process(jail.server.pid).children(recursive=True)[-1]
        program.suspend()
        time.sleep(2)
        program.resume()

    other = threading.Thread(target=hold_up)
    other.start()
    assert jail("import time; time.sleep(.7)\nprint(1)", seconds=1.0, wall_seconds=1.5) == {
        "ended": "done",
        "said": "1\n",
    }
    other.join()


def test_a_program_that_gets_no_processor_is_held_up_and_never_wrong(jail):
    def hold_up():
        time.sleep(0.4)
        psutil.Process(jail.server.pid).children(recursive=True)[-1].suspend()

    other = threading.Thread(target=hold_up)
    other.start()
    asked = {"seconds": 1.0, "wall_seconds": 1.2, "most_seconds": 1.5, "input": ""}
    assert jail("import time; time.sleep(1)\nprint(1)", **asked)["ended"] == "held_up"
    other.join()


def test_what_is_tried_again_fails_in_the_end(no_process_is_left, monkeypatch):
    """A scoring process that somebody kills each time."""
    one = _slow()

    async def run():
        async with ScoringPool(settings(CODE, deadline_seconds=30.0)) as pool:
            scoring = asyncio.create_task(pool.score(one))
            seen = set()
            while not scoring.done():
                await asyncio.sleep(0.05)
                slot = pool._slots[0]
                if slot.sent and slot.process.pid not in seen and _below(slot.process.pid):
                    seen.add(slot.process.pid)
                    os.kill(_below(slot.process.pid)[0].pid, signal.SIGKILL)
            await scoring
        return pool, seen

    pool, seen = asyncio.run(run())
    assert one.reward is None and "signal SIGKILL" in one.reward_error and "(tried 3 times)" in one.reward_error
    assert pool.failure_counts["crash"] == 1 and len(seen) == 3


def _answered(name, error, response="x"):
    """What the worker replies when our function `name` raises `error` for this response, and none for an empty one."""

    def function(*, response, **_):
        if response:
            raise error
        return 0.0

    request = {"prompt": "", "response": response, "answer": "1", "metadata": {}}
    return scoring_worker.answer(request, function, {}, (), name=name)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), "memory"),
        (RecursionError(), "exception"),
        (ValueError("4300 digits"), "exception"),
        (OverflowError(), "exception"),
        (KeyError(1), "exception"),
        (UnicodeError(), "exception"),
    ],
)
@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_what_a_response_makes_one_of_ours_raise_is_a_score(name, error, cause):
    reply = _answered(name, error)
    assert (reply["value"], reply["cause"]) == (0.0, cause)
    assert reply["correct"] is (
        False if name in ("code", "math", "gsm8k", "choice", "arithmetic", "exact_match", "reasoning_gym") else None
    )


@pytest.mark.parametrize(
    ("error", "kind", "again"),
    [
        (OSError(28, "no space"), "exception", True),
        (ImportError("no sympy"), "exception", False),
        (RuntimeError("the sandbox failed"), "exception", True),
        (blame.HeldUp("busy"), "deadline", True),
        (KeyboardInterrupt(), "exception", True),
        (RewardError("gone"), "exception", False),
    ],
)
def test_what_we_make_it_raise_is_a_failure(error, kind, again):
    reply = _answered("math", error)
    assert "value" not in reply and reply["failure"] == kind
    assert reply["again"] is again


def test_an_error_of_the_row_or_of_a_users_function_is_a_failure():
    assert _answered("mine:score", ValueError("no"))["failure"] == "exception"
    assert _answered("mine:score", MemoryError())["failure"] == "memory"

    def broken(**_):
        raise ValueError("the answer cannot be read")

    request = {"prompt": "", "response": "x", "answer": "?", "metadata": {}}
    assert scoring_worker.answer(request, broken, {}, (), name="math")["failure"] == "exception"
