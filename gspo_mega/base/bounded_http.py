"""A small HTTP server for people and Prometheus, with bounds: connections that send no request end, and nobody is asked
under another site's name.

Owns those bounds and the check of the Host header. A page of another site can have its name resolve to this machine;
the browser then sends that name, which is none of ours. Standard library only.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from gspo_mega.base.proxies import own_hosts

HEAD_SECONDS = 10.0
MOST_WAITING = 64
MOST_CONNECTIONS = 256


class BoundedServer(ThreadingHTTPServer):
    """Serves `BoundedHandler`s. `names`: under which it is asked, without a port, besides those of this machine."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler], family: int = socket.AF_INET) -> None:
        self.address_family = family
        self.names = {address[0]}
        self._guard = threading.Lock()
        self._since: dict[Any, float] = {}  # of connections whose request has not come yet, in order
        self._num = 0
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            late = [next(iter(self._since))] if len(self._since) >= MOST_WAITING else []
            is_full = self._num >= MOST_CONNECTIONS
            if not is_full:
                self._num += 1
                self._since[request] = time.monotonic()
        self._end(late)
        if is_full:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started; the caller closes the connection
            self._left(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._left(request)

    def service_actions(self) -> None:
        """Called twice a second: no head may take longer than `HEAD_SECONDS`, however it comes."""
        now = time.monotonic()
        with self._guard:
            late = [one for one, since in self._since.items() if now - since > HEAD_SECONDS]
        self._end(late)

    def _left(self, request: Any) -> None:
        with self._guard:
            self._num -= 1
            self._since.pop(request, None)

    def has_come(self, request: Any) -> None:
        with self._guard:
            self._since.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no error, and what it sent belongs in no log."""

    def is_asked_by_its_name(self, host: str) -> bool:
        """Whether the value of a Host header names this machine. A header that is absent names nobody else."""
        name = _without_port(host.strip()).lower()
        if not name:
            return True
        return name in {known.lower() for known in (*self.names, *own_hosts())} or name == _full_name().lower()

    def _end(self, requests: list[Any]) -> None:
        for request in requests:
            self.has_come(request)
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class BoundedHandler(BaseHTTPRequestHandler):
    timeout = HEAD_SECONDS  # of a reader that takes nothing

    def parse_request(self) -> bool:
        cast(BoundedServer, self.server).has_come(self.request)
        return super().parse_request()

    def is_asked_by_its_name(self) -> bool:
        hosts = self.headers.get_all("Host") or [""]
        return len(hosts) == 1 and cast(BoundedServer, self.server).is_asked_by_its_name(hosts[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a URL or a header may hold a token."""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, _ = host.rpartition(":")
    return name if colon and ":" not in name else host


@functools.cache
def _full_name() -> str:
    return socket.getfqdn()
