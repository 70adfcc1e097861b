"""How an episode ended: what it earned, or why it failed.

Owns which failures are the episode's own and which are the infrastructure's. An own failure leaves its group: to draw
another sample in its place would train on what does not fail. A failure of the infrastructure says nothing about any
sample, because none was begun, so another is drawn in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gspo_mega.agents.protocol import Outcome
from gspo_mega.base.episode_records import Episode, ToolRecord

# Every kind of failure, counted as `num_episode_failures_<kind>`.
FAILURE_KINDS = (
    "exception",  # the episode's function, or the agent, ended with an error
    "wrong_type",  # what it returned is no outcome
    "not_finite",
    "deadline",  # episodes.turn_deadline_seconds or deadline_seconds, of its own time
    "blocked",  # it held its process's event loop for longer than episodes.blocked_seconds
    "crash",  # it ended its process
    "memory",
    "too_large",  # a message over episodes.endpoint.max_body_bytes
    "messages",  # the chat template refuses its messages
    "not_replayable",  # begun again, it asked for other turns than it had asked for
    "no_turn",  # it ended without a turn, so there is nothing to train on
    "unreachable",  # what it needs from outside cannot be reached (protocol.Unreachable)
    "killed",  # an agent's process was ended by SIGKILL, twice
    "not_started",  # an agent's process could not be started
)

# Failures of the infrastructure, each with the kind that it has once the episode has asked for a turn: what was sampled
# may have caused it then, and it is the episode's own.
INFRASTRUCTURE_KINDS = {"unreachable": "exception", "killed": "crash", "not_started": "crash"}


@dataclass(frozen=True)
class Failure:
    """`kind`: one of `FAILURE_KINDS`. `text`: the reason in words, with the tool that was running."""

    kind: str
    text: str

    def behind(self, num_turns: int) -> Failure:
        """This failure, of an episode that has asked for so many turns."""
        if num_turns == 0 or self.kind not in INFRASTRUCTURE_KINDS:
            return self
        return Failure(INFRASTRUCTURE_KINDS[self.kind], self.text)


def is_of_infrastructure(episode: Episode) -> bool:
    """Whether another sample is drawn in this one's place."""
    return episode.failure is not None and episode.failure.partition(":")[0] in INFRASTRUCTURE_KINDS


@dataclass(frozen=True)
class Finished:
    """The end of one episode: an `outcome` or a `failure`.

    `limit`: the kind of the TurnRefused that ended it, if it did not catch that; its outcome is `Outcome()` then.
    `tool_calls`: in the order in which they began. `own_seconds`: its own time, waiting for turns not counted.
    """

    outcome: Outcome | None
    failure: Failure | None = None
    limit: str = ""
    tool_calls: list[ToolRecord] = field(default_factory=list)
    own_seconds: float = 0.0
