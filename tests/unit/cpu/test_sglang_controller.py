"""SGLang's controller of data-parallel schedulers, without a GPU: it waits for requests instead of asking all the time."""

import types

import zmq

from gspo_mega.cpu.sglang_hooks import _CONTROLLER_SLEEP_MS, _wait_for_requests


class Socket:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def poll(self, timeout: int) -> int:
        self.calls.append(timeout)
        return 0


def test_it_sleeps_before_it_looks_again_and_not_where_it_waits_anyway():
    received = []
    module = types.SimpleNamespace(zmq=zmq, sock_recv=lambda socket, flags=0: received.append(flags) or "request")
    _wait_for_requests(module)  # pyright: ignore[reportArgumentType]
    socket = Socket()
    assert module.sock_recv(socket, flags=zmq.NOBLOCK) == "request" and socket.calls == [_CONTROLLER_SLEEP_MS]
    assert module.sock_recv(socket) == "request" and len(socket.calls) == 1
    assert received == [zmq.NOBLOCK, 0]
