"""One sampled turn, what samples it, and how an episode ended.

Episodes say what they need of a sampler (`TurnSampler`); `rollout/sampler.py` provides it. A failure that is the
episode's own leaves its group: drawing another sample in its place would train on what does not fail. A failure of the
infrastructure says nothing about any sample, so another is drawn in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

import numpy as np

from gspo_mega.agents.messages import StopWatch
from gspo_mega.agents.protocol import Outcome
from gspo_mega.base.episodes import Episode, ToolRecord
from gspo_mega.base.sampling_masks import SamplingMasks

OnTokens = Callable[[int, Sequence[int]], None]

"""Called with a position in the turn and the tokens from there on, as the server reports them. A position below what
was already reported takes those tokens back: their server failed, and the turn was sampled again from there."""


@dataclass(frozen=True)
class Turn:
    """One turn, sampled by a server after a context. Each sequence has one entry per sampled token.

    `log_probs` are in nats, at the sampling temperature. `finish_reason` is `stop` (the last token is a stop token),
    `length` or `stop_string` (the text of the last tokens has a stop string). `routed_experts` is an integer array of
    shape [context + turn - 1, layers, top_k], or None. `server_id` is the server that sampled the last token, and so
    holds the prefix in its cache. `sampling_masks` are the tokens that each was sampled from, with `log_probs` over
    these; None if from all. `num_cached_tokens`: how many tokens of the context the server that sampled the first token
    read from its prefix cache; None if it did not say so.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    routed_experts: np.ndarray | None = None
    server_id: str = ""
    sampling_masks: SamplingMasks | None = None
    num_cached_tokens: int | None = None


class TurnParams(Protocol):
    """How to sample a turn. `SamplingParams` in `rollout/client/completion.py` implements it and explains them."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def min_p(self) -> float: ...

    def at_most(self, num_tokens: int, watch: StopWatch | None = None) -> Self:
        """Return the same parameters with `max_new_tokens` no larger than `num_tokens`, for a turn that also ends where
        `watch` finds a stop string.
        """
        ...


Params = TypeVar("Params", bound=TurnParams)

_Params = TypeVar("_Params", bound=TurnParams, contravariant=True)


class TurnSampler(Protocol[_Params]):
    """Samples turns. `Sampler` in `rollout/sampler.py` implements it."""

    async def sample(
        self,
        name: str,
        token_ids: Sequence[int],
        params: _Params,
        request_id: str,
        prefer: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Sample one whole turn after the context `token_ids`, and return it.

        `name` is the prompt's name, for errors. `prefer` names the server that holds the context in its prefix cache;
        it is used if it may work and is not overloaded. Raises RolloutError if no server can sample the turn; that ends
        the run.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """The limits of an episode. `max_turns` counts its turns, branches included; `max_tokens` bounds a context together
    with its turn. The `max_new_tokens` of a single turn is in its TurnParams.
    """

    max_turns: int
    max_tokens: int


# Every kind of failure, counted as `num_episode_failures_<kind>`.
FAILURE_KINDS = (
    "exception",  # the episode's function, or the agent, ended with an error
    "wrong_type",  # what it returned is not an outcome
    "not_finite",  # a number in what it returned is not finite
    "deadline",  # it took more time of its own than episodes.turn_deadline_seconds or deadline_seconds
    "blocked",  # it held its process's event loop for longer than episodes.blocked_seconds
    "crash",  # it ended its process
    "memory",  # it ran out of memory
    "too_large",  # it sent a message over episodes.endpoint.max_body_bytes
    "messages",  # the chat template refuses its messages
    "not_replayable",  # it began again and asked for other turns than before
    "no_turn",  # it ended without a turn, so there is nothing to train on
    "unreachable",  # what it needs from outside cannot be reached (Unreachable)
    "killed",  # an agent's process was ended by SIGKILL, twice
    "not_started",  # an agent's process could not be started
)

# Failures of the infrastructure. They say nothing about a sample that was not begun, so another is drawn in its place.
# Once the episode has asked for a turn, what was sampled may have caused the failure: it then has the kind on the right
# and is the episode's own. An episode with a failure of its own leaves its group without a replacement: to draw another
# would train on samples that do not fail.
INFRASTRUCTURE_KINDS = {"unreachable": "exception", "killed": "crash", "not_started": "crash"}


@dataclass(frozen=True)
class Failure:
    """Why an episode failed: a `kind` of `FAILURE_KINDS`, and a `text` that also names the tool that was running."""

    kind: str
    text: str

    def after_turns(self, num_turns: int) -> Failure:
        """Return this failure as it counts for an episode that has asked for `num_turns` turns."""
        if num_turns == 0 or self.kind not in INFRASTRUCTURE_KINDS:
            return self
        return Failure(INFRASTRUCTURE_KINDS[self.kind], self.text)


def lost_by_infrastructure(episode: Episode) -> bool:
    """Whether the infrastructure lost the episode before its first turn, so that another sample is drawn instead."""
    return episode.failure is not None and episode.failure.partition(":")[0] in INFRASTRUCTURE_KINDS


@dataclass(frozen=True)
class Finished:
    """The end of one episode: an `outcome` or a `failure`.

    `limit` is the kind of the TurnRefused that ended the episode, if it did not catch that; its outcome is then
    `Outcome()`. `tool_calls` are in the order in which they began. `own_seconds` is the episode's own time, without the
    time in which it waited for turns.
    """

    outcome: Outcome | None
    failure: Failure | None = None
    limit: str = ""
    tool_calls: list[ToolRecord] = field(default_factory=list)
    own_seconds: float = 0.0
