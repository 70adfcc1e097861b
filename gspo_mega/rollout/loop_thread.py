"""One thread with one asyncio event loop, for everything that talks to servers.

Owns the thread. The trainer's own threads submit coroutines to it and wait for results; if the thread has ended, they
get an error, because no result would ever come.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

from gspo_mega.base.errors import RolloutError

_LOOK_SECONDS = 1.0


class LoopThread:
    """The thread starts at construction; `close()` cancels its tasks and ends it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a task end the loop
            self._error = error

    def check(self) -> None:
        """Raise RolloutError if the thread has ended."""
        if not self._thread.is_alive():
            raise RolloutError(f"the thread {self._name!r} has ended: {self._error!r}") from self._error

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """Run `coroutine` on the loop; the future may be waited for and cancelled from any other thread. Raises
        RolloutError.
        """
        try:
            self.check()
        except RolloutError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run `coroutine` on the loop and wait for its result; the deadline is the coroutine's own. Never call this
        from the loop. Raises what the coroutine raises, and RolloutError if the thread has ended.
        """
        future = self.submit(coroutine)
        while True:
            try:
                return future.result(timeout=_LOOK_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise  # the coroutine itself raised it
                self.check()

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self.run(self._cancel_rest())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        else:  # the thread has ended with tasks left: cancel them on this thread
            self._loop.run_until_complete(self._cancel_rest())
        self._loop.close()

    async def _cancel_rest(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
