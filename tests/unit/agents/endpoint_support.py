"""A session that answers by rule, and an endpoint on an event loop of its own, for tests of the endpoint's HTTP."""

import asyncio
import collections
import contextlib
import http.client
import json
import time
import urllib.parse

import openai

from gspo_mega.agents.endpoint import AgentEndpoint
from gspo_mega.agents.session import AgentTurn, EpisodeSession
from gspo_mega.config.schema import Endpoint as Settings
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.pooled_server import LoopThread

STOP = 256
OPENERS = ("<think>", "<tool_call>")


def decode(token_ids):
    return bytes(token for token in token_ids if token != STOP).decode("utf-8", "replace")


class ScriptedSession(EpisodeSession):
    """Each turn is the next text of the script (or an error), sampled byte by byte; `gate` is waited for before each
    token after `free` ones. Attributes: asked, what each turn was asked; params, how turns are sampled.
    """

    def __init__(self, script, opening="", message_of=None):
        self.episode_id = "step000001-g00002-s003"
        self.script = list(script)
        self.asked = []
        self.finished = []
        self.opening = opening
        self.gate = asyncio.Event()
        self.gate.set()
        self.free = 0
        self.num_restarts = 0
        self.counts = collections.Counter()
        self.params = SamplingParams(64, 1.0, 1.0, -1, (STOP,))
        self.take_back = None
        self.message_of = message_of or (lambda text: {"role": "assistant", "content": text})

    def restart(self):
        self.num_restarts += 1

    async def answer(self, messages, *, tools=None, max_new_tokens=None, stop=(), on_tokens=None, on_begin=None):
        number = len(self.asked)
        self.asked.append({"messages": messages, "tools": tools, "max_new_tokens": max_new_tokens})
        text = self.script[number]
        if isinstance(text, Exception):
            raise text
        if on_begin is not None:
            on_begin(self.opening, 7 + number)
        token_ids = [*text.encode(), STOP]
        for place, token in enumerate(token_ids):
            if place >= self.free:
                await self.gate.wait()
            if on_tokens is not None:
                on_tokens(place, [token])
        if self.take_back is not None and on_tokens is not None:
            position, text = self.take_back
            token_ids = [*text.encode(), STOP]
            on_tokens(position, token_ids[position:])
        self.finished.append(number)
        log_probs = [-0.5 - place for place in range(len(token_ids))]
        return AgentTurn(number, self.message_of(text), "stop", 7 + number, token_ids, log_probs)


class Served:
    """An endpoint with its settings, reached from the test's thread; `run` runs a coroutine on its loop."""

    def __init__(self, **settings):
        self.loop = LoopThread("endpoint")
        self.endpoint = AgentEndpoint(Settings(**settings), "policy", decode, OPENERS, [STOP])
        self.run(self.endpoint.start())

    def run(self, coroutine):
        return self.loop.run(coroutine)

    def close(self):
        self.run(self.endpoint.close())
        self.loop.close()

    @contextlib.contextmanager
    def visit(self, script, **options):
        """A session with that script, open while the block runs: (session, visit)."""

        async def make():
            session = ScriptedSession(script, **options)
            manager = self.endpoint.open(session)
            return session, manager, await manager.__aenter__()

        session, manager, visit = self.run(make())
        try:
            yield session, visit
        except BaseException as error:
            self.loop._loop.call_soon_threadsafe(session.gate.set)
            with contextlib.suppress(type(error)):
                self.run(manager.__aexit__(type(error), error, error.__traceback__))
            raise
        else:
            self.run(manager.__aexit__(None, None, None))

    def set(self, session):
        self.loop._loop.call_soon_threadsafe(session.gate.set)


def post_body(**changes):
    body = {"model": "policy", "messages": [{"role": "user", "content": "two and three?"}]} | changes
    return json.dumps(body).encode()


def client_of(visit, **options):
    return openai.OpenAI(base_url=visit.base_url, api_key=visit.api_key, max_retries=0, **options)


def raw(visit, body, headers=(), path="chat/completions", method="POST", key=None):
    """Status, headers, and the body as JSON."""
    place = urllib.parse.urlsplit(visit.base_url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    try:
        authorization = {"Authorization": f"Bearer {visit.api_key if key is None else key}"}
        connection.request(method, f"{place.path}/{path}", body, authorization | dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())
    finally:
        connection.close()


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
