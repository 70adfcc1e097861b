"""Requests to a service outside the run: JSON over HTTP, with a deadline, a few retries and the service's key.

This module decides what is sent where, when it is sent again, and what counts as a failed request; `services.py` makes
the requests and reads the answers. The address and the key come from environment variables; no text that this module
makes contains either.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from gspo_mega.base.errors import RewardError
from gspo_mega.base.network import proxy_for
from gspo_mega.config.schema import RemoteReward
from gspo_mega.config.validate_rewards import url_problem

if TYPE_CHECKING:  # imported where it is used: commands that only read a configuration do without it
    import aiohttp

logger = logging.getLogger(__name__)

# Status codes after which the same request may succeed a little later.
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_MOST_ANSWER_BYTES = 16 * 1024**2
_SHOWN_CHARACTERS = 200
_READY_POLL_SECONDS = 0.5
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.25, 8.0
# The retries that a service always gets, and the requests that earn it a further one, so that a service that fails for
# long does not get several times as many requests.
_FREE_RETRIES, _REQUESTS_PER_RETRY = 10, 5


class RemoteFailure(Exception):
    """A request, or what it was asked about one response, failed. `kind`: as the scoring pool counts it. `status`: the
    answer's HTTP status, if that is the failure.
    """

    def __init__(self, kind: str, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.kind, self.status = kind, status


class OwnServers(Protocol):
    """The servers of a service that the run starts. `patience_seconds`: how long to wait while none is ready."""

    patience_seconds: float

    def ready(self) -> tuple[list[str], str]:
        """Return the addresses of those that are ready, and their key."""
        ...


class _Again(RemoteFailure):
    """A failure after which the request may be sent again; `wait_seconds`: as the service asks."""

    wait_seconds = 0.0


class RemoteCalls:
    """The requests to one service. Use it in one event loop, and call `close()` in the end."""

    def __init__(
        self, settings: RemoteReward, own: OwnServers | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        """`own`: the servers of a service that the run starts. Raises RewardError if an environment variable that the
        settings name is not set or holds nothing usable.
        """
        self._settings = settings
        self._own = own
        self._turn = 0
        self._url = settings.url
        if settings.url.startswith("$"):
            self._url = _variable(settings, "url", settings.url[1:], environment)
            if self._url.startswith("$") or url_problem(self._url) is not None:
                raise RewardError(
                    f"reward {settings.name!r}: the environment variable {settings.url[1:]} (url) holds no address;"
                    " valid: http:// or https://, a host, and no user or password"
                )
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._secrets = [self._url] if settings.url.startswith("$") else []
        if settings.api_key_variable is not None:
            key = _variable(settings, "api_key_variable", settings.api_key_variable, environment)
            if not key.isascii() or not key.isprintable():
                raise RewardError(
                    f"reward {settings.name!r}: {settings.api_key_variable} holds no key: more than a line"
                )
            self._headers["Authorization"] = f"Bearer {key}"
            self._secrets.append(key)
        self._host = urlsplit(self._url).netloc.rpartition("@")[2]
        # The run's own servers are asked directly; a service may be outside of the cluster.
        self._proxy = proxy_for(self._url, environment) if own is None else None
        if self._proxy is not None and (password := urlsplit(self._proxy).password):
            self._secrets.append(password)
        self._session: aiohttp.ClientSession | None = None
        self._num_requests = self._num_retries = 0
        self._retries_by_kind: Counter[str] = Counter()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, body: Any, route: str = "") -> Any:
        """Send a request, and return the answer parsed from JSON. `route` is appended to the service's URL unless that
        ends with it. Raises RemoteFailure, whose text names the service or its host.
        """
        if self._own is None:
            return await self._within_deadline(body, route)
        # A server that is restarting is no failure of a response: it, or another one, answers later.
        give_up = time.monotonic() + self._own.patience_seconds
        while True:
            await self._wait_until_ready(self._own)
            try:
                return await self._within_deadline(body, route)
            except RemoteFailure as failure:
                if failure.kind != "connection" or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(_READY_POLL_SECONDS)

    async def _within_deadline(self, body: Any, route: str) -> Any:
        self._num_requests += 1
        last: RemoteFailure | None = None
        deadline = self._settings.deadline_seconds
        try:
            async with asyncio.timeout(deadline):
                for attempt in range(self._settings.retries + 1):
                    try:
                        return await self._attempt(self._url_of(route), json.dumps(body).encode())
                    except _Again as failure:
                        last = failure
                        if attempt == self._settings.retries or self._num_retries >= self._most_retries:
                            raise
                        self._num_retries += 1
                        self._tell_of_retry(failure)
                        wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**attempt)
                        await asyncio.sleep(max(failure.wait_seconds, wait * random.uniform(0.5, 1.0)))
        except TimeoutError:
            after = f", after: {last}" if last is not None else ""
            raise RemoteFailure("deadline", f"{self._host}: no answer within {deadline:g} s{after}") from None
        raise AssertionError("unreachable")

    def _tell_of_retry(self, failure: RemoteFailure) -> None:
        """Log the first retry for each kind of cause, and then the tenth, hundredth and so on."""
        self._retries_by_kind[failure.kind] += 1
        count = self._retries_by_kind[failure.kind]
        if count == 10 ** (len(str(count)) - 1):
            logger.warning(
                "reward %s: tried again (%s, time %d): %s", self._settings.name, failure.kind, count, failure
            )

    @property
    def _most_retries(self) -> int:
        return _FREE_RETRIES + self._num_requests // _REQUESTS_PER_RETRY

    async def _wait_until_ready(self, own: OwnServers) -> None:
        """Wait until one of the run's own servers is ready. A start or restart uses up no request's deadline."""
        deadline = time.monotonic() + own.patience_seconds
        while not own.ready()[0]:
            if time.monotonic() > deadline:
                why = f"no server of {self._settings.name} was ready for {own.patience_seconds:g} s"
                raise RemoteFailure("connection", why)
            await asyncio.sleep(_READY_POLL_SECONDS)

    def _url_of(self, route: str) -> str:
        """Return the URL of the next attempt; the run's own servers take turns."""
        url = self._url
        if self._own is not None:
            addresses, key = self._own.ready()
            if not addresses:
                raise _Again("connection", f"no server of {self._settings.name} is ready")
            self._turn += 1
            url = addresses[self._turn % len(addresses)]
            self._headers["Authorization"] = f"Bearer {key}"
            self._secrets = [key]
            self._host = urlsplit(url).netloc
        return url if not route or url.endswith(route) else url.rstrip("/") + route

    async def _attempt(self, url: str, data: bytes) -> Any:
        import aiohttp

        try:
            # A redirection would take the key to another host.
            async with self._open().post(
                url, data=data, headers=self._headers, allow_redirects=False, proxy=self._proxy
            ) as answer:
                body = await _read(answer.content)
                if answer.status != 200:
                    raise self._refusal(answer.status, answer.headers, body)
        except (aiohttp.ClientError, OSError) as error:
            raise _Again("connection", f"{self._host}: {self.hidden(str(error) or type(error).__name__)}") from None
        if body is None:
            raise RemoteFailure("malformed", f"{self._host}: an answer of more than {_MOST_ANSWER_BYTES} bytes")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise RemoteFailure("malformed", f"{self._host}: no JSON: {self.shown(body)}") from None

    def _refusal(self, status: int, headers: Mapping[str, str], body: bytes | None) -> RemoteFailure:
        why = f"{self._host}: status {status}: {self.shown(body or b'')}"
        if status not in _RETRIED_STATUS:
            return RemoteFailure("status", why, status)
        failure, after = _Again("status", why, status), headers.get("Retry-After", "")
        failure.wait_seconds = float(after) if after.isascii() and after.isdigit() else 0.0
        return failure

    def shown(self, given: Any) -> str:
        """Return the beginning of what a service answered, for a failure's text; without secrets."""
        text = given.decode("utf-8", errors="replace") if isinstance(given, bytes) else str(given)
        return " ".join(self.hidden(text).split())[:_SHOWN_CHARACTERS] or "nothing"

    def hidden(self, text: str) -> str:
        """Return a text without the key, and without an address that comes from a variable."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def _read(content: aiohttp.StreamReader) -> bytes | None:
    """Return a whole body; None if it is too long."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > _MOST_ANSWER_BYTES:
            return None
    return bytes(body)


def _variable(settings: RemoteReward, key: str, name: str, environment: Mapping[str, str]) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise RewardError(f"reward {settings.name!r}: the environment variable {name} ({key}) is not set")
    return value
