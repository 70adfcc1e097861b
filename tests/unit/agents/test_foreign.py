"""Foreign agents: real processes that know the policy as an address, how they end, and what they cannot take along."""

import asyncio
import dataclasses
import os
import shutil
import sys
import threading
import time

import chat_templates as families
import pytest
from endpoint_support import OPENERS, STOP, ScriptedSession, decode
from run_configs import make_config
from session_support import Params, Said, side_of

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.external_agent import ForeignAgents
from gspo_mega.agents.protocol import ContextFull, Outcome, Task
from gspo_mega.agents.turn import Limits
from gspo_mega.base.errors import EpisodeError, RolloutError

HEAD = "import json, os, pathlib, sys, time, urllib.request\n"
ASK = """
def ask(messages):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
task = json.loads(pathlib.Path(os.environ["GSPO_MEGA_TASK_FILE"]).read_text())
def result(value):
    pathlib.Path(os.environ["GSPO_MEGA_RESULT_FILE"]).write_text(json.dumps(value))
"""
TWO_TURNS = """
first = ask(task["messages"])
second = ask([*task["messages"], first, {"role": "user", "content": "sure?"}])
"""
TASK = Task([{"role": "user", "content": "2+3?"}], answer="5", prompt_id="p:1", seed=4)


def run_agent(code, script=("four", "five"), sessions=None, *, cancel_at=None, episodes=None, **options):
    """The end of an agent with that code, its session, and the runner. Cancelled when the file `cancel_at` has a text."""
    config = make_config(
        rollout=dict(
            episode=dict(function="foreign", options=dict(command=[sys.executable, "-c", HEAD + ASK + code], **options))
        ),
        episodes=dict(max_tokens=128, **(episodes or {})),
        data=dict(chat_template=True),
    )

    async def act():
        runner = ForeignAgents(config.episodes, config.rollout, decode, OPENERS, [STOP])
        await runner.start()
        session = ScriptedSession(script)
        try:
            running = asyncio.ensure_future(runner.run(TASK, session, "e-1 (p:1)"))
            while cancel_at is not None and not (cancel_at.exists() and cancel_at.read_text()):
                await asyncio.sleep(0.02)
            if cancel_at is not None:
                running.cancel()
            return await running, session, runner
        finally:
            await runner.close()
            assert runner._scratch is None or not runner._scratch.exists()

    return asyncio.run(act())


def test_an_agent_takes_turns_and_leaves_its_reward_to_the_functions():
    finished, session, _ = run_agent(TWO_TURNS)
    assert (finished.outcome, finished.failure, finished.limit) == (Outcome(), None, "")
    assert [len(one["messages"]) for one in session.asked] == [1, 3]
    assert session.asked[1]["messages"][1] == {"role": "assistant", "content": "four"}
    assert finished.own_seconds > 0
    assert session.counts["num_endpoint_errors"] == 0


def test_an_agent_writes_what_it_earned():
    code = 'assert task["answer"] == "5" and task["seed"] == 4\n' + TWO_TURNS
    code += 'result({"reward": 0.5, "turn_rewards": [0, 1], "correct": True, "info": {"a": [1]}})'
    finished, _, _ = run_agent(code, reward="file")
    assert finished.outcome == Outcome(0.5, [0.0, 1.0], True, info={"a": [1]})


@pytest.mark.parametrize(("code", "reward"), [("sys.exit(0)", 1.0), ("sys.exit(3)", 0.0)])
def test_an_exit_code_is_a_reward_where_that_is_asked_for(code, reward):
    finished, _, _ = run_agent(TWO_TURNS + code, reward="exit_code")
    assert finished.outcome == Outcome(reward, correct=bool(reward))


@pytest.mark.parametrize(
    ("code", "reward", "kind", "text"),
    [
        ("print('lost'); sys.exit(3)", "functions", "exception", "exit code 3; its last output: lost"),
        ("raise KeyError('x')", "functions", "exception", "KeyError: 'x'"),
        ("os.kill(os.getpid(), 9)", "exit_code", "killed", "signal 9"),
        ("os.kill(os.getpid(), 11)", "functions", "crash", "signal 11"),
        ("os.kill(os.getppid(), 9); time.sleep(60)", "functions", "killed", "the agent's process ended"),
        ("pass", "file", "wrong_type", "wrote no GSPO_MEGA_RESULT_FILE"),
        ("result({'score': 1})", "file", "wrong_type", "has 'score'; valid: reward"),
        ("result('high')", "file", "wrong_type", "number"),
        ("result({'reward': float('inf')})", "file", "not_finite", "Outcome.reward"),
        ("bytearray(200_000_000)", "functions", "exception", "MemoryError"),
    ],
)
def test_what_an_agent_does_wrong_is_its_episodes_failure(code, reward, kind, text):
    finished, _, _ = run_agent(code, reward=reward, episodes=dict(memory_bytes=128 * 1024**2))
    assert finished.outcome is None
    assert finished.failure.kind == kind
    assert finished.failure.text.startswith("e-1 (p:1): ") and text in finished.failure.text


@pytest.mark.parametrize("key", ["turn_deadline_seconds", "deadline_seconds"])
def test_an_agent_that_takes_too_long_is_ended_with_its_children(key, tmp_path):
    note = tmp_path / "pid"
    # The agent's Python may take seconds to start. A turn after one of them leaves room for the whole deadline.
    limits = {"turn_deadline_seconds": 6.0 if key[0] == "t" else 6.5, "deadline_seconds": 7.0}
    own = "ask(task['messages'])\n" if key[0] == "d" else ""
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    code += "print('waits for a lock', flush=True)\n"
    code += f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
    code += ("time.sleep(1)\n" + own + "time.sleep(60)") if own else "time.sleep(60)"
    finished, _, _ = run_agent(code, episodes=limits)
    assert finished.failure.kind == "deadline"
    assert finished.failure.text.endswith(f"(episodes.{key}); its last output: waits for a lock")
    assert not os.path.exists(f"/proc/{note.read_text()}")


@pytest.mark.parametrize("session_temperature", [1.0, 0.0])
@pytest.mark.parametrize("asked_temperature", [1.0, 0.0])
def test_an_agent_may_name_the_temperature_of_its_own_session_only(session_temperature, asked_temperature):
    """One endpoint serves training at 1.0 and evaluations at 0.0."""
    session = ScriptedSession(["four"])
    session.params = dataclasses.replace(session.params, temperature=session_temperature)
    code = ASK.replace('"messages": messages}', f'"messages": messages, "temperature": {asked_temperature}}}')
    finished, _, _ = run_with(session, f"{code}\nask(task['messages'])", evaluates_at=0.0)
    refused = int(asked_temperature != session_temperature)
    assert (len(session.asked), session.counts["num_endpoint_errors"]) == (1 - refused, refused)
    assert (finished.failure is not None) == bool(refused)


def test_waiting_for_the_policy_is_not_the_agents_time():
    class Slow(ScriptedSession):
        async def answer(self, *args, **options):
            await asyncio.sleep(4.0)
            return await super().answer(*args, **options)

    finished, _, _ = run_with(Slow(["four", "five"]), TWO_TURNS, turn_deadline_seconds=7.0, deadline_seconds=7.5)
    assert finished.failure is None
    assert finished.own_seconds < 7.5


def run_with(session, code, *, evaluates_at=1.0, **limits):
    config = make_config(
        rollout=dict(episode=dict(function="foreign", options=dict(command=[sys.executable, "-c", HEAD + ASK + code]))),
        episodes=dict(max_tokens=128, **limits),
        data=dict(chat_template=True),
        eval=dict(path="held_out.jsonl", temperature=evaluates_at),
    )

    async def act():
        runner = ForeignAgents(config.episodes, config.rollout, decode)
        await runner.start()
        try:
            return await runner.run(TASK, session, "e"), session, runner
        finally:
            await runner.close()

    return asyncio.run(act())


def test_an_agent_that_a_limit_ends_is_judged_like_one_that_ended():
    """It did not catch the refusal; to leave such episodes out would train on short ones."""
    finished, session, _ = run_agent(TWO_TURNS, script=["four", ContextFull("full")])
    assert (finished.outcome, finished.failure, finished.limit) == (Outcome(), None, "context_full")
    assert session.counts["num_endpoint_errors"] == 1
    assert run_agent(TWO_TURNS, script=["four", ContextFull("full")], reward="file")[0].limit == "context_full"


def test_a_turn_that_nobody_waits_for_is_in_the_record(tmp_path):
    """The agent ends while its last turn is sampled: the turn is sampled to its end."""
    code = TWO_TURNS.replace("second =", "import threading\nthreading.Thread(daemon=True, target=lambda:")
    asked = tmp_path / "asked"
    code = code.rstrip() + f").start()\nwhile not pathlib.Path({str(asked)!r}).exists(): time.sleep(0.01)"

    class Slow(ScriptedSession):
        async def answer(self, *args, **options):
            if self.asked:
                asked.touch()
                await asyncio.sleep(0.8)
            return await super().answer(*args, **options)

    finished, session, _ = run_with(Slow(["four", "five"]), code)
    assert finished.failure is None
    assert session.finished == [0, 1]
    assert session.counts["num_endpoint_unheard"] == 1


ONCE = """
first = ask(task["messages"])
if not pathlib.Path(NOTE).exists():
    pathlib.Path(NOTE).touch()
    HOW
second = ask([*task["messages"], first, {"role": "user", "content": "sure?"}])
"""


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("os.kill(os.getpid(), 9)", None),
        ("os.kill(os.getppid(), 9); time.sleep(60)", None),
        ("os.kill(os.getpid(), 11)", "crash: "),
        ("pathlib.Path(NOTE).unlink(); os.kill(os.getpid(), 9)", "crash: "),
    ],
)
def test_an_agent_that_is_killed_once_begins_again_with_its_turns(tmp_path, how, failure):
    """Nothing is sampled again, so it does not matter why; killed again with the same turns, it is its own failure."""
    side = side_of(tmp_path, families.QUICKSTART, "four", "five", "six", tools=())
    episode = driven(side, ONCE.replace("HOW", how).replace("NOTE", repr(str(tmp_path / "note"))))
    if failure is None:
        assert episode.failure is None and [turn.text for turn in episode.turns] == ["four", "five"]
        assert episode.counts["num_replayed_turns"] == episode.counts["num_episodes_restarted"] == 1
        assert len(side.sampler.calls) == 2
    else:
        assert episode.failure.startswith(failure) and [turn.text for turn in episode.turns] == ["four"]


def test_a_turn_that_is_open_when_its_agent_is_killed_is_sampled_to_its_end(tmp_path):
    """To drop it and sample again would drop long turns sooner than short ones."""
    gate = asyncio.Event()
    side = side_of(tmp_path, families.QUICKSTART, "four", Said("five", gate=gate), tools=())
    how = "import threading; more = [*task['messages'], first, {'role': 'user', 'content': 'sure?'}]\n"
    how += "    threading.Thread(daemon=True, target=ask, args=(more,)).start()\n"
    how += f"    while not pathlib.Path({str(tmp_path / 'asked')!r}).exists(): time.sleep(0.01)\n    os.kill(os.getpid(), 9)"

    async def open_gate():
        while len(side.sampler.calls) < 2:
            await asyncio.sleep(0.05)
        (tmp_path / "asked").touch()
        await asyncio.sleep(2)
        gate.set()

    episode = driven(side, ONCE.replace("HOW", how).replace("NOTE", repr(str(tmp_path / "note"))), open_gate)
    assert episode.failure is None and [turn.text for turn in episode.turns] == ["four", "five"]
    assert episode.counts["num_replayed_turns"] == 2 and len(side.sampler.calls) == 2


def driven(side, code, beside=lambda: asyncio.sleep(0)):
    """The record of an episode of an agent with that code, with a session as in a run."""
    options = dict(command=[sys.executable, "-c", HEAD + ASK + code])
    config = make_config(rollout=dict(episode=dict(function="foreign", options=options)), data=dict(chat_template=True))

    async def act():
        driver = EpisodeDriver(
            side.conversation, Limits(8, 4096), ForeignAgents(config.episodes, config.rollout, decode)
        )
        await driver.start()
        other = asyncio.ensure_future(beside())
        try:
            return await driver.run(side.prompt, 0, "g-s", side.sampler, Params())
        finally:
            other.cancel()
            await driver.close()

    return asyncio.run(act())


def test_a_run_without_servers_ends_with_its_error():
    with pytest.raises(RolloutError, match="no server"):
        run_agent(TWO_TURNS, script=[RolloutError("no server")])


def test_a_defect_of_ours_in_a_turn_ends_the_run_as_it_does_with_an_episode_of_a_worker():
    """The agent hears 503 and may end as it likes; who runs the training must see the error."""
    for code in (TWO_TURNS, "try: ask(task['messages'])\nexcept OSError: pass\n"):
        with pytest.raises(KeyError, match="ours"):
            run_agent(code, script=[KeyError("ours")])


def test_what_an_agent_wrote_is_removed_beside_the_event_loop(monkeypatch):
    """A tree of many files takes long, and the loop samples for all episodes meanwhile."""
    threads, remove = [], shutil.rmtree

    def removing(path, **options):
        threads.append(threading.current_thread())
        remove(path, **options)

    monkeypatch.setattr("gspo_mega.agents.external_agent.shutil.rmtree", removing)
    run_agent("pathlib.Path(os.environ['TMPDIR'], 'a').mkdir()\n" + TWO_TURNS)
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_a_cancelled_episode_ends_its_agent(tmp_path):
    note = tmp_path / "pid"
    code = f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    with pytest.raises(asyncio.CancelledError):
        run_agent(code, cancel_at=note)
    assert not os.path.exists(f"/proc/{note.read_text()}")


def test_an_agent_speaks_to_the_endpoint_directly_and_keeps_the_way_out(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "intern.example")
    code = "assert os.environ['http_proxy'] == os.environ['HTTP_PROXY'] == 'http://127.0.0.1:9'\n"
    code += "assert {'intern.example', '127.0.0.1'} <= set(os.environ['no_proxy'].split(','))\n"
    finished, session, _ = run_agent(code + TWO_TURNS)
    assert finished.failure is None and session.counts is not None


def test_the_environment_is_the_short_list_and_what_was_named(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    monkeypatch.setenv("NAMED", "y")
    code = "assert 'SECRET_OF_THE_RUN' not in os.environ and os.environ['NAMED'] == 'y'\n"
    code += "assert os.environ['TMPDIR'] == os.path.dirname(os.environ['GSPO_MEGA_TASK_FILE'])"
    finished, _, _ = run_agent(code, episodes=dict(environment=("NAMED",)))
    assert finished.failure is None, finished.failure


def test_a_process_left_behind_does_not_delay_the_end():
    code = "import subprocess\nsubprocess.Popen(['sleep', '60'])\n"
    began = time.monotonic()
    finished, _, _ = run_agent(code)
    assert finished.failure is None
    assert time.monotonic() - began < 20


def test_a_variable_that_is_not_set_is_named_at_the_start():
    with pytest.raises(EpisodeError, match="episodes.environment: NO_SUCH is not set"):
        run_agent("", episodes=dict(environment=("NO_SUCH",)))


def test_a_program_that_is_not_there_is_named_at_the_start():
    config = make_config(rollout=dict(episode=dict(function="foreign", options=dict(command=["no-such-agent"]))))
    with pytest.raises(EpisodeError, match="no program 'no-such-agent'"):
        asyncio.run(ForeignAgents(config.episodes, config.rollout, decode).start())


@pytest.mark.parametrize("make", ["os.mkfifo(path)", "os.symlink('/dev/zero', path)", "os.mkdir(path)"])
def test_a_result_that_is_no_file_does_not_hold_up_the_run(make):
    code = f"{TWO_TURNS}path = os.environ['GSPO_MEGA_RESULT_FILE']\n{make}"
    finished, _, _ = run_agent(code, reward="file")
    assert finished.failure.kind == "wrong_type"
