"""A server's answer to one generate request: assembled from its reports, and refused if it makes no sense.

Owns what a well-formed answer is. A wrong token id, log-prob or weight version would silently train a wrong policy, so
every field is checked against the others and against the request. No HTTP here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gspo_mega.base.token_columns import Column, constant, floats, ints, joined
from gspo_mega.rollout.client.answer_fields import (
    NonsenseAnswer,
    RefusedAnswer,
    checked_log_probs,
    checked_token_ids,
    field_of,
    finish_reason_of,
    shown,
    version_of,
    versions_of,
)
from gspo_mega.rollout.client.routes import decode_routes


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. Log-probs are of log_softmax(logits / temperature), before top_p and top_k.

    `temperature` 0 is greedy, with log-probs at temperature 1. `top_k` -1 admits all tokens. Sampling ends with the
    first of `stop_token_ids`, which is part of the response.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """SGLang's `sampling_params`."""
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

    def at_most(self, num_tokens: int) -> SamplingParams:
        """The same, for a response of no more than `num_tokens`."""
        return self if num_tokens >= self.max_new_tokens else replace(self, max_new_tokens=num_tokens)

    def after(self, num_tokens: int) -> SamplingParams:
        """How to sample the rest of a response that has `num_tokens` already."""
        return replace(self, max_new_tokens=self.max_new_tokens - num_tokens) if num_tokens else self


@dataclass(frozen=True)
class RoutingShape:
    """What returned experts must look like: `experts_per_token` expert ids per token and layer. SGLang returns zeros
    for the first `num_dense_layers`, which have no experts.
    """

    num_layers: int
    experts_per_token: int
    num_experts: int
    num_dense_layers: int = 0


@dataclass(frozen=True)
class Completion:
    """One response, or the beginning of one. Sequences have one entry per response token.

    Attributes:
        log_probs: log-prob of each sampled token, in nats.
        weight_versions: the weight version that sampled each token.
        finish_reason: `stop` (the last token is a stop token), `length`, or `abort`: the response was cut short, and
            these are its tokens so far, sampled like all others.
        routed_experts: [prompt + response - 1, layers, experts_per_token] of `route_type`, 0 in layers without
            experts. None if not requested, and where a response was cut short and the server did not return them.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    routed_experts: np.ndarray | None = None


class Answer:
    """One answer of SGLang's streaming /generate while it arrives, in disjoint reports
    (`incremental_streaming_output`).

    `request_id` and `num_prompt_tokens` are those of the request: an answer to another request is nonsense, even if it
    is well formed. `weight_version`: the one under which the request began, None if no other can come meanwhile.
    `completion` is None until the last report.

    A report names the version that the server has when it reports, which may be newer than that of its tokens: reports
    wait in the server while an update overtakes them. From the first report that names another version on, only the end
    of a whole answer says which version a token is of. Without that end, the answer ends before that report.
    """

    def __init__(
        self,
        *,
        request_id: str,
        num_prompt_tokens: int,
        params: SamplingParams,
        vocab_size: int,
        routing: RoutingShape | None,
        weight_version: int | None = None,
    ) -> None:
        self._weight_version = weight_version
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self._vocab_size = vocab_size
        self._routing = routing
        self._num = 0
        self._token_ids: list[np.ndarray] = []  # of each report, as all that follow
        self._log_probs: list[np.ndarray] = []
        self._versions: list[Column[int]] = []
        self.completion: Completion | None = None

    def add(self, report: Any) -> int:
        """Add one report; returns the number of tokens in it.

        Raises NonsenseAnswer saying what is wrong: then nothing of the answer may be used, including the earlier
        reports. Raises RefusedAnswer with the server's own message.
        """
        if self.completion is not None:
            raise NonsenseAnswer(f"the answer went on after its end: {shown(report)}")
        if isinstance(report, dict) and "error" in report:
            raise RefusedAnswer(_error_text(report["error"]))
        meta = field_of(report, "meta_info", dict)
        if meta.get("id") != self._request_id:
            raise NonsenseAnswer(f"the answer is to request {shown(meta.get('id'))}; {self._request_id!r} was sent")
        reason = finish_reason_of(meta.get("finish_reason"))
        # A request that is cut short while it waits in the server's queue is answered without a prompt.
        sent = meta.get("prompt_tokens")
        if (type(sent) is not int or sent != self._num_prompt_tokens) and not (
            reason == "abort" and "prompt_tokens" not in meta
        ):
            raise NonsenseAnswer(f"{shown(sent)} prompt tokens; {self._num_prompt_tokens} were sent")
        count = self._take_tokens(report, meta, reason)
        if reason is not None:
            self.completion = self._end(meta, reason)
        return count

    def tokens_from(self, position: int) -> list[int]:
        """The tokens reported so far, from that one on."""
        if position == self._num - len(self._token_ids[-1] if self._token_ids else ()):
            return self._token_ids[-1].tolist() if self._token_ids else []
        return self._known_token_ids()[position:].tolist()

    def so_far(self) -> Completion:
        """The tokens reported so far whose version is certain, as a response that was cut short. Raises
        NonsenseAnswer.
        """
        token_ids = self._known_token_ids()
        _check_middle(token_ids, self._params)
        end = self._num_certain()
        versions = joined([constant(0, 0), *self._versions])
        return Completion(ints(token_ids[:end]), self._known_log_probs()[:end], versions[:end], "abort")

    def _known_token_ids(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self._token_ids])

    def _known_log_probs(self) -> Column[float]:
        return floats(np.concatenate([np.zeros(0), *self._log_probs]))

    def _num_certain(self) -> int:
        """How many tokens from the first on are of the version under which the request began."""
        num = 0
        for versions in self._versions:
            if self._weight_version is not None and versions[0] != self._weight_version:
                break
            num += len(versions)
        return num

    def _take_tokens(self, report: dict, meta: dict, reason: str | None) -> int:
        token_ids, total = field_of(report, "output_ids", list), meta.get("completion_tokens")
        before = self._num
        count = len(token_ids)
        if reason == "abort" and type(total) is int and 0 <= total - before < count:
            count = total - before  # the last report of an aborted request repeats the token reported before it
            token_ids = token_ids[:count]
        if type(total) is not int or total != before + count:
            raise NonsenseAnswer(f"completion_tokens {shown(total)} after {before} token ids and {count} more")
        if total > self._params.max_new_tokens:
            raise NonsenseAnswer(f"{total} tokens; 1 to {self._params.max_new_tokens} were asked for")
        entries = field_of(meta, "output_token_logprobs", list) if count or reason in ("stop", "length") else []
        if reason == "abort":
            entries = entries[:count]
        self._token_ids.append(checked_token_ids(token_ids, self._vocab_size))
        self._log_probs.append(checked_log_probs(entries, token_ids))
        if count:
            self._versions.append(constant(version_of(meta.get("weight_version")), count))
        self._num = total
        return count

    def _end(self, meta: dict, reason: str) -> Completion:
        count, token_ids = self._num, self._known_token_ids()
        if reason == "abort":
            _check_middle(token_ids, self._params)
        else:
            _check_end(token_ids, reason, self._params)
        routes = None
        if self._routing is not None and count and (reason != "abort" or "routed_experts" in meta):
            routes = _routed_experts(meta, self._num_prompt_tokens + count - 1, self._routing)
        if reason != "abort" or "weight_versions" in meta:
            versions = versions_of(meta, count)
            return Completion(ints(token_ids), self._known_log_probs(), versions, reason, routes)
        whole = self.so_far()
        end = len(whole.token_ids)
        return replace(whole, routed_experts=None if routes is None else routes[: self._num_prompt_tokens + end - 1])


class Response:
    """One response as it grows, over the servers that sampled it: the parts' tokens and their records, end to end."""

    def __init__(self, num_prompt_tokens: int, params: SamplingParams, with_routes: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self._with_routes = with_routes
        self.whole = Completion([], [], [], "abort")

    def __len__(self) -> int:
        return len(self.whole.token_ids)

    def add(self, part: Completion) -> bool:
        """Append the next part, which was sampled with all tokens so far as its prompt.

        Returns False and changes nothing where experts are required and the part does not have those of its tokens.
        """
        if not part.token_ids:
            return True
        routes = part.routed_experts
        if self._with_routes:
            if routes is None:
                return False
            if self.whole.routed_experts is not None:
                # The earlier tokens keep the routes they were sampled with, not those of the second server's prefill.
                known = self.whole.routed_experts
                routes = np.concatenate([known, routes[len(known) :]])
        whole = self.whole
        token_ids = joined([whole.token_ids, part.token_ids])
        reason = part.finish_reason
        if reason == "abort" and token_ids[-1] in self._params.stop_token_ids:
            reason = "stop"
        elif reason == "abort" and len(token_ids) == self._params.max_new_tokens:
            reason = "length"
        log_probs = joined([whole.log_probs, part.log_probs])
        versions = joined([whole.weight_versions, part.weight_versions])
        self.whole = Completion(token_ids, log_probs, versions, reason, routes)
        return True


def _check_end(token_ids: np.ndarray, reason: str, params: SamplingParams) -> None:
    count = len(token_ids)
    if not count:
        raise NonsenseAnswer(f"0 tokens; 1 to {params.max_new_tokens} were asked for")
    if reason == "length" and count != params.max_new_tokens:
        raise NonsenseAnswer(f"ended for length after {count} tokens of {params.max_new_tokens}")
    if reason == "stop" and token_ids[-1] not in params.stop_token_ids:
        raise NonsenseAnswer(f"stopped at token {token_ids[-1]}, which is none of {params.stop_token_ids}")
    _check_middle(token_ids, params)


def _check_middle(token_ids: np.ndarray, params: SamplingParams) -> None:
    before = token_ids[:-1]
    places = [int(found.argmax()) for stop in params.stop_token_ids if (found := before == stop).any()]
    if places:
        token = before[min(places)]
        raise NonsenseAnswer(f"went on after the stop token {token} at position {min(places)}")


def _routed_experts(meta: dict, num_rows: int, routing: RoutingShape) -> np.ndarray:
    """`meta` has the decoded numbers, or their base64."""
    flat = meta.get("routed_experts")
    if not isinstance(flat, np.ndarray):
        try:
            flat = decode_routes(field_of(meta, "routed_experts", str), routing.num_experts)
        except ValueError as error:
            raise NonsenseAnswer(str(error)) from error
    shape = (num_rows, routing.num_layers, routing.experts_per_token)
    if flat.size != math.prod(shape):
        raise NonsenseAnswer(f"{flat.size} routed experts; {shape} (tokens, layers, experts per token) expected")
    return flat.reshape(shape)


def _error_text(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return message[:2000] if isinstance(message, str) else shown(message)
