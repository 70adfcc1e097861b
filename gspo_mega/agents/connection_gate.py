"""Which connections of the endpoint are kept: as many as the process has room for, and none that sends no request.

A new connection may wait `HEAD_SECONDS` for its first request, one that was answered before `IDLE_SECONDS` for the
next. If too many new ones wait, the one that has waited longest is closed. That does not hit an honest client, which
sends its head at once.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

HEAD_SECONDS = 10.0

GRACE_SECONDS = 1.0

IDLE_SECONDS = 300.0

# How many connections may have sent no request yet, of all peers and of one. Agents on this machine are one peer.
MOST_WAITING, MOST_WAITING_OF_PEER = 512, 256

_MOST_CONNECTIONS = 16_384


class Gate:
    """Decides which connections of a server are kept. Its method `protocol` is given to `loop.create_server`."""

    def __init__(self, handler: Callable[[], Any], most: int | None = None) -> None:
        """`handler` makes the library's protocol. `most` is the number of connections at the same time; the default is
        half of the file descriptors that this process may have.
        """
        self._handler = handler
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = most if most is not None else min(_MOST_CONNECTIONS, max(64, soft // 2))
        self._open: Counter[Any] = Counter()
        self._by_handler: dict[Any, _Connection] = {}
        self.waiting: dict[_Connection, None] = {}  # for their first request, in the order in which they came

    def protocol(self) -> asyncio.Protocol:
        return _Connection(self, self._handler())

    def begun(self, handler: Any) -> None:
        """Note that a request is being answered. `handler` is the library's protocol of its connection."""
        if (connection := self._by_handler.get(handler)) is not None:
            connection.stop_waiting()

    def ended(self, handler: Any) -> None:
        """Note that the request of this connection has been answered."""
        if (connection := self._by_handler.get(handler)) is not None:
            connection.wait(IDLE_SECONDS)

    # --- a connection's side ----------------------------------------------------------------------------------

    def admits(self, connection: _Connection) -> bool:
        """Whether there is room for one more connection. Makes room by closing one that waits, if it can."""
        peer = connection.peer
        if self._open.total() >= self._most or self._open[peer] >= max(self._most // 2, MOST_WAITING_OF_PEER):
            return False
        self._open[peer] += 1
        self._by_handler[connection.handler] = connection
        late: list[_Connection] = []
        if len(self.waiting) >= MOST_WAITING:
            late = [next(iter(self.waiting))]
        elif len(self.waiting) >= MOST_WAITING_OF_PEER:
            of_peer = [one for one in self.waiting if one.peer == peer]
            late = of_peer[:1] if len(of_peer) >= MOST_WAITING_OF_PEER else []
        for one in late:
            # If many come at once, none of their heads has been read yet; give them time.
            if time.monotonic() - one.since >= GRACE_SECONDS:
                one.end()
        return True

    def left(self, connection: _Connection) -> None:
        if self._by_handler.pop(connection.handler, None) is not None:
            self._open[connection.peer] -= 1
            if self._open[connection.peer] <= 0:
                del self._open[connection.peer]


class _Connection(asyncio.Protocol):
    """The library's protocol of one connection, with a limit on its waiting."""

    def __init__(self, gate: Gate, handler: Any) -> None:
        self._gate, self.handler = gate, handler
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_in = False
        self.peer: Any = None
        self.since = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else None
        self._is_in = self._gate.admits(self)
        if not self._is_in:
            transport.abort()
            return
        self.handler.connection_made(transport)
        self._gate.waiting[self] = None
        self.wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_in:
            self._is_in = False
            self.stop_waiting()
            self._gate.left(self)
            self.handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in:
            self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received() if self._is_in else None

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def wait(self, seconds: float) -> None:
        """Wait at most so many seconds, from now on, for a request."""
        if self._is_in:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def stop_waiting(self) -> None:
        self._gate.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        self.stop_waiting()
        if self._transport is not None:
            self._transport.abort()
