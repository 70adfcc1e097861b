"""Rewards from a language model as a judge, behind the OpenAI-compatible route of a server.

Owns what the judge is asked, and what its answer says: a number that a pattern or a key of its JSON
finds. An answer in which neither finds one is a failure, as is a number outside the judge's bounds; it is never 0.
"""

from __future__ import annotations

import json
import math
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import JudgeReward
from gspo_mega.rewards.patterns import compiled
from gspo_mega.rewards.prompt_forms import filled
from gspo_mega.rewards.remote import RemoteCalls, RemoteFailure

REWARD_GROUP = "reward"
# Only the end of a longer answer is read.
_MOST_CHARACTERS = 64 * 1024
# A closed block between three backticks, which begin their lines.
_BLOCK = r"(?ms)^[ \t]*```[A-Za-z]*[ \t]*\n(.*?)^[ \t]*```[ \t]*$"


class Judge:
    """Asks one judge about one response at a time."""

    batch_size = 1

    def __init__(self, settings: JudgeReward, calls: RemoteCalls) -> None:
        self._settings = settings
        self._calls = calls

    async def __call__(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replies in the form of a scoring process's. Raises RemoteFailure."""
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
    """Raises RewardError: its pattern is none of RE2, or has no group `reward`."""
    if judge.regex is None:
        return
    try:
        groups = compiled(judge.regex).groupindex
    except RewardError as error:
        raise RewardError(f"reward {judge.name!r}: regex: {error}") from error
    if REWARD_GROUP not in groups:
        raise RewardError(f"reward {judge.name!r}: regex: {judge.regex!r} has no group (?P<{REWARD_GROUP}>...)")


def number_in(text: str, judge: JudgeReward) -> float:
    """The reward that an answer states. Raises ValueError, with the rest of a sentence about the answer."""
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
    """The value of a key in an answer that is a JSON object, or whose last block between three backticks is one."""
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
