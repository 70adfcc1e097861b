"""Addresses that a server may bind, and how one is written with its port.

Owns both. Resolves no name: `rollout/server/supervise_server.py` does, on the machine that binds it.
"""

from __future__ import annotations

import ipaddress
import re
import socket

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
