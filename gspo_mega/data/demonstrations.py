"""Demonstrations for the supervised start: a prompt and the response to learn, as token ids.

Owns the response's half alone; the prompt is read and encoded exactly as for rollouts (`prompts.py`), so that what is
learnt here continues there. Their order is `stream.py`'s, as for prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.config.prompt_sources import sources_of
from gspo_mega.config.schema import Data
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.jsonl import Row, type_name
from gspo_mega.data.prompts import RowSource, encoder_of, missing_key, problem_of_prompt


@dataclass(frozen=True)
class Demonstration:
    """`response_token_ids` ends with the end token. `demonstration_id` is `<source>:<zero-based row>`."""

    demonstration_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]


class DemonstrationSource(RowSource[Demonstration]):
    """Demonstrations of one file. Too long: a prompt over `data.max_prompt_tokens`, or a response (end token
    included) over `max_response_tokens`, which no rollout could produce either."""

    def __init__(
        self, name: str, path: str | Path, data: Data, encoder: PromptEncoder, max_response_tokens: int
    ) -> None:
        self._max_response_tokens = max_response_tokens
        super().__init__(name, path, data, encoder)

    def _problem_of(self, values: Row) -> str | None:
        key = self._data.response_key
        problem = problem_of_prompt(values, self._data, self._encoder) or missing_key(values, key, "data.response_key")
        if problem is not None:
            return problem
        response = values[key]
        if not isinstance(response, str):
            return f"{key!r} must be a text, not {type_name(response)}"
        if not response.strip():
            return f"{key!r} is empty"
        if response.rstrip().endswith(self._encoder.eos_token):
            return (
                f"{key!r} ends with the end token {self._encoder.eos_token!r}; leave it out, it is added to every"
                " response"
            )
        return None

    def _make(self, row: int, values: Row) -> Demonstration | None:
        data = self._data
        _, prompt_ids = self._encoder.encode_prompt(values[data.prompt_key])
        response_ids = self._encoder.encode_response(values[data.response_key])
        if len(prompt_ids) > data.max_prompt_tokens or len(response_ids) > self._max_response_tokens:
            return None
        return Demonstration(f"{self.name}:{row}", tuple(prompt_ids), tuple(response_ids))

    def _limits(self) -> str:
        return (
            f"data.max_prompt_tokens: {self._data.max_prompt_tokens}, rollout.max_new_tokens:"
            f" {self._max_response_tokens}"
        )


def load_demonstrations(data: Data, tokenizer: Any, *, max_response_tokens: int) -> list[DemonstrationSource]:
    """Open and check every source of `data` as demonstrations, in its order. Raises DataError as `load_prompts`."""
    encoder = encoder_of(data, tokenizer)
    return [
        DemonstrationSource(source.name, source.path, data, encoder, max_response_tokens) for source in sources_of(data)
    ]
