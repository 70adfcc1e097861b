"""The pool of worker processes that users' episode functions and tools run in.

    run(task, session, name) -> a worker has room -> the function runs there, its turns reach the session -> Finished

The pool decides which worker runs what, and what follows when a worker is lost: the episode that broke it fails, and
all others begin again in another worker, where their turns are answered from the record (`EpisodeSession.restart`). If
a loop stands still, the page shows whose callback runs, and that episode fails at once. If a process ends or writes
nonsense, the episodes that ran at that moment are suspects. They begin again apart from the others and in smaller
company, in the end one per worker. An episode that loses a second worker while it is the only one there has broken it.
If no episode ran, all begin again as before, and are suspects from the second time on. So no episode fails for what
another did, nor because its worker was once ended from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from typing import Any

from gspo_mega.agents.pooled_worker import NO_BOUND, Loss, PooledSession, PooledWorker, PoolEntry
from gspo_mega.agents.protocol import Task
from gspo_mega.agents.turn import Finished
from gspo_mega.base.errors import EpisodeError
from gspo_mega.config.schema import EpisodeFunction, Episodes

_START_ATTEMPTS = 3
# Suspects begin again in groups of at most this fraction (1/8) of them.
_SHARE_OF_SUSPECTS = 8
# How many workers in a row, each in place of the one before, may end without having had an episode.
_MOST_IDLE_LOSSES = 5
# The pause before the second of them is started. It doubles each time.
_PAUSE_SECONDS = 1.0


class EpisodePool:
    """Runs episodes in worker processes, any number at the same time: an `EpisodeRunner`.

    Use it inside one event loop: `await pool.start()`, concurrent `run`, `await pool.close()`; or as an async context
    manager. The thread of that loop must live as long as the pool, because the workers end with it.

    Attributes:
        tool_schemas: the schemas of the run's tools for the chat template, known once the pool has started.
        counts: since the start, `num_workers_recycled` (workers that were replaced, for any reason) and
            `num_processes_ended` (processes that episodes left behind).
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
            self._add_worker(worker)

    async def close(self) -> None:
        """End every worker, even in the middle of an episode; episodes that still run fail with EpisodeError."""
        self._fail_all(EpisodeError("the pool of episodes is closed"))
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
        """Run one episode to its end, and return how it ended. `name` is its prompt's name, for errors.

        A turn that was begun is sampled to its end and recorded, even if the episode did not wait for it. What the
        episode does wrong is in the result. Cancelling this ends the episode. Raises RolloutError, and any other error
        of `session.answer` that the episode did not cause; EpisodeError if the pool is closed or its functions cannot
        be loaded any more.
        """
        if self._broken is not None:
            raise self._broken
        self._num_entries += 1
        entry = PoolEntry(self._num_entries, task, session, name, asyncio.get_running_loop().create_future())
        self._open_entries.add(entry)
        self._waiting.append(entry)
        self._assign()
        try:
            finished = await entry.ended
            if finished.failure is None and entry.turns:
                # Nobody waits for these turns any more, but dropping them would drop long turns sooner than short ones.
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

    def _assign(self) -> None:
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
                self._free_worker(entry.room)
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

    def _free_worker(self, most: int) -> None:
        """Retire a worker, so that an empty one takes its place. One empty worker is wanted per `most` suspects, and
        at most half of the workers serve suspects. Without this, none would become empty while other episodes wait.
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

    def _episode_left(self, worker: PooledWorker) -> None:
        """An episode has left a worker."""
        if worker.num_processes_ended:
            self.counts["num_processes_ended"] += worker.num_processes_ended
            worker.num_processes_ended = 0
        if worker.is_dirty:
            self._retire(worker)
        self._assign()

    # The lives of workers

    async def _new_worker(self) -> PooledWorker:
        return await PooledWorker.start(self._settings, self._episode, self._tools)

    def _add_worker(self, worker: PooledWorker) -> None:
        self._workers.append(worker)
        self._spawn(self._serve(worker))
        self._assign()

    def _retire(self, worker: PooledWorker) -> None:
        """Give a worker no more episodes, and have another in its place."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._retired.add(worker)
            self._spawn(self._replace(worker))

    async def _serve(self, worker: PooledWorker) -> None:
        """Serve one worker until it is lost, or until it has no episode left after it was retired."""
        left = asyncio.Event()

        def done(_: PoolEntry) -> None:
            self._episode_left(worker)
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
            self._handle_loss(worker, loss)
        await worker.end()
        self._retired.discard(worker)

    async def _replace(self, lost: PooledWorker) -> None:
        """Start a worker in place of `lost`, which may still have episodes if it was retired. At most twice
        `num_workers` processes ever run.
        """
        if lost.num_idle_losses >= _MOST_IDLE_LOSSES:
            functions = ", ".join([self._episode.function, *self._tools])
            raise EpisodeError(
                f"{_MOST_IDLE_LOSSES} processes of episodes in a row ended without an episode in them; the last one:"
                f" {lost.idle_loss}. Either what they import ({functions}) ends them, or something outside does, such"
                " as the system when memory runs out"
            )
        self._num_opening += 1
        try:
            if lost.num_idle_losses > 1:
                await asyncio.sleep(_PAUSE_SECONDS * 2 ** (lost.num_idle_losses - 2))
            while len(self._retired) > self._settings.num_workers:
                await asyncio.sleep(0.05)
            self.counts["num_workers_recycled"] += 1
            worker = await self._start_with_retries()
        finally:
            self._num_opening -= 1
        worker.num_idle_losses = lost.num_idle_losses
        self._add_worker(worker)

    async def _start_with_retries(self) -> PooledWorker:
        for _ in range(_START_ATTEMPTS - 1):
            with contextlib.suppress(EpisodeError):
                return await self._new_worker()
        return await self._new_worker()

    def _handle_loss(self, worker: PooledWorker, loss: Loss) -> None:
        """Handle the loss of a worker: fail the episode that broke it, if that is known, and let all others begin
        again.
        """
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
                self._spawn(self._restart_episode(entry))

    async def _restart_episode(self, entry: PoolEntry) -> None:
        """Let an episode begin again, once the turns that are being sampled for it are in its record."""
        if entry.turns:
            await asyncio.wait(entry.turns)
        if entry.ended.done():
            return
        entry.session.restart()
        if entry.room == NO_BOUND:
            self._waiting.appendleft(entry)
        else:
            self._suspects.append(entry)
        self._assign()

    # Failures that end the run

    def _spawn(self, work: Any) -> None:
        """Run one of the pool's own coroutines as a task. What it raises ends the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_all(error)
            self._waiting.clear()

    def _fail_all(self, error: BaseException) -> None:
        """Fail every episode that is still running, and every later one."""
        self._broken = self._broken or error
        for entry in self._open_entries:
            if not entry.ended.done():
                entry.ended.set_exception(self._broken)


def check_functions(settings: Episodes, episode: EpisodeFunction, tools: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Load an episode and its tools once, in a worker, before a run needs them. Return the tools' schemas.

    Do not call it inside an event loop. Raises EpisodeError with what is missing.
    """

    async def load() -> list[dict[str, Any]]:
        worker = await PooledWorker.start(settings, episode, tools)
        await worker.end()
        return worker.tool_schemas

    return asyncio.run(load())
