"""Environments that are served over OpenEnv's protocol, as episodes. Others wrote and run the server.

    rollout:
      episode:
        function: openenv
        options:
          url: http://127.0.0.1:8000
          action_key: message           # the field of the server's action that the answer goes into
          observation_key: text         # the field of its observation that the policy reads; without it, all as JSON
          wire: websocket               # or http
          reset: {task: easy}           # optional: further fields of every reset
          action_pattern: "<a>(.*?)</a>"

`websocket` (`/ws`) has an environment per connection, and so one per episode. `http` (`/reset`, `/step`, `/state`) is
for servers that keep an environment between requests, by the `episode_id` that every request names. Many servers make a
new one for every request, or have a single one for all. `/state` shows that, and both are refused by name instead of
being played wrongly. A row's metadata may have `reset`, with further fields for its own reset.

The loop itself is in `environment_loop.py`.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import aiohttp

from gspo_mega.agents.adapters.environment_loop import Step, pattern_of, play
from gspo_mega.agents.protocol import Model, Outcome, Task, Tools, Unreachable
from gspo_mega.base.errors import EpisodeError
from gspo_mega.base.network import proxy_for

_MOST_BYTES = 8 * 1024**2
_MOST_SEED = 2**31
_WIRES = ("websocket", "http")
# The statuses of a server that starts or ends, or of a proxy in front of one.
_NOT_READY = (502, 503, 504)


async def episode(
    task: Task,
    model: Model,
    tools: Tools,
    *,
    url: str,
    action_key: str,
    observation_key: str | None = None,
    wire: Literal["websocket", "http"] = "websocket",
    reset: dict[str, Any] | None = None,
    action_pattern: str | None = None,
) -> Outcome:
    """Play one environment of the server, from its reset to its end.

    Raises EpisodeError if the server refuses a request, answers with something else than it should, or mixes
    environments; Unreachable if it cannot be reached, ends the connection, or is not ready to serve.
    """
    fields = {
        "seed": task.seed % _MOST_SEED,
        "episode_id": uuid.uuid4().hex,
        **(reset or {}),
        **(task.metadata.get("reset") or {}),
    }

    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            connection = _Socket(session, url) if wire == "websocket" else _Requests(session, url, fields["episode_id"])
            async with connection as server:

                async def act(action: str) -> Step:
                    return _step(await server.step({action_key: action}), observation_key, url)

                first = _step(await server.reset(fields), observation_key, url)
                return await play(task, model, first, act, pattern_of(action_pattern))
    except aiohttp.ClientConnectionError as error:
        raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error
    except aiohttp.WSServerHandshakeError as error:
        if error.status not in _NOT_READY:
            raise
        raise Unreachable(f"{url}: HTTP {error.status}") from error


def check_options(
    *,
    url: str,
    action_key: str,
    observation_key: str | None = None,
    wire: str = "websocket",
    reset: dict[str, Any] | None = None,
    action_pattern: str | None = None,
) -> None:
    """Check the options. Raises EpisodeError if the wire, the address or the pattern is not valid."""
    if wire not in _WIRES:
        raise EpisodeError(f"openenv: wire {wire!r}; valid: {', '.join(_WIRES)}")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EpisodeError(f"openenv: url {url!r} is not the address of a server; valid: such as http://127.0.0.1:8000")
    pattern_of(action_pattern)


class _Wire(Protocol):
    async def reset(self, fields: dict[str, Any]) -> Any: ...

    async def step(self, action: dict[str, Any]) -> Any: ...


class _Socket:
    """One environment on a connection of its own."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/ws"
        self._proxy = proxy_for(url)

    async def __aenter__(self) -> _Wire:
        self._socket = await self._session.ws_connect(self._url, max_msg_size=_MOST_BYTES, proxy=self._proxy)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._socket.closed:
            await self._socket.send_str(json.dumps({"type": "close"}))
        await self._socket.close()

    async def reset(self, fields: dict[str, Any]) -> Any:
        return await self._ask("reset", fields)

    async def step(self, action: dict[str, Any]) -> Any:
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: dict[str, Any]) -> Any:
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Unreachable(f"{self._url}: the connection ended in a {kind} ({message.type.name.lower()})")
        reply = _parsed(message.data, self._url)
        if reply.get("type") == "error":
            problem = reply.get("data") or {}
            raise EpisodeError(f"{self._url}: {kind}: {problem.get('code')}: {problem.get('message')!s:.300}")
        return reply.get("data")


class _Requests:
    """An environment that the server finds again by its `episode_id`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, episode_id: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._proxy = proxy_for(url)
        self._episode_id = episode_id
        self._num_steps = 0

    async def __aenter__(self) -> _Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reset(self, fields: dict[str, Any]) -> Any:
        return await self._ask("POST", "/reset", fields)

    async def step(self, action: dict[str, Any]) -> Any:
        answer = await self._ask("POST", "/step", {"action": action, "episode_id": self._episode_id})
        self._num_steps += 1
        if self._num_steps == 1:
            await self._check_state()
        return answer

    async def _check_state(self) -> None:
        """Check that the server still has this environment. Called once, after the first step. Raises EpisodeError."""
        state = await self._ask("GET", f"/state?episode_id={self._episode_id}")
        instead = "use wire: websocket, which has an environment for each episode"
        if state.get("step_count", 1) == 0:
            raise EpisodeError(
                f"{self._url}: its state counts no step after the first one; the server makes a new environment for"
                f" each HTTP request; {instead}"
            )
        if state.get("episode_id") not in (None, self._episode_id):
            raise EpisodeError(
                f"{self._url}: its state is of episode {state['episode_id']!r}, not of {self._episode_id!r}; the server"
                f" has one environment for all; {instead}"
            )

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self._session.request(method, self._url + path, json=body, proxy=self._proxy) as response:
            text = await read_body(response, self._url + path)
            if response.status != 200:
                said = text[:300].decode("utf-8", "replace")
                raised = Unreachable if response.status in _NOT_READY else EpisodeError
                raise raised(f"{self._url}{path}: HTTP {response.status}: {said}")
            return _parsed(text, self._url + path)


async def read_body(response: aiohttp.ClientResponse, where: str) -> bytes:
    """Return the whole body. Raises EpisodeError if it is too long, and Unreachable if the connection ends inside
    it.
    """
    body = bytearray()
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _MOST_BYTES:
                raise EpisodeError(f"{where}: more than {_MOST_BYTES} bytes")
    except (
        aiohttp.ClientError,
        RuntimeError,
    ) as error:  # a plain RuntimeError if the connection ended between two reads
        raise Unreachable(f"{where}: the connection ended in the answer ({error})") from error
    return bytes(body)


def _step(answer: Any, observation_key: str | None, url: str) -> Step:
    """Read an answer to `reset` or `step`: {"observation": {...}, "reward": number or null, "done": bool}."""
    if not isinstance(answer, dict) or "observation" not in answer:
        raise EpisodeError(f"{url}: answered {json.dumps(answer):.200}; an object with `observation` was expected")
    observation = answer["observation"]
    if observation_key is not None:
        if not isinstance(observation, dict) or observation_key not in observation:
            has = ", ".join(observation) if isinstance(observation, dict) else f"{observation!r:.80}"
            raise EpisodeError(f"{url}: its observation has no {observation_key!r} (observation_key); it has {has}")
        observation = observation[observation_key]
    reward = answer.get("reward")
    info = answer.get("metadata") if isinstance(answer.get("metadata"), dict) else {}
    return Step(observation, None if reward is None else float(reward), bool(answer.get("done")), info or {})


def _parsed(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EpisodeError(f"{where}: answered {text[:100]!r}; a JSON object was expected")
    return found
