"""What an episode does wrong is that episode's failure: every fault in a real worker, with neighbours that go on."""

import asyncio
import os
import re
import subprocess
import sys
import time

import pytest
from pool_support import PolicySession, kinds, run, task, the_worker

from gspo_mega.agents import loop_watch

pytestmark = pytest.mark.usefixtures("folder", "nothing_is_left")

# What an episode does, the kind of its failure, and what the failure says.
ENDS_ITSELF = {
    "raises": ("raise ValueError('too long')", "exception", r"ValueError: too long \(<string>:2\)"),
    "leaves": ("sys.exit(3)", "exception", "SystemExit: 3"),
    "interrupts": ("raise KeyboardInterrupt", "exception", "KeyboardInterrupt"),
    "recurses": ("recurse()", "exception", r"RecursionError: .* \(user_episodes.py:\d+\)"),
    "nothing": ("return", "wrong_type", "returned nothing"),
    "a text": ("return 'good'", "wrong_type", "'good' .str.; a number was expected"),
    "not a number": ("return float('nan')", "not_finite", "nan"),
    "forgets to await": ("message = model.turn([])\nreturn message['content']", "exception", "an `await` forgotten"),
    "returns what it should await": ("return model.turn([])", "wrong_type", "coroutine"),
    "cancels itself": ("asyncio.current_task().cancel()\nawait asyncio.sleep(9)", "exception", "CancelledError"),
    "awaits a cancelled task": (
        "inner = asyncio.ensure_future(asyncio.sleep(9))\ninner.cancel()\nawait inner",
        "exception",
        "CancelledError",
    ),
    "cancels all": (
        "for one in asyncio.all_tasks():\n    one.cancel()\nawait asyncio.sleep(9)",
        "exception",
        "CancelledError|may cancel only its own tasks",
    ),
    "leaves in a task": (
        "async def leave(): sys.exit(4)\nawait asyncio.create_task(leave())",
        "exception",
        "SystemExit: 4",
    ),
    "stops the loop": ("asyncio.get_running_loop().stop()\nraise ValueError('on')", "exception", "ValueError: on"),
    "closes the loop": ("asyncio.get_running_loop().close()", "exception", "RuntimeError"),
    "runs a loop": ("asyncio.run(asyncio.sleep(0))", "exception", "RuntimeError"),
    "too much at once": ("bytearray(10**12)", "memory", "MemoryError"),
    "a huge message": ("await model.turn([{'role': 'user', 'content': 'x' * 200_000}])", "too_large", "at most 100000"),
    "no messages": ("await model.turn('hello')", "exception", "list of messages"),
    "an object in a message": ("await model.turn([{'role': 'user', 'content': object()}])", "exception", "JSON"),
    "a number that isn't one": ("await model.turn([{'role': 'user', 'content': float('inf')}])", "exception", "JSON"),
    "a reward for no turn": ("model.set_reward(3, 1.0)", "exception", "IndexError: there was no turn 3"),
    "a reward that is none": (
        "await model.turn(task.messages)\nmodel.set_reward(-1, 'x')",
        "not_finite|wrong_type",
        "x",
    ),
    "huge info": ("return Outcome(info={'x': 'y' * 10**6})", "wrong_type", "Outcome.info has"),
    "many parts": ("return Outcome(parts={f'part {n}': 0.0 for n in range(10_000)})", "too_large", "at most 100000"),
    "sleeps": ("await asyncio.sleep(1000)", "deadline", "no turn and no end within 2 s of its own$"),
    "sleeps on": (
        "while True:\n    try:\n        await asyncio.sleep(1000)\n    except BaseException:\n        pass",
        "deadline",
        "within 2 s of its own; it ignores that",
    ),
    "waits for nothing": ("await asyncio.get_running_loop().create_future()", "deadline", "within 2 s of its own"),
    "waits for a thread": ("await asyncio.to_thread(time.sleep, 30)", "deadline", "within 2 s of its own"),
    "takes long in all": (
        "for _ in range(100):\n    await asyncio.sleep(1)\n    await model.turn(task.messages)",
        "deadline",
        "no end within 4 s of its own",
    ),
}
NEIGHBOUR = {"0": "await asyncio.sleep(0.2)", "1": "assert await tools.call('add', {'a': 1, 'b': 2}) == '3'"}


def neighbours(number, delay_seconds=0.2):
    tasks = [task(100 + n, rounds=NEIGHBOUR) for n in range(number)]
    return tasks, [PolicySession(delay_seconds) for _ in tasks]


def test_what_ends_an_episode_ends_no_other():
    """All faults at once in one worker, which lives on, with neighbours that have the same records as without faults."""
    faults = [task(number, rounds={"0": text}) for number, (text, _, _) in enumerate(ENDS_ITSELF.values())]
    tasks, sessions = neighbours(4)
    changes = {"turn_deadline_seconds": 2.0, "deadline_seconds": 4.0, "tools": ("user_episodes:add",)}
    function = {"function": "user_episodes:faulty"}
    with open("user_episodes.py", "a") as module:
        module.write(
            "\n\nasync def faulty(task, model, tools):\n"
            "    return await (play if len(task.metadata['do']) == 2 else behave)(task, model, tools)\n"
        )
    references = [PolicySession() for _ in tasks]
    alone, _, _ = run(tasks, sessions=references, **function, **changes)
    ends, sessions, _ = run(
        [*faults, *tasks],
        sessions=[*(PolicySession() for _ in faults), *sessions],
        endpoint={"max_body_bytes": 100_000},
        **function,
        **changes,
    )
    for (name, (_, kind, text)), end in zip(ENDS_ITSELF.items(), ends, strict=False):
        assert end.outcome is None and end.failure is not None, name
        assert re.fullmatch(kind, end.failure.kind) and re.search(text, end.failure.text), (name, end.failure)
    assert kinds(alone) == {"": 4} and [end.outcome for end in ends[-4:]] == [end.outcome for end in alone]
    assert [session.record for session in sessions[-4:]] == [session.record for session in references]
    assert [session.num_restarts for session in sessions] == [0] * len(sessions)


LOSES_ITS_WORKER = {
    "blocks": ("stuck()", "blocked", r"blocked the event loop of its worker for 1 s at user_episodes.py:\d+ .stuck."),
    "blocks with the interpreter": ("re.match('(a+)+$', 'a' * 40 + 'b')", "blocked", "for 1 s at <?string>?|for 1 s"),
    "blocks in a callback": (
        "asyncio.get_running_loop().call_later(0.1, stuck)\nawait asyncio.sleep(9)",
        "blocked",
        "(stuck)",
    ),
    "blocks in a callback from a thread": (
        "loop = asyncio.get_running_loop()\nawait asyncio.to_thread(loop.call_soon_threadsafe, stuck)\nawait asyncio.sleep(9)",
        "blocked",
        "(stuck)",
    ),
    "blocks with the interpreter in a thread": (
        "await asyncio.to_thread(re.match, '(a+)+$', 'a' * 40 + 'b')",
        "blocked",
        "for 1 s",
    ),
    "stops the process": ("os.kill(os.getpid(), signal.SIGSTOP)", "blocked", "for 1 s"),
    "exits": ("os._exit(3)", "crash", "exit code 3"),
    "is killed": ("os.kill(os.getpid(), 9)", "crash", "SIGKILL"),
    "kills its group": ("os.killpg(0, 9)", "crash", "SIGKILL"),
    "crashes": ("ctypes.string_at(0)", "crash", "SIGSEGV"),
    "exits in a thread": ("await asyncio.to_thread(lambda: [time.sleep(0.3), os._exit(5)])", "crash", "exit code 5"),
    "writes into our pipe": (
        "for n in range(3, 20):\n    try:\n        os.write(n, b'[1, 2]\\n')\n    except OSError:\n        pass\n"
        "await asyncio.sleep(9)",
        "crash",
        "not a message|ended",
    ),
    "forges a message": (
        "for n in range(3, 20):\n    try:\n        os.write(n, FORGED)\n    except OSError:\n        pass\n"
        "await asyncio.sleep(9)",
        "crash",
        "not a message|ended",
    ),
    "closes our pipes": ("os.closerange(3, 100)\nawait asyncio.sleep(9)", "crash", "ended"),
    "closes our pipes and ends slowly": (
        "import atexit\natexit.register(time.sleep, 3)\nos.closerange(3, 100)\nawait asyncio.sleep(9)",
        "crash",
        "ended",
    ),
    "fills the memory": (
        "task.state['x'] = kept = []\nwhile True:\n    kept.append(bytearray(2**20))",
        "memory",
        "MemoryError",
    ),
}


@pytest.mark.parametrize("name", LOSES_ITS_WORKER)
def test_who_loses_a_worker_fails_and_its_neighbours_end_as_alone(name):
    text, kind, says = LOSES_ITS_WORKER[name]
    tasks, sessions = neighbours(3)
    references = [PolicySession() for _ in tasks]
    if not REFERENCE:
        REFERENCE.append((run(tasks, sessions=references, function="user_episodes:play", tools=ADD)[0], references))
    [(expected, references)] = REFERENCE
    ends, sessions, pool = run(
        [task(0, rounds={"1": text}), *tasks],
        sessions=[PolicySession(), *sessions],
        function="user_episodes:play",
        tools=ADD,
        memory_bytes=256 * 1024**2,
        blocked_seconds=15.0 if name == "fills the memory" else 1.0,  # which takes its time on a busy machine
    )
    assert ends[0].failure is not None and ends[0].outcome is None
    assert ends[0].failure.kind == kind and re.search(says, ends[0].failure.text), ends[0].failure
    assert [end.outcome for end in ends[1:]] == [end.outcome for end in expected]
    assert [s.record for s in sessions[1:]] == [s.record for s in references]
    assert all(s.num_restarts > 0 and s.num_replayed > 0 for s in sessions[1:])
    assert [[(r.turn, r.name, r.result) for r in end.tool_calls] for end in ends[1:]] == [[(1, "add", "3")]] * 3
    assert pool.counts["num_workers_recycled"] >= 1
    # The culprit is known at once, or alone the next time.
    assert name in ("fills the memory", *OVER_ALL) or [s.num_restarts for s in sessions[1:]] == [1] * 3


ADD = ("user_episodes:add",)
OVER_ALL = ("writes into our pipe", "forges a message", "closes our pipes", "closes our pipes and ends slowly")
REFERENCE: list = []


def test_a_run_that_is_held_up_itself_blames_nobody(monkeypatch):
    """What passes between two looks counts up to a bound, so that a machine that stood still is no blocked loop."""
    times = iter([0.0, 0.25, 0.5, 100.0, 100.25])
    with monkeypatch.context() as patch:
        patch.setattr(loop_watch.time, "monotonic", lambda: next(times))
        watch = loop_watch.LoopWatch()
        assert [watch.silent_seconds(0.5) for _ in range(4)] == [0.25, 0.5, 1.0, 1.25]
    watch.close()

    async def hold_up(pool, sessions):
        for _ in range(2):
            await asyncio.sleep(0.1)
            time.sleep(1.5)

    ends, _, pool = run(["await asyncio.sleep(1)\nreturn 1.0"] * 3, inside=hold_up)
    assert kinds(ends) == {"": 3} and not pool.counts


def test_the_line_that_blocks_is_named_beside_many_deep_threads():
    text = (
        "def deep(n): return deep(n - 1) if n else time.sleep(3)\n"
        "asyncio.ensure_future(asyncio.gather(*(asyncio.to_thread(deep, 80) for _ in range(60))))\n"
        "await asyncio.sleep(0.5)\nstuck()"
    )
    [end], _, _ = run([text])
    assert end.failure.kind == "blocked" and re.search(r" at user_episodes.py:\d+ \(stuck\);", end.failure.text), end


LATE = """
import signal, sys, time
from gspo_mega.agents.loop_watch import WatchedLoop

loop = WatchedLoop(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
time.sleep(1.5)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
time.sleep(60)
"""


def test_the_line_that_blocks_is_named_although_the_process_says_it_late(tmp_path):
    """As on a machine whose processors are all taken: here the signal waits."""
    (tmp_path / "late.py").write_text(LATE)
    watch = loop_watch.LoopWatch()
    with subprocess.Popen([sys.executable, tmp_path / "late.py", watch.path], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            assert re.fullmatch(r" at late.py:\d+ \(<module>\)", asyncio.run(watch.where(process.pid)))
        finally:
            process.kill()
    watch.close()


def test_a_fork_of_an_episode_says_nothing():
    text = "if os.fork() == 0:\n    Path('forked').touch()\nawait asyncio.sleep(0.5)\nreturn 1.0"
    ends, _, pool = run([text, "await asyncio.sleep(1)\nreturn 2.0"])
    assert [end.outcome.reward for end in ends] == [1.0, 2.0] and os.path.exists("forked")
    assert pool.counts == {"num_processes_ended": 1}


@pytest.mark.parametrize("number", [1, 20])
def test_a_worker_that_is_killed_from_outside_costs_nobody_anything(number):
    async def kill(pool, sessions):
        while not all(session.record for session in sessions):
            await asyncio.sleep(0.01)
        the_worker().kill()

    tasks = [task(n, rounds={"0": "await asyncio.sleep(1)"}) for n in range(number)]
    ends, sessions, pool = run(tasks, function="user_episodes:play", inside=kill)
    assert kinds(ends) == {"": number} and [len(s.record) for s in sessions] == [3] * number
    assert pool.counts == {"num_workers_recycled": 1} and [s.num_restarts for s in sessions] == [1] * number


def test_nobody_knows_who_and_the_culprit_is_found():
    """A thread that nobody sees ends the process: of twelve episodes the one that starts it fails."""
    text = "threading.Timer(0.3, os._exit, (9,)).start()\nawait asyncio.sleep(2)"
    tasks = [task(n, rounds={"1": text if n == 7 else "await asyncio.sleep(0.5)"}) for n in range(12)]
    ends, sessions, _ = run(tasks, function="user_episodes:play", num_workers=2)
    assert kinds(ends) == {"": 11, "crash": 1} and ends[7].failure.text.endswith("(exit code 9)")
    assert [len(s.record) for s in sessions] == [3] * 7 + [2] + [3] * 4


def test_an_error_that_comes_from_a_neighbours_memory_is_nobodys():
    """What is full makes others fail in many ways; here a tool, and then the episode itself."""
    fills = {"1": "task.state['x'] = bytearray(200 * 2**20)\nawait asyncio.sleep(1.5)\ntask.state.clear()"}
    needs = "try:\n    bytearray(100 * 2**20)\nexcept MemoryError:\n    raise RuntimeError('no thread')"
    rounds = {"0": "await asyncio.sleep(0.7)", "1": "await tools.call('need', {})", "2": needs}
    later = {"1": f"await asyncio.sleep(0.7)\n{needs}"}
    with open("user_episodes.py", "a") as module:
        module.write(f"\n\ndef need() -> None:\n    'Need memory.'\n    {needs.replace(chr(10), chr(10) + '    ')}\n")
    ends, sessions, _ = run(
        [task(0, rounds=fills), task(1, rounds=rounds), task(2, rounds=later)],
        function="user_episodes:play",
        tools=("user_episodes:need",),
        memory_bytes=256 * 1024**2,
        blocked_seconds=15.0,
    )
    assert kinds(ends) == {"": 3} and [call.result for call in ends[1].tool_calls] == ["null"]
    assert all(session.num_restarts > 0 for session in sessions)


def test_a_thread_that_only_waits_is_not_blamed_for_a_loop_that_stands_still(folder):
    """The process is stopped from outside while one episode has a thread and no callback runs."""

    async def stop(pool, sessions):
        while not (folder / "waits").exists():
            await asyncio.sleep(0.05)
        the_worker().suspend()

    # The thread says when: at the callback's own end the page would still name the callback.
    waits = "await asyncio.to_thread(lambda: [time.sleep(0.5), Path('waits').touch(), time.sleep(1)])\nreturn 1.0"
    ends, sessions, _ = run([waits, "await asyncio.sleep(2)\nreturn 2.0"], inside=stop, blocked_seconds=3.0)
    assert kinds(ends) == {"": 2} and [session.num_restarts for session in sessions] == [1, 1]
