"""The pool's own life: limits and errors of turns, own time, what an episode finds around it, recycling, closing."""

import asyncio
import os

import pytest
from pool_support import PolicySession, kinds, run, settings, task

from gspo_mega.agents.pool import EpisodePool, check_functions
from gspo_mega.base.errors import DataError, EpisodeError, RolloutError
from gspo_mega.config.schema import EpisodeFunction

pytestmark = pytest.mark.usefixtures("folder", "nothing_is_left")


def test_a_refused_turn_may_be_caught_and_ends_the_episode_otherwise():
    caught = "try:\n    await model.turn([])\nexcept TurnRefused as refusal:\n    return Outcome(info={'kind': refusal.kind})"
    through = "await model.turn([])"
    ends, _, _ = run([caught, through], sessions=[PolicySession(max_turns=0), PolicySession(max_turns=0)])
    assert ends[0].outcome.info == {"kind": "too_many_turns"} and ends[0].limit == ""
    assert ends[1].outcome is not None and ends[1].outcome.reward is None and ends[1].limit == "too_many_turns"


def test_errors_of_a_turn_are_the_episodes_or_the_runs():
    text = "await model.turn([{'role': 'user', 'content': 'x'}])"
    ends, _, _ = run(
        [text, text, f"try:\n    {text}\nexcept Exception as error:\n    return Outcome(info={{'said': repr(error)}})"],
        sessions=[PolicySession(error=error) for error in (DataError("a role"), EpisodeError("other"), DataError("r"))],
    )
    assert (ends[0].failure.kind, ends[1].failure.kind) == ("messages", "not_replayable")
    assert "a role" in ends[0].failure.text
    assert ends[2].outcome.info == {"said": "BadMessages('r')"}, "which an episode may catch"
    with pytest.raises(RolloutError, match="no server"):
        run([text], sessions=[PolicySession(error=RolloutError("no server"))])


def test_rewards_of_turns_reach_the_session():
    text = (
        "for n in range(3):\n    await model.turn(task.messages)\n    model.set_reward(n, n / 2)\n"
        "model.set_reward(-1, 7)\nreturn Outcome(turn_rewards=[None, 1.0], correct=True, parts={'p': 2})"
    )
    [end], [session], _ = run([text])
    assert session.rewards == {0: 0.0, 1: 0.5, 2: 7.0}
    assert (end.outcome.turn_rewards, end.outcome.correct, end.outcome.parts) == ([None, 1.0], True, {"p": 2.0})


def test_turns_at_the_same_time():
    text = (
        "asked = [model.turn([{'role': 'user', 'content': str(n)}], max_new_tokens=n + 1) for n in range(8)]\n"
        "return Outcome(info={'said': [one['content'] for one in await asyncio.gather(*asked)]})"
    )
    [end], [session], _ = run([text], sessions=[PolicySession(0.5)])
    assert end.outcome.info["said"] == [message["content"] for _, message in session.record]
    assert session.most_in_flight == 8
    [end], _, _ = run([text.replace("range(8)", "range(100)")])
    assert end.failure.text.startswith("EpisodeError: more than 64 turns are asked for at the same time")


def test_waiting_for_the_policy_is_not_an_episodes_own_time():
    text = "for _ in range(3):\n    await model.turn(task.messages)\n    await asyncio.sleep(0.3)\nreturn 1.0"
    [end], _, _ = run([text], sessions=[PolicySession(1.6)], turn_deadline_seconds=1.5, deadline_seconds=4.0)
    assert end.outcome is not None and 0.85 < end.own_seconds < 4.0


def test_what_others_keep_the_loop_busy_for_is_not_either():
    """Each works for 20 times 50 ms: 4 s are more than the deadline of 3.5 s, 1 s is not."""
    text = "for _ in range(20):\n    time.sleep(0.05)\n    await asyncio.sleep(0)\nreturn 1.0"
    ends, _, _ = run([text] * 4, turn_deadline_seconds=3.5, deadline_seconds=3.5)
    assert kinds(ends) == {"": 4} and all(0.9 < end.own_seconds < 3.5 for end in ends)


def test_waiting_for_a_thread_that_others_have_is_not_either():
    """Of 200 tools 64 run at a time, so the last ones end after 4 s, of which 1 is their own."""
    text = "await tools.call('sleep', {'seconds': 1.0})\nreturn 1.0"
    ends, _, _ = run([text] * 200, tools=("user_episodes:sleep",), turn_deadline_seconds=3.5)
    assert kinds(ends) == {"": 200} and all(0.5 < end.own_seconds < 3.5 for end in ends)


def test_waiting_for_threads_that_the_episode_has_itself_is_its_own_time():
    text = "await asyncio.gather(*(asyncio.to_thread(time.sleep, 1.0) for _ in range(200)))\nreturn 1.0"
    [end], _, _ = run([text], turn_deadline_seconds=3.0)
    assert end.failure.kind == "deadline"


def test_a_thread_that_was_given_up_is_not_waited_for():
    text = (
        "waiting = [asyncio.ensure_future(asyncio.to_thread(time.sleep, 1.0)) for _ in range(70)]\n"
        "await asyncio.sleep(0.1)\n[one.cancel() for one in waiting]\nawait asyncio.sleep(9)"
    )
    [end], _, _ = run([text], turn_deadline_seconds=3.0)
    assert end.failure.kind == "deadline"


def test_of_the_environment_only_what_is_harmless_or_named(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setenv("SEARCH_KEY", "given")
    text = "return Outcome(info=dict(os.environ))"
    [end], _, _ = run([text], environment=("SEARCH_KEY",))
    assert "WANDB_API_KEY" not in end.outcome.info and end.outcome.info["SEARCH_KEY"] == "given"
    monkeypatch.delenv("SEARCH_KEY")
    with pytest.raises(EpisodeError, match="episodes.environment: SEARCH_KEY is not set"):
        run([text], environment=("SEARCH_KEY",))


def test_files_and_network_and_what_is_printed(capfd):
    ends, _, _ = run(
        [
            "Path('b').write_text('x' * 1001)",
            "Path('a').write_text('x' * 1000)\nreturn 1.0",
            "print('said by an episode')\nos.write(1, b'{\"episode\": 1}\\n')\nreturn 1.0 if sys.stdin.read() == '' else 0.0",
        ],
        file_bytes=1000,
    )
    assert "OSError" in ends[0].failure.text and [end.outcome.reward for end in ends[1:]] == [1.0, 1.0]
    assert "said by an episode" in capfd.readouterr().err
    connect = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=2)"
    try:
        [end], _, _ = run([connect], network=False)
    except EpisodeError as error:
        assert "episodes.network: false: the kernel refuses" in str(error)
    else:
        assert "unreachable" in end.failure.text


def test_workers_are_recycled_and_a_straggler_holds_nobody_up():
    async def look(pool, sessions):
        while pool.counts["num_workers_recycled"] < 2:
            await asyncio.sleep(0.01)

    text = "return float(os.getpid())"
    straggler = "await asyncio.sleep(3)\nreturn float(os.getpid())"
    ends, _, pool = run([straggler, *[text] * 9], recycle_after=4, inside=look)
    assert kinds(ends) == {"": 10} and pool.counts == {"num_workers_recycled": 2}
    assert len({end.outcome.reward for end in ends}) == 3


def test_only_so_many_at_a_time():
    text = "Path(f'in{task.seed}').touch()\nawait asyncio.sleep(0.2)\nn = len(list(Path('.').glob('in*')))\nPath(f'in{task.seed}').unlink()\nreturn n"
    ends, _, _ = run([text] * 9, episodes_per_worker=3)
    assert max(end.outcome.reward for end in ends) == 3


def test_an_episode_that_nobody_waits_for_any_more_is_ended(folder):
    text = "try:\n    await asyncio.sleep(60)\nfinally:\n    Path('ended').touch()"

    async def play():
        async with EpisodePool(settings(), EpisodeFunction(function="user_episodes:behave")) as pool:
            playing = asyncio.create_task(pool.run(task(0, text), PolicySession(), "0"))
            await asyncio.sleep(0.5)
            playing.cancel()
            while not (folder / "ended").exists():
                await asyncio.sleep(0.01)
            end = await pool.run(task(1, "return 1.0"), PolicySession(), "1")
            assert end.outcome is not None and not pool.counts
            waiting = asyncio.create_task(pool.run(task(2, text), PolicySession(), "2"))
            await asyncio.sleep(0.2)
        with pytest.raises(EpisodeError, match="the pool of episodes is closed"):
            await waiting
        with pytest.raises(EpisodeError, match="closed"):
            await pool.run(task(1, "return 1.0"), PolicySession(), "1")

    asyncio.run(play())


def test_closing_reaches_an_episode_between_two_workers():
    """Its worker is lost, and the turn that is being sampled for it has not come to its end."""

    async def play():
        async with EpisodePool(settings(), EpisodeFunction(function="user_episodes:behave")) as pool:
            texts = ["await model.turn(task.messages)", "await asyncio.sleep(0.3)\nos._exit(1)"]
            sessions = [PolicySession(1000.0), PolicySession()]
            playing = [
                asyncio.create_task(pool.run(task(n, text), session, str(n)))
                for n, (text, session) in enumerate(zip(texts, sessions, strict=True))
            ]
            assert (await playing[1]).failure.kind == "crash" and not playing[0].done()
        with pytest.raises(EpisodeError, match="the pool of episodes is closed"):
            await asyncio.wait_for(playing[0], 5)

    asyncio.run(play())


def test_children_whose_episode_is_not_known_end_with_its_worker(folder):
    text = "os.system('setsid sleep 60 & echo $! > pid')\nreturn 1.0"
    [end], _, _ = run([text])
    assert end.outcome is not None and not os.path.exists(f"/proc/{int((folder / 'pid').read_text())}")


def test_a_task_that_is_too_large_is_that_episodes():
    ends, _, _ = run([task(0, "return '" + "x" * 3000 + "'"), task(1, "return 1.0")], endpoint={"max_body_bytes": 2000})
    assert ends[0].failure.kind == "too_large" and "its task has" in ends[0].failure.text
    assert ends[1].outcome.reward == 1.0


def test_functions_that_vanish_during_a_run_stop_it(folder):
    async def remove(pool, sessions):
        (folder / "user_episodes.py").unlink()

    with pytest.raises(EpisodeError, match="there is no module 'user_episodes'"):
        run(["await asyncio.sleep(0.5)\nos._exit(1)", "await asyncio.sleep(5)"], inside=remove)


def test_what_cannot_be_loaded_is_found_before_the_run(folder):
    def check(function, *tools, **options):
        return check_functions(settings(), EpisodeFunction(function=function, options=options), tools)

    (folder / "bad.py").write_text(
        "import asyncio\ndef plain(task, model, tools): ...\nasync def narrow(task): ...\n"
        "def silent(a: int): ...\ndef odd(a: complex):\n    'Text.'\ndef add(a: int):\n    'Text.'\n"
    )
    (folder / "crashing.py").write_text("import os; os._exit(4)")
    assert [one["function"]["name"] for one in check("user_episodes:play", "user_episodes:add", rounds=2)] == ["add"]
    for arguments, text in {
        ("user_episodes:plays",): "no function 'plays'; did you mean 'play'",
        ("absent:play",): "there is no module 'absent'",
        ("bad:plain",): r"episode 'bad:plain' .*bad.py:2.: it is a plain function; `async def episode",
        ("bad:narrow",): "cannot be called as .task, model, tools.",
        ("crashing:f",): "episode crashing:f: the process of episodes ended while it loaded them .exit code 4.",
        ("user_episodes:play", "bad:silent"): r"tool 'bad:silent' .*bad.py:4.: it has no docstring",
        ("user_episodes:play", "bad:odd"): "parameter 'a' has the type complex",
        ("user_episodes:play", "bad:none"): "tool 'bad:none': bad has no function 'none'",
        ("user_episodes:play", "user_episodes:add", "bad:add"): "'user_episodes:add' is called add too",
        ("gym_text",): "cannot be called as .task, model, tools.: missing a required argument: 'environment'",
    }.items():
        with pytest.raises(EpisodeError, match=text):
            check(*arguments)
    with pytest.raises(EpisodeError, match="environment 'user_episodes:Maze': user_episodes has no function 'Maze'"):
        check("gym_text", environment="user_episodes:Maze")
    with pytest.raises(EpisodeError, match="url '127.0.0.1:80' is not the address"):
        check("openenv", url="127.0.0.1:80", action_key="message")


def test_a_turn_that_the_episode_no_longer_waits_for_is_in_the_record():
    """To drop it would drop long turns sooner than short ones."""
    text = (
        "asyncio.ensure_future(model.turn([{'role': 'user', 'content': 'long'}]))\nawait asyncio.sleep(0.1)\nreturn 1.0"
    )
    [end], [session], _ = run([text], sessions=[PolicySession(1.0)])
    assert end.outcome.reward == 1.0
    assert len(session.record) == 1
    late = PolicySession(1.0)

    async def fail(*args, **options):
        await asyncio.sleep(1.0)
        raise RolloutError("no server")

    late.answer = fail
    with pytest.raises(RolloutError, match="no server"):
        run([text], sessions=[late])


@pytest.mark.parametrize("most", ["'12'", "2.5", "True", "[1]"])
def test_a_wrong_number_of_tokens_is_the_episodes_failure(most):
    [end], [session], _ = run([f"await model.turn(task.messages, max_new_tokens={most})"])
    assert end.failure.kind == "exception"
    assert "a whole number was expected" in end.failure.text
    assert session.record == []
