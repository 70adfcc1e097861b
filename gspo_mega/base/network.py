"""A small HTTP server for people and Prometheus, with bounds: connections that send no request end, and nobody is asked
under another site's name.

Owns those bounds and the check of the Host header. A page of another site can have its name resolve to this machine;
the browser then sends that name, which is none of ours. Standard library only.

Addresses that a server may bind, and how one is written with its port.

Owns both. Resolves no name: `rollout/server/supervise.py` does, on the machine that binds it.

Which addresses are reached without an HTTP proxy, whatever the proxy variables of the environment say.

A cluster often sets `http_proxy` and its like for the way out. The processes of a job speak to each other directly: the
names of this machine, its addresses, and those of the job's other machines are added to `no_proxy`. SGLang's processes
speak to nobody else and get no proxy variable at all. Standard library only.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def address_problem(host: str) -> str | None:
    """Why no server may bind `host`, or None. Every spelling of the wildcard, which would open it to every network, is
    refused.
    """
    own = "give this machine's own address, or 127.0.0.1 or ::1 where everything runs on one machine"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _no_address_problem(host, own)
    if address.is_unspecified or (
        address.version == 6 and address.ipv4_mapped is not None and address.ipv4_mapped.is_unspecified
    ):
        return f"{host} opens the server to every network; {own}"
    if address.is_multicast or str(address) == "255.255.255.255":
        return f"{host} is no machine's address; {own}"
    return None


def _no_address_problem(host: str, own: str) -> str | None:
    try:
        # What the C library takes for an IPv4 address: 0, 0.0, 0x0, 000.0.0.0 and others are the wildcard, too.
        meant = socket.inet_ntoa(socket.inet_aton(host)) if host.isascii() and " " not in host else None
    except OSError:
        meant = None
    if meant is not None:
        return (
            f"{host} opens the server to every network; {own}"
            if meant == "0.0.0.0"
            else f"{host!r} is another spelling of {meant}; write that"
        )
    if host.startswith("["):
        return f"{host}: an IPv6 address is written without brackets"
    if not _NAME.fullmatch(host):
        return f"{host!r} is neither an IP address nor the name of a machine; {own}"
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` is reached from this machine alone. Any name but localhost counts as the network's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def with_port(host: str, port: int) -> str:
    """`host:port`, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Clients differ in which spelling they read: both are always set, to the same value.
NO_PROXY = ("no_proxy", "NO_PROXY")
VARIABLES = tuple(
    spelled for name in ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy") for spelled in (name, name.upper())
)
_LOCAL = ("localhost", "127.0.0.1", "::1")


def own_hosts(proc: Path = Path("/proc/net")) -> list[str]:
    """The names and addresses of this machine, localhost first. Asks no name server."""
    name = socket.gethostname()
    names = [name, name.partition(".")[0]] if name else []
    return list(dict.fromkeys([*_LOCAL, *names, *_addresses(proc)]))


def direct(hosts: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`no_proxy`, in both spellings, as in `environment`, with this machine and `hosts` added. Names and addresses are
    written out: not every client understands a network such as 10.0.0.0/8.
    """
    given = [environment.get(name, "").strip() for name in NO_PROXY]
    if "*" in given:  # the star counts only where nothing else is there
        return dict.fromkeys(NO_PROXY, "*")
    listed = [part.strip() for text in given for part in text.split(",") if part.strip()]
    return dict.fromkeys(NO_PROXY, ",".join(dict.fromkeys([*listed, *own_hosts(), *(h for h in hosts if h)])))


def keep_direct(hosts: Iterable[str] = ()) -> None:
    """Have this process, and what it starts from here on, reach this machine and `hosts` without a proxy."""
    os.environ.update(direct(hosts))


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that speaks to the job's own addresses only."""
    kept = {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}
    return kept | dict.fromkeys(NO_PROXY, "*")


def for_users_code(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a user's function or agent gets of the proxy variables, besides `direct`: the way out. A proxy's address
    with a user or a password is a credential, which only the section's `environment` hands on.
    """
    proxies = {name: environment[name] for name in VARIABLES if name in environment}
    return {name: value for name, value in proxies.items() if "@" not in value}


def proxy_of(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The HTTP proxy through which a service outside of the job is asked; None where it is asked directly. SOCKS
    proxies are left out.
    """
    parts = urlsplit(url)
    by_scheme = _proxies_of(environment)
    found = by_scheme.get(parts.scheme) or by_scheme.get("all")
    if not found or not parts.hostname:
        return None
    no_proxy = direct(environment=environment)["no_proxy"]
    if no_proxy == "*" or _is_listed(parts.hostname, parts.netloc.rpartition("@")[2], no_proxy):
        return None
    found = found if "://" in found else f"http://{found}"
    return found if urlsplit(found).scheme in ("http", "https") else None


def _is_listed(host: str, host_and_port: str, no_proxy: str) -> bool:
    """As Python's own client reads the list: a name stands for itself and for what ends with it after a dot."""
    for part in no_proxy.lower().split(","):
        name = part.strip().lstrip(".")
        if name and any(one == name or one.endswith(f".{name}") for one in (host.lower(), host_and_port.lower())):
            return True
    return False


def _proxies_of(environment: Mapping[str, str]) -> dict[str, str]:
    """By scheme, as Python's own client finds them: the lower-case spelling wins, an empty value is none."""
    found = {name[:-6].lower(): value for name, value in environment.items() if name.lower().endswith("_proxy")}
    lower = {name[:-6]: value for name, value in environment.items() if name.endswith("_proxy")}
    return {scheme: value for scheme, value in {**found, **lower}.items() if value}


def _addresses(proc: Path) -> list[str]:
    """Of this machine's interfaces, from the kernel's tables; empty where they cannot be read."""
    found: list[str] = []
    lines = _lines(proc / "fib_trie")
    for before, line in itertools.pairwise(lines):
        if "/32 host LOCAL" in line:
            found.append(before.split()[-1])
    for line in _lines(proc / "if_inet6"):
        with_scope = ipaddress.IPv6Address(int(line.split()[0], 16))
        if not with_scope.is_link_local:
            found.append(str(with_scope))
    return [address for address in dict.fromkeys(found) if not ipaddress.ip_address(address).is_loopback]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


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
