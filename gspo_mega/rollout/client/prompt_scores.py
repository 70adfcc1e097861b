"""The log-probs that a server gives to tokens it did not sample: the form of the request, and what its answer must be.

Owns SGLang's prompt log-probs, which are at temperature 1 whatever the request says. It chooses no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_mega.rollout.client.answer_fields import log_prob_of, shown
from gspo_mega.rollout.client.completion import NonsenseAnswer
from gspo_mega.rollout.client.server_client import ServerClient, ServerError


async def score_tokens(
    client: ServerClient, token_ids: Sequence[int], start: int, vocab_size: int, deadline_seconds: float
) -> np.ndarray:
    """Log-probs of the tokens from `start` on, each given those before it, in one pass: [len(token_ids) - start]
    float64, nats, at temperature 1.

    `start` is at least 1, because the first token has no log-prob. The server may take keys and values of the tokens
    before `start` - 1 from its cache; the others it computes anew. Raises ServerError, also for an answer about other
    tokens.
    """
    body = {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    if client.adapter is not None:
        body["lora_path"] = client.adapter
    answer = await client.call_object("/generate", body, deadline_seconds, what="score")
    try:
        return read_scores(answer, token_ids, start, vocab_size)
    except NonsenseAnswer as error:
        raise ServerError(client.server_id, "score", "nonsense", str(error)) from error


def read_scores(answer: Any, token_ids: Sequence[int], start: int, vocab_size: int) -> np.ndarray:
    """The log-probs in SGLang's answer to a request of `score_tokens`: [len(token_ids) - start] float64, nats.

    Its entries are [log-prob, token id, text] from token `start` - 1 on, whose own log-prob is null or of no use.
    Raises NonsenseAnswer.
    """
    # SGLang shows the last token of the vocabulary as 0 here; its log-prob is the token's own.
    named = {vocab_size - 1: (vocab_size - 1, 0)}
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(entries, list):
        raise NonsenseAnswer(f"no input_token_logprobs in {shown(answer)}")
    sent = meta.get("prompt_tokens") if meta is not None else None
    if type(sent) is not int or sent != len(token_ids):
        raise NonsenseAnswer(f"{shown(sent)} prompt tokens; {len(token_ids)} were sent")
    wanted = list(token_ids[start:])
    if len(entries) != len(wanted) + 1:
        raise NonsenseAnswer(f"{len(entries)} log-probs of prompt tokens; {len(wanted) + 1} expected")
    values = np.zeros(len(wanted))
    for place, (entry, token) in enumerate(zip(entries[1:], wanted, strict=True)):
        is_entry = isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int
        if not is_entry or entry[1] not in named.get(token, (token,)):
            raise NonsenseAnswer(f"log-prob entry {shown(entry)} at token {start + place}; token id {token} was sent")
        values[place] = log_prob_of(entry[0], f"of token {token} at place {start + place}")
    return values
