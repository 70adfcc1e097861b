"""The search for non-finite numbers at active tokens, and when a device is asked for its result.

Owns `deferred`: inside of it what was found is read once, at its end, by one device synchronisation for all searches. A
search alone reads its result at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_mega.base.errors import NumericsError


@dataclass(frozen=True)
class NonFiniteToken:
    """The first active token whose number is NaN or infinite: which tensor, which sequence, which place in [T]."""

    tensor: str
    segment: int
    token: int
    value: float

    def __str__(self) -> str:
        return f"{self.tensor} is {self.value} at active token {self.token}, sequence {self.segment} of the micro-batch"


Describe = Callable[[NonFiniteToken], Exception]


@dataclass(frozen=True)
class _Search:
    """`row`: [4] float64 on the device: whether there is such a token, its segment, its place in [T], its value."""

    tensor: str
    row: Tensor
    describe: Describe


_pending: ContextVar[list[_Search] | None] = ContextVar("pending searches", default=None)


def not_finite(bad: NonFiniteToken) -> NumericsError:
    return NumericsError(f"{bad}; log-probs of active tokens must be finite")


def require_finite(mask: Tensor, segment_ids: Tensor, describe: Describe, **tensors: Tensor) -> None:
    """Raise `describe(token)` of the first active non-finite entry of the named `tensors`, each [T]: at once, with one
    device synchronisation, or inside of `deferred` at its end, without one here. Masked entries may hold anything.
    """
    searches = [_search(name, mask, segment_ids, values, describe) for name, values in tensors.items() if len(values)]
    if (pending := _pending.get()) is None:
        _settle(searches)
    else:
        pending.extend(searches)


@contextmanager
def deferred() -> Iterator[None]:
    """Read what all searches inside found when it ends, unless by an exception; the first one found raises. What is
    computed meanwhile from numbers that are not finite must not be kept before that.
    """
    searches: list[_Search] = []
    token = _pending.set(searches)
    try:
        yield
    finally:
        _pending.reset(token)
    _settle(searches)


def settle() -> None:
    """Inside of `deferred`: read what was found so far."""
    if pending := _pending.get():
        searches = list(pending)
        pending.clear()
        _settle(searches)


def _search(name: str, mask: Tensor, segment_ids: Tensor, values: Tensor, describe: Describe) -> _Search:
    values = values.detach()
    bad = mask.bool() & ~torch.isfinite(values)
    # An index that is a tensor without dimensions would be read by the host.
    token = bad.to(torch.uint8).argmax().view(1)
    parts = (bad.any().view(1), segment_ids.index_select(0, token), token, values.index_select(0, token))
    return _Search(name, torch.cat([part.double() for part in parts]), describe)


def _settle(searches: list[_Search]) -> None:
    if not searches:
        return
    rows = torch.stack([search.row for search in searches]).tolist()
    for search, (found, segment, token, value) in zip(searches, rows, strict=True):
        if found:
            raise search.describe(NonFiniteToken(search.tensor, int(segment), int(token), value))
