"""How an episode ended: what it earned, or why it failed.

Owns which failures are the episode's own and which are the infrastructure's. An own failure leaves its group: to draw
another sample in its place would train on what does not fail. A failure of the infrastructure says nothing about any
sample, because none was begun, so another is drawn in its place.

One sampled turn, and who samples it.

Owns the seam between episodes and the rollout servers: episodes say what they need, `rollout.sampling` provides it.

What a user writes: an episode function, and finding the one that a name stands for.

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

Messages are dictionaries in OpenAI's form. `model.turn` owns the tokens: what it sampled is never encoded again, and a
history that is handed back unchanged is extended. A history that was edited begins a branch (docs/episodes.md).

The function runs in a worker process, beside many other episodes on one event loop. So it awaits what takes long, and
does not block: a blocking library call belongs in `asyncio.to_thread`. It may raise, print or crash, and only that
episode is lost. When another episode of its worker breaks it, the function begins again in a new worker with the same
task: turns that it asked for already are answered from the record, as are tools without a `task` parameter. A function
must therefore ask for the same turns again, given the same answers: draw random numbers from
`random.Random(task.seed)`, and tell no time.

Owns the names, the checks before a run, and the checks of a result. `episode_worker.py` runs the functions.
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

OnTokens = Callable[[int, Sequence[int]], None]
"""Called with a position in the turn and the tokens from there on, as they are reported. A position below what was
reported already takes those tokens back: their server failed, and the turn was sampled again from there."""

# Users' episodes may import this module by its earlier name, for one more release.
sys.modules.setdefault("gspo_mega.episodes.protocol", sys.modules[__name__])


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


Message: TypeAlias = dict[str, Any]

MAX_INFO_CHARACTERS = 16 * 1024


@dataclass(frozen=True)
class Task:
    """What one episode is about: a row of the data.

    `messages`: the row's prompt as messages (a text is one user message), the system prompt of the configuration
    included; fresh copies, which the function may change. `answer` and `metadata` come from the row. `seed` is the
    episode's own and stays the same when the episode begins again. `state` is empty: what tools with a `task`
    parameter keep between calls.
    """

    messages: list[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt_id: str = ""
    source: str = ""
    seed: int = 0
    state: dict[str, Any] = field(default_factory=dict)


class TurnRefused(EpisodeError):
    """The policy may not take this turn: a limit is reached. A function may catch it and give an outcome of its choice.

    Not caught, it ends the episode as a limit ends a response: with the turn rewards that were set, scored by the
    reward functions, and trained on. To leave such episodes out would train on short ones only.
    """

    kind = "refused"


class ContextFull(TurnRefused):
    """`episodes.max_tokens` leaves no room for another token."""

    kind = "context_full"


class TooManyTurns(TurnRefused):
    """The episode has had its `episodes.max_turns`."""

    kind = "too_many_turns"


class Unreachable(EpisodeError):
    """Something that the episode needs from outside cannot be reached, for no fault of the episode's.

    Raised before the first turn, another sample is drawn in this one's place. Later, what was sampled may have caused
    it, and it is a failure as any other.
    """


class Model(Protocol):
    """The policy, as an episode sees it."""

    async def turn(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Message:
        """Show the policy these messages and sample its next one: `{"role": "assistant", "content": text}`, with
        `reasoning_content` and `tool_calls` where the tokens hold them.

        `max_new_tokens`: fewer than `rollout.max_new_tokens` for this turn. Turns may be asked for at the same time;
        they are numbered in the order of the calls. Raises TurnRefused.
        """
        ...

    def set_reward(self, turn: int, value: float) -> None:
        """Give a turn a reward of its own, by its number; -1 is the last one. It stays when a limit ends the episode.

        Raises IndexError: there was no such turn; ValueError, TypeError: the value is no finite number.
        """
        ...


class Tools(Protocol):
    """The run's tools (`rollout.tools`), which `tools.py` describes."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template is given: one OpenAI function schema for each tool."""
        ...

    async def call(self, name: str, arguments: dict[str, Any] | str) -> str:
        """Run a tool and return its result as text. Wrong arguments, an unknown name and an exception of the tool are
        answers too: a text that begins with `error: `. `arguments` may be JSON text.
        """
        ...

    async def answer(self, message: Message) -> list[Message]:
        """Run all tool calls of an assistant's message, one after the other: one tool message for each, in order."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What an episode earned.

    `reward`: for the whole episode, beyond what its turns have; None leaves it to `reward.functions`. `turn_rewards`:
    of turn k at place k, None or missing where a turn has none. The episode's reward is `reward`, plus all turn
    rewards, plus the weighted sum of the reward functions. `correct`: whether the task was solved, which held-out
    accuracy counts; None leaves it to the reward functions. `parts`: further numbers, recorded beside the reward.
    `info`: anything else worth recording, of JSON's types, up to `MAX_INFO_CHARACTERS` as JSON text.
    """

    reward: float | None = None
    turn_rewards: Sequence[float | None] = ()
    correct: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


EpisodeFunction: TypeAlias = Callable[..., Awaitable[Any]]


class BuiltIn(NamedTuple):
    """`path`: where the function is. `in_worker`: whether it runs users' code, and so in a worker process."""

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
    """Whether the episode of this name runs in a worker process: every one but those that are ours alone."""
    return name not in BUILTINS or BUILTINS[name].in_worker


def load_episode(name: str, options: dict[str, Any]) -> EpisodeFunction:
    """The function that `rollout.episode` names: a built-in, or `package.module:function`.

    Raises EpisodeError: no such built-in, module or function; an import that fails; a function that is not async; or
    one that cannot be called with a task, a model, tools and these options.
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
    """The outcome in what an episode function returned, its numbers as finite Python floats. Raises BadResult."""
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
        raise BadResult("wrong_type", f"Outcome.info is no JSON: {error}") from None
    if len(text) > MAX_INFO_CHARACTERS:
        raise BadResult("wrong_type", f"Outcome.info has {len(text)} characters as JSON; at most {MAX_INFO_CHARACTERS}")
    return json.loads(text)


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
