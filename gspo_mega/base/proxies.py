"""Which addresses are reached without an HTTP proxy, whatever the proxy variables of the environment say.

A cluster often sets `http_proxy` and its like for the way out. The processes of a job speak to each other directly: the
names of this machine, its addresses, and those of the job's other machines are added to `no_proxy`. SGLang's processes
speak to nobody else and get no proxy variable at all. Standard library only.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

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
