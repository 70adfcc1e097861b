"""A port on which a server can listen. Owns the search; the server itself binds the port later."""

from __future__ import annotations

import os
import socket

from gspo_mega.base.addresses import address_problem
from gspo_mega.base.errors import ConfigError


def free_port(host: str, beyond: int | None = None) -> int:
    """A port of `host` that is free now, and above the port `beyond` where there is room; below the ephemeral range, so
    that no outgoing connection takes it. Raises ConfigError where `host` is not an address of this machine, or resolves
    to the wildcard address.
    """
    low, high = 20_000, 32_000
    start = (os.getpid() * 7919 if beyond is None else beyond + 1 - low) % (high - low)
    for offset in range(high - low):
        port = low + (start + offset) % (high - low)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
                if (problem := address_problem(probe.getsockname()[0])) is not None:
                    raise ConfigError(f"server.host: {host}: {problem}")
            except PermissionError:
                continue
            except OSError as error:
                if error.errno == 98:  # in use
                    continue
                raise ConfigError(f"server.host: cannot bind {host}: {error}") from error
            return port
    raise ConfigError(f"server.host: no free port of {host} between {low} and {high}")
