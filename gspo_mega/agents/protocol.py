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
from typing import Any, NamedTuple, Protocol, TypeAlias

from gspo_mega.base.errors import EpisodeError
from gspo_mega.base.user_functions import import_function, place_of
from gspo_mega.rewards.user_code import BadResult, number_of, verdict_of

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
