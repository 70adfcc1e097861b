"""The rules of episodes: what acts, its tools, its limits, and how the rewards of turns become advantages.

`validate_episodes` checks what the configuration alone can tell; whether a function can be imported and called is
checked where it is loaded. The options of `rollout.episode: foreign` follow: their type, and their validator, which the
agents' code uses as well.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gspo_mega.base.errors import Violation
from gspo_mega.base.network import address_problem
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.config.derived import ONE_TURN, TOOL_LOOP, is_one_turn
from gspo_mega.config.schema import Config, Data, Episodes, Rollout

# Episodes that are part of the package. All but the first have turns, so they need a list of messages.
BUILT_IN_EPISODES = (ONE_TURN, TOOL_LOOP, "foreign", "gym_text", "openenv")
_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# Where the reward of a foreign agent's episode comes from.
FOREIGN_REWARDS = ("functions", "exit_code", "file")


def validate_episodes(config: Config) -> Iterator[Violation]:
    """Yield what is wrong with `rollout.episode`, `rollout.tools` and `episodes`, or contradicts them."""
    yield from _validate_episode_function(config.rollout, config.data)
    yield from _validate_episode_rewards(config)
    yield from _validate_tools(config.rollout, config.episodes)
    yield from _validate_lengths(config)
    yield from _validate_isolation(config.episodes, config.rollout.episode.function)
    yield from _validate_turn_advantages(config)


def _validate_episode_function(rollout: Rollout, data: Data) -> Iterator[Violation]:
    episode = rollout.episode
    if episode.function not in BUILT_IN_EPISODES and not _FUNCTION_PATH.fullmatch(episode.function):
        yield Violation(
            "rollout.episode",
            f"{episode.function!r} is no episode; valid: {', '.join(BUILT_IN_EPISODES)}, or package.module:function",
        )
    if episode.function == "foreign" and (problem := validate_foreign_options(episode.options)) is not None:
        yield Violation(f"rollout.episode.options.{problem[0]}", problem[1])
    if is_one_turn(rollout):
        if episode.options:
            yield Violation("rollout.episode.options", "one_turn takes no options; leave them out")
    elif not data.chat_template:
        yield Violation(
            "data.chat_template",
            f"false with `rollout.episode: {episode.function}`: the messages of several turns become tokens by the"
            " tokenizer's chat template; valid: true",
        )


def _validate_episode_rewards(config: Config) -> Iterator[Violation]:
    episode = config.rollout.episode
    returns_nothing = episode.function in (ONE_TURN, TOOL_LOOP) or (
        episode.function == "foreign" and episode.options.get("reward", "functions") == "functions"
    )
    if not returns_nothing or config.reward.functions:
        return
    if config.data.sources and all(source.reward for source in config.data.sources):
        return  # then held-out prompts have a reward, too
    yield Violation(
        "reward.functions",
        f"missing; `rollout.episode: {episode.function}` returns no reward here, so at least one function has to"
        " return it: a built-in verifier's name, or package.module:function",
    )


def _validate_tools(rollout: Rollout, episodes: Episodes) -> Iterator[Violation]:
    episode, tools = rollout.episode.function, rollout.tools
    for index, tool in enumerate(tools):
        if not _FUNCTION_PATH.fullmatch(tool):
            yield Violation(f"rollout.tools.{index}", f"{tool!r} is no tool; valid: package.module:function")
    for name, count in Counter(tool.partition(":")[2].split(".")[-1] for tool in tools).items():
        if count > 1:
            yield Violation("rollout.tools", f"{count} tools are named {name!r}; names must differ")
    if tools and episode in BUILT_IN_EPISODES and episode != TOOL_LOOP:
        own = "it has one turn" if episode == ONE_TURN else "the agent or the environment has its own"
        yield Violation(
            "rollout.tools",
            f"`rollout.episode: {episode}` calls none of them: {own}; leave them out, or name an episode that does,"
            " tool_loop or package.module:function",
        )
    if episode == TOOL_LOOP and not tools:
        yield Violation(
            "rollout.tools",
            "missing; `rollout.episode: tool_loop` calls tools, each package.module:function",
        )
    if episode == TOOL_LOOP and episodes.max_turns < 2:
        yield Violation(
            "episodes.max_turns",
            f"{episodes.max_turns} with `rollout.episode: tool_loop`: after a call no turn is left for an"
            " answer; at least 2",
        )
    if tools and episodes.tool_format == "none":
        yield Violation(
            "episodes.tool_format",
            "none with `rollout.tools`: no text of the policy would be a call; valid: auto, hermes, brackets",
        )
    if len(tools) > 1 and episodes.tool_format == "brackets":
        yield Violation(
            "episodes.tool_format",
            f"brackets names no tool and `rollout.tools` has {len(tools)}; valid then: auto, hermes",
        )


def _validate_lengths(config: Config) -> Iterator[Violation]:
    limit = config.episodes.max_tokens
    least = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if limit is None and not is_one_turn(config.rollout):
        yield Violation(
            "episodes.max_tokens",
            f"missing; the longest episode of {config.rollout.episode.function} does not follow from other keys; at"
            f" least max_prompt_tokens + max_new_tokens = {least}",
        )
    if limit is not None and limit < least:
        yield Violation(
            "episodes.max_tokens",
            f"{limit} leaves no room for a first turn after a longest prompt (max_prompt_tokens + max_new_tokens ="
            f" {least}); at least that",
        )


def _validate_isolation(episodes: Episodes, function: str) -> Iterator[Violation]:
    if (problem := address_problem(episodes.endpoint.host)) is not None:
        yield Violation("episodes.endpoint.host", problem)
    if not episodes.network and function in ("foreign", "openenv"):
        yield Violation(
            "episodes.network",
            f"false with `rollout.episode: {function}`, which is reached through the network; valid: true",
        )


def _validate_turn_advantages(config: Config) -> Iterator[Violation]:
    advantage, recipe = config.advantage, RECIPES[config.algorithm]
    if advantage.turns == "return_to_go" and (recipe.has_one_advantage or config.objective.ratio == "sequence"):
        yield Violation(
            "advantage.turns",
            f"return_to_go with `algorithm: {config.algorithm}`: a term of the whole sequence has one advantage;"
            " valid: episode (or `algorithm: gspo_token`, or `grpo`)",
        )
    if advantage.turns == "episode" and advantage.turn_discount != 1:
        yield Violation(
            "advantage.turn_discount",
            f"{advantage.turn_discount:g} has no effect with `turns: episode`; 1, or `turns: return_to_go`",
        )


@dataclass(frozen=True)
class ForeignOptions:
    """The options of `rollout.episode: foreign`. `command`: the agent's program and its arguments. `reward`: one of
    `FOREIGN_REWARDS`. `model`: the name that agents ask for. `processes`: the number of agents at a time.
    """

    command: tuple[str, ...]
    reward: str = "functions"
    model: str = "policy"
    processes: int = 32

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> ForeignOptions:
        """Return the options, for which `validate_foreign_options` must have found nothing wrong."""
        return cls(**{**options, "command": tuple(options["command"])})


def validate_foreign_options(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (name of an option, what is wrong with it), or None if nothing is wrong."""
    names = [one.name for one in fields(ForeignOptions)]
    for name in options:
        if name not in names:
            return name, f"foreign has no such option; valid: {', '.join(names)}"
    if "command" not in options:
        return "command", "missing; the agent's program and its arguments, a list of texts"
    command = options["command"]
    if not isinstance(command, list | tuple) or not command or not all(isinstance(one, str) and one for one in command):
        return "command", f"{command!r}; the agent's program and its arguments, a list of texts, was expected"
    if options.get("reward", "functions") not in FOREIGN_REWARDS:
        return "reward", f"{options['reward']!r}; valid: {', '.join(FOREIGN_REWARDS)}"
    model = options.get("model", "policy")
    if not isinstance(model, str) or not model:
        return "model", f"{model!r}; a name was expected"
    processes = options.get("processes", 32)
    if type(processes) is not int or processes < 1:
        return "processes", f"{processes!r}; an integer >= 1 was expected"
    return None


def program_problem(command: Sequence[str]) -> str | None:
    """Return what is wrong with an agent's program on this machine, or None."""
    if shutil.which(command[0]) is None:
        return f"no program {command[0]!r} here; valid: a program on PATH, or a path to an executable file"
    return None
