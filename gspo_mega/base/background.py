"""Work beside the thread that needs its result later: a thread for each piece of it.

Owns that such a thread never keeps a process from ending. Standard library only.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def begin(name: str, work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `work` in a thread of this name; the future has its result, or what it raised."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
