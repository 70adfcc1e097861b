"""The last seconds of a server that is asked to stop: its open requests leave it, then it may end.

Owns the order and its deadline. Whoever sends requests sees the state `draining`, and ends its own with their tokens;
requests that are left when the time is nearly over are cut short here, and their answers have their tokens, too.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gspo_mega.base.errors import ConfigError
from gspo_mega.rollout.secret import read_secret

_POLL_SECONDS = 0.125
# Nobody may have read the new state yet: the pool reads it every quarter of a second, and a request is on its way.
_SETTLED_SECONDS = 0.625
# Of `server.drain_seconds`: before its end the requests that are left are cut short.
_CUT_SHORT_AT = 0.8
_ANSWER_SECONDS = 2.0


class OpenRequests(Protocol):
    """The open requests of one server."""

    def count(self) -> int | None:
        """How many there are; None where the server does not say."""
        ...

    def cut_short(self) -> None:
        """Ask the server to end them all; each answer has its tokens so far."""
        ...


def drain(
    requests: OpenRequests, seconds: float, go_on: Callable[[float], bool], clock: Callable[[], float] = time.monotonic
) -> str:
    """Wait until no request is open, at most `seconds`. Returns what happened, in words.

    `go_on` is called with a time to sleep, and returns whether to wait on.
    """
    began, quiet_since, was_cut = clock(), None, False
    most = 0
    while True:
        count, now = requests.count(), clock()
        most = max(most, count or 0)
        if count is None:
            return "it does not say what is open"
        quiet_since = None if count else now if quiet_since is None else quiet_since
        if quiet_since is not None and now - quiet_since >= _SETTLED_SECONDS:
            how = "cut short" if was_cut else "left"
            return f"{most} open requests {how} in {now - began:.1f} s" if most else "no request was open"
        if now - began >= seconds:
            return f"{count} requests were still open after {seconds:g} s (server.drain_seconds)"
        if count and not was_cut and now - began >= _CUT_SHORT_AT * seconds:
            requests.cut_short()
            was_cut = True
        if not go_on(_POLL_SECONDS):
            return f"told to end at once, with {count} requests open"


class ServerRequests:
    """`OpenRequests` of the SGLang server at `address`, over HTTP with the attempt's key."""

    def __init__(self, address: str, api_key_file: Path) -> None:
        self._host = address.removeprefix("http://")
        self._api_key_file = api_key_file

    def count(self) -> int | None:
        """Running and waiting, on all its data-parallel ranks."""
        try:
            loads = json.loads(self._call("GET", "/v1/loads?include=core"))["loads"]
            counts = [load[name] for load in loads for name in ("num_running_reqs", "num_waiting_reqs")]
            return sum(counts) if all(type(count) is int and count >= 0 for count in counts) else None
        except (OSError, http.client.HTTPException, ConfigError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def cut_short(self) -> None:
        try:
            self._call("POST", "/abort_request", {"rid": "", "abort_all": True})
        except (OSError, http.client.HTTPException, ConfigError):
            return  # the server is ending already; its requests fail, and continue from what they had reported

    def _call(self, method: str, path: str, body: object = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, timeout=_ANSWER_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {read_secret(self._api_key_file)}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection.getresponse().read()
        finally:
            connection.close()
