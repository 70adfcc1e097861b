"""A server's answer to one generate request: parsed, and refused if it makes no sense.

Owns what a well-formed answer is. A wrong token id, log-prob or weight version here would train a wrong policy
without a sign, so every field is checked against every other one and against the request. No HTTP here.
"""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_mega.errors import RolloutError

_LOG_PROB_ROUNDING = 1e-5
"""A log-softmax of nearly all the mass may come out this much above zero in fp32."""


class NonsenseAnswer(RolloutError):
    """A server answered with something that cannot be true."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. Log-probs come under log_softmax(logits / temperature), whatever top_p and top_k.

    `temperature` 0 is greedy (log-probs then at temperature 1). `top_k` -1 is all tokens. Sampling ends with the first
    of `stop_token_ids`, which is part of the response.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop_token_ids": list(self.stop_token_ids),
            "skip_special_tokens": False,
        }
        if self.top_k != -1:
            params["top_k"] = self.top_k
        return params


@dataclass(frozen=True)
class RoutingShape:
    """What returned experts must look like: of every layer, so many a token. SGLang leaves zeros for the first
    `num_dense_layers`, which have no experts."""

    num_layers: int
    experts_per_token: int
    num_experts: int
    num_dense_layers: int = 0


@dataclass(frozen=True)
class Completion:
    """One response. Lists have one entry a response token.

    `log_probs` are nats, of the sampled token. `weight_versions` says which weights made each token.
    `finish_reason` is `stop` (its last token is a stop token), `length`, or `abort`: cut short by the server, which
    leaves nothing to train on, so its lists are empty. `routed_experts`: int32
    [prompt + response - 1, layers, experts_per_token], -1 in layers without experts, or None if not asked for.
    """

    token_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: str
    routed_experts: np.ndarray | None = None


def parse_completion(
    answer: Any, *, num_prompt_tokens: int, params: SamplingParams, vocab_size: int, routing: RoutingShape | None
) -> Completion:
    """Check and convert one element of SGLang's /generate answer. Raises NonsenseAnswer saying what is wrong."""
    meta = _field(answer, "meta_info", dict)
    finish = _field(meta, "finish_reason", dict)
    reason = finish.get("type")
    if reason == "abort":
        return Completion([], [], [], "abort")
    if reason not in ("stop", "length"):
        raise NonsenseAnswer(f"finish_reason {finish!r}; stop, length or abort expected")

    token_ids = _token_ids(_field(answer, "output_ids", list), vocab_size)
    count = len(token_ids)
    if meta.get("prompt_tokens") != num_prompt_tokens:
        raise NonsenseAnswer(f"{meta.get('prompt_tokens')} prompt tokens; {num_prompt_tokens} were sent")
    if meta.get("completion_tokens") != count:
        raise NonsenseAnswer(f"completion_tokens {meta.get('completion_tokens')} beside {count} token ids")
    _check_end(token_ids, reason, params)
    return Completion(
        token_ids,
        _log_probs(_field(meta, "output_token_logprobs", list), token_ids),
        _weight_versions(meta, count),
        reason,
        None if routing is None else _routed_experts(meta, num_prompt_tokens + count - 1, routing),
    )


def _field(mapping: Any, name: str, kind: type) -> Any:
    if not isinstance(mapping, dict) or not isinstance(mapping.get(name), kind):
        raise NonsenseAnswer(f"no {name} ({kind.__name__}) in {str(mapping)[:200]!r}")
    return mapping[name]


def _token_ids(values: list, vocab_size: int) -> list[int]:
    for position, token in enumerate(values):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise NonsenseAnswer(f"token {token!r} at position {position}; ids are 0 to {vocab_size - 1}")
    return values


def _check_end(token_ids: list[int], reason: str, params: SamplingParams) -> None:
    count = len(token_ids)
    if not 1 <= count <= params.max_new_tokens:
        raise NonsenseAnswer(f"{count} tokens; 1 to {params.max_new_tokens} were asked for")
    if reason == "length" and count != params.max_new_tokens:
        raise NonsenseAnswer(f"ended for length after {count} tokens of {params.max_new_tokens}")
    if reason == "stop" and token_ids[-1] not in params.stop_token_ids:
        raise NonsenseAnswer(f"stopped at token {token_ids[-1]}, which is none of {params.stop_token_ids}")
    for position, token in enumerate(token_ids[:-1]):
        if token in params.stop_token_ids:
            raise NonsenseAnswer(f"went on after the stop token {token} at position {position}")


def _log_probs(entries: list, token_ids: list[int]) -> list[float]:
    """`entries`: [log-prob, token id, text or null] for each token."""
    if len(entries) != len(token_ids):
        raise NonsenseAnswer(f"{len(entries)} log-probs for {len(token_ids)} tokens")
    log_probs = []
    for position, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise NonsenseAnswer(f"log-prob entry {entry!r} at position {position} beside token {token}")
        value = entry[0]
        if type(value) not in (float, int) or not math.isfinite(value) or value > _LOG_PROB_ROUNDING:
            raise NonsenseAnswer(f"log-prob {value!r} of token {token} at position {position}; a finite number <= 0 expected")
        log_probs.append(float(value))
    return log_probs


def _weight_versions(meta: dict, count: int) -> list[int]:
    """Expand [{version, start, end}] spans, which must tile the response."""
    versions: list[int] = []
    for span in _field(meta, "weight_versions", list):
        try:
            version, start, end = int(span["version"]), span["start"], span["end"]
        except (KeyError, TypeError, ValueError) as error:
            raise NonsenseAnswer(f"weight version span {span!r}") from error
        if start != len(versions) or type(end) is not int or not start <= end <= count:
            raise NonsenseAnswer(f"weight version spans {meta['weight_versions']!r} do not tile {count} tokens")
        versions.extend([version] * (end - start))
    if len(versions) != count:
        raise NonsenseAnswer(f"weight version spans {meta['weight_versions']!r} do not tile {count} tokens")
    return versions


def _routed_experts(meta: dict, num_rows: int, routing: RoutingShape) -> np.ndarray:
    try:
        flat = np.frombuffer(base64.b64decode(_field(meta, "routed_experts", str), validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise NonsenseAnswer(f"routed_experts is not base64 of int32: {error}") from error
    shape = (num_rows, routing.num_layers, routing.experts_per_token)
    if flat.size != math.prod(shape):
        raise NonsenseAnswer(f"{flat.size} routed experts; {shape} (tokens, layers, experts a token) expected")
    if flat.size and not 0 <= flat.min() <= flat.max() < routing.num_experts:
        raise NonsenseAnswer(f"routed experts from {flat.min()} to {flat.max()}; 0 to {routing.num_experts - 1} exist")
    routes = flat.reshape(shape).astype(np.int32)
    routes[:, : routing.num_dense_layers] = -1
    return routes
