"""Collect the signals that a supervisor receives instead of ending by them.

Owns the handlers while they are installed. What a signal means is the business of `local/supervisor.py` and
`slurm/stop_request.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def signals_taken(numbers: Iterable[int], received: list[int]) -> Iterator[None]:
    """While this lasts, each of these signals is noted at the end of `received` and does nothing else. Main thread
    only.
    """
    before = {number: signal.signal(number, lambda heard, _: received.append(heard)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals that ask for a stop, as they come, while this lasts. One that was ignored at our start stays so:
    `nohup`, and jobs a script puts in the background. Main thread only.
    """
    received: list[int] = []
    with signals_taken([number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN], received):
        yield received
