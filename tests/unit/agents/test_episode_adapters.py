"""Environments with reset and step as episodes: in the worker's own process, and behind OpenEnv's wire on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from pool_support import PolicySession, run, task

from gspo_mega.agents.adapters.openenv import read_body
from gspo_mega.agents.protocol import Unreachable

pytestmark = pytest.mark.usefixtures("folder", "nothing_is_left")

GAMES = '''
import time
from pathlib import Path


class Steps:
    """Over after `size` actions, the last of which is worth 1."""

    def __init__(self, size=2, told=True):
        self.size, self.taken, self.told = size, [], told

    def reset(self, *, seed=None, options=None):
        text = f"seed {seed}, {options['answer']}, {options['prompt_id']}"
        return (text, {}) if self.told else text

    def step(self, action):
        self.taken.append(action)
        over = len(self.taken) == self.size
        return f"took {action}", 1.0 if over else 0.25, over, False, {"success": True} if over else {}

    def close(self):
        Path(f"closed{len(self.taken)}").touch()


class Old:
    """Gym's four values, and no seed."""

    def reset(self):
        return {"board": [0, 1]}

    def step(self, action):
        return "", 2, True, {}


class Async:
    async def reset(self, **given):
        return ", ".join(sorted(given)), {}

    async def step(self, action):
        return "", 0.5, False, True, {}


class Broken:
    def reset(self):
        return "go"

    def step(self, action):
        return "observation only"


class Slow(Old):
    def step(self, action):
        time.sleep(1000)
'''


@pytest.fixture
def games(folder):
    (folder / "games.py").write_text(GAMES)
    return folder


def gym(environment, tasks=None, **changes):
    options = {"environment": f"games:{environment}", **changes.pop("options", {})}
    return run(tasks or [task(3)], function="gym_text", options=options, **changes)


def shown(session, turn):
    """The messages that a turn was asked with, as (role, content)."""
    return [(one["role"], one["content"]) for one in json.loads(session.record[turn][0])[0]]


def test_observations_are_messages_and_rewards_are_the_turns(games):
    [end], [session], _ = gym("Steps", options={"environment_options": {"size": 3}})
    said = [message["content"] for _, message in session.record]
    first = ("user", "task 3\n\nseed 3, None, data:3")
    assert shown(session, 0) == [first]
    assert shown(session, 2) == [
        first,
        ("assistant", said[0]),
        ("user", f"took {said[0]}"),
        ("assistant", said[1]),
        ("user", f"took {said[1]}"),
    ]
    assert session.rewards == {0: 0.25, 1: 0.25, 2: 1.0}
    assert (end.outcome.reward, end.outcome.correct, end.outcome.info) == (None, True, {"num_steps": 3})
    assert (games / "closed3").exists()


def test_older_and_asynchronous_environments(games):
    [end], [session], _ = gym("Old")
    assert shown(session, 0) == [("user", 'task 3\n\n{"board": [0, 1]}')] and session.rewards == {0: 2.0}
    assert end.outcome.correct is None
    [end], [session], _ = gym("Async")
    assert shown(session, 0) == [("user", "task 3\n\noptions, seed")] and session.rewards == {0: 0.5}


def test_what_of_an_answer_is_the_action(games):
    _, [session], _ = gym("Steps", options={"action_pattern": "^(..)"})
    said = [message["content"] for _, message in session.record]
    assert shown(session, 1)[-1] == ("user", f"took {said[0][:2]}")
    _, [session], _ = gym("Steps", options={"action_pattern": "<(.*)>"})
    assert shown(session, 1)[-1] == ("user", f"took {session.record[0][1]['content']}")


def test_environments_that_misbehave_fail_their_episode(games):
    [end], _, _ = gym("Broken")
    assert "step of Broken returned 'observation only'; (observation, reward," in end.failure.text
    ends, _, _ = gym("Slow", [task(0)], turn_deadline_seconds=1.5)
    assert ends[0].failure.kind == "deadline"
    [end], _, _ = gym("Steps", options={"environment_options": {"size": 0}}, sessions=[PolicySession(max_turns=3)])
    assert end.limit == "too_many_turns" and (games / "closed3").exists()


# OpenEnv


class Server:
    """A small server of OpenEnv's wire: a sum of numbers to be named. `keeps`: `episode` (an environment for each
    `episode_id`), `one` (a single one), `none` (a new one for each request, as openenv-core makes it over HTTP).
    """

    def __init__(self, keeps="episode"):
        self.keeps = keeps
        self.environments = {}
        self.num_connections = self.num_open = 0

    def app(self):
        app = web.Application()
        app.router.add_post("/reset", self.over_http(self.reset))
        app.router.add_post("/step", self.over_http(self.step))
        app.router.add_get("/state", self.state)
        app.router.add_get("/ws", self.socket)
        return app

    def find(self, episode_id):
        key = episode_id if self.keeps == "episode" else ""
        if self.keeps == "none":
            return {"steps": 0, "id": None}
        return self.environments.setdefault(key, {"steps": 0, "id": None})

    def reset(self, environment, data):
        environment.update(steps=0, id=data.get("episode_id"), seed=data["seed"], level=data.get("level", 1))
        text = f"level {environment['level']}, seed {environment['seed']}"
        return {"observation": {"text": text, "left": 2}, "reward": None, "done": False}

    def step(self, environment, data):
        if not re.fullmatch("[0-9a-f]{8}", data["message"]):
            raise ValueError(f"no message: {data['message']}")
        environment["steps"] += 1
        over = environment["steps"] >= 2
        text = f"got {data['message']}"
        return {"observation": {"text": text, "left": 0}, "reward": 1.5 if over else None, "done": over}

    def over_http(self, act):
        async def handle(request):
            body = await request.json()
            found = self.find(body.get("episode_id"))
            try:
                return web.json_response(act(found, body["action"] if act == self.step else body))
            except ValueError as error:
                return web.json_response({"detail": str(error)}, status=422)

        return handle

    async def state(self, request):
        found = self.find(request.query.get("episode_id"))
        return web.json_response({"episode_id": found["id"], "step_count": found["steps"]})

    async def socket(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_connections += 1
        self.num_open += 1
        environment = {"steps": 0, "id": None}
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                break
            try:
                data = getattr(self, asked["type"])(environment, asked["data"])
                await socket.send_json({"type": "observation", "data": data})
            except ValueError as error:
                await socket.send_json({"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}})
        self.num_open -= 1
        await socket.close()
        return socket


@contextlib.contextmanager
def serving(server):
    """The address of a running server."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.app())
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def openenv(url, tasks, **options):
    sessions = options.pop("sessions", None)
    options = {"url": url, "action_key": "message", "observation_key": "text", **options}
    return run(tasks, function="openenv", options=options, sessions=sessions)


@pytest.mark.parametrize("wire", ["websocket", "http"])
def test_every_episode_has_its_own_environment(wire):
    server = Server()
    with serving(server) as url:
        sessions = [PolicySession(0.05) for _ in range(5)]
        tasks = [task(n) for n in range(4)] + [task(4)]
        tasks[4].metadata["reset"] = {"level": 9}
        ends, sessions, _ = openenv(url, tasks, wire=wire, reset={"level": 2}, sessions=sessions)
    for number, (end, session) in enumerate(zip(ends, sessions, strict=True)):
        said = session.record[0][1]["content"]
        level = 9 if number == 4 else 2
        assert shown(session, 0) == [("user", f"task {number}\n\nlevel {level}, seed {number}")]
        assert shown(session, 1)[1:] == [("assistant", said), ("user", f"got {said}")]
        assert session.rewards == {1: 1.5} and end.outcome.info == {"num_steps": 2}
    if wire == "websocket":
        assert (server.num_connections, server.num_open) == (5, 0)
    else:
        assert len(server.environments) == 5


@pytest.mark.parametrize(
    ("keeps", "says"),
    [
        ("none", "makes a new environment for each HTTP request; use wire: websocket"),
        ("one", "one environment for all"),
    ],
)
def test_a_server_that_mixes_environments_up_is_refused(keeps, says):
    with serving(Server(keeps)) as url:
        ends, _, _ = openenv(
            url, [task(n) for n in range(4)], wire="http", sessions=[PolicySession(0.1) for _ in range(4)]
        )
    failures = [end.failure.text for end in ends if end.failure is not None]
    assert len(failures) >= 3 and all(says in text for text in failures)


def test_what_a_server_refuses_is_the_episodes_failure_and_a_missing_server_is_not():
    with serving(Server()) as url:
        for wire in ("websocket", "http"):
            [end], _, _ = openenv(url, [task(0)], wire=wire, action_pattern="^(.)")
            assert end.failure.kind == "exception" and "no message: " in end.failure.text
            [end], _, _ = openenv(url, [task(0)], wire=wire, observation_key="txt")
            assert "has no 'txt' (observation_key); it has text, left" in end.failure.text
    for wire in ("websocket", "http"):
        [end], _, _ = openenv(url, [task(0)], wire=wire)
        assert end.failure.kind == "unreachable" and "ClientConnectorError" in end.failure.text


@pytest.mark.parametrize("wire", ["websocket", "http"])
@pytest.mark.parametrize("way", ["status 503", "closed"])
def test_a_server_that_is_not_ready_is_none_to_play_with(wire, way):
    """It accepts the connection, and then says that it cannot, or nothing."""
    said = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n" if way == "status 503" else b""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connection.recv(4096)
                    connection.sendall(said)
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        [end], _, _ = openenv(f"http://127.0.0.1:{listening.getsockname()[1]}", [task(0)], wire=wire)
        listening.shutdown(socket.SHUT_RDWR)
    assert end.failure.kind == "unreachable", end.failure


def test_a_connection_that_ends_in_an_answer_is_named():
    class Torn(Server):
        def over_http(self, act):
            async def handle(request):
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b"{")
                request.transport.close()
                return response

            return handle

    with serving(Torn()) as url:
        [end], _, _ = openenv(url, [task(0)], wire="http")
    assert end.failure.kind == "unreachable", end.failure
    assert f"{url}/reset: the connection ended in the answer" in end.failure.text


def test_a_connection_that_ends_between_two_reads_is_named():
    """aiohttp's reader raises a plain RuntimeError then."""

    async def read_on():
        loop = asyncio.get_running_loop()
        content = aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop)  # its protocol has no connection
        await read_body(SimpleNamespace(content=content), "http://a/step")

    with pytest.raises(Unreachable, match=r"http://a/step: the connection ended in the answer \(Connection closed"):
        asyncio.run(read_on())
