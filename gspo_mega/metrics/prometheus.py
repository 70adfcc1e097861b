"""The last step's metrics of rank 0 in Prometheus' text format, over HTTP at /metrics (`metrics.prometheus`).

The names follow from the catalogue. The endpoint only answers reads, and has no password: whoever can reach the address
can read the numbers.
"""

from __future__ import annotations

import functools
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping

from gspo_mega.base.network import BoundedHandler, BoundedServer
from gspo_mega.metrics.catalogue import CATALOGUE, find_metric
from gspo_mega.metrics.tables import Metric

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "gspo_mega_"
_PLACEHOLDER = re.compile(r"<(\w+)>")


class PrometheusEndpoint:
    """The HTTP endpoint; a context manager. The server has its own thread. If the address cannot be bound, `tell` is
    called once with a line for the user, and each step tries again.
    """

    def __init__(self, host: str, port: int, run: str, attempt: int, tell: Callable[[str], None]) -> None:
        self._address, self._run, self._attempt, self._tell = (host, port), run, attempt, tell
        self._text = exposition(run, attempt, None, 0.0, {})
        self._server: BoundedServer | None = None
        self._is_told = False

    def __enter__(self) -> PrometheusEndpoint:
        self._bind()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def port(self) -> int | None:
        """The bound port; None while the address cannot be bound."""
        return None if self._server is None else self._server.server_address[1]

    def update(self, step: int, values: Mapping[str, float | None]) -> None:
        """Show the values of a new step; those that are None are left out."""
        if self._server is None:
            self._bind()
        present = {name: value for name, value in values.items() if value is not None}
        self._text = exposition(self._run, self._attempt, step, time.time(), present)

    def _bind(self) -> None:
        host, port = self._address
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            server = BoundedServer((host, port), self._handler(), family)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                self._tell(
                    f"notice   metrics.prometheus: {host}:{port} cannot be bound: {error.strerror or error};"
                    " training goes on, and it is tried again with each step"
                )
            return
        self._server = server
        threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()

    def _handler(self) -> type[BoundedHandler]:
        endpoint = self

        class Handler(BoundedHandler):
            def do_GET(self) -> None:
                if not self.is_asked_by_own_name():
                    self.send_error(403, "this server is not asked by that name")
                    return
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = endpoint._text.encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


def exposed_name(entry: str) -> str:
    """The Prometheus name of an entry of the catalogue: `reward/source/<source>` is gspo_mega_reward_source. A
    placeholder within a word becomes `_by_<placeholder>`, so that the name differs from that of the entry without it:
    `rollout/num_retries_<kind>` would be gspo_mega_rollout_num_retries_by_kind.
    """
    entry = re.sub(r"_<(\w+)>|/<(\w+)>(?=_)", lambda found: f"_by_{found[1] or found[2]}", entry)
    return _PREFIX + re.sub(r"[^A-Za-z0-9_]+", "_", _PLACEHOLDER.sub("", entry)).replace("__", "_").strip("_")


@functools.lru_cache(maxsize=4096)
def labels_of(name: str) -> tuple[tuple[str, str], ...]:
    """(label, value) for each placeholder in the catalogue's entry of a metric's name."""
    entry = find_metric(name).name
    pattern = "".join(
        f"(?P<{part[1:-1]}>[A-Za-z0-9._-]+)" if part.startswith("<") else re.escape(part)
        for part in re.split(r"(<\w+>)", entry)
    )
    found = re.fullmatch(pattern, name)
    return () if found is None else tuple(found.groupdict().items())


def exposition(run: str, attempt: int, step: int | None, at: float, values: Mapping[str, float]) -> str:
    """The text for one step of a run. `step`: None if this start of the run has no step yet. `at`: unix seconds of the
    step's line.
    """
    own = {
        "attempt": ("start of the run, counted from 1", attempt),
        "step": ("last step with metrics", step),
        "step_timestamp_seconds": ("unix seconds at which that step ended", at if step is not None else None),
    }
    lines = []
    for name, (text, value) in own.items():
        if value is not None:
            lines += _family(f"{_PREFIX}{name}", text, [((), value)], run)
    by_entry: dict[str, list[tuple[tuple[tuple[str, str], ...], float]]] = {}
    for name, value in values.items():
        by_entry.setdefault(find_metric(name).name, []).append((labels_of(name), value))
    for entry, samples in by_entry.items():
        lines += _family(exposed_name(entry), _help(CATALOGUE[entry]), samples, run)
    return "\n".join(lines) + "\n"


def _family(name: str, text: str, samples: list[tuple[tuple[tuple[str, str], ...], float]], run: str) -> list[str]:
    lines = [f"# HELP {name} " + text.replace("\\", "\\\\").replace("\n", "\\n"), f"# TYPE {name} gauge"]
    for labels, value in samples:
        shown = ",".join(f'{label}="{text}"' for label, text in (("run", run), *labels))  # no character to escape
        lines.append(f"{name}{{{shown}}} {value!r}")
    return lines


def _help(metric: Metric) -> str:
    return f"{metric.description} ({metric.unit})"
