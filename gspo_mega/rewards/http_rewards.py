"""Rewards from an endpoint of the user's: batches of responses as JSON, a number for each.

    request   {"responses": [{"prompt": text, "response": text, "answer": ..., "metadata": {...}, "options": {...},
              "num_response_tokens": n}, ...]}
    answer    {"rewards": [0.5, {"reward": 0.5, "correct": true, "fluency": 0.7}, {"error": "why"}, ...]}, as many, in
              the same order

Owns this format, and which responses share a request. A request that fails fails each of its responses; so does an
answer that is no such object or has another number of rewards. One entry that is no reward fails its response alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import HttpReward, JudgeReward, ModelReward, RemoteReward
from gspo_mega.rewards.judges import Judge, check_judge
from gspo_mega.rewards.model_rewards import Classifier
from gspo_mega.rewards.remote import OwnServers, RemoteCalls, RemoteFailure
from gspo_mega.rewards.returned_values import BadResult, result_of

Reply = dict[str, Any]


@dataclass
class _Job:
    request: dict[str, Any]
    reply: asyncio.Future[Reply]


class _Exchange(Protocol):
    """What a kind of service makes of requests: one reply for each. Raises RemoteFailure, which fails them all."""

    batch_size: int

    async def __call__(self, requests: list[dict[str, Any]]) -> list[Reply]: ...


class Service:
    """One service, as the scoring pool asks it. Use it in one event loop, and call `close()` in the end."""

    def __init__(self, settings: RemoteReward, own: OwnServers | None = None) -> None:
        """`own`, and raises RewardError: as `RemoteCalls`."""
        self._calls = RemoteCalls(settings, own)
        self._exchange = _exchange_of(settings, self._calls)
        self._concurrency = settings.concurrency
        self._waiting: deque[_Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request: dict[str, Any]) -> asyncio.Future[Reply]:
        """The reply to one response, in the form of a scoring process's. `request`: the pool's, with `options`."""
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if len(self._tasks) < self._concurrency:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return job.reply

    async def close(self, error: RewardError) -> None:
        """End the requests under way; what waits for a reply gets `error`."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._calls.close()
        for job in self._waiting:
            if not job.reply.done():
                job.reply.set_exception(error)
        self._waiting.clear()

    async def _work(self) -> None:
        while self._waiting:
            batch: list[_Job] = []
            while self._waiting and len(batch) < self._exchange.batch_size:
                job = self._waiting.popleft()
                if not job.reply.done():  # else its caller was cancelled
                    batch.append(job)
            if batch:
                await self._serve(batch)

    async def _serve(self, batch: list[_Job]) -> None:
        try:
            replies = await self._exchange([job.request for job in batch])
        except RemoteFailure as failure:
            replies = [_failed(failure.kind, str(failure))] * len(batch)
        except asyncio.CancelledError:
            self._waiting.extendleft(reversed(batch))
            raise
        except Exception as error:  # of this package's own, or a request that is no JSON
            replies = [_failed("exception", f"{type(error).__name__}: {error}")] * len(batch)
        for job, reply in zip(batch, replies, strict=True):
            if not job.reply.done():
                job.reply.set_result(reply)


def check_service(settings: RemoteReward) -> None:
    """Raises RewardError: a variable that it needs is not set, or what it should read cannot be meant. Asks nothing."""
    RemoteCalls(settings)
    if isinstance(settings, JudgeReward):
        check_judge(settings)


def _exchange_of(settings: RemoteReward, calls: RemoteCalls) -> _Exchange:
    if isinstance(settings, JudgeReward):
        return Judge(settings, calls)
    if isinstance(settings, ModelReward):
        return Classifier(settings, calls)
    assert isinstance(settings, HttpReward)
    return _HttpExchange(settings, calls)


class _HttpExchange:
    def __init__(self, settings: HttpReward, calls: RemoteCalls) -> None:
        self.batch_size = settings.batch_size
        self._calls = calls

    async def __call__(self, requests: list[dict[str, Any]]) -> list[Reply]:
        sent = ("prompt", "response", "answer", "metadata", "options", "num_response_tokens")
        answer = await self._calls.post({"responses": [{key: one[key] for key in sent} for one in requests]})
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise RemoteFailure("malformed", f"no object with a list `rewards`: {self._calls.shown(answer)}")
        if len(rewards) != len(requests):
            raise RemoteFailure("malformed", f"{len(rewards)} rewards for {len(requests)} responses")
        return [self._reply(reward) for reward in rewards]

    def _reply(self, reward: Any) -> Reply:
        if isinstance(reward, dict) and reward.get("error") is not None:
            return _failed("exception", f"the service says: {self._calls.shown(reward['error'])}")
        try:
            value, parts, correct = result_of(reward)
        except BadResult as error:
            return _failed(error.kind, self._calls.hidden(str(error)))
        return {"value": value, "parts": parts, "correct": correct}


def _failed(kind: str, why: str) -> Reply:
    return {"failure": kind, "why": why}
