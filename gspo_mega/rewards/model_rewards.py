"""Rewards from a sequence classifier behind a server of SGLang: its route `/classify`, which takes texts and answers
with the outputs of the model's head.

Owns that format. A response that the server refuses, because it is longer than the model's context, fails alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gspo_mega.config.schema import ModelReward
from gspo_mega.rewards.prompt_forms import filled
from gspo_mega.rewards.remote import RemoteCalls, RemoteFailure
from gspo_mega.rewards.returned_values import BadResult, number_of

# What a server answers where one of several texts is at fault.
_OF_A_TEXT = (400, 413, 422)

Reply = dict[str, Any]


class Classifier:
    """Asks one model about several responses at a time."""

    def __init__(self, settings: ModelReward, calls: RemoteCalls) -> None:
        self.batch_size = settings.batch_size
        self._settings = settings
        self._calls = calls

    async def __call__(self, requests: list[Reply]) -> list[Reply]:
        """Replies in the form of a scoring process's. Raises RemoteFailure where all fail."""
        try:
            texts = [filled(self._settings.text, request) for request in requests]
            answer = await self._calls.post({"text": texts}, "/classify")
        except RemoteFailure as failure:
            if len(requests) == 1 or not (failure.kind == "exception" or failure.status in _OF_A_TEXT):
                raise
            return await self._alone(requests)
        if not isinstance(answer, list):
            raise RemoteFailure("malformed", f"no list of embeddings: {self._calls.shown(answer)}")
        if len(answer) != len(requests):
            raise RemoteFailure("malformed", f"{len(answer)} scores for {len(requests)} responses")
        return [self._reply(one) for one in answer]

    async def _alone(self, requests: list[Reply]) -> list[Reply]:
        """One after the other: so they are as many requests at a time as before."""
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
