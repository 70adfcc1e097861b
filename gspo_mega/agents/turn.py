"""One sampled turn, and who samples it.

Owns the seam between episodes and the rollout servers: episodes say what they need, `rollout.sampling` provides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np

OnTokens = Callable[[int, Sequence[int]], None]
"""Called with a position in the turn and the tokens from there on, as they are reported. A position below what was
reported already takes those tokens back: their server failed, and the turn was sampled again from there."""


@dataclass(frozen=True)
class Turn:
    """What a server sampled behind a context. Sequences have one entry per sampled token.

    `log_probs` are nats at the sampling temperature. `finish_reason` is `stop` (the last token is a stop token) or
    `length`. `routed_experts` is [context + turn - 1, layers, top_k] integers, or None. `server_id` is the server that
    sampled the last token, and so holds the prefix.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    routed_experts: np.ndarray | None = None
    server_id: str = ""


class TurnParams(Protocol):
    """How to sample a turn; `rollout.client.completion.SamplingParams` is one, and says what the values mean."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    def at_most(self, num_tokens: int) -> Self:
        """The same with `max_new_tokens` no larger than `num_tokens`."""
        ...


Params = TypeVar("Params", bound=TurnParams)
_Params = TypeVar("_Params", bound=TurnParams, contravariant=True)


class TurnSampler(Protocol[_Params]):
    """Samples turns; `rollout.sampling.Sampler` is one."""

    async def sample(
        self,
        name: str,
        token_ids: Sequence[int],
        params: _Params,
        request_id: str,
        prefer: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """One whole turn behind the context `token_ids`. `name`: of the prompt, in errors. `prefer`: the server that
        holds the context in its prefix cache, if it may work and is not overloaded.

        Raises RolloutError where no server can do it, which ends the run.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """`max_turns`: of an episode, branches included. `max_tokens`: of a context with its turn. A turn's own
    `max_new_tokens` is in its TurnParams.
    """

    max_turns: int
    max_tokens: int
