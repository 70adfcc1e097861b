"""One worker process of episodes as its parent sees it: which episodes it has, what it says, and how it was lost.

`PooledWorker` starts the process, exchanges messages with it (`episode_worker.py` has the format) and interprets its
end as a `Loss`. Which worker an episode goes to, and what becomes of the episodes of a lost one, is decided in
`pool.py`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from gspo_mega.agents.loop_watch import LoopWatch
from gspo_mega.agents.owned_processes import NO_EPISODE
from gspo_mega.agents.protocol import Outcome, Task, TurnRefused
from gspo_mega.agents.turn import FAILURE_KINDS, Failure, Finished
from gspo_mega.base.episodes import ToolRecord
from gspo_mega.base.errors import DataError, EpisodeError
from gspo_mega.config.schema import EpisodeFunction, Episodes
from gspo_mega.rewards.guarded_process import GuardedProcess, ProcessKind

if TYPE_CHECKING:
    from gspo_mega.agents.session import AgentTurn

NO_BOUND = 2**31
_MODULE = "gspo_mega.agents.episode_worker"
_LOOKS = 5  # how often a loop is checked in the time after which it counts as blocked
_MOST_TICK_SECONDS = 0.25


class PooledSession(Protocol):
    """What a worker's messages reach. `EpisodeSession` in `session.py` implements it."""

    async def answer(self, messages: list[dict[str, Any]], *, max_new_tokens: int | None = None) -> AgentTurn: ...

    def set_reward(self, turn: int, value: float) -> None: ...

    def restart(self) -> None: ...


@dataclass(eq=False)
class PoolEntry:
    """One episode of the pool.

    `room` is how many episodes its worker may have; it is lowered once a worker that the episode was in was lost and
    it is not known who broke it. `num_lost` is how often this episode may have been the cause. `tools` is what its
    tools did, each with the key under which another worker finds the result. `late_error` is an error that ends the
    run, from a turn that was still being sampled when the episode had ended.
    """

    number: int
    task: Task
    session: PooledSession
    name: str
    ended: asyncio.Future[Finished]
    room: int = NO_BOUND
    num_lost: int = 0
    tools: list[tuple[ToolRecord, list[str] | None]] = field(default_factory=list)
    turns: set[asyncio.Task[None]] = field(default_factory=set)
    late_error: Exception | None = None

    def finish(self, outcome: Outcome | None, failure: Failure | None = None, **more: Any) -> None:
        if not self.ended.done():
            self.ended.set_result(Finished(outcome, failure, tool_calls=[record for record, _ in self.tools], **more))

    def fail(self, kind: str, text: str, **more: Any) -> None:
        self.finish(None, Failure(kind, text), **more)

    def stop_turns(self) -> None:
        for turn in self.turns:
            turn.cancel()


class Loss(NamedTuple):
    """How a worker was lost.

    `kind` is the kind of failure for the episode that caused it, and `why` says it in words. `suspects` are the
    episodes whose code ran at that moment, or all episodes of the worker if that is not known. `is_certain` says that
    the only suspect is the cause.
    """

    kind: str
    why: str
    suspects: list[PoolEntry]
    is_certain: bool = False


class PooledWorker:
    """A running worker.

    Attributes:
        entries: its episodes, by number.
        num_started: how many episodes it has had.
        num_processes_ended: how many processes of its episodes were ended, since the pool last counted them.
        is_dirty: an episode left something behind that does not end.
        num_idle_losses: how many workers in a row, up to this one, were lost without having had an episode. The first
            episode sets it to 0.
        idle_loss: how this worker was lost without an episode.
    """

    def __init__(self, settings: Episodes, process: GuardedProcess, watch: LoopWatch) -> None:
        self.entries: dict[int, PoolEntry] = {}
        self.num_started = 0
        self.num_processes_ended = 0
        self.is_dirty = False
        self.num_idle_losses = 0
        self.idle_loss = ""
        self.tool_schemas: list[dict[str, Any]] = process.ready["tools"]
        self._settings = settings
        self._process = process
        self._watch = watch
        self._num_lines = 0
        self._is_lost = False

    @classmethod
    async def start(cls, settings: Episodes, episode: EpisodeFunction, tools: tuple[str, ...]) -> Self:
        """Start a worker and return it. Raises EpisodeError if the episode or a tool cannot be loaded."""
        most_bytes = settings.endpoint.max_body_bytes
        kind = ProcessKind(_MODULE, "process of episodes", "episodes", EpisodeError, most_bytes + 1, NO_EPISODE)
        watch = LoopWatch()
        setup = {
            "episode": {"function": episode.function, "options": episode.options},
            "tools": tools,
            "page": watch.path,
            "memory_bytes": settings.memory_bytes,
            "file_bytes": settings.file_bytes,
            "network": settings.network,
            "turn_deadline_seconds": settings.turn_deadline_seconds,
            "deadline_seconds": settings.deadline_seconds,
            "tick_seconds": min(
                _MOST_TICK_SECONDS, settings.blocked_seconds / (2 * _LOOKS), settings.turn_deadline_seconds / 10
            ),
            "most_bytes": most_bytes,
        }
        names = ", ".join([f"episode {episode.function}", *(f"tool {name}" for name in tools)])
        try:
            process = await GuardedProcess.start(kind, setup, names, settings.environment)
        except BaseException:
            watch.close()
            raise
        watch.remove_file()
        return cls(settings, process, watch)

    @property
    def room(self) -> int:
        return min((entry.room for entry in self.entries.values()), default=NO_BOUND)

    async def end(self) -> None:
        """End the process and everything that it started."""
        self._is_lost = True
        await self._process.end()
        self._watch.close()

    def begin(self, entry: PoolEntry) -> None:
        """Run an episode. What its tools without a `task` parameter did in an earlier worker is not done again."""
        past, entry.tools = entry.tools, []
        task = {**asdict(entry.task), "state": {}}
        messages = [{"past": _as_message(record), "key": key} for record, key in past if key is not None]
        lines = [_line(entry, message) for message in (*messages, {"task": task, "name": entry.name})]
        if len(lines[-1]) > self._settings.endpoint.max_body_bytes:
            entry.fail("too_large", self._too_large("task", lines[-1]))
            return
        self.entries[entry.number] = entry
        self.num_started += 1
        self.num_idle_losses = 0
        for line in lines:
            self._process.send_line(line)

    def forget(self, entry: PoolEntry) -> None:
        """Tell the worker that nobody waits for this episode any more. Its place is free once the worker says so."""
        self._send(entry, {"end": True})

    def _who_runs(self) -> list[PoolEntry]:
        current, others = self._watch.who_runs()
        named = [self.entries[number] for number in {current, *others} if number in self.entries]
        return named or list(self.entries.values())

    async def listen(self, done: Any) -> Loss:
        """Serve the worker's messages until it is lost, and return how. `done(entry)` is called when an episode has
        left the worker.
        """
        reading, watching = asyncio.create_task(self._read(done)), asyncio.create_task(self._blocked())
        try:
            await asyncio.wait([reading, watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_lost = True
            reading.cancel()
            watching.cancel()
            await asyncio.gather(reading, watching, return_exceptions=True)
        if not reading.cancelled():
            return reading.result() or await self._process_ended()
        place = await self._watch.where(self._process.ready["pid"])
        return Loss(
            "blocked",
            f"it blocked the event loop of its worker for {self._settings.blocked_seconds:g} s{place}; await what takes"
            " long, or hand it to asyncio.to_thread",
            *watching.result(),
        )

    async def _blocked(self) -> tuple[list[PoolEntry], bool]:
        """Wait until the worker's loop is blocked. Return whose code runs, and whether it is certain who blocks it. It
        is not certain if another episode has a thread: that thread may be the cause, or may only wait, too.
        """
        most = self._settings.blocked_seconds
        while self._watch.silent_seconds(2 * most / _LOOKS) < most:
            await asyncio.sleep(most / _LOOKS)
        current, others = self._watch.who_runs()
        return self._who_runs(), current in self.entries and others <= {current}

    async def _process_ended(self) -> Loss:
        """Return the loss of a worker whose pipe has ended. The process may need longer to end than a loop may
        block.
        """
        suspects = self._who_runs()
        if self._process.may_speak:
            return Loss("crash", "its worker wrote something that is not a message", suspects)
        return Loss("crash", f"its worker process ended ({await self._process.exit_text()})", suspects)

    async def _read(self, done: Any) -> Loss | None:
        """Handle messages. Return a loss at the first one that is not valid, or None when there are no more."""
        while (message := await self._process.receive(None)) is not None:
            try:
                if message["line"] != self._num_lines:
                    raise ValueError("a line is missing or doubled")
                self._num_lines += 1
                entry = self.entries[message["episode"]]
                if message.get("is_crowded") and len(self.entries) > 1:
                    return Loss("memory", message["why"], list(self.entries.values()))
                self._handle(entry, message)
                self.num_processes_ended += int(message.get("num_processes", 0))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                why = f"its worker wrote something that is not a message ({type(error).__name__}: {error})"
                return Loss("crash", why, self._who_runs())
            if "is_clean" in message:
                self.is_dirty = self.is_dirty or not message["is_clean"]
                del self.entries[entry.number]
                done(entry)
        return None

    def _handle(self, entry: PoolEntry, message: dict[str, Any]) -> None:
        """Handle one message. Raises KeyError, TypeError or ValueError if it is not valid."""
        if "ask" in message:
            if not entry.ended.done():
                turn = asyncio.create_task(self._turn(entry, message))
                entry.turns.add(turn)
                turn.add_done_callback(entry.turns.discard)
        elif "reward" in message:
            try:
                entry.session.set_reward(int(message["turn"]), float(message["reward"]))
            except EpisodeError as error:
                entry.fail("exception", str(error))
                self.forget(entry)
        elif "tool" in message:
            entry.tools.append((ToolRecord(**message["tool"]), message["key"]))
        elif "outcome" in message:
            outcome = Outcome(**message["outcome"])
            entry.finish(outcome, limit=str(message["limit"]), own_seconds=float(message["own_seconds"]))
        elif message["failure"] in FAILURE_KINDS:
            entry.fail(message["failure"], str(message["why"]), own_seconds=float(message["own_seconds"]))
        elif not entry.ended.done():
            raise ValueError(f"failure {message['failure']!r:.60}")

    async def _turn(self, entry: PoolEntry, message: dict[str, Any]) -> None:
        try:
            most = message["max_new_tokens"]
            answer = await entry.session.answer(message["messages"], max_new_tokens=most)
            self._send(entry, {"ask": message["ask"], "message": answer.message, "number": answer.number})
        except TurnRefused as refusal:
            self._send(entry, {"ask": message["ask"], "refused": refusal.kind, "why": str(refusal)})
        except DataError as error:
            self._send(entry, {"ask": message["ask"], "refused": "messages", "why": str(error)})
        except EpisodeError as error:
            entry.fail("not_replayable", str(error))
            self.forget(entry)
        except Exception as error:  # no server can serve, or this package has a defect: it ends the run
            if entry.ended.done():
                entry.late_error = error
            else:
                entry.ended.set_exception(error)
            self.forget(entry)

    def _send(self, entry: PoolEntry, message: dict[str, Any]) -> None:
        if self._is_lost or entry.number not in self.entries:
            return
        line = _line(entry, message)
        if len(line) > self._settings.endpoint.max_body_bytes:
            entry.fail("too_large", self._too_large("answer", line))
            line = _line(entry, {"end": True})
        self._process.send_line(line)

    def _too_large(self, what: str, line: bytes) -> str:
        most = self._settings.endpoint.max_body_bytes
        return f"its {what} has {len(line)} bytes as a message; at most {most} (episodes.endpoint.max_body_bytes)"


def _line(entry: PoolEntry, message: dict[str, Any]) -> bytes:
    return json.dumps({"episode": entry.number} | message, ensure_ascii=False).encode("utf-8", "replace")


def _as_message(record: ToolRecord) -> dict[str, Any]:
    return {key: value for key, value in asdict(record).items() if value is not None}
