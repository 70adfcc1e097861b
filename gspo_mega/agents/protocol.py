"""What a user writes: an episode function, and finding the one that a name stands for.

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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from gspo_mega.base.errors import EpisodeError
from gspo_mega.rewards.returned_values import BadResult, number_of, verdict_of
from gspo_mega.rewards.user_functions import import_function, place_of

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
    """The run's tools (`rollout.tools`), which `tool_schema.py` describes."""

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
    "one_turn": BuiltIn("gspo_mega.agents.one_turn:one_turn", in_worker=False),
    "tool_loop": BuiltIn("gspo_mega.agents.tool_loop:tool_loop", in_worker=True),  # where the tools are
    "foreign": BuiltIn("gspo_mega.agents.foreign:ForeignAgents", in_worker=False),
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
