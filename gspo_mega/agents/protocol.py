"""What an episode function gets and returns, how a name in the configuration becomes one, and how an episode ended.

An episode is how the policy meets one task: which messages it is shown, which tools it may call, when it is over, and
what it has earned. It is an async function

    async def episode(task: Task, model: Model, tools: Tools, **options) -> Outcome | float

    async def episode(task, model, tools):
        messages = [*task.messages]
        while True:
            message = await model.turn(messages)        # one turn: sampled, recorded, and given back as a message
            messages.append(message)
            if not message.get("tool_calls"):
                return float(message["content"].strip() == task.answer)
            messages += await tools.answer(message)     # one tool message for each call

Messages are dictionaries in OpenAI's form. `model.turn` keeps the tokens: it never encodes again what it sampled, and
it extends a history that is handed back unchanged. A history that was edited begins a branch (docs/episodes.md).

The function runs in a worker process, next to many other episodes on one event loop. It must await what takes long and
must not block: put a blocking library call into `asyncio.to_thread`. It may raise, print or crash; only that episode is
lost. If another episode of its worker breaks the worker, the function begins again in a new worker with the same task.
Turns that it has already asked for are then answered from the record, and so are tools without a `task` parameter. A
function must therefore ask for the same turns again when it gets the same answers: draw random numbers from
`random.Random(task.seed)`, and do not read the clock.

The file has three parts: what a user writes and how it is checked; what the rollout servers provide for it
(`TurnSampler`); and how an episode ended (`Finished`), with the kinds of failure.
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np

from gspo_mega.base.episodes import Episode, ToolRecord
from gspo_mega.base.errors import EpisodeError
from gspo_mega.rewards.functions import BadResult, import_function, number_of, place_of, verdict_of

# Users' episodes may import this module by its earlier name, for one more release.
sys.modules.setdefault("gspo_mega.episodes.protocol", sys.modules[__name__])


Message: TypeAlias = dict[str, Any]

MAX_INFO_CHARACTERS = 16 * 1024


@dataclass(frozen=True)
class Task:
    """What one episode is about: a row of the data.

    `messages` is the row's prompt as messages (a text becomes one user message), with the system prompt of the
    configuration. They are fresh copies, which the function may change. `answer` and `metadata` come from the row.
    `seed` belongs to the episode and stays the same when the episode begins again. `state` is empty at the start: tools
    with a `task` parameter keep there what they need between calls.
    """

    messages: list[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt_id: str = ""
    source: str = ""
    seed: int = 0
    state: dict[str, Any] = field(default_factory=dict)


class Model(Protocol):
    """The policy, as an episode sees it."""

    async def turn(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Message:
        """Show the policy these messages, sample its next one and return it: `{"role": "assistant", "content": text}`,
        with `reasoning_content` and `tool_calls` if the tokens hold them.

        `max_new_tokens` lowers `rollout.max_new_tokens` for this turn. Several turns may be asked for at the same time;
        they are numbered in the order of the calls. Raises TurnRefused if a limit is reached.
        """
        ...

    def set_reward(self, turn: int, value: float) -> None:
        """Give turn number `turn` a reward of its own; -1 is the last turn. It stays when a limit ends the episode.

        Raises IndexError if there was no such turn, ValueError or TypeError if the value is not a finite number.
        """
        ...


class Tools(Protocol):
    """The run's tools (`rollout.tools`), which `tools.py` describes."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template is given: one OpenAI function schema per tool."""
        ...

    async def call(self, name: str, arguments: dict[str, Any] | str) -> str:
        """Run a tool and return its result as text. `arguments` may be JSON text. Wrong arguments, an unknown name and
        an exception in the tool are results too: the text then begins with `error: `.
        """
        ...

    async def answer(self, message: Message) -> list[Message]:
        """Run all tool calls of an assistant's message, in order. Return one tool message per call."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What an episode earned.

    `reward` is for the whole episode, in addition to the rewards of its turns; None leaves it to `reward.functions`.
    `turn_rewards[k]` is the reward of turn k, None or missing if the turn has none. The episode's reward is `reward`,
    plus all turn rewards, plus the weighted sum of the reward functions. `correct` says whether the task was solved,
    which held-out accuracy counts; None leaves it to the reward functions. `parts` holds further numbers, which are
    recorded next to the reward. `info` holds anything else worth recording: JSON types, up to `MAX_INFO_CHARACTERS` as
    JSON text.
    """

    reward: float | None = None
    turn_rewards: Sequence[float | None] = ()
    correct: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


class TurnRefused(EpisodeError):
    """The policy may not take this turn, because a limit is reached. A function may catch this and return an outcome of
    its choice.

    If it is not caught, it ends the episode as a limit ends a response: the turn rewards that were set stay, the reward
    functions score the episode, and it is trained on. Leaving such episodes out would train on short ones only.
    """

    kind = "refused"


class ContextFull(TurnRefused):
    """`episodes.max_tokens` leaves no room for another token."""

    kind = "context_full"


class TooManyTurns(TurnRefused):
    """The episode has taken `episodes.max_turns` turns."""

    kind = "too_many_turns"


class Unreachable(EpisodeError):
    """Something that the episode needs from outside cannot be reached, through no fault of the episode.

    If it is raised before the first turn, another sample is drawn in place of this one. Later, what was sampled may
    have caused it, and it counts as a failure like any other.
    """


EpisodeFunction: TypeAlias = Callable[..., Awaitable[Any]]


class BuiltIn(NamedTuple):
    """A built-in episode. `path` says where its function is. `in_worker`: it runs in a worker process, because it runs
    users' code.
    """

    path: str
    in_worker: bool


BUILTINS: dict[str, BuiltIn] = {
    "one_turn": BuiltIn("gspo_mega.agents.driver:one_turn", in_worker=False),
    "tool_loop": BuiltIn("gspo_mega.agents.driver:tool_loop", in_worker=True),  # where the tools are
    "foreign": BuiltIn("gspo_mega.agents.external_agent:ForeignAgents", in_worker=False),
    "gym_text": BuiltIn("gspo_mega.agents.adapters.gym_text:episode", in_worker=True),
    "openenv": BuiltIn("gspo_mega.agents.adapters.openenv:episode", in_worker=True),
}


def runs_in_worker(name: str) -> bool:
    """Whether the episode of this name runs in a worker process. Only built-ins without users' code do not."""
    return name not in BUILTINS or BUILTINS[name].in_worker


def load_episode(name: str, options: dict[str, Any]) -> EpisodeFunction:
    """Return the function that `rollout.episode` names: a built-in, or `package.module:function`.

    Raises EpisodeError if there is no such built-in, module or function, if the import fails, if the function is not
    async, or if it cannot be called with a task, a model, tools and these options.
    """
    if ":" in name:
        function = import_function(name, "episode", EpisodeError)
    elif name in BUILTINS:
        function = import_function(BUILTINS[name].path, "episode", EpisodeError)
    else:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise EpisodeError(f"episode {name!r}: {guess}valid: {', '.join(BUILTINS)}, or package.module:function")
    where = f"episode {name!r}{place_of(function)}"
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isclass(function) or inspect.isasyncgenfunction(called):
        kind = "a class" if inspect.isclass(function) else "an async generator (it yields)"
        raise EpisodeError(f"{where}: it is {kind}; `async def episode(task, model, tools)` is expected")
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(called):
        raise EpisodeError(f"{where}: it is a plain function; `async def episode(task, model, tools)` is expected")
    try:
        inspect.signature(function).bind(None, None, None, **options)
    except TypeError as error:
        given = "".join(f", {key}=..." for key in options)
        raise EpisodeError(f"{where}: cannot be called as (task, model, tools{given}): {error}") from error
    check = getattr(inspect.getmodule(function), "check_options", None) if name in BUILTINS else None
    if check is not None:
        check(**options)
    return function


def outcome_of(returned: Any) -> Outcome:
    """Return what an episode function returned as an Outcome, its numbers as finite Python floats. Raises BadResult."""
    if returned is None:
        raise BadResult(
            "wrong_type", "returned nothing; a number or an Outcome was expected (Outcome() leaves it to rewards)"
        )
    if not isinstance(returned, Outcome):
        return Outcome(number_of(returned, "the result"))
    correct = None if returned.correct is None else verdict_of(returned.correct, "Outcome.correct")
    rewards = returned.turn_rewards
    if isinstance(rewards, str | bytes) or not hasattr(rewards, "__iter__") or getattr(rewards, "shape", None) == ():
        raise BadResult("wrong_type", f"Outcome.turn_rewards is {rewards!r:.60}; a list of numbers was expected")
    if not isinstance(returned.parts, dict):
        raise BadResult("wrong_type", f"Outcome.parts is {returned.parts!r:.60}; a dictionary was expected")
    return Outcome(
        None if returned.reward is None else number_of(returned.reward, "Outcome.reward"),
        [
            None if value is None else number_of(value, f"Outcome.turn_rewards[{turn}]")
            for turn, value in enumerate(rewards)
        ],
        correct,
        {str(key): number_of(value, f"Outcome.parts[{key!r}]") for key, value in returned.parts.items()},
        _info(returned.info),
    )


def _info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise BadResult("wrong_type", f"Outcome.info is {info!r:.60}; a dictionary was expected")
    try:
        text = json.dumps(info, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadResult("wrong_type", f"Outcome.info is not JSON: {error}") from None
    if len(text) > MAX_INFO_CHARACTERS:
        raise BadResult("wrong_type", f"Outcome.info has {len(text)} characters as JSON; at most {MAX_INFO_CHARACTERS}")
    return json.loads(text)


OnTokens = Callable[[int, Sequence[int]], None]
"""Called with a position in the turn and the tokens from there on, as the server reports them. A position below what
was already reported takes those tokens back: their server failed, and the turn was sampled again from there."""


@dataclass(frozen=True)
class Turn:
    """One turn, sampled by a server after a context. Each sequence has one entry per sampled token.

    `log_probs` are in nats, at the sampling temperature. `finish_reason` is `stop` (the last token is a stop token) or
    `length`. `routed_experts` is an integer array of shape [context + turn - 1, layers, top_k], or None. `server_id` is
    the server that sampled the last token, and so holds the prefix in its cache.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    routed_experts: np.ndarray | None = None
    server_id: str = ""


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

    def at_most(self, num_tokens: int) -> Self:
        """Return the same parameters with `max_new_tokens` no larger than `num_tokens`."""
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
