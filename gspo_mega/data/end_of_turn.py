"""The end tokens of a run, asked of its loaded tokenizer and its chat template: the one place where they are derived.

Rollouts of every kind (training, evaluation, episodes), demonstrations and the exported folder take them from here.
`models/end_tokens.py` owns how the sources become one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo_mega.base.errors import DataError
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.models.end_tokens import EndToken, EndTokens, end_tokens


def run_end_tokens(
    encoder: PromptEncoder, tokenizer: Any, configured: Sequence[int], vocab_size: int | None, *, calls: bool = False
) -> EndTokens:
    """The tokens at which every response of a run ends, and what to tell the user where their sources differ.

    `encoder`: of the run's prompts, with `tokenizer`, a Hugging Face one. `configured`: `ModelSpec.eos_token_ids`.
    `vocab_size`: the model's, None where it is not known. `calls`: the policy may call tools, and the template may end
    such a turn in another way. Raises DataError where there is none.
    """
    own = None if tokenizer.eos_token_id is None else EndToken(tokenizer.eos_token_id, tokenizer.eos_token)
    by_template = [encoder.turn_end_token_id, encoder.call_end_token_id if calls else None]
    template, call = (
        None if token_id is None else EndToken(token_id, tokenizer.convert_ids_to_tokens(token_id))
        for token_id in by_template
    )
    known = {
        token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in configured if token_id < len(tokenizer)
    }
    found = end_tokens(configured, own, template, vocab_size, known, None if call == template else call)
    if not found.ids:
        said = "".join(f"{text}. " for text in found.notices)
        raise DataError(
            f"{said}No end token is named: give eos_token_id in generation_config.json, or eos_token in"
            " tokenizer_config.json; a response could never end"
        )
    return found


def check_taught_end(encoder: PromptEncoder, end_token_ids: Sequence[int], folder: str) -> None:
    """Raise DataError where demonstrations would end with a token that ends no response, because the model of `folder`
    has no such token. `end_token_ids`: a run's, as `run_end_tokens` gives them.
    """
    if encoder.end_token_id not in end_token_ids:
        raise DataError(
            f"{folder}: demonstrations would end with {encoder.end_token!r} ({encoder.end_token_id}), which is outside"
            " the model's vocabulary; name another eos_token in its tokenizer_config.json"
        )
