"""Processes that an episode starts end with it, however they were started; its neighbours' go on."""

import asyncio
from pathlib import Path

import psutil
import pytest
from pool_support import PolicySession, kinds, run, settings, task

from gspo_mega.agents.pool import EpisodePool
from gspo_mega.config.schema import EpisodeFunction

pytestmark = pytest.mark.usefixtures("folder", "nothing_is_left")

# Ways to start a process and leave it; each ends with its pid in `pid`.
WAYS = {
    "subprocess": "pid = subprocess.Popen(['sleep', '600'], start_new_session=True).pid",
    "with another environment": "pid = subprocess.Popen(['/bin/sleep', '600'], env={'A': 'b'}).pid",
    "positional arguments": "pid = subprocess.Popen(['sleep', '600'], -1, None, None, None, None, None, True).pid",
    "asyncio": "pid = (await asyncio.create_subprocess_exec('sleep', '600')).pid",
    "a shell's child, left behind": (
        "pid = int(subprocess.check_output('setsid sleep 600 >&- 2>&- & echo $!', shell=True))"
    ),
    "a thread": "pid = (await asyncio.to_thread(subprocess.Popen, ['sleep', '600'])).pid",
    "a tool": "pid = int(await tools.call('act', {'text': \"subprocess.Popen(['sleep', '600']).pid\"}))",
    "a task": (
        "async def start(): return subprocess.Popen(['sleep', '600']).pid\npid = await asyncio.create_task(start())"
    ),
    "fork": "pid = os.fork()\nif pid == 0:\n    time.sleep(600)",
    "a fork's child, left behind": (
        "here, there = os.pipe()\nif os.fork() == 0:\n    inner = os.fork()\n    if inner == 0:\n        time.sleep(600)\n"
        "    os.write(there, str(inner).encode())\n    os._exit(0)\npid = int(os.read(here, 20))"
    ),
    "spawn": "pid = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')",
    "multiprocessing": (
        "import multiprocessing\none = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "one.start()\npid = one.pid"
    ),
}
TOOLS = ("user_episodes:act",)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_processes_end_with_their_episode_and_the_neighbours_live_on(folder):
    texts = [f"{way}\nreturn float(pid)" for way in WAYS.values()]
    neighbour = (
        f"{WAYS['subprocess']}\nPath('pid').write_text(str(pid))\n"
        "while not os.path.exists('on'):\n    await asyncio.sleep(0.01)\nreturn 1.0"
    )

    async def play():
        function = EpisodeFunction(function="user_episodes:behave")
        # A dozen starts of processes hold one event loop, on a busy machine for more than a second.
        async with EpisodePool(settings(blocked_seconds=15.0), function, TOOLS) as pool:
            staying = asyncio.create_task(pool.run(task(99, neighbour), PolicySession(), "neighbour"))
            while not (folder / "pid").exists() or not (folder / "pid").read_text():
                await asyncio.sleep(0.01)
            ends = await asyncio.gather(
                *(pool.run(task(n, text), PolicySession(), str(n)) for n, text in enumerate(texts))
            )
            assert kinds(ends) == {"": len(WAYS)}
            left = [way for way, end in zip(WAYS, ends, strict=True) if lives(int(end.outcome.reward))]
            assert left == [] and lives(int((folder / "pid").read_text()))
            (folder / "on").touch()
            assert (await staying).outcome.reward == 1.0
            assert not lives(int((folder / "pid").read_text()))
            # Both forks of one way have the mark.
            assert len(WAYS) + 1 <= pool.counts["num_processes_ended"] <= len(WAYS) + 2
            assert pool.counts["num_workers_recycled"] == 0

    asyncio.run(play())


def test_a_thread_that_waits_for_a_process_ends_with_it():
    """So the worker need not be replaced, as one is that has a thread left."""
    waits = "await asyncio.to_thread(subprocess.run, ['sleep', '600'])"
    [end], _, pool = run([waits], turn_deadline_seconds=1.0)
    assert end.failure.kind == "deadline" and pool.counts == {"num_processes_ended": 1}


def test_an_episode_that_ignores_its_end_loses_its_processes_all_the_same():
    ignores = "while True:\n    try:\n        await asyncio.sleep(9)\n    except BaseException:\n        pass"
    text = f"{WAYS['subprocess']}\nPath('pid').write_text(str(pid))\n{ignores}"
    neighbour = (
        "while not os.path.exists('pid') or open(f'/proc/{Path(\"pid\").read_text()}/stat').read().split()[2] != 'Z':\n"
        "    await model.turn(task.messages)\n    await asyncio.sleep(0.05)\nreturn 1.0"
    )
    ends, _, _ = run([text, neighbour], turn_deadline_seconds=4.0)
    assert ends[0].failure.kind == "deadline" and ends[1].failure is None


def test_a_process_that_the_module_started_is_no_episodes(folder):
    with open(folder / "user_episodes.py", "a") as module:
        module.write("\n\nSHARED = subprocess.Popen(['sleep', '600'])\n")
    first = "subprocess.Popen(['sleep', '600'])\nreturn float(SHARED.pid)"
    second = "await asyncio.sleep(1)\nassert SHARED.poll() is None\nreturn float(SHARED.pid)"
    ends, _, pool = run([first, second])
    assert kinds(ends) == {"": 2} and pool.counts == {"num_processes_ended": 1}
    assert not lives(int(ends[0].outcome.reward)), "it ends with its worker"


def test_an_episode_without_processes_looks_for_none(folder, monkeypatch):
    [end], _, pool = run(["return float('GSPO_MEGA_EPISODE' in os.environ)"])
    assert end.outcome.reward == 1.0 and not pool.counts and Path("/proc/self/environ").exists()
