"""Tools in a worker: what the policy is told, what is recorded, and what a tool that misbehaves does to its episode."""

import json

import pytest
from pool_support import TOOLS, PolicySession, call, run, task

pytestmark = pytest.mark.usefixtures("folder", "nothing_is_left")

# A call, and what the policy is told.
ANSWERS = [
    (("add", {"a": 1, "b": 2}), "3"),
    (("add", '{"a": "1", "b": 2}'), "3"),
    (("add", {"a": 1}), "error: add lacks its argument 'b'"),
    (("add", {"a": 1, "b": 2, "c": 3}), "error: add has no argument 'c'; it takes a, b"),
    (("add", {"a": "x", "b": 2}), "error: argument 'a' of add is \"x\"; an integer was expected"),
    (("add", "{a: 1}"), "error: the arguments of add are not JSON: Expecting property name enclosed in double quotes"),
    (("add", [1, 2]), "error: the arguments of add are [1, 2]; an object was expected"),
    (("subtract", {}), "error: there is no tool 'subtract'; valid: add, wait, sleep, count, draw, act, act_async"),
    (("wait", {"seconds": 0.01}), "waited 0.01"),
    (("sleep", {"seconds": 0.01}), "slept"),
    (("count", {}), "1"),
    (("count", {}), "2"),
    (("act", {"text": "{'found': ['ü', None]}"}), '{"found": ["ü", null]}'),
    (("act", {"text": "'\\ud800'"}), "?"),
    (("act", {"text": "object()"}), "error: the tool returned object, which is not JSON"),
    (("act", {"text": "len(10 * 'x' * 10**4 * 'y')"}), "error: TypeError: can't multiply sequence by non-int of type"),
    (("act", {"text": "'x' * 10**5"}), "x" * 65536 + "\n[cut after 65536 characters]"),
    (("act", {"text": "sys.exit(4)"}), "error: SystemExit: 4"),
    (("act", {"text": "recurse()"}), "error: RecursionError: maximum recursion depth exceeded"),
    (("act", {"text": "raise_(StopIteration(1))"}), "error: StopIteration: 1"),
    (("act_async", {"text": "raise_(KeyError('k'))"}), "error: KeyError: 'k'"),
    (("act_async", {"text": "sys.exit(4)"}), "error: SystemExit: 4"),
    (("act_async", {"text": "raise_(asyncio.CancelledError())"}), "error: act_async was cancelled"),
]


def test_what_the_policy_is_told_and_what_is_recorded():
    calls = [call(name, arguments, f"c{number}") for number, ((name, arguments), _) in enumerate(ANSWERS)]
    text = "message = await model.turn(task.messages)\nanswers = await tools.answer(message)\n"
    text += "Path('answers').write_text(__import__('json').dumps(answers))\nreturn 1.0"
    session = PolicySession(calls={0: calls})
    [end], _, _ = run([text], tools=TOOLS, sessions=[session])
    assert end.outcome is not None and end.outcome.reward == 1.0
    answers = json.load(open("answers"))
    for ((name, arguments), expected), answer, record, asked in zip(
        ANSWERS, answers, end.tool_calls, calls, strict=True
    ):
        assert answer["content"].startswith(expected), answer
        assert len(expected) < 40 or len(answer["content"]) < 70_000
        assert (answer["role"], answer["tool_call_id"], answer["name"]) == ("tool", asked["id"], name)
        said = record.result if record.error is None else f"error: {record.error}"
        assert (record.turn, record.name, said) == (0, name, answer["content"])
        assert (record.error is not None) == expected.startswith("error: ")
        if isinstance(arguments, dict):
            assert record.arguments == arguments
    assert end.tool_calls[1].arguments == {"a": "1", "b": 2} and end.tool_calls[5].arguments == {"text": "{a: 1}"}


def test_an_episode_sees_the_schemas_and_so_does_the_run():
    [end], _, pool = run(
        ["return Outcome(info={'names': [one['function']['name'] for one in tools.schemas]})"], tools=TOOLS
    )
    assert end.outcome.info["names"] == ["add", "wait", "sleep", "count", "draw", "act", "act_async"]
    assert [one["function"]["name"] for one in pool.tool_schemas] == end.outcome.info["names"]


DRAWS = "drawn = [await tools.call('draw', {}) for _ in range(2)]\nmodel_said = drawn\n"


def test_begun_again_an_episode_finds_what_its_tools_said():
    """Tools without a task are not run twice; those with one are, since they keep their state in it."""
    rounds = {
        "0": "task.state['drawn'] = [await tools.call('draw', {}), await tools.call('draw', {})]",
        "1": "assert await tools.call('count', {}) == '1'\nPath('ready').touch()\nawait asyncio.sleep(0.5)",
        "2": "assert await tools.call('count', {}) == '2'\n"
        "Path('drawn').write_text(' '.join(task.state['drawn'] + [await tools.call('draw', {})]))",
    }
    culprit = "while not os.path.exists('ready'):\n    await asyncio.sleep(0.01)\nos.kill(os.getpid(), 9)"
    [end, lost], [session, _], _ = run(
        [task(0, rounds=rounds), task(1, rounds={"0": culprit})], function="user_episodes:play", tools=TOOLS
    )
    assert end.outcome is not None and lost.failure.kind == "crash" and session.num_restarts >= 1
    assert open("draws").read() == "xxx"
    draws = [record for record in end.tool_calls if record.name == "draw"]
    assert [record.result for record in draws] == open("drawn").read().split() and len(
        set(open("drawn").read().split())
    ) == 3
    assert [(r.turn, r.name) for r in end.tool_calls] == [
        (0, "draw"),
        (0, "draw"),
        (1, "count"),
        (2, "count"),
        (2, "draw"),
    ]


@pytest.mark.parametrize(
    ("tool", "arguments"), [("sleep", {"seconds": 30.0}), ("wait", {"seconds": 30.0})], ids=["thread", "async"]
)
def test_a_tool_that_takes_too_long_is_named(tool, arguments):
    text = f"message = await model.turn(task.messages)\nawait tools.call({tool!r}, {arguments!r})\nreturn 1.0"
    ends, _, pool = run([text, "await asyncio.sleep(1.2)\nreturn 1.0"], tools=TOOLS, turn_deadline_seconds=1.5)
    assert ends[0].failure.kind == "deadline"
    assert ends[0].failure.text.startswith(f"no turn and no end within 1.5 s of its own; in the tool {tool} for 1.")
    assert ends[1].outcome.reward == 1.0
    # A thread cannot be ended: its process is replaced.
    assert pool.counts["num_workers_recycled"] == (1 if tool == "sleep" else 0)


def test_a_tool_that_loses_the_worker_is_its_episodes():
    ends, _, _ = run(
        ["await tools.call('act', {'text': 'os._exit(6)'})", "await asyncio.sleep(1)\nreturn 1.0"], tools=TOOLS
    )
    assert ends[0].failure.kind == "crash" and "exit code 6" in ends[0].failure.text and ends[1].outcome.reward == 1.0


def test_a_loop_of_calls_ends():
    ends, _, _ = run(["while True:\n    await tools.call('add', {'a': 1, 'b': 1})"], tools=TOOLS)
    assert ends[0].failure.text.startswith("EpisodeError: more than 1000 calls of tools in one episode")
    assert len(ends[0].tool_calls) == 1000
