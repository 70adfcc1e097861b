"""Who has the event loop of a worker: a page of memory that the worker and its parent share, and a loop that writes it.

In the worker, `WatchedLoop` writes down which episode's callback runs, and counts ticks. The parent reads the page with
`LoopWatch`: a count that stands still is a blocked loop, and the page names the episode that blocks it, or that ran
when the process ended. A page needs neither the worker's interpreter, which one call into C may hold, nor a living
worker. The name has to be there before the callback runs, because a watching thread in the worker would not run during
such a call.

What an episode's code gives to the loop, steps of its tasks included, passes through the three public methods that
`WatchedLoop` overrides; they know the episode by the context of the call. What a transport calls (`data_received`) does
not: it runs without a name, and the episode that blocks there is found in the way in which one that ends a process is.

`OwnClock` measures the own time of one episode, which its deadlines count. It stands still while the episode waits for
others: for a turn of the policy, or for a thread if none of its own functions has one. Time in which other episodes
keep the loop busy is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import functools
import mmap
import os
import re
import signal
import sysconfig
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from gspo_mega.base import processes
from gspo_mega.base.errors import EpisodeError

# How many threads one worker has for tools and for what episodes hand to `asyncio.to_thread`.
NUM_THREADS = 64

# A thread's stack. 64 stacks of the usual 8 MiB would use up a small bound on memory.
_STACK_BYTES = 2 * 1024**2

_PAGE_BYTES = mmap.PAGESIZE

_TICK, _CURRENT, _THREADS = 0, 1, 2  # places on the page, of 8 bytes each

_DUMP_SIGNAL = signal.SIGUSR1

# A process that waits for a processor may write its stack late; one that is stopped never does.
_DUMP_SECONDS = 10.0
_DUMP_POLL_SECONDS = 0.1

_T = TypeVar("_T")

_Args = TypeVarTuple("_Args")

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


class Owner:
    """An episode as the loop knows it.

    Attributes:
        number: counts episodes from 1.
        busy_seconds: the time of its callbacks so far.
        tasks: the tasks that it made.
        threads: the places on the page of the threads in which its functions run.
        has_processes: it may have started processes that still live.
        clock: measures its own time.
    """

    def __init__(self, number: int, loop: WatchedLoop) -> None:
        self.number = number
        self.busy_seconds = 0.0
        self.clock = OwnClock(lambda: loop.busy_seconds - self.busy_seconds)
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.threads: set[int] = set()
        self.has_processes = False


CURRENT: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("episode", default=None)


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that shows on the page whose callback it runs. `busy_seconds` is the time of all episodes'
    callbacks so far.
    """

    def __init__(self, page_path: str) -> None:
        super().__init__()
        self.busy_seconds = 0.0
        page = os.open(page_path, os.O_RDWR | os.O_APPEND)
        self._page = memoryview(mmap.mmap(page, _PAGE_BYTES)).cast("Q")
        # The kernel gives a process's signal to its main thread, so only that thread's stack is written.
        faulthandler.register(_DUMP_SIGNAL, file=page, all_threads=False, chain=False)
        self.set_task_factory(_owned_task)
        threading.stack_size(_STACK_BYTES)
        self.set_default_executor(_OwnedThreads(self._page))

    def tick(self) -> None:
        """Show that the loop runs."""
        self._page[_TICK] += 1

    def call_soon(
        self, callback: Callable[[*_Args], object], *args: *_Args, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._shown(callback, context), *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*_Args], object], *args: *_Args, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._shown(callback, context), *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Args], object],
        *args: *_Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._shown(callback, context), *args, context=context)

    def _shown(
        self, callback: Callable[[*_Args], object], context: contextvars.Context | None
    ) -> Callable[[*_Args], object]:
        """Wrap the callback so that the page shows its episode while it runs."""
        owner = _owner_in(context)
        return callback if owner is None else functools.partial(self._step, owner, callback)

    def _step(self, owner: Owner, callback: Callable[..., object], *args: Any) -> None:
        self._page[_CURRENT] = owner.number
        started = time.perf_counter()
        try:
            callback(*args)
        finally:
            spent = time.perf_counter() - started
            self.busy_seconds += spent
            owner.busy_seconds += spent
            self._page[_CURRENT] = 0


def _owner_in(context: contextvars.Context | None) -> Owner | None:
    return CURRENT.get() if context is None else context.get(CURRENT)


class _OwnedTask(asyncio.Task[_T]):
    """A task that knows its episode. No other episode may cancel it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coro: Any, *, context: Any = None) -> None:
        self.owner = _owner_in(context)
        super().__init__(coro, loop=loop, context=context)
        if self.owner is not None:
            self.owner.tasks.add(self)

    def cancel(self, msg: Any = None) -> bool:
        by = CURRENT.get()
        if by is not None and by is not self.owner:
            raise EpisodeError("an episode may cancel only its own tasks")
        return super().cancel(msg)


def _owned_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T],
    /,
    *,
    context: contextvars.Context | None = None,
) -> asyncio.Future[_T]:
    return _OwnedTask(loop, coro, context=context)


class _OwnedThreads(ThreadPoolExecutor):
    """Threads that show on the page which episode's function they run."""

    def __init__(self, page: memoryview) -> None:
        super().__init__(NUM_THREADS, "tool")
        self._page = page
        self._free = deque(range(_THREADS, _THREADS + NUM_THREADS))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        owner = CURRENT.get()
        if owner is None:
            return super().submit(fn, *args, **kwargs)
        owner.clock.change(queued=1)
        try:
            future = super().submit(self._run, owner, fn, *args, **kwargs)
        except BaseException:
            owner.clock.change(queued=-1)
            raise
        future.add_done_callback(functools.partial(_was_given_up, owner))
        return future

    def _run(self, owner: Owner, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = self._free.popleft()
        self._page[place] = owner.number
        owner.threads.add(place)
        owner.clock.change(queued=-1, threads=1)
        try:
            return function(*args, **kwargs)
        finally:
            owner.clock.change(threads=-1)
            owner.threads.discard(place)
            self._page[place] = 0
            self._free.append(place)


def _was_given_up(owner: Owner, future: Future[Any]) -> None:
    if future.cancelled():  # before it had a thread
        owner.clock.change(queued=-1)


class LoopWatch:
    """The parent's view of one worker. `path` is where the page is until the worker has opened it."""

    def __init__(self) -> None:
        self._file, self.path = tempfile.mkstemp(prefix="episodes_")
        os.ftruncate(self._file, _PAGE_BYTES)
        self._page = memoryview(mmap.mmap(self._file, _PAGE_BYTES)).cast("Q")
        self._tick, self._looked, self._silent_seconds = 0, time.monotonic(), 0.0

    def remove_file(self) -> None:
        """Remove the page's name from the file system, once the worker has opened it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Release the page. A second call does nothing."""
        self.remove_file()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def silent_seconds(self, most_step_seconds: float) -> float:
        """Return for how long the loop has given no sign. Between two calls at most `most_step_seconds` count, in case
        this process itself was held up.
        """
        tick, now = self._page[_TICK], time.monotonic()
        if tick != self._tick:
            self._tick, self._silent_seconds = tick, 0.0
        else:
            self._silent_seconds += min(now - self._looked, most_step_seconds)
        self._looked = now
        return self._silent_seconds

    def who_runs(self) -> tuple[int, set[int]]:
        """Return the number of the episode whose callback runs, or ran when the process ended (0: none), and the
        numbers of the episodes that have a thread.
        """
        return self._page[_CURRENT], {number for number in self._page[_THREADS : _THREADS + NUM_THREADS] if number}

    async def where(self, pid: int) -> str:
        """Return where the main thread of the worker `pid` is, as ` at file.py:12 (function)`. Users' code is preferred
        to the standard library's. Empty if it cannot be found out.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, _DUMP_SIGNAL)
            await self._dumped(pid)
        text = os.pread(self._file, 64 * 1024, _PAGE_BYTES).decode("utf-8", "replace")
        frames = [found for line in text.splitlines() if (found := _FRAME.match(line))]  # the innermost first
        library = sysconfig.get_path("stdlib")
        own = [one for one in frames if not one["file"].startswith((library, "<"))] or frames
        if not own:
            return ""
        return f" at {Path(own[0]['file']).name}:{own[0]['line']} ({own[0]['function']})"

    async def _dumped(self, pid: int) -> None:
        """Wait until the process `pid` has written its stack: it has begun, and has written no more for a while."""
        until, size = time.monotonic() + _DUMP_SECONDS, _PAGE_BYTES
        while time.monotonic() < until:
            await asyncio.sleep(_DUMP_POLL_SECONDS)
            last, size = size, os.fstat(self._file).st_size
            if size == last and (size > _PAGE_BYTES or processes.state_of(pid) in ("T", "t", "Z", None)):
                return


class OwnClock:
    """The own time of one episode, in seconds. Any thread may use it."""

    def __init__(self, others_seconds: Callable[[], float]) -> None:
        """`others_seconds` returns for how long other episodes have kept the loop busy so far."""
        self._others = others_seconds
        self._lock = threading.Lock()
        self._num_turns = self._num_queued = self._num_threads = 0
        self._seconds = 0.0
        self._since, self._others_then = time.perf_counter(), others_seconds()

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._now()

    def change(self, *, turns: int = 0, queued: int = 0, threads: int = 0) -> None:
        """Note that so many more turns are asked for, functions wait for a thread, and functions have a thread."""
        with self._lock:
            self._seconds = self._now()
            self._since, self._others_then = time.perf_counter(), self._others()
            self._num_turns += turns
            self._num_queued += queued
            self._num_threads += threads

    def _now(self) -> float:
        if self._num_turns or (self._num_queued and not self._num_threads):
            return self._seconds
        passed = time.perf_counter() - self._since
        return self._seconds + max(0.0, passed - (self._others() - self._others_then))
