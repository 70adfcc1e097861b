"""Demonstrations for the supervised start: a prompt and an answer to it, as token ids and a mask.

`problem_of_response` says what `data.response_key` may hold. A demonstration of one turn is read and encoded exactly as
prompts are for rollouts (`prompts.py`), so that rollouts continue where the demonstrations end. A conversation of
several turns becomes tokens by the rules of episodes, which the caller hands in. `stream.py` orders them, as it does
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gspo_mega.config.prompt_sources import sources_of
from gspo_mega.config.schema import Data
from gspo_mega.data.chat import Message, PromptEncoder, problem_of_message, read_message
from gspo_mega.data.prompts import RowSource, encoder_of, missing_key, problem_of_prompt
from gspo_mega.data.rows import Enough, Row, type_name

# Fewer than of prompts: a conversation is rendered several times, which takes milliseconds, a prompt a tenth of one.
NUM_CONVERSATIONS_SURVEYED = 1_000
_ROLES = ("assistant", "tool", "user")


@dataclass(frozen=True)
class DemonstratedRow:
    """One sequence to learn from. `response_mask` has an entry per response token: 1 for what the assistant says, its
    end tokens included, and 0 for what others say.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    response_mask: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)

    @property
    def num_learned(self) -> int:
        return sum(self.response_mask)


@dataclass(frozen=True)
class Demonstration:
    """The sequences of one row of the data. `demonstration_id` is `<source>:<row counted from 0>`. There is one
    sequence, and one more for every branch: a place where the chat template writes earlier turns in another way. Each
    of the assistant's tokens has mask 1 in one of the sequences.
    """

    demonstration_id: str
    rows: tuple[DemonstratedRow, ...]

    @classmethod
    def of_one_turn(
        cls, demonstration_id: str, prompt_token_ids: Sequence[int], response_token_ids: Sequence[int]
    ) -> Demonstration:
        """A demonstration of one response, every token of which is learned."""
        response = tuple(response_token_ids)
        return cls(demonstration_id, (DemonstratedRow(tuple(prompt_token_ids), response, (1,) * len(response)),))


EncodeConversation: TypeAlias = Callable[[Sequence[Message], Sequence[Message]], tuple[DemonstratedRow, ...] | None]
"""Given a prompt as messages, the system prompt included, and the messages that follow it, returns the sequences of the
conversation; None if they are longer than a rollout could be. Raises DataError if the chat template refuses them, or if
no rollout could produce them."""


class DemonstrationSource(RowSource[Demonstration]):
    """Demonstrations of one file. Too long is what no rollout could produce: a prompt over `data.max_prompt_tokens`, a
    turn (end token included) over `max_response_tokens`, or a conversation that is too long for `conversation`.
    """

    def __init__(
        self,
        name: str,
        path: str | Path,
        data: Data,
        encoder: PromptEncoder,
        max_response_tokens: int,
        conversation: EncodeConversation | None = None,
        enough: Enough = lambda num_rows: False,
    ) -> None:
        self._max_response_tokens = max_response_tokens
        self._conversation = conversation
        super().__init__(name, path, data, encoder, enough)

    def _problem_of(self, values: Row) -> str | None:
        problem = problem_of_prompt(values, self._data, self._encoder) or problem_of_response(
            values, self._data, has_turns=self._conversation is not None
        )
        if problem is not None:
            return problem
        end = self._encoder.end_token
        for message in _messages_of(values[self._data.response_key]):
            if message["role"] == "assistant" and (message.get("content") or "").rstrip().endswith(end):
                return (
                    f"{self._data.response_key!r} has a text that ends with the end token {end!r}; leave it out, it is"
                    " added to every turn"
                )
        return None

    def _make(self, row: int, values: Row) -> Demonstration | None:
        data, name = self._data, f"{self.name}:{row}"
        prompt, messages = values[data.prompt_key], _messages_of(values[data.response_key])
        _, prompt_ids = self._encoder.encode_prompt(prompt)
        if len(prompt_ids) > data.max_prompt_tokens:
            return None
        if self._conversation is not None:
            rows = self._conversation(self._encoder.messages_of(prompt), messages)
            return None if rows is None else Demonstration(name, rows)
        response_ids = self._encoder.encode_response(messages[0]["content"])
        return (
            None
            if len(response_ids) > self._max_response_tokens
            else Demonstration.of_one_turn(name, prompt_ids, response_ids)
        )

    def _num_surveyed(self) -> int:
        return super()._num_surveyed() if self._conversation is None else NUM_CONVERSATIONS_SURVEYED

    def limits(self) -> str:
        several = "" if self._conversation is None else ", episodes.max_turns, episodes.max_tokens"
        return (
            f"data.max_prompt_tokens: {self._data.max_prompt_tokens}, rollout.max_new_tokens:"
            f" {self._max_response_tokens}{several}"
        )


def problem_of_response(values: Row, data: Data, *, has_turns: bool) -> str | None:
    """What is wrong with the demonstration of a row, or None. `has_turns`: the episode of the run may have several
    turns. Needs no tokenizer.
    """
    key = data.response_key
    missing = missing_key(values, key, "data.response_key")
    if missing is not None:
        return missing
    response = values[key]
    if isinstance(response, str):
        return None if response.strip() else f"{key!r} is empty"
    if not isinstance(response, list):
        return f"{key!r} must be a text or a list of chat messages, not {type_name(response)}"
    if not response:
        return f"{key!r} is an empty list of messages"
    if not data.chat_template:
        return f"{key!r} is a list of chat messages, which needs data.chat_template: true"
    for number, message in enumerate(response, start=1):
        if (problem := _problem_of_message(message)) is not None:
            return f"{key!r} has message {number} that {problem}"
    roles = [message["role"] for message in response]
    if roles[0] != "assistant" or roles[-1] != "assistant":
        at = 1 if roles[0] != "assistant" else len(roles)
        return f"{key!r} has message {at} from the {roles[at - 1]}; the first and the last must be the assistant's"
    for number in range(1, len(roles)):
        if roles[number - 1] == roles[number] == "assistant":
            return f"{key!r} has two messages of the assistant's, {number} and {number + 1}, with nothing between them"
    if not has_turns and (len(roles) > 1 or read_message(response[0]).keys() - {"role", "content"}):
        return (
            f"{key!r} has several turns or calls, and `rollout.episode: one_turn` has neither; name the episode that"
            " the policy is trained with afterwards, such as tool_loop"
        )
    return None


def _problem_of_message(message: Any) -> str | None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return f"is no message of the role {', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
    said = "" if message.get("content") is None else message["content"]
    if (problem := problem_of_message({**message, "content": said})) is not None:
        return problem
    if message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls"):
        return 'has no text; {"role": "assistant", "content": "text"} is the form'
    return None


def _messages_of(response: str | list[Message]) -> list[Message]:
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    return [read_message(message) for message in response]


def load_demonstrations(
    data: Data, tokenizer: Any, *, max_response_tokens: int, conversation: EncodeConversation | None = None
) -> list[DemonstrationSource]:
    """Open and check every source of `data` as demonstrations, in its order. `conversation`: makes tokens of several
    turns; None if the run's episode has one turn. Raises DataError as `load_prompts`.
    """
    encoder = encoder_of(data, tokenizer)
    return [
        DemonstrationSource(source.name, source.path, data, encoder, max_response_tokens, conversation)
        for source in sources_of(data)
    ]
