"""The report of runs that go on, over HTTP: the same page, to which new steps are added without a reload. Read-only.

Every request carries the token of this server in its URL. The page asks for changes. The answer has the present curves
and summary, and the trajectories of the steps after those that the page has. The server keeps no state of its readers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from gspo_mega.base.errors import DataError
from gspo_mega.base.network import BoundedHandler, BoundedServer
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.report.page import LIVE_SCRIPT, make_data, make_episodes, make_page
from gspo_mega.report.run_record import read_run

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveReport:
    """The page of some run folders, and what has changed since it was made. Raises ConfigError for a folder that is not
    a run's.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._folders = [RunFolder(read_run(path).path) for path in paths]
        self._lock = threading.Lock()  # only one request at a time may read a large run

    def stamp(self) -> str:
        """A text that changes whenever a file changes that the page shows."""
        digest = hashlib.sha256()
        for folder in self._folders:
            files = [folder.metrics_file, folder.config_file, folder.journal_dir]
            for attempt in folder.attempts():
                files += [attempt.state_file, attempt.restart_file, attempt.plan_file]
            for inner in (folder.journal_dir, folder.evaluations_dir):
                if inner.is_dir():
                    files += sorted(inner.iterdir())
            for file in files:
                try:
                    found = file.stat()
                except FileNotFoundError:
                    continue
                digest.update(f"{file}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> str:
        """The HTML of the page as the runs are now."""
        with self._lock:
            stamp = self.stamp()
            records = [read_run(folder.path) for folder in self._folders]
            samples, packed = make_episodes(self._folders, [0] * len(self._folders))
            live = {"stamp": stamp, "after": [sample.last_step for sample in samples]}
            return make_page(make_data(records, samples) | {"live": live}, packed, scripts=[LIVE_SCRIPT], connects=True)

    def changes(self, stamp: str, after: Sequence[int]) -> dict[str, Any] | None:
        """What the page with this stamp lacks, as JSON types, or None if it lacks nothing. `after`: the page's last
        step with trajectories, for each run.
        """
        with self._lock:
            now = self.stamp()
            if now == stamp:
                return None
            records = [read_run(folder.path) for folder in self._folders]
            samples, packed = make_episodes(self._folders, after)
            last = [max(sample.last_step, before) for sample, before in zip(samples, after, strict=True)]
            data = make_data(records, samples) | {"live": {"stamp": now, "after": last}}
            return {"data": data, "episodes": packed if any(sample.episodes for sample in samples) else None}


class LiveServer(BoundedServer):
    """Serves a LiveReport at `url` while `serve_forever` runs. Raises OSError if it cannot listen on the address."""

    def __init__(self, report: LiveReport, address: str = "127.0.0.1", port: int = 0) -> None:
        self.report, self.token = report, secrets.token_urlsafe(24)
        super().__init__((address, port), _Handler)

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.port}/?token={self.token}"


class _Handler(BoundedHandler):
    def do_GET(self) -> None:
        live = cast(LiveServer, self.server)
        split = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(split.query).items()}
        if not hmac.compare_digest(asked.get("token", "").encode(), live.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "the token is missing or wrong: open the address that was printed\n")
        elif not self.is_asked_by_own_name():
            self._answer(
                HTTPStatus.FORBIDDEN, "this server is not asked by that name: use the address that was printed\n"
            )
        elif split.path == "/":
            self._answer_with(live.report.page, "text/html; charset=utf-8")
        elif split.path == "/changes":
            self._answer_with(lambda: self._changes(live.report, asked), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "there is / and /changes\n")

    def _changes(self, report: LiveReport, asked: dict[str, str]) -> str | None:
        after = [int(step) for step in asked.get("after", "").split(",")]
        found = report.changes(asked.get("stamp", ""), after)
        return None if found is None else json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def _answer_with(self, make: Callable[[], str | None], kind: str) -> None:
        try:
            text = make()
        except DataError as error:  # a line that is being written looks damaged; the next request finds it complete
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, "after: one whole number per run, with commas between\n")
        else:
            self._answer(HTTPStatus.NO_CONTENT if text is None else HTTPStatus.OK, text or "", kind)

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
