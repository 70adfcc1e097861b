"""Rewards from services: an endpoint of the user's, a language model as a judge, a sequence classifier.

`Service` collects the responses that share a request; `RemoteCalls` (`remote.py`) sends it. The endpoint
(`_HttpExchange`) gets batches of responses as JSON and answers with a reward for each, as many and in the same order:

    request   {"responses": [{"prompt": text, "response": text, "answer": ..., "metadata": {...}, "options": {...},
              "num_response_tokens": n}, ...]}
    answer    {"rewards": [0.5, {"reward": 0.5, "correct": true, "fluency": 0.7}, {"error": "why"}, ...]}

A request that fails fails each of its responses; so does an answer that is not such an object or has another number of
rewards. An entry that is no reward fails only its own response.

`Judge` asks one response at a time over a server's OpenAI-compatible route, and finds a number in the answer with a
pattern or a key of its JSON. An answer without that number, or with one outside the judge's bounds, is a failure and
never 0. `Classifier` asks SGLang's route `/classify`, which takes texts and answers with the outputs of the model's
head; a response that is longer than the model's context fails by itself. Both use a form, in which `filled` replaces
placeholders by the response and the data that belongs to it.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import HttpReward, JudgeReward, ModelReward, RemoteReward
from gspo_mega.config.validate_rewards import PLACEHOLDER
from gspo_mega.rewards.builtin import compiled
from gspo_mega.rewards.remote import OwnServers, RemoteCalls, RemoteFailure
from gspo_mega.rewards.user_code import BadResult, number_of, result_of

Reply = dict[str, Any]
REWARD_GROUP = "reward"
# Only the end of a longer answer is read.
_MOST_CHARACTERS = 64 * 1024
# A closed block between three backticks, each at the beginning of a line.
_BLOCK = r"(?ms)^[ \t]*```[A-Za-z]*[ \t]*\n(.*?)^[ \t]*```[ \t]*$"
# A server answers with these if one of several texts is at fault.
_TEXT_AT_FAULT = (400, 413, 422)


@dataclass
class _ServiceJob:
    request: dict[str, Any]
    reply: asyncio.Future[Reply]


class Service:
    """One service, as the scoring pool asks it. Use it in one event loop, and call `close()` in the end."""

    def __init__(self, settings: RemoteReward, own: OwnServers | None = None) -> None:
        """`own` and RewardError: see `RemoteCalls`."""
        self._calls = RemoteCalls(settings, own)
        self._exchange = _exchange_of(settings, self._calls)
        self._concurrency = settings.concurrency
        self._waiting: deque[_ServiceJob] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request: dict[str, Any]) -> asyncio.Future[Reply]:
        """Queue one response, and return its future reply, in the form of a scoring process's. `request`: the pool's
        request with `options`.
        """
        job = _ServiceJob(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if len(self._tasks) < self._concurrency:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return job.reply

    async def close(self, error: RewardError) -> None:
        """End the requests in progress; everything that waits for a reply gets `error`."""
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
            batch: list[_ServiceJob] = []
            while self._waiting and len(batch) < self._exchange.batch_size:
                job = self._waiting.popleft()
                if not job.reply.done():  # else its caller was cancelled
                    batch.append(job)
            if batch:
                await self._serve(batch)

    async def _serve(self, batch: list[_ServiceJob]) -> None:
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
    """Raise RewardError if a variable that the service needs is not set or its settings are invalid. Sends nothing."""
    RemoteCalls(settings)
    if isinstance(settings, JudgeReward):
        check_judge(settings)


class _Exchange(Protocol):
    """How one kind of service answers requests: one reply for each. Raises RemoteFailure, which fails all of them."""

    batch_size: int

    async def __call__(self, requests: list[dict[str, Any]]) -> list[Reply]: ...


def _exchange_of(settings: RemoteReward, calls: RemoteCalls) -> _Exchange:
    if isinstance(settings, JudgeReward):
        return Judge(settings, calls)
    if isinstance(settings, ModelReward):
        return Classifier(settings, calls)
    assert isinstance(settings, HttpReward)
    return _HttpExchange(settings, calls)


def _failed(kind: str, why: str) -> Reply:
    return {"failure": kind, "why": why}


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


class Judge:
    """Asks one judge about one response at a time."""

    batch_size = 1

    def __init__(self, settings: JudgeReward, calls: RemoteCalls) -> None:
        self._settings = settings
        self._calls = calls

    async def __call__(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return replies in the form of a scoring process's. Raises RemoteFailure."""
        [request] = requests
        judge = self._settings
        messages = [{"role": "user", "content": filled(judge.prompt, request)}]
        if judge.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": filled(judge.system_prompt, request)})
        body = {"model": judge.model, "messages": messages, "temperature": judge.temperature}
        answer = await self._calls.post(body | {"max_tokens": judge.max_tokens} | judge.body, "/chat/completions")
        try:
            [choice, *_] = answer["choices"]
            text, end = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            text = end = None
        if not isinstance(text, str):
            raise RemoteFailure("malformed", f"no choices with a message: {self._calls.shown(answer)}")
        try:
            value = number_in(text[-_MOST_CHARACTERS:], judge)
        except ValueError as error:
            cut = f" (it ends at max_tokens, {judge.max_tokens})" if end == "length" else ""
            raise RemoteFailure("malformed", self._calls.hidden(f"the judge's answer{cut} {error}")) from None
        return [{"value": value, "parts": {}, "correct": None}]


def check_judge(judge: JudgeReward) -> None:
    """Raise RewardError if the judge's pattern is not one of RE2 or has no group `reward`."""
    if judge.regex is None:
        return
    try:
        groups = compiled(judge.regex).groupindex
    except RewardError as error:
        raise RewardError(f"reward {judge.name!r}: regex: {error}") from error
    if REWARD_GROUP not in groups:
        raise RewardError(f"reward {judge.name!r}: regex: {judge.regex!r} has no group (?P<{REWARD_GROUP}>...)")


def number_in(text: str, judge: JudgeReward) -> float:
    """Return the reward that an answer states. Raises ValueError with the end of a sentence that begins "the judge's
    answer".
    """
    found: Any
    if judge.regex is not None:
        matches = [match.group(REWARD_GROUP) for match in compiled(judge.regex).finditer(text)]
        if not matches:
            raise ValueError(f"has nothing that `regex` finds: {_shown(text)}")
        found = matches[-1] or ""
    else:
        assert judge.json_key is not None
        found = _key_of(judge.json_key, text)
    if judge.values:
        if str(found).strip() not in judge.values:
            raise ValueError(f"says {_shown(str(found))}, which is none of `values`: {', '.join(judge.values)}")
        return judge.values[str(found).strip()]
    try:
        number = float(found) if not isinstance(found, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"says {_shown(str(found))}, which is no number")
    low, high = judge.lowest, judge.highest
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"{'' if low is None else f'{low:g}'} to {'' if high is None else f'{high:g}'}"
        raise ValueError(f"says {number:g}, which is not in {bounds}")
    return number


def _key_of(key: str, text: str) -> Any:
    """Return the value of a key in an answer that is a JSON object, or whose last block between three backticks is
    one.
    """
    candidates = [text]
    candidates += [found.group(1) for found in compiled(_BLOCK).finditer(text)][-1:]
    for candidate in candidates:
        try:
            given = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(given, dict) and key in given:
            return given[key]
    raise ValueError(f"is no JSON object with {key!r}: {_shown(text)}")


def _shown(text: str) -> str:
    return repr(" ".join(text.split())[-120:])


class Classifier:
    """Asks one model about several responses at a time."""

    def __init__(self, settings: ModelReward, calls: RemoteCalls) -> None:
        self.batch_size = settings.batch_size
        self._settings = settings
        self._calls = calls

    async def __call__(self, requests: list[Reply]) -> list[Reply]:
        """Return replies in the form of a scoring process's. Raises RemoteFailure if all requests fail."""
        try:
            texts = [filled(self._settings.text, request) for request in requests]
            answer = await self._calls.post({"text": texts}, "/classify")
        except RemoteFailure as failure:
            if len(requests) == 1 or not (failure.kind == "exception" or failure.status in _TEXT_AT_FAULT):
                raise
            return await self._one_by_one(requests)
        if not isinstance(answer, list):
            raise RemoteFailure("malformed", f"no list of embeddings: {self._calls.shown(answer)}")
        if len(answer) != len(requests):
            raise RemoteFailure("malformed", f"{len(answer)} scores for {len(requests)} responses")
        return [self._reply(one) for one in answer]

    async def _one_by_one(self, requests: list[Reply]) -> list[Reply]:
        """Ask one by one, so that no more requests run at a time than before."""
        replies: list[Reply] = []
        for request in requests:
            try:
                replies += await self([request])
            except RemoteFailure as failure:
                replies.append({"failure": failure.kind, "why": str(failure)})
            await asyncio.sleep(0)
        return replies

    def _reply(self, answer: Any) -> Reply:
        outputs = answer.get("embedding") if isinstance(answer, dict) else None
        label = self._settings.label
        if not isinstance(outputs, list) or len(outputs) <= label:
            why = f"no embedding with output {label} (`label`): {self._calls.shown(answer)}"
            return {"failure": "malformed", "why": why}
        try:
            return {"value": number_of(outputs[label], "the score"), "parts": {}, "correct": None}
        except BadResult as error:
            return {"failure": error.kind, "why": str(error)}


def filled(form: str, request: dict[str, Any]) -> str:
    """Return a form with its placeholders replaced, all at once, so that braces in the inserted texts stay as they are.

    Raises RemoteFailure if the row or the entry's options lack a key.
    """

    def value(found: re.Match[str]) -> str:
        name, _, key = found[1].partition(".")
        given = request[name]
        if key:
            if key not in given:
                raise RemoteFailure("exception", f"there is no {found[1]} to fill in")
            given = given[key]
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return PLACEHOLDER.sub(value, form)
