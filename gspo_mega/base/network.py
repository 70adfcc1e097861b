"""Addresses that a server may bind, HTTP proxies, and a small bounded HTTP server. Standard library only.

Addresses: these functions resolve no name. `rollout/server/supervise.py` does, on the machine that binds it.

Proxies: a cluster often sets `http_proxy` and similar variables for connections to the outside. The processes of a job
speak to each other directly, so the names and addresses of this machine and of the job's other machines are added to
`no_proxy`. SGLang's processes speak to nobody else and get no proxy variable at all.

The HTTP server is for people and Prometheus. It ends connections that send no request, and a handler can refuse
requests under another site's name: a page of another site can make its name resolve to this machine, and the browser
then sends that name in the Host header.
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

# Clients differ in which spelling they read, so both are always set to the same value.
NO_PROXY_NAMES = ("no_proxy", "NO_PROXY")
PROXY_NAMES = tuple(
    spelled for name in ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy") for spelled in (name, name.upper())
)

# A connection of the HTTP server ends if its request's head has not come after HEAD_SECONDS. At most MOST_WAITING
# connections may be without a request, and at most MOST_CONNECTIONS may be open.
HEAD_SECONDS = 10.0
MOST_WAITING = 64
MOST_CONNECTIONS = 256

_LOCAL = ("localhost", "127.0.0.1", "::1")
_MACHINE_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def address_problem(host: str) -> str | None:
    """Return why no server may bind `host`, or None if one may.

    Every spelling of the wildcard is refused, because it would open the server to every network.
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
        # The C library accepts more spellings of an IPv4 address: 0, 0.0, 0x0, 000.0.0.0 and others are the wildcard.
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
    if not _MACHINE_NAME.fullmatch(host):
        return f"{host!r} is neither an IP address nor the name of a machine; {own}"
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached only from this machine. Any name but localhost counts as one of the network."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def with_port(host: str, port: int) -> str:
    """Return `host:port` as a URL has it, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_hosts(proc: Path = Path("/proc/net")) -> list[str]:
    """Return the names and addresses of this machine, localhost first. This asks no name server."""
    name = socket.gethostname()
    names = [name, name.partition(".")[0]] if name else []
    return list(dict.fromkeys([*_LOCAL, *names, *_addresses(proc)]))


def no_proxy_variables(hosts: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `no_proxy` of `environment` with this machine and `hosts` added, in both spellings.

    Every name and address is written out, because not every client understands a network such as 10.0.0.0/8.
    """
    given = [environment.get(name, "").strip() for name in NO_PROXY_NAMES]
    if "*" in given:  # clients read the star only if the value has nothing else
        return dict.fromkeys(NO_PROXY_NAMES, "*")
    listed = [part.strip() for text in given for part in text.split(",") if part.strip()]
    return dict.fromkeys(NO_PROXY_NAMES, ",".join(dict.fromkeys([*listed, *own_hosts(), *(h for h in hosts if h)])))


def set_no_proxy(hosts: Iterable[str] = ()) -> None:
    """Make this process, and those that it starts from now on, reach this machine and `hosts` without a proxy."""
    os.environ.update(no_proxy_variables(hosts))


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a process that speaks only to the job's own addresses: without any proxy."""
    kept = {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}
    return kept | dict.fromkeys(NO_PROXY_NAMES, "*")


def proxy_variables_for_user_code(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the proxies that a user's function or agent gets, in addition to `no_proxy_variables`.

    A proxy's address with a user or a password is a credential. It is left out here; only the `environment` of the
    configuration's section hands it on.
    """
    proxies = {name: environment[name] for name in PROXY_NAMES if name in environment}
    return {name: value for name, value in proxies.items() if "@" not in value}


def proxy_for(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the HTTP proxy through which to reach a service outside the job, or None to reach it directly.

    SOCKS proxies are left out.
    """
    parts = urlsplit(url)
    by_scheme = _proxies_of(environment)
    found = by_scheme.get(parts.scheme) or by_scheme.get("all")
    if not found or not parts.hostname:
        return None
    no_proxy = no_proxy_variables(environment=environment)["no_proxy"]
    if no_proxy == "*" or _is_listed(parts.hostname, parts.netloc.rpartition("@")[2], no_proxy):
        return None
    found = found if "://" in found else f"http://{found}"
    return found if urlsplit(found).scheme in ("http", "https") else None


def _is_listed(host: str, host_and_port: str, no_proxy: str) -> bool:
    """Read the list as Python's own client does: a name stands for itself and for what ends with it after a dot."""
    for part in no_proxy.lower().split(","):
        name = part.strip().lstrip(".")
        if name and any(one == name or one.endswith(f".{name}") for one in (host.lower(), host_and_port.lower())):
            return True
    return False


def _proxies_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies by scheme, as Python's own client finds them: the lower-case spelling wins, and an empty value
    means none.
    """
    found = {name[:-6].lower(): value for name, value in environment.items() if name.lower().endswith("_proxy")}
    lower = {name[:-6]: value for name, value in environment.items() if name.endswith("_proxy")}
    return {scheme: value for scheme, value in {**found, **lower}.items() if value}


def _addresses(proc: Path) -> list[str]:
    """Return the addresses of this machine's interfaces from the kernel's tables; empty if they cannot be read."""
    found: list[str] = []
    for before, line in itertools.pairwise(_lines(proc / "fib_trie")):
        if "/32 host LOCAL" in line:
            found.append(before.split()[-1])
    for line in _lines(proc / "if_inet6"):
        address = ipaddress.IPv6Address(int(line.split()[0], 16))
        if not address.is_link_local:
            found.append(str(address))
    return [address for address in dict.fromkeys(found) if not ipaddress.ip_address(address).is_loopback]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


class BoundedServer(ThreadingHTTPServer):
    """An HTTP server with `BoundedHandler`s. `names` are the names, without a port, under which clients may reach it in
    addition to those of this machine.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler], family: int = socket.AF_INET) -> None:
        self.address_family = family
        self.names = {address[0]}
        self._guard = threading.Lock()
        self._waiting_since: dict[Any, float] = {}  # the connections whose request has not come yet, oldest first
        self._num_connections = 0
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            late = [next(iter(self._waiting_since))] if len(self._waiting_since) >= MOST_WAITING else []
            is_full = self._num_connections >= MOST_CONNECTIONS
            if not is_full:
                self._num_connections += 1
                self._waiting_since[request] = time.monotonic()
        self._shut_down(late)
        if is_full:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started; the caller closes the connection
            self._connection_ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connection_ended(request)

    def service_actions(self) -> None:
        """End connections whose head takes longer than `HEAD_SECONDS`. The base class calls this twice a second."""
        now = time.monotonic()
        with self._guard:
            late = [request for request, since in self._waiting_since.items() if now - since > HEAD_SECONDS]
        self._shut_down(late)

    def _connection_ended(self, request: Any) -> None:
        with self._guard:
            self._num_connections -= 1
            self._waiting_since.pop(request, None)

    def request_has_come(self, request: Any) -> None:
        """Stop limiting the time of a connection, because its request has come."""
        with self._guard:
            self._waiting_since.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that goes away is no error, and what it sent belongs in no log."""

    def is_asked_by_own_name(self, host: str) -> bool:
        """Whether the value of a Host header names this machine. An empty one is accepted, as it names nobody else."""
        name = _without_port(host.strip()).lower()
        if not name:
            return True
        return name in {known.lower() for known in (*self.names, *own_hosts())} or name == _full_name().lower()

    def _shut_down(self, requests: list[Any]) -> None:
        for request in requests:
            self.request_has_come(request)
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class BoundedHandler(BaseHTTPRequestHandler):
    """The base of the handlers of a `BoundedServer`."""

    timeout = HEAD_SECONDS  # for a client that does not read the answer

    def parse_request(self) -> bool:
        cast(BoundedServer, self.server).request_has_come(self.request)
        return super().parse_request()

    def is_asked_by_own_name(self) -> bool:
        """Whether the request has at most one Host header, and that names this machine."""
        hosts = self.headers.get_all("Host") or [""]
        return len(hosts) == 1 and cast(BoundedServer, self.server).is_asked_by_own_name(hosts[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a URL or a header may hold a token."""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, _ = host.rpartition(":")
    return name if colon and ":" not in name else host


@functools.cache
def _full_name() -> str:
    return socket.getfqdn()
