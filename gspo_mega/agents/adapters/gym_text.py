"""Text environments of Gymnasium's form as episodes: any object with `reset` and `step`.

    rollout:
      episode:
        function: gym_text
        options:
          environment: my_package.games:Maze     # a class or function that makes one environment
          environment_options: {size: 5}         # its keyword arguments
          action_pattern: "<move>(.*?)</move>"   # optional: which part of an answer is the action

`reset(seed=..., options=...)` returns an observation, or an observation and a dictionary. `seed` is the episode's;
`options` are the row's metadata, with its `answer` and `prompt_id`. Either is left out if `reset` has no such
parameter. `step(action)` takes a text and returns Gymnasium's five values (observation, reward, terminated, truncated,
info) or Gym's four. Both may be async; plain ones run in a thread, so that they do not hold up other episodes.
`close()` is called at the end, if there is one. Gymnasium itself is not needed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from gspo_mega.agents.adapters.environment_loop import Step, pattern_of, play
from gspo_mega.agents.protocol import Model, Outcome, Task, Tools
from gspo_mega.base.errors import EpisodeError
from gspo_mega.base.user_functions import import_function


async def episode(
    task: Task,
    model: Model,
    tools: Tools,
    *,
    environment: str,
    environment_options: dict[str, Any] | None = None,
    action_pattern: str | None = None,
) -> Outcome:
    """Play one environment from `reset` to its end. Raises EpisodeError if it returns something else than it should."""
    made = await _call(import_function(environment, "environment", EpisodeError), **(environment_options or {}))
    try:
        return await play(
            task,
            model,
            _first(await _call(made.reset, **_given_to_reset(made.reset, task))),
            lambda action: _act(made, action),
            pattern_of(action_pattern),
        )
    finally:
        if callable(getattr(made, "close", None)):
            await _call(made.close)


def check_options(
    *, environment: str, environment_options: dict[str, Any] | None = None, action_pattern: str | None = None
) -> None:
    """Check the options. Raises EpisodeError if the environment cannot be imported or made with these options, or if
    the pattern is not valid.
    """
    factory = import_function(environment, "environment", EpisodeError)
    try:
        inspect.signature(factory).bind(**(environment_options or {}))
    except TypeError as error:
        raise EpisodeError(f"environment {environment!r}: cannot be made with environment_options: {error}") from error
    except ValueError:  # Python does not know the parameters of a built-in
        pass
    pattern_of(action_pattern)


async def _act(environment: Any, action: str) -> Step:
    returned = await _call(environment.step, action)
    if not isinstance(returned, tuple) or len(returned) not in (4, 5):
        raise EpisodeError(
            f"step of {type(environment).__name__} returned {returned!r:.100}; (observation, reward, terminated,"
            " truncated, info) was expected"
        )
    observation, reward, *over, info = returned
    return Step(observation, float(reward), any(map(bool, over)), info if isinstance(info, dict) else {})


def _first(returned: Any) -> Step:
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        returned = returned[0]
    return Step(returned)


def _given_to_reset(reset: Callable[..., Any], task: Task) -> dict[str, Any]:
    ours = {
        "seed": task.seed,
        "options": {**task.metadata, "answer": task.answer, "prompt_id": task.prompt_id},
    }
    parameters = inspect.signature(reset).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return ours
    names = {one.name for one in parameters}
    return {key: value for key, value in ours.items() if key in names}


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
