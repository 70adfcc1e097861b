"""The pool of workers that users' episode functions and tools run in.

    run(task, session, name) -> a worker has room -> the function runs there, its turns reach the session -> Finished

Owns which worker runs what, and what follows when one is lost: the episode that did it fails, and all others begin
again in another worker, where their turns are answered from the record (`Session.restart`). A loop that stands still
has one whose callback runs, and that one fails at once. Of a process that ends or writes nonsense, the episodes that
ran just then are suspects: they begin again apart from the others and in smaller company, in the end alone, and one
that loses a worker a second time, alone, has done it. Where nobody ran, all begin again as they were, and are suspects
from the second time on. So a neighbour never fails for another, nor does an episode whose worker was ended from outside
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from typing import Any

from gspo_mega.agents.pooled_worker import NO_BOUND, Loss, PooledSession, PooledWorker, PoolEntry
from gspo_mega.agents.protocol import Finished, Task
from gspo_mega.base.errors import EpisodeError
from gspo_mega.config.schema import EpisodeFunction, Episodes

_START_ATTEMPTS = 3
# Suspects begin again in company of at most this part of them.
_SHARE_OF_SUSPECTS = 8
# So many workers may be started, each in place of the one before, that end without having had an episode. The pause
# before the second of them; it doubles.
_MOST_IDLE_LOSSES = 5
_PAUSE_SECONDS = 1.0


class EpisodePool:
    """Runs episodes in worker processes, any number at a time.

    Use it inside one event loop: `await pool.start()`, concurrent `run`, `await pool.close()`; or as an async context
    manager. The thread of that loop must live as long as the pool, because the workers end with it.

    Attributes:
        tool_schemas: of the run's tools, as the chat template is given them; known once the pool has started.
        counts: since the start, `num_workers_recycled` (workers that were replaced, whatever the reason) and
            `num_processes_ended` (that episodes left).
    """

    def __init__(self, settings: Episodes, episode: EpisodeFunction, tools: tuple[str, ...] = ()) -> None:
        self.tool_schemas: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self._settings = settings
        self._episode = episode
        self._tools = tools
        self._workers: list[PooledWorker] = []
        self._retired: set[PooledWorker] = set()
        self._waiting: deque[PoolEntry] = deque()
        self._suspects: deque[PoolEntry] = deque()
        self._open_entries: set[PoolEntry] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = EpisodeError("the pool of episodes is not started")
        self._num_entries = 0
        self._num_opening = 0

    async def start(self) -> None:
        """Start all workers. Raises EpisodeError as `check_functions` does."""
        started = await asyncio.gather(
            *(self._new_worker() for _ in range(self._settings.num_workers)), return_exceptions=True
        )
        workers = [one for one in started if isinstance(one, PooledWorker)]
        for outcome in started:
            if isinstance(outcome, BaseException):
                await asyncio.gather(*(worker.end() for worker in workers))
                raise outcome
        self._broken = None
        self.tool_schemas = workers[0].tool_schemas
        for worker in workers:
            self._open(worker)

    async def close(self) -> None:
        """End every worker, even in the middle of an episode; episodes that still run fail with EpisodeError."""
        self._break(EpisodeError("the pool of episodes is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in (*self._workers, *self._retired)))
        self._workers, self._retired = [], set()

    async def __aenter__(self) -> EpisodePool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, task: Task, session: PooledSession, name: str) -> Finished:
        """Run one episode to its end. `name`: of its prompt, in errors. What it does wrong is in the result.

        A turn that was begun is sampled to its end and recorded, also where the episode did not wait for it.

        Cancelling this ends the episode. Raises RolloutError and whatever else `session.answer` raises that is not the
        episode's; EpisodeError: the pool is closed, or its functions cannot be loaded any more.
        """
        if self._broken is not None:
            raise self._broken
        self._num_entries += 1
        entry = PoolEntry(self._num_entries, task, session, name, asyncio.get_running_loop().create_future())
        self._open_entries.add(entry)
        self._waiting.append(entry)
        self._place()
        try:
            finished = await entry.ended
            if finished.failure is None and entry.turns:
                # Nobody waits for them any more. To drop them would drop long turns sooner than short ones.
                await asyncio.wait(entry.turns)
                if entry.late_error is not None:
                    raise entry.late_error
            return finished
        finally:
            self._open_entries.discard(entry)
            entry.ended.cancel()  # does nothing to one that has ended
            entry.stop_turns()
            for worker in (*self._workers, *self._retired):
                if entry.number in worker.entries:
                    worker.forget(entry)

    # Which worker runs what

    def _place(self) -> None:
        """Hand waiting episodes to workers with room."""
        while self._suspects and (entry := self._suspects[0]):
            room = next(
                (
                    worker
                    for worker in self._workers
                    if not worker.entries or (worker.room == entry.room and len(worker.entries) < entry.room)
                ),
                None,
            )
            if room is None and not entry.ended.done():
                self._make_room(entry.room)
                break
            self._suspects.popleft()
            if room is not None and not entry.ended.done():
                self._begin(room, entry)
        while self._waiting:
            if self._waiting[0].ended.done():  # its caller was cancelled
                self._waiting.popleft()
                continue
            # An empty worker is kept for suspects as long as there are any.
            free = [
                worker
                for worker in self._workers
                if worker.room == NO_BOUND
                and len(worker.entries) < self._settings.episodes_per_worker
                and (worker.entries or not self._suspects)
            ]
            if not free:
                return
            self._begin(min(free, key=lambda worker: len(worker.entries)), self._waiting.popleft())

    def _make_room(self, most: int) -> None:
        """Have a worker without episodes for each `most` suspects, in up to half of the workers at a time: while others
        wait, none gets empty by itself.
        """
        serving = sum(worker.room != NO_BOUND for worker in self._workers)
        wanted = min(math.ceil(len(self._suspects) / most), max(1, self._settings.num_workers // 2) - serving)
        plain = [worker for worker in self._workers if worker.room == NO_BOUND]
        if self._num_opening < wanted and plain and len(self._retired) < self._settings.num_workers:
            self._retire(min(plain, key=lambda worker: len(worker.entries)))

    def _begin(self, worker: PooledWorker, entry: PoolEntry) -> None:
        worker.begin(entry)
        if worker.num_started >= self._settings.recycle_after:
            self._retire(worker)

    def _done(self, worker: PooledWorker) -> None:
        """An episode has left a worker."""
        if worker.num_processes_ended:
            self.counts["num_processes_ended"] += worker.num_processes_ended
            worker.num_processes_ended = 0
        if worker.is_dirty:
            self._retire(worker)
        self._place()

    # The lives of workers

    async def _new_worker(self) -> PooledWorker:
        return await PooledWorker.start(self._settings, self._episode, self._tools)

    def _open(self, worker: PooledWorker) -> None:
        self._workers.append(worker)
        self._go(self._serve(worker))
        self._place()

    def _retire(self, worker: PooledWorker) -> None:
        """Give a worker no more episodes, and have another in its place."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._retired.add(worker)
            self._go(self._replace(worker))

    async def _serve(self, worker: PooledWorker) -> None:
        """One worker's life, until it is lost or has no episode left after it was retired."""
        left = asyncio.Event()

        def done(_: PoolEntry) -> None:
            self._done(worker)
            if worker in self._retired and not worker.entries:
                left.set()

        listening = asyncio.create_task(worker.listen(done))
        leaving = asyncio.create_task(left.wait())
        try:
            await asyncio.wait([listening, leaving], return_when=asyncio.FIRST_COMPLETED)
            loss = listening.result() if listening.done() else None
        finally:
            for one in (listening, leaving):
                one.cancel()
            await asyncio.gather(listening, leaving, return_exceptions=True)
        if loss is not None:
            if not worker.entries:
                worker.num_idle_losses += 1
                worker.idle_loss = loss.why
            self._retire(worker)
            self._judge(worker, loss)
        await worker.end()
        self._retired.discard(worker)

    async def _replace(self, lost: PooledWorker) -> None:
        """Start a worker. One that was retired may still have episodes; no more than twice `num_workers` ever run."""
        if lost.num_idle_losses >= _MOST_IDLE_LOSSES:
            functions = ", ".join([self._episode.function, *self._tools])
            raise EpisodeError(
                f"{_MOST_IDLE_LOSSES} processes of episodes, each in place of the one before, ended without an episode"
                f" in them; of the last one: {lost.idle_loss}. Either what they import ({functions}) ends them, or"
                " something outside, such as the machine for want of memory"
            )
        self._num_opening += 1
        try:
            if lost.num_idle_losses > 1:
                await asyncio.sleep(_PAUSE_SECONDS * 2 ** (lost.num_idle_losses - 2))
            while len(self._retired) > self._settings.num_workers:
                await asyncio.sleep(0.05)
            self.counts["num_workers_recycled"] += 1
            worker = await self._started()
        finally:
            self._num_opening -= 1
        worker.num_idle_losses = lost.num_idle_losses
        self._open(worker)

    async def _started(self) -> PooledWorker:
        for _ in range(_START_ATTEMPTS - 1):
            with contextlib.suppress(EpisodeError):
                return await self._new_worker()
        return await self._new_worker()

    def _judge(self, worker: PooledWorker, loss: Loss) -> None:
        """A worker is lost: fail the episode that did it, if that is known, and have all others begin again."""
        entries, suspects = list(worker.entries.values()), loss.suspects
        if loss.is_certain or (len(entries) == 1 and len(suspects) == 1 and suspects[0].num_lost > 0):
            suspects[0].fail(loss.kind, loss.why)
        else:
            is_known = len(suspects) == 1 or len(suspects) < len(entries)
            for entry in suspects:
                entry.num_lost += 1
                if is_known or entry.num_lost > 1:
                    entry.room = max(1, len(suspects) // _SHARE_OF_SUSPECTS)
        worker.entries.clear()
        for entry in entries:
            if entry.ended.done():
                entry.stop_turns()
            else:
                self._go(self._again(entry))

    async def _again(self, entry: PoolEntry) -> None:
        """Have an episode begin again, once the turns that are being sampled for it are in its record."""
        if entry.turns:
            await asyncio.wait(entry.turns)
        if entry.ended.done():
            return
        entry.session.restart()
        if entry.room == NO_BOUND:
            self._waiting.appendleft(entry)
        else:
            self._suspects.append(entry)
        self._place()

    # Failures that are the run's

    def _go(self, work: Any) -> None:
        """Run a coroutine of the pool's own; what it raises ends the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)
            self._waiting.clear()

    def _break(self, error: BaseException) -> None:
        """Fail every episode that is not done, and every later one."""
        self._broken = self._broken or error
        for entry in self._open_entries:
            if not entry.ended.done():
                entry.ended.set_exception(self._broken)


def check_functions(settings: Episodes, episode: EpisodeFunction, tools: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Load an episode and its tools once, in a worker, before a run needs them; returns the tools' schemas.

    Not to be called inside an event loop. Raises EpisodeError with what is missing.
    """

    async def load() -> list[dict[str, Any]]:
        worker = await PooledWorker.start(settings, episode, tools)
        await worker.end()
        return worker.tool_schemas

    return asyncio.run(load())
