"""The fields of a server's reports: each is read, and refused if it makes no sense.

Owns what one field may be. How the reports of an answer fit together, and to its request, is `completion.py`'s. What is
right is checked in whole lists; values are looked at one by one only to say which is wrong.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from gspo_mega.base.errors import RolloutError
from gspo_mega.base.token_columns import constant, joined

_LOG_PROB_ROUNDING = 1e-5
"""In fp32, the log-prob of a token with nearly all the probability may exceed zero by this much."""


_MOST_VERSION = 2**31
_VERSION = re.compile(r"[0-9]{1,10}")
_MOST_SHOWN = 200


class NonsenseAnswer(RolloutError):
    """A server answered with something that cannot be true."""


class RefusedAnswer(RolloutError):
    """A server refuses this request."""


def shown(value: Any) -> str:
    """The beginning of what a server sent, as Python writes it; of a value that is nested too deeply, its type."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # also an int of too many digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def whole_number(value: Any, what: str) -> int:
    """An exact int from 0 on: no bool, and no float that equals one. Raises NonsenseAnswer."""
    if type(value) is not int or value < 0:
        raise NonsenseAnswer(f"{what} {shown(value)}; a whole number from 0 on expected")
    return value


def log_prob_of(value: Any, where: str) -> float:
    """A finite number, at most 0 up to rounding; nats. Raises NonsenseAnswer."""
    try:
        if type(value) in (float, int) and math.isfinite(value) and value <= _LOG_PROB_ROUNDING:
            return float(value)
    except OverflowError:  # an int that no float holds
        pass
    raise NonsenseAnswer(f"log-prob {shown(value)} {where}; a finite number <= 0 expected")


def field_of(mapping: Any, name: str, kind: type) -> Any:
    if not isinstance(mapping, dict) or not isinstance(mapping.get(name), kind):
        raise NonsenseAnswer(f"no {name} ({kind.__name__}) in {shown(mapping)}")
    return mapping[name]


def finish_reason_of(finish: Any) -> str | None:
    """The type of SGLang's `finish_reason`, None where the response goes on. Raises NonsenseAnswer, RefusedAnswer."""
    if finish is None:
        return None
    reason = finish.get("type") if isinstance(finish, dict) else None
    if reason not in ("stop", "length", "abort"):
        raise NonsenseAnswer(f"finish_reason {shown(finish)}; stop, length or abort expected")
    if reason == "abort" and finish.get("status_code") is not None:
        message = finish.get("message")
        message = message[:2000] if isinstance(message, str) else shown(message)
        raise RefusedAnswer(f"{shown(finish['status_code'])}: {message}")
    return reason


def checked_token_ids(values: list, vocab_size: int) -> np.ndarray:
    """[tokens] int32."""
    if set(map(type, values)) == {int}:
        with contextlib.suppress(OverflowError):  # said below
            array = np.array(values, np.int32)
            if array.min() >= 0 and array.max() < vocab_size:
                return array
    for position, token in enumerate(values):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise NonsenseAnswer(f"token {shown(token)} at position {position}; ids are 0 to {vocab_size - 1}")
    return np.zeros(0, np.int32)


def checked_log_probs(entries: list, token_ids: list[int]) -> np.ndarray:
    """Log-prob of each token, [tokens] float64 nats. `entries`: [log-prob, token id, text or null] per token."""
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
    """The first column of entries of one length whose second one is `token_ids`; None of others. Of a string, or of an
    object's keys, it would be strings.
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
    """A weight version: an int, or its digits, which is what SGLang sends. Raises NonsenseAnswer."""
    is_text = isinstance(value, str) and _VERSION.fullmatch(value) is not None
    if not is_text and type(value) is not int:
        raise NonsenseAnswer(f"{what} {shown(value)}; a number expected")
    version = int(value)
    if not 0 <= version < _MOST_VERSION:
        raise NonsenseAnswer(f"{what} {shown(value)}; a number from 0 to below 2**31 expected")
    return version


def versions_of(meta: dict, count: int) -> Sequence[int]:
    """The version of each of `count` tokens, from [{version, start, end}] spans, which must tile the response."""
    num = 0
    parts: list[Sequence[int]] = [constant(0, 0)]
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
        parts.append(constant(version, end - start))
        num = end
    if num != count:
        raise NonsenseAnswer(f"weight version spans {shown(spans)} do not tile {count} tokens")
    return joined(parts)
