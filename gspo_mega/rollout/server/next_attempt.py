"""How a server goes on into the next attempt of a run (`train.keep_servers`): the order to do so, and what it forgets.

When ranks have failed, the supervisor of the run (`launcher/kept_servers.py`) writes one line of JSON to the input of
`gspo-mega serve`: the folder of the next attempt, and the configuration's file. `Orders` reads it. `forget` then makes
SGLang what it is after a start: nothing runs, is paused, cached or half published, and its weights have no version. So
ranks publish to it before they sample, as to any server that has just started. Neither torch nor sglang is imported
here.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ConfigError, RolloutError
from gspo_mega.base.run_folder import Attempt, atomic_write_json
from gspo_mega.config.schema import Config
from gspo_mega.rollout.registration import read_secret
from gspo_mega.rollout.server.spec import spec_from_config

# A server forgets in tenths of a second. One whose scheduler waits for a rank that is gone, or hangs, does not.
FORGET_SECONDS = 10.0
UNPUBLISHED = "unpublished"
"""What SGLang reports as the version of weights that nobody published."""
_PAUSE_SECONDS = 0.02
_LINE_BYTES = 65_536


@dataclass(frozen=True)
class Order:
    """Go on in the attempt whose folder for this server is `attempt`, with the configuration in the file `config`."""

    attempt: str
    config: str


class Orders:
    """The orders that come through an input, one line of JSON each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._begun = b""

    def wait(self, seconds: float) -> Order | None:
        """Return the next order, or None after `seconds` at most. What is no order is ignored."""
        if self._descriptor is None:
            time.sleep(seconds)
            return None
        readable, _, _ = select.select([self._descriptor], [], [], seconds)
        if not readable:
            return None
        new = os.read(self._descriptor, _LINE_BYTES)
        if not new:
            self._descriptor = None
            return None
        line, newline, rest = (self._begun + new).partition(b"\n")
        self._begun = rest if newline else line
        try:
            return Order(**json.loads(line)) if newline else None
        except (ValueError, TypeError):
            return None


def answer(attempt: Attempt, server_id: str, why: str | None, seconds: float) -> None:
    """Tell the supervisor whether the server goes on in `attempt`: `why` says why not, or None. Raises OSError."""
    attempt.kept_servers_dir.mkdir(parents=True, exist_ok=True)
    record = {"is_kept": why is None, "why": why, "seconds": seconds}
    atomic_write_json(attempt.kept_server_file(server_id), record)


def differs(now: Config, then: Config, start_folder: str) -> bool:
    """Whether a server that started with the configuration `then` would start in another way with `now`."""
    place = Path("/")

    def started_with(config: Config) -> Any:
        spec = spec_from_config(
            config,
            model_path=start_folder,
            weight_version=None,
            port=0,
            api_key_file=place,
            attempt="",
            index=0,
            generation=0,
            store=place,
        )
        return config.model.path, config.publish.method, spec

    return started_with(now) != started_with(then)


def forget(
    address: str, api_key_file: Path, groups: Sequence[str], *, is_published_to: bool, seconds: float = FORGET_SECONDS
) -> None:
    """Make the SGLang server at `address` one that has just started, but for its weights. `groups`: those through which
    it may have been sent weights. `is_published_to`: its weights change; otherwise only its requests end.

    Raises RolloutError if it does not answer, or refuses, within `seconds`.
    """
    server = _Caller(address, api_key_file, seconds)
    server.call("/abort_request", {"rid": "", "abort_all": True})
    if is_published_to:
        server.try_to("/end_weight_update", {})  # refused if no update is under way
        for name in groups:
            server.try_to("/destroy_weights_update_group", {"group_name": name})  # refused if it has left the group
        server.call("/update_weight_version", {"new_version": UNPUBLISHED, "abort_all_requests": False})
        server.call("/continue_generation", {})
    # The last, so that nothing that was computed before stays in the cache. Its scheduler, which answers only while it
    # runs, refuses as long as a request has not ended.
    while server.try_to("/flush_cache", {}) != 200:
        server.call("/abort_request", {"rid": "", "abort_all": True})
        time.sleep(_PAUSE_SECONDS)


class _Caller:
    """Calls of one server, all within `seconds` from now."""

    def __init__(self, address: str, api_key_file: Path, seconds: float) -> None:
        self._host = address.removeprefix("http://")
        self._api_key_file, self._seconds = api_key_file, seconds
        self._until = time.monotonic() + seconds
        self._answered: set[str] = set()

    def call(self, path: str, body: object = None) -> None:
        if (status := self.try_to(path, body)) != 200:
            raise RolloutError(f"its SGLang answers {path} with status {status}")

    def try_to(self, path: str, body: object = None) -> int:
        """Return the status of the answer. Raises RolloutError if there is none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise self._too_slow(path)
        connection = http.client.HTTPConnection(self._host, timeout=left)
        try:
            headers = {"Authorization": f"Bearer {read_secret(self._api_key_file)}", "Content-Type": "application/json"}
            connection.request(
                "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
            )
            answer = connection.getresponse()
            answer.read()
            self._answered.add(path)
            return answer.status
        except TimeoutError as error:
            if path in self._answered:  # it does answer: this call began when nearly no time was left
                raise self._too_slow(path) from error
            raise RolloutError(f"its SGLang does not answer {path} within {self._seconds:g} s") from error
        except (OSError, ConfigError, http.client.HTTPException) as error:
            raise RolloutError(f"its SGLang does not answer {path}: {error!r}") from error
        finally:
            connection.close()

    def _too_slow(self, path: str) -> RolloutError:
        return RolloutError(f"its SGLang needs more than {self._seconds:g} s to forget what it did ({path})")
