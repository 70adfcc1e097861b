"""Score trajectories in a pool of isolated processes, with a deadline.

    score(episode) -> one job per function -> a process takes jobs -> replies, in order -> the episode's reward

`ScoringPool` decides which process scores what, and what happens if a scoring does not end normally. If the response is
the cause (`blame.py`), its reward is 0 and the cause is counted. If the machine is the cause, the scoring is tried
again. Anything else is a failed scoring: the episode has no reward, and the failure is recorded and counted. A function
that can no longer be loaded stops the run; the collector decides how many failures stop the run.

While a scoring takes long, `TreeTime` reads from /proc how its process and everything below it spends the time:
computing, asleep, or held up by the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_mega.base.episodes import ENDED_BY_LIMIT, OWN_REWARD, Episode
from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import OwnReward, Reward
from gspo_mega.config.validate_rewards import MOST_ATTEMPTS, MOST_DEADLINES, services_by_name
from gspo_mega.rewards.blame import CAUSES, is_killed_by_others, is_own_end
from gspo_mega.rewards.functions import BUILTINS, zero_for
from gspo_mega.rewards.guarded_process import GuardedProcess, ProcessKind
from gspo_mega.rewards.remote import OwnServers
from gspo_mega.rewards.services import Service, check_service
from gspo_mega.rewards.weighted_sum import Reply, WeightedFunction, sum_of, table_of, tally

# Only the end of a longer response is judged: the final answer is there, and a hostile response stays affordable.
MAX_RESPONSE_CHARACTERS = 64 * 1024
# Every kind of failure that is counted.
FAILURE_KINDS = (
    *("exception", "wrong_type", "not_finite", "deadline", "crash", "memory"),
    *("connection", "status", "malformed"),  # of services
)
# Fast functions get several requests ahead, which saves a round trip for each. Slow ones get one, so that no process
# idles while requests wait for another. A process gets as many as take about this time, judging by its recent ones.
_AHEAD_SECONDS = 0.02
_MOST_AHEAD = 32
_START_ATTEMPTS = 3
# The time of a scoring is first examined after the first share of its deadline, and then at intervals of the second
# share, or of `_LEAST_INTERVAL_SECONDS` if that is longer.
_FIRST_CHECK, _CHECK_INTERVAL = 1 / 8, 1 / 32
_LEAST_INTERVAL_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_THREADS = 64
_KIND = ProcessKind("gspo_mega.rewards.scoring_worker", "scoring process", "reward", RewardError)


@dataclass
class _ScoringJob:
    """One call of one function. `num_lost`: the attempts lost so far."""

    request: dict[str, Any]
    reply: asyncio.Future[dict[str, Any]]
    num_lost: int = 0


class _Overdue(Exception):
    """A scoring is over its deadline. `held_up`: the machine did not give it that time; `computing`: it computed most
    of its own time.
    """

    def __init__(self, held_up: bool, computing: bool) -> None:
        super().__init__()
        self.held_up, self.computing = held_up, computing


@dataclass
class _Slot:
    """A place for one process. `sent`: the jobs that the process has, oldest first; it works on the first."""

    process: GuardedProcess
    sent: deque[_ScoringJob] = field(default_factory=deque)
    num_scored: int = 0
    head_since: float = 0.0
    mean_seconds: float = _AHEAD_SECONDS

    @property
    def num_ahead(self) -> int:
        return min(_MOST_AHEAD, max(1, int(_AHEAD_SECONDS / self.mean_seconds)))


class ScoringPool:
    """Scores trajectories with `settings.functions`, in processes and by services, or with a source's own reward.

    Use it inside one event loop: `await pool.start()`, any number of concurrent `score`, `await pool.close()`; or
    as an async context manager. The thread of that loop must live as long as the pool, because the scoring processes
    end with it.

    Attributes:
        num_scored: trajectories scored so far.
        failure_counts: failed scorings of single functions so far, by kind (`FAILURE_KINDS`).
        fault_counts: scorings of single functions that are 0 because the response made them fail, by cause
            (`blame.CAUSES`).
    """

    def __init__(
        self,
        settings: Reward,
        source_rewards: Mapping[str, OwnReward] | None = None,
        own_servers: Callable[[str], OwnServers] | None = None,
    ) -> None:
        """`source_rewards`: the functions of each source that has a reward of its own. `own_servers`: gives the servers
        of an entry of `reward.model` that has a `path`.
        """
        self._own_servers = own_servers
        self.num_scored = 0
        self.failure_counts: dict[str, int] = dict.fromkeys(FAILURE_KINDS, 0)
        self.fault_counts: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._settings = settings
        self._setup, self._remote, self._entries, self._entries_of_source = table_of(settings, source_rewards or {})
        self._services: dict[str, Service] = {}
        self._waiting: deque[_ScoringJob] = deque()
        self._work = asyncio.Event()
        self._slots: list[_Slot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._broken: RewardError | None = None
        self._next_id = 0

    async def start(self) -> None:
        """Start all processes and load the functions. Raises RewardError as `check_reward` does."""
        self._services = {
            name: Service(one, self._own_servers(name) if self._own_servers and not one.url else None)
            for name, one in services_by_name(self._settings).items()
        }
        num_processes = self._settings.num_workers if self._setup["functions"] else 0
        started = await asyncio.gather(
            *(scoring_process(self._setup, self._settings) for _ in range(num_processes)),
            return_exceptions=True,
        )
        self._slots = [_Slot(process) for process in started if isinstance(process, GuardedProcess)]
        for outcome in started:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome
        self._tasks = [asyncio.create_task(self._serve(slot)) for slot in self._slots]

    async def close(self) -> None:
        """End every process, even in the middle of a function; jobs that still wait fail with RewardError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.process.end() for slot in self._slots))
        error = RewardError("the scoring pool is closed")
        self._break(error)
        await asyncio.gather(*(service.close(error) for service in self._services.values()))
        self._tasks, self._slots, self._services = [], [], {}

    async def __aenter__(self) -> ScoringPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(self, episode: Episode) -> None:
        """Fill `reward`, `reward_parts`, `reward_error` and `correct` of an episode, and count in its `counts` the
        failures that the response caused.

        The reward is the sum of the episode's own reward, its turns' rewards and the weighted functions: in float64,
        rounded once, and 0 if the terms cancel except for rounding. A function whose `only_if` does not hold is not
        asked and adds 0. If any function fails, the reward is None and `reward_error` names function and reason; the
        parts of the others are kept. If nothing gives a reward, an episode that a limit ended has 0; any other fails.

        Raises RewardError if the pool is closed or was never started, or if its functions can no longer be loaded.
        """
        entries = self._entries_of_source.get(episode.prompt.source, self._entries)
        found = tally(entries, await self._ask(entries, episode))
        parts = {name: value for name, value in episode.reward_parts.items() if name.partition("/")[0] == OWN_REWARD}
        terms = [parts[OWN_REWARD]] if OWN_REWARD in parts else []
        terms += [turn.reward for turn in episode.turns if turn.reward is not None]
        terms += found.terms
        parts |= found.parts
        errors = [text for _, text in found.failures]
        for kind, _ in found.failures:
            self.failure_counts[kind] += 1
        counts = dict(episode.counts)
        for cause in found.causes:
            self.fault_counts[cause] += 1
            for name in ("num_response_faults", f"num_response_faults_{cause}"):
                counts[name] = counts.get(name, 0) + 1
        episode.counts = counts
        if not terms and not errors and ENDED_BY_LIMIT not in episode.info:
            self.failure_counts["wrong_type"] += 1
            errors.append("the episode returned no reward, and reward.functions is empty")
        total = sum_of(terms)
        if not errors and not math.isfinite(total):
            self.failure_counts["not_finite"] += 1
            errors.append(f"the weighted sum of {', '.join(parts)} is {total}")
        episode.reward = None if errors else total
        episode.reward_parts = parts
        episode.reward_error = "; ".join(errors) or None
        if episode.correct is None or errors:
            episode.correct = None if errors else found.correct
        self.num_scored += 1

    async def _ask(self, entries: tuple[WeightedFunction, ...], episode: Episode) -> dict[str, Reply]:
        """Ask all functions, each after those that it depends on (`only_if`). Returns the replies by label."""
        replies: dict[str, Reply] = {}
        waiting = list(entries)
        while waiting:
            ready = [entry for entry in waiting if entry.is_known(replies)]
            asked = [entry.label for entry in ready if entry.is_open(replies)]
            answers = await asyncio.gather(*(self._call(label, episode) for label in asked))
            replies |= {entry.label: None for entry in ready} | dict(zip(asked, answers))
            waiting = [entry for entry in waiting if entry.label not in replies]
        return replies

    def _call(self, label: str, episode: Episode) -> asyncio.Future[dict[str, Any]]:
        if self._broken is not None:
            raise self._broken
        if not self._tasks and not self._services:
            raise RewardError("the scoring pool was not started")
        self._next_id += 1
        prompt = episode.prompt
        request = {
            "id": self._next_id,
            "label": label,
            "prompt": prompt.text,
            "response": episode.response_text[-MAX_RESPONSE_CHARACTERS:],
            "answer": prompt.answer,
            "metadata": prompt.metadata,
            "num_response_tokens": episode.num_sampled_tokens,
        }
        if (asked := self._remote.get(label)) is not None:
            return self._services[asked["function"]].ask(request | {"options": asked["options"]})
        job = _ScoringJob(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._work.set()
        return job.reply

    async def _serve(self, slot: _Slot) -> None:
        """Keep one slot's process supplied until the pool is closed. An error fails the waiting jobs."""
        try:
            while True:
                if slot.num_scored >= self._settings.recycle_after and not slot.sent:
                    await self._replace(slot)
                self._supply(slot)
                if slot.sent:
                    await self._receive(slot)
                else:
                    self._work.clear()
                    await self._work.wait()
        except RewardError as error:
            self._break(error)
        except Exception as error:
            self._break(RewardError(f"the scoring pool failed: {error!r}"))
            raise

    def _supply(self, slot: _Slot) -> None:
        """Hand waiting jobs to a process, up to the number that it may have ahead; none once it is due for replacement.

        It never gets more than its share of the waiting jobs, because they may be slower than its recent ones.
        """
        share = math.ceil(len(self._waiting) / len(self._slots))
        while self._waiting and len(slot.sent) < min(slot.num_ahead, share):
            if slot.num_scored + len(slot.sent) >= self._settings.recycle_after:
                return
            job = self._waiting.popleft()
            if job.reply.done():  # its caller was cancelled
                continue
            if not slot.sent:
                slot.head_since = time.monotonic()
            slot.sent.append(job)
            slot.process.send(job.request)

    async def _receive(self, slot: _Slot) -> None:
        """Wait for the reply to a process's oldest job, or for its deadline or the process's end."""
        deadline = self._settings.deadline_seconds
        try:
            reply = await self._reply(slot)
        except _Overdue as over:
            if slot.process.is_gone:  # a process that it started keeps its pipe open
                reply = None
            else:
                why = f"no result within {deadline:g} s"
                if over.held_up:
                    why += ", most of which it did not get a processor: the machine is busy, or somebody stopped it"
                cause = "time" if over.computing and not over.held_up else None
                again = over.held_up or (cause is None and self._is_own(slot))
                await self._give_up(slot, "deadline", why, cause, again)
                return
        if reply is None:
            why = f"the scoring process ended ({await slot.process.exit_text()})"
            code = slot.process.exit_code or 0
            last = slot.sent[0].num_lost + 1 >= MOST_ATTEMPTS
            again = self._is_own(slot) or is_killed_by_others(code)
            await self._give_up(slot, "crash", why, "crash" if is_own_end(code) and last else None, again)
            return
        if reply.get("id") != slot.sent[0].request["id"]:
            # That happens when a function forks and returns twice.
            await self._give_up(slot, "crash", "the scoring process answered out of turn")
            return
        job = slot.sent.popleft()
        now = time.monotonic()
        slot.mean_seconds += 0.25 * (max(now - slot.head_since, 1e-6) - slot.mean_seconds)
        slot.head_since = now
        slot.num_scored += 1
        self._answered(job, reply)

    async def _reply(self, slot: _Slot) -> dict[str, Any] | None:
        """Return the next reply, or None when `GuardedProcess.receive` returns None. Time in which the machine holds
        the process up does not count, up to `MOST_DEADLINES` deadlines. Raises _Overdue.
        """
        deadline = self._settings.deadline_seconds
        wait, clock = _FIRST_CHECK * deadline, None
        while True:
            try:
                return await slot.process.receive(slot.head_since + wait - time.monotonic())
            except TimeoutError:
                if slot.process.is_gone:
                    raise _Overdue(held_up=False, computing=False) from None
            step = max(_LEAST_INTERVAL_SECONDS, _CHECK_INTERVAL * deadline)
            if clock is None:
                clock = TreeTime(slot.process.pid)
            else:
                clock.update(step)
            passed = time.monotonic() - slot.head_since
            own = passed - clock.held_up_seconds
            if own >= deadline:
                computing = clock.computed_seconds >= (clock.seen_seconds - clock.held_up_seconds) / 2
                raise _Overdue(held_up=False, computing=computing)
            if passed >= deadline * (1 if clock.is_stopped else MOST_DEADLINES):
                raise _Overdue(held_up=True, computing=False)
            wait = passed + min(step, deadline - own)

    def _is_own(self, slot: _Slot) -> bool:
        """Return whether the job that a process works on is for a built-in function."""
        return self._function_of(slot.sent[0])["function"] in BUILTINS

    def _function_of(self, job: _ScoringJob) -> dict[str, Any]:
        return self._setup["functions"][job.request["label"]]

    def _answered(self, job: _ScoringJob, reply: dict[str, Any]) -> None:
        """Pass a reply on, or queue the job again if the machine was the cause of its failure."""
        job.num_lost += 1
        if reply.get("again") and job.num_lost < MOST_ATTEMPTS:
            self._waiting.append(job)
            self._work.set()
            return
        if reply.get("again"):
            reply["why"] += f" (tried {job.num_lost} times)"
        _resolve(job, reply)

    async def _give_up(self, slot: _Slot, kind: str, why: str, cause: str | None = None, again: bool = False) -> None:
        """End the job that a process was working on, queue the jobs after it again, and replace the process.

        `cause`: what the response caused, for which a built-in function gives 0. `again`: whether to try the job again.
        """
        job = slot.sent.popleft()
        own = self._function_of(job)
        if cause is not None and own["function"] in BUILTINS:
            _resolve(job, zero_for(cause, own["function"], own["options"]))
        else:
            self._answered(job, {"failure": kind, "why": why, "again": again})
        self._waiting.extendleft(reversed(slot.sent))
        slot.sent.clear()
        self._work.set()
        await self._replace(slot)

    async def _replace(self, slot: _Slot) -> None:
        await slot.process.end()
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                slot.process = await scoring_process(self._setup, self._settings)
                break
            except RewardError:
                if attempt == _START_ATTEMPTS:
                    raise
        slot.num_scored = 0
        slot.mean_seconds = _AHEAD_SECONDS

    def _break(self, error: RewardError) -> None:
        """Fail every job that is not done, and every later one."""
        self._broken = self._broken or error
        for job in [*self._waiting, *(job for slot in self._slots for job in slot.sent)]:
            if not job.reply.done():
                job.reply.set_exception(self._broken)
        self._waiting.clear()
        for slot in self._slots:
            slot.sent.clear()


def _resolve(job: _ScoringJob, reply: dict[str, Any]) -> None:
    if not job.reply.done():
        job.reply.set_result(reply)


def check_reward(settings: Reward, source_rewards: Mapping[str, OwnReward] | None = None) -> None:
    """Load every function of a configuration once, in a scoring process, before a run needs it. Services are not asked,
    but the environment variables that they need must be set.

    Do not call this inside an event loop. Raises RewardError with what is missing.
    """
    setup, *_ = table_of(settings, source_rewards or {})
    for service in services_by_name(settings).values():
        check_service(service)

    async def load() -> None:
        process = await scoring_process(setup, settings)
        await process.end()

    asyncio.run(load())


async def scoring_process(setup: dict[str, Any], settings: Reward) -> GuardedProcess:
    """Return a process that has loaded the functions of `setup`. Raises RewardError as `check_reward` does."""
    names = ", ".join(sorted({entry["function"] for entry in setup["functions"].values()}))
    return await GuardedProcess.start(_KIND, setup, f"rewards {names}", settings.environment)


class TreeTime:
    """The time of a process tree since this object was made.

    Attributes:
        computed_seconds: processor time of all its processes, those that have ended included.
        held_up_seconds: time in which one of them wanted a processor or a page from disk and did not get it, or was
            stopped by somebody.
        seen_seconds: all of the time.
        is_stopped: whether one of them was stopped at the last `update`.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.computed_seconds = self.held_up_seconds = self.seen_seconds = 0.0
        self.is_stopped = False
        self._last = time.monotonic()
        self._before, _ = _ticks_and_states(pid)

    def update(self, expected_seconds: float) -> None:
        """Add the time since the last call. `expected_seconds`: how long that should be; if it is much longer, this
        process was held up, and so were those of the tree.
        """
        passed = time.monotonic() - self._last
        self._last += passed
        ticks, states = _ticks_and_states(self._pid)
        computed = max(0.0, (ticks - self._before) / _TICKS)
        self._before = max(ticks, self._before)
        self.is_stopped = bool(states & set("Tt"))
        if states & set("RDTt") or passed > 2 * expected_seconds + 0.5:
            self.held_up_seconds += max(0.0, passed - computed)
        self.computed_seconds += computed
        self.seen_seconds += passed


def _ticks_and_states(pid: int) -> tuple[int, set[str]]:
    """Return (processor time so far in ticks, states of all threads) of a process tree."""
    ticks, states = 0, set[str]()
    left = [pid]
    while left:
        one = Path("/proc", str(left.pop()))
        with contextlib.suppress(OSError, ValueError):
            fields = _stat(one / "stat")
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that have ended
            for task in list((one / "task").iterdir())[:_MOST_THREADS]:
                states.add(_stat(task / "stat")[0])
                left += map(int, (task / "children").read_text(encoding="ascii").split())
    return ticks, states


def _stat(path: Path) -> list[str]:
    """Return the fields of a stat file after "pid (command)"; the command may contain anything."""
    return path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
