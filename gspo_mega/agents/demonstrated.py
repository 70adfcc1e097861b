"""A demonstrated conversation as the tokens that an episode would have recorded, had the policy sampled its text.

`DemonstrationEncoder` takes the steps of a session (`session.py`): locate, render the suffix, parse, record. A message
of the assistant takes the place of sampling. So the template's text between turns, the branches and the mask come from
the same code as in a rollout, and a demonstration that a rollout could not bring about is refused or left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_mega.agents.messages import MessageParts, ToolFormat, format_of, parts_of
from gspo_mega.agents.recorder import Recorder
from gspo_mega.agents.turn import Limits, Turn
from gspo_mega.base.episodes import Episode
from gspo_mega.base.errors import DataError
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import episode_lengths, is_one_turn
from gspo_mega.config.schema import Config
from gspo_mega.data.chat import Message, arguments_of
from gspo_mega.data.demonstrations import DemonstratedRow
from gspo_mega.data.prompts import encoder_of
from gspo_mega.data.templates import Rewritten, SuffixRule

_NO_PROMPT = Prompt("", "", (), "")


def demonstration_encoder(
    config: Config, tokenizer: Any, end_token_ids: Sequence[int], tool_schemas: Sequence[dict[str, Any]]
) -> DemonstrationEncoder | None:
    """Return the encoder for a run's demonstrations of several turns; None if its episode has one turn.

    `end_token_ids` are the model's. Raises DataError if the template cannot continue after a turn, or if its format of
    calls is not known.
    """
    if is_one_turn(config.rollout):
        return None
    encoder = encoder_of(config.data, tokenizer)
    lengths = episode_lengths(config)
    return DemonstrationEncoder(
        SuffixRule(encoder, end_token_ids, tool_schemas),
        format_of(config.episodes.tool_format, tokenizer.get_chat_template(), tool_schemas),
        Limits(lengths.turns, lengths.tokens),
        config.rollout.max_new_tokens,
    )


class DemonstrationEncoder:
    """Encodes the demonstrations of one run."""

    def __init__(
        self,
        rule: SuffixRule,
        tool_format: ToolFormat,
        limits: Limits,
        max_new_tokens: int,
    ) -> None:
        """`rule` has the tools' schemas. `limits` are those of the run's episodes; `max_new_tokens` is that of one
        turn.
        """
        self._rule = rule
        self._format = tool_format
        self._limits = limits
        self._max_new_tokens = max_new_tokens

    def __call__(self, prompt: Sequence[Message], messages: Sequence[Message]) -> tuple[DemonstratedRow, ...] | None:
        """Return the rows of `messages` after `prompt`, or None if a rollout would have met a limit before the end.

        Raises DataError if the template refuses a message or has no place for it, if the run would not read one of its
        calls in the text, or if the results are not one per call.
        """
        recorder = Recorder()
        history = list(prompt)
        for turn, (number, message, others) in enumerate(_turns_of(messages)):
            if turn == self._limits.max_turns:
                return None
            context, gap = self._context(recorder, history)
            as_sampled = self._rule.sampled_text(history, message)
            text, sampled = as_sampled.text, as_sampled.token_ids
            num_before = len(recorder.tokens(context))
            if len(sampled) > self._max_new_tokens or num_before + len(sampled) > self._limits.max_tokens:
                return None
            parts = parts_of(text, self._format, turn=turn, tools=self._rule.tools, gap=gap)
            self._check_calls(number, message, parts)
            said = self._rule.given(history, parts.message, text)
            nothing = Turn(sampled, [0.0] * len(sampled), [0] * len(sampled), "stop")
            recorder.add_sampled(context, said, nothing, text)
            history += [said, *_answered(number, said.get("tool_calls") or [], others)]
        return tuple(
            DemonstratedRow(row.prompt.token_ids, tuple(row.response_token_ids), tuple(row.response_mask))
            for row in Episode("", 0, _NO_PROMPT, recorder.nodes).rows()
        )

    def _context(self, recorder: Recorder, history: Sequence[Message]) -> tuple[int, str]:
        """Add the context node for `history`. Return its id and its text."""
        tools = self._rule.tools
        place = recorder.locate(history, tools)
        rendered = (
            self._rule.first(place.messages)
            if place.node < 0
            else self._rule.after(recorder.history(place.node), place.new)
        )
        if isinstance(rendered, Rewritten):
            place = place.rewritten()
            rendered = self._rule.first(place.messages)
        return recorder.add_context(place, rendered, tools), rendered.text

    def _check_calls(self, number: int, message: Message, parts: MessageParts) -> None:
        """Raise DataError if the run would read other calls in the text of a message than the message has."""
        read = [_meaning_of(call) for call in parts.message.get("tool_calls") or []]
        if parts.num_broken_calls or (message.get("tool_calls") and read != [*map(_meaning_of, message["tool_calls"])]):
            found = ", ".join(f"{name}({arguments})" for name, arguments in read) or "none"
            raise DataError(
                f"message {number}: the run would not read its tool calls (episodes.tool_format: {self._format.name};"
                f" read: {found}; broken: {parts.num_broken_calls})"
            )


def _turns_of(messages: Sequence[Message]) -> Iterator[tuple[int, Message, list[Message]]]:
    """Yield each turn: its message's number in the list, counted from 1; the message; the messages after it."""
    starts = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        yield start + 1, messages[start], list(messages[start + 1 : end])


def _answered(number: int, calls: Sequence[Message], others: Sequence[Message]) -> list[Message]:
    """Return the messages after a turn. Results of tools get the id and the name of their call, in the order of the
    calls, as `Tools.answer` gives them. Raises DataError if there are not as many results as calls.
    """
    results = [message for message in others if message["role"] == "tool"]
    if results and len(results) != len(calls):
        raise DataError(
            f"message {number} has {len(calls)} tool calls, and {len(results)} results of tools follow it; a rollout"
            " gives one for each call"
        )
    waiting = iter(calls)
    answered = []
    for message in others:
        if message["role"] == "tool":
            call = next(waiting)
            message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        answered.append(message)
    return answered


def _meaning_of(call: Message) -> tuple[str, str]:
    return call["function"]["name"], json.dumps(arguments_of(call), sort_keys=True)
