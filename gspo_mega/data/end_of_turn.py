"""The end tokens of a run, asked of its loaded tokenizer and its chat template: the one place where they are derived.

Rollouts of every kind (training, evaluation, episodes), demonstrations and the exported folder take them from here.
`model/end_tokens.py` owns how the sources become one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo_mega.data.chat import PromptEncoder
from gspo_mega.errors import DataError
from gspo_mega.model.end_tokens import EndToken, EndTokens, end_tokens


def run_end_tokens(
    encoder: PromptEncoder, tokenizer: Any, configured: Sequence[int], vocab_size: int | None
) -> EndTokens:
    """The tokens at which every response of a run ends, and what to tell the user where their sources differ.

    `encoder`: of the run's prompts, with `tokenizer`, a Hugging Face one. `configured`: `ModelSpec.eos_token_ids`.
    `vocab_size`: the model's, None where it is not known. Raises DataError where there is none.
    """
    own = None if tokenizer.eos_token_id is None else EndToken(tokenizer.eos_token_id, tokenizer.eos_token)
    turn_end = encoder.turn_end_token_id
    template = None if turn_end is None else EndToken(turn_end, tokenizer.convert_ids_to_tokens(turn_end))
    known = {
        token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in configured if token_id < len(tokenizer)
    }
    found = end_tokens(configured, own, template, vocab_size, known)
    if not found.ids:
        said = "".join(f"{text}. " for text in found.notices)
        raise DataError(
            f"{said}No end token is named: give eos_token_id in generation_config.json, or eos_token in"
            " tokenizer_config.json; a response could never end"
        )
    return found
