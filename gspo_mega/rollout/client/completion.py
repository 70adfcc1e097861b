"""A server's answer to one generate request: assembled from its reports, and refused if it makes no sense.

A wrong token id, log-prob or weight version would silently train a wrong policy, so every field is checked, by itself
and against the others and the request. There is no HTTP here.

First come the request's parameters and the finished answer (`SamplingParams`, `Completion`), then the answer while it
arrives (`StreamedAnswer`) and the response as it grows over several servers (`PartialResponse`). Then come the checks
of single fields. They check whole lists at once, and look at values one by one only to say which one is wrong.

The last part decodes routes, the experts that a server sent each token to: base64 of little-endian int32. They are
nearly all of an answer (four fifths of a megabyte for 300 tokens of a model with 94 layers), so they never pass through
the JSON parser. Threads decode them while the event loop goes on reading: decoder and numpy release the interpreter's
lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pybase64

from gspo_mega.agents.messages import StopWatch
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import Column, constant_column, float_column, int_column, join_columns, route_type
from gspo_mega.base.sampling_masks import SamplingMasks

_LOG_PROB_ROUNDING = 1e-5
"""In fp32, the log-prob of a token with nearly all the probability may exceed zero by this much (nats)."""

_MOST_VERSION = 2**31

_VERSION = re.compile(r"[0-9]{1,10}")

_MOST_SHOWN = 200

_ROUTES_KEY = b'"routed_experts":'

# How many characters are decoded at once: they and their numbers fit into a core's cache. It is a multiple of 16
# characters, which are three numbers.
_ROUTES_BLOCK = 16 * 2**14


class NonsenseAnswer(RolloutError):
    """A server answered with something that cannot be true."""


class RefusedAnswer(RolloutError):
    """A server refuses this request."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. Log-probs are log_softmax(logits / temperature), over the tokens that `top_k`,
    `top_p` and `min_p` keep if `has_masks`, else over all tokens.

    `temperature` 0 is greedy, with log-probs at temperature 1. `top_k` -1 admits all tokens. Sampling ends with the
    first of `stop_token_ids`, which is part of the response, or where `watch` finds a stop string.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    min_p: float = 0.0
    watch: StopWatch | None = None

    @property
    def has_masks(self) -> bool:
        """Whether the server returns the set of tokens that each token was sampled from."""
        return self.top_k > 1

    def as_json(self) -> dict[str, Any]:
        """Return the parameters as SGLang's `sampling_params`."""
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop_token_ids": list(self.stop_token_ids),
            "skip_special_tokens": False,
        }
        if self.top_k != -1:
            params["top_k"] = self.top_k
        if self.min_p:
            params["min_p"] = self.min_p
        return params

    def at_most(self, num_tokens: int, watch: StopWatch | None = None) -> SamplingParams:
        """Return the same parameters for a response of at most `num_tokens` that ends where `watch` says."""
        return replace(self, max_new_tokens=min(num_tokens, self.max_new_tokens), watch=watch)

    def after(self, num_tokens: int) -> SamplingParams:
        """Return the parameters for the rest of a response that already has `num_tokens`."""
        return replace(self, max_new_tokens=self.max_new_tokens - num_tokens) if num_tokens else self


@dataclass(frozen=True)
class RoutingShape:
    """The shape that returned routes must have: `experts_per_token` expert ids per token and layer. SGLang returns
    zeros for the first `num_dense_layers`, which have no experts.
    """

    num_layers: int
    experts_per_token: int
    num_experts: int
    num_dense_layers: int = 0


@dataclass(frozen=True)
class Completion:
    """One response, or the beginning of one. Sequences have one entry per response token.

    Attributes:
        log_probs: the log-prob of each sampled token, in nats.
        weight_versions: the weight version that sampled each token.
        finish_reason: `stop` (the last token is a stop token), `length`, or `abort`: the response was cut short, and
            these are its tokens so far, sampled like all others.
        routed_experts: [prompt + response - 1, layers, experts_per_token] of `route_type`, 0 in layers without
            experts. None if they were not requested, or if the response was cut short and the server did not return
            them.
        sampling_masks: the tokens that each token was sampled from, itself among them; None without masks.
        num_cached_tokens: how many first tokens of the prompt the server read from its prefix cache; None if it did not
            say so.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    routed_experts: np.ndarray | None = None
    sampling_masks: SamplingMasks | None = None
    num_cached_tokens: int | None = None


class StreamedAnswer:
    """One answer of SGLang's streaming /generate while it arrives, in disjoint reports
    (`incremental_streaming_output`).

    `request_id` and `num_prompt_tokens` are those of the request: an answer to another request is nonsense, even if it
    is well formed. `weight_version` is the version under which the request began; None if the version cannot change
    during the request. `completion` is None until the last report.

    A report names the version that the server has when it reports. That may be newer than the version of its tokens,
    because reports wait in the server while an update overtakes them. From the first report that names another version
    on, only the end of a whole answer says which version a token is of. Without that end, the answer ends before that
    report.
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
        self._token_ids: list[np.ndarray] = []  # one entry per report, as in the next three
        self._log_probs: list[np.ndarray] = []
        self._versions: list[Column[int]] = []
        self._masks: list[SamplingMasks] = []
        self._num_cached_tokens: int | None = None
        self.completion: Completion | None = None

    def add(self, report: Any) -> int:
        """Add one report, and return the number of tokens in it.

        Raises NonsenseAnswer, which says what is wrong: then nothing of the answer may be used, not even the earlier
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
        # Nothing is trained on this number, so one that cannot be true is left out instead of refused.
        cached = meta.get("cached_tokens")
        if type(cached) is int and 0 <= cached <= self._num_prompt_tokens:
            self._num_cached_tokens = cached
        count = self._take_tokens(report, meta, reason)
        if reason is not None:
            self.completion = self._end(meta, reason)
        return count

    def tokens_from(self, position: int) -> list[int]:
        """Return the tokens reported so far, from `position` on."""
        if position == self._num - len(self._token_ids[-1] if self._token_ids else ()):
            return self._token_ids[-1].tolist() if self._token_ids else []
        return self._known_token_ids()[position:].tolist()

    def so_far(self) -> Completion:
        """Return the tokens reported so far whose version is certain, as a response that was cut short. Raises
        NonsenseAnswer.
        """
        token_ids = self._known_token_ids()
        _check_middle(token_ids, self._params)
        end = self._num_certain()
        versions = join_columns([constant_column(0, 0), *self._versions])
        masks = self._known_masks()
        if masks is not None:
            masks = masks.between(0, end)
        return Completion(
            int_column(token_ids[:end]),
            self._known_log_probs()[:end],
            versions[:end],
            "abort",
            sampling_masks=masks,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _known_token_ids(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self._token_ids])

    def _known_log_probs(self) -> Column[float]:
        return float_column(np.concatenate([np.zeros(0), *self._log_probs]))

    def _known_masks(self) -> SamplingMasks | None:
        return SamplingMasks.join(self._masks) if self._params.has_masks else None

    def _num_certain(self) -> int:
        """Return how many tokens from the first on are of the version under which the request began."""
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
        log_probs = checked_log_probs(entries, token_ids)
        if self._params.has_masks:
            log_probs, masks = _sampling_masks(meta, self._token_ids[-1], self._vocab_size)
            self._masks.append(masks)
        self._log_probs.append(log_probs)
        if count:
            self._versions.append(constant_column(version_of(meta.get("weight_version")), count))
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
            log_probs, masks = self._known_log_probs(), self._known_masks()
            cached = self._num_cached_tokens
            return Completion(int_column(token_ids), log_probs, versions, reason, routes, masks, cached)
        whole = self.so_far()
        end = len(whole.token_ids)
        return replace(whole, routed_experts=None if routes is None else routes[: self._num_prompt_tokens + end - 1])


class PartialResponse:
    """One response as it grows over the servers that sample it: the tokens and records of its parts, end to end."""

    def __init__(self, num_prompt_tokens: int, params: SamplingParams, with_routes: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self._with_routes = with_routes
        self.whole = Completion([], [], [], "abort", sampling_masks=SamplingMasks.none(0) if params.has_masks else None)

    def __len__(self) -> int:
        return len(self.whole.token_ids)

    def add(self, part: Completion) -> bool:
        """Append the next part, which was sampled with all tokens so far in its prompt.

        Return False and change nothing if routes are required and the part does not have them for its tokens.
        """
        if not part.token_ids:
            return True
        routes = part.routed_experts
        if self._with_routes:
            if routes is None:
                return False
            if self.whole.routed_experts is not None:
                # Earlier tokens keep the routes with which they were sampled, not those of the second server's prefill.
                known = self.whole.routed_experts
                routes = np.concatenate([known, routes[len(known) :]])
        whole = self.whole
        token_ids = join_columns([whole.token_ids, part.token_ids])
        reason = part.finish_reason
        if reason == "abort" and token_ids[-1] in self._params.stop_token_ids:
            reason = "stop"
        elif reason == "abort" and len(token_ids) == self._params.max_new_tokens:
            reason = "length"
        log_probs = join_columns([whole.log_probs, part.log_probs])
        versions = join_columns([whole.weight_versions, part.weight_versions])
        masks = None
        if whole.sampling_masks is not None and part.sampling_masks is not None:
            masks = SamplingMasks.join([whole.sampling_masks, part.sampling_masks])
        # A later part's prompt has sampled tokens in it.
        cached = whole.num_cached_tokens if whole.token_ids else part.num_cached_tokens
        self.whole = Completion(token_ids, log_probs, versions, reason, routes, masks, cached)
        return True


def _check_end(token_ids: np.ndarray, reason: str, params: SamplingParams) -> None:
    count = len(token_ids)
    if not count:
        raise NonsenseAnswer(f"0 tokens; 1 to {params.max_new_tokens} were asked for")
    if reason == "length" and count != params.max_new_tokens:
        raise NonsenseAnswer(f"ended for length after {count} tokens of {params.max_new_tokens}")
    if reason == "stop" and token_ids[-1] not in params.stop_token_ids:
        raise NonsenseAnswer(f"stopped at token {token_ids[-1]}, which is not one of {params.stop_token_ids}")
    _check_middle(token_ids, params)


def _check_middle(token_ids: np.ndarray, params: SamplingParams) -> None:
    before = token_ids[:-1]
    places = [int(found.argmax()) for stop in params.stop_token_ids if (found := before == stop).any()]
    if places:
        token = before[min(places)]
        raise NonsenseAnswer(f"went on after the stop token {token} at position {min(places)}")


def _routed_experts(meta: dict, num_rows: int, routing: RoutingShape) -> np.ndarray:
    """Return the routes as [rows, layers, experts per token]. `meta` has the decoded numbers, or their base64."""
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


def _sampling_masks(meta: dict, token_ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, SamplingMasks]:
    """Return the log-probs over the kept tokens, [tokens] float64 nats, and these tokens, from the next reported
    tokens' `meta`. Raises NonsenseAnswer.
    """
    count = len(token_ids)
    if not count:
        return np.zeros(0), SamplingMasks.none(0)
    # As with `output_token_logprobs`, the last report of an aborted request may have more entries than tokens.
    sets = field_of(meta, "output_token_sampling_mask", list)[:count]
    values = field_of(meta, "output_token_sampling_logprobs", list)[:count]
    if len(sets) != count or len(values) != count or set(map(type, sets)) != {list}:
        raise NonsenseAnswer(f"{len(sets)} sampling masks and {len(values)} of their log-probs for {count} tokens")
    log_probs = [log_prob_of(value, f"over the kept tokens at position {place}") for place, value in enumerate(values)]
    ids = list(chain.from_iterable(sets))
    if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise NonsenseAnswer(f"a sampling mask with other things than token ids from 0 to {vocab_size - 1}")
    counts, flat = np.fromiter(map(len, sets), np.int32, count), np.array(ids, np.int32)
    owner = np.repeat(np.arange(count), counts)
    found = np.bincount(owner[flat == token_ids[owner]], minlength=count)
    if (found != 1).any():
        place = int(np.argmax(found != 1))
        times = f"token {token_ids[place]} is {found[place]} times"
        raise NonsenseAnswer(f"{times} in its sampling mask {shown(sets[place])}")
    try:
        return np.array(log_probs), SamplingMasks.of_ids(counts, flat)
    except ValueError as error:
        raise NonsenseAnswer(f"a sampling mask: {error}") from error


def _error_text(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return message[:2000] if isinstance(message, str) else shown(message)


def shown(value: Any) -> str:
    """Return the beginning of what a server sent, as Python writes it; for a value that cannot be written, its type."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # also an int of too many digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def whole_number(value: Any, what: str) -> int:
    """Return `value` if it is an int from 0 on, and no bool or float. Raises NonsenseAnswer otherwise."""
    if type(value) is not int or value < 0:
        raise NonsenseAnswer(f"{what} {shown(value)}; a whole number from 0 on expected")
    return value


def log_prob_of(value: Any, where: str) -> float:
    """Return a log-prob in nats: a finite number, at most 0 up to rounding. Raises NonsenseAnswer otherwise."""
    try:
        if type(value) in (float, int) and math.isfinite(value) and value <= _LOG_PROB_ROUNDING:
            return float(value)
    except OverflowError:  # an int that no float holds
        pass
    raise NonsenseAnswer(f"log-prob {shown(value)} {where}; a finite number <= 0 expected")


def field_of(mapping: Any, name: str, kind: type) -> Any:
    """Return the field `name` of an object. Raises NonsenseAnswer if there is none of this type."""
    if not isinstance(mapping, dict) or not isinstance(mapping.get(name), kind):
        raise NonsenseAnswer(f"no {name} ({kind.__name__}) in {shown(mapping)}")
    return mapping[name]


def finish_reason_of(finish: Any) -> str | None:
    """Return the type of SGLang's `finish_reason`, or None if the response goes on. Raises NonsenseAnswer;
    RefusedAnswer if the server refuses the request.
    """
    if finish is None:
        return None
    reason = finish.get("type") if isinstance(finish, dict) else None
    if reason not in ("stop", "length", "abort"):
        raise NonsenseAnswer(f"finish_reason {shown(finish)}; stop, length or abort expected")
    if reason == "abort" and finish.get("status_code") is not None:
        message = finish.get("message")
        message = message[:2000] if isinstance(message, str) else shown(message)
        if "sampling-mask-max-tokens" in message:
            message += " (rollout.top_k; server.options.sampling_mask_max_tokens)"
        raise RefusedAnswer(f"{shown(finish['status_code'])}: {message}")
    return reason


def checked_token_ids(values: list, vocab_size: int) -> np.ndarray:
    """Return token ids as [tokens] int32. Raises NonsenseAnswer if one is not in the vocabulary."""
    if set(map(type, values)) == {int}:
        with contextlib.suppress(OverflowError):  # reported below
            array = np.array(values, np.int32)
            if array.min() >= 0 and array.max() < vocab_size:
                return array
    for position, token in enumerate(values):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise NonsenseAnswer(f"token {shown(token)} at position {position}; ids are 0 to {vocab_size - 1}")
    return np.zeros(0, np.int32)


def checked_log_probs(entries: list, token_ids: list[int]) -> np.ndarray:
    """Return the log-prob of each token, [tokens] float64, in nats. `entries` has [log-prob, token id, text or null]
    per token. Raises NonsenseAnswer.
    """
    if len(entries) != len(token_ids):
        raise NonsenseAnswer(f"{len(entries)} log-probs for {len(token_ids)} tokens")
    if entries and (given := _columns_of(entries, token_ids)) is not None and set(map(type, given)) == {float}:
        array = np.array(given)
        if np.isfinite(array).all() and array.max() <= _LOG_PROB_ROUNDING:
            return array
    log_probs = []  # one by one, to say which is wrong
    for position, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int or entry[1] != token:
            raise NonsenseAnswer(f"log-prob entry {shown(entry)} at position {position}, where the token is {token}")
        log_probs.append(log_prob_of(entry[0], f"of token {token} at position {position}"))
    return np.array(log_probs, np.float64)


def _columns_of(entries: list, token_ids: list[int]) -> list | None:
    """Return the first column of entries that have the same length and whose second column is `token_ids`; None for
    other entries. If an entry is a string or an object, the values are strings.
    """
    try:
        (width,) = set(map(len, entries))
    except (TypeError, ValueError):
        return None
    values = list(chain.from_iterable(entries))
    if width < 2 or values[1::width] != token_ids or set(map(type, values[1::width])) != {int}:
        return None
    return values[::width]


def version_of(value: Any, what: str = "weight_version") -> int:
    """Return a weight version, from an int or from its digits, which SGLang sends. Raises NonsenseAnswer."""
    is_text = isinstance(value, str) and _VERSION.fullmatch(value) is not None
    if not is_text and type(value) is not int:
        raise NonsenseAnswer(f"{what} {shown(value)}; a number expected")
    version = int(value)
    if not 0 <= version < _MOST_VERSION:
        raise NonsenseAnswer(f"{what} {shown(value)}; a number from 0 to below 2**31 expected")
    return version


def versions_of(meta: dict, count: int) -> Sequence[int]:
    """Return the version of each of `count` tokens, from [{version, start, end}] spans, which must tile the response.
    Raises NonsenseAnswer.
    """
    num = 0
    parts: list[Sequence[int]] = [constant_column(0, 0)]
    spans = field_of(meta, "weight_versions", list)
    for span in spans:
        if not isinstance(span, dict) or not {"version", "start", "end"} <= span.keys():
            raise NonsenseAnswer(f"weight version span {shown(span)}; version, start and end expected")
        try:
            version = version_of(span["version"])
            start, end = (whole_number(span[name], name) for name in ("start", "end"))
        except NonsenseAnswer as error:
            raise NonsenseAnswer(f"weight version span {shown(span)}: {error}") from None
        if start != num or not start <= end <= count:
            raise NonsenseAnswer(f"weight version spans {shown(spans)} do not tile {count} tokens")
        parts.append(constant_column(version, end - start))
        num = end
    if num != count:
        raise NonsenseAnswer(f"weight version spans {shown(spans)} do not tile {count} tokens")
    return join_columns(parts)


class EncodedRoutes:
    """The base64 of an answer's routes, which was at `meta_info.routed_experts` in its JSON."""

    def __init__(self, text: memoryview) -> None:
        self.text = text

    def put_into(self, report: Any) -> None:
        """Replace the empty string that `cut_routes` left in this report."""
        meta = report.get("meta_info") if isinstance(report, dict) else None
        if isinstance(meta, dict) and meta.get("routed_experts") == "":
            meta["routed_experts"] = self


def cut_routes(event: bytes | bytearray) -> tuple[bytes | bytearray, EncodedRoutes | None]:
    """Return a report's JSON with an empty string in place of its routes, and the routes. A report without routes is
    returned unchanged.

    A quote inside a JSON string is escaped, so the key is never found in a text. The string of the routes ends at the
    next quote, because base64 has none.
    """
    start = event.find(_ROUTES_KEY)
    if start < 0:
        return event, None
    start += len(_ROUTES_KEY)
    while event[start : start + 1] == b" ":
        start += 1
    end = event.find(b'"', start + 1)
    if event[start : start + 1] != b'"' or end < 0:
        return event, None
    return event[: start + 1] + event[end:], EncodedRoutes(memoryview(event)[start + 1 : end])


def decode_routes(text: str | bytes | memoryview, num_experts: int) -> np.ndarray:
    """Return all numbers of base64 of int32, in one dimension, with the dtype `route_type(num_experts)`. Raises
    ValueError, which says what is wrong with them.
    """
    characters = memoryview(text.encode() if isinstance(text, str) else text)
    padding = bytes(characters[-2:]).count(b"=")
    count, rest = divmod(len(characters) // 4 * 3 - padding, 4)
    if len(characters) % 4 or rest:
        raise ValueError(f"routed_experts is not base64 of int32: {len(characters)} characters")
    routes = np.empty(count, route_type(num_experts))
    done = 0
    for start in range(0, len(characters), _ROUTES_BLOCK):
        try:
            data = pybase64.b64decode_as_bytearray(characters[start : start + _ROUTES_BLOCK], validate=True)
            numbers = np.frombuffer(data, "<u4")
            routes[done : done + len(numbers)] = numbers
        except ValueError as error:  # binascii.Error, too
            raise ValueError(f"routed_experts is not base64 of int32: {error}") from error
        if numbers.size and numbers.max() >= num_experts:
            signed = numbers.view("<i4")
            raise ValueError(f"routed experts from {signed.min()} to {signed.max()}; 0 to {num_experts - 1} exist")
        done += len(numbers)
    if done != count:
        raise ValueError(f"routed_experts is not base64 of int32: {done} numbers in {len(characters)} characters")
    return routes


async def decode_routes_of(report: Any, num_experts: int) -> None:
    """Put decoded numbers in place of the base64 that `cut_routes` took out of this report. Raises ValueError."""
    meta = report.get("meta_info") if isinstance(report, dict) else None
    if isinstance(meta, dict) and isinstance(encoded := meta.get("routed_experts"), EncodedRoutes):
        decoding = asyncio.get_running_loop().run_in_executor(_decoders(), decode_routes, encoded.text, num_experts)
        meta["routed_experts"] = await decoding


@cache
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="routes")
