"""The prompt files of a run in one form, whichever way the configuration names them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.errors import DataError
from gspo_mega.config.schema import Config, Data, EvalSet, OwnReward, Source


def names_prompts(data: Data) -> bool:
    """Whether any prompts to train on are named. `gspo-mega eval` alone does without."""
    return data.path is not None or bool(data.sources) or data.reasoning_gym is not None


def sources_of(data: Data) -> tuple[Source, ...]:
    """`data.sources`, `data.path` as a single source named after the file's stem, or the files of
    `data.reasoning_gym`, a source for each task.

    Characters that a source name may not hold become `-`. Raises DataError where neither is given.
    """
    if data.reasoning_gym is not None:
        made = data.reasoning_gym
        return tuple(
            Source(name=task.name, path=str(Path(made.folder) / f"{task.name}.train.jsonl"), weight=task.weight)
            for task in made.tasks
        )
    if data.path is None:
        if not data.sources:
            raise DataError("no data: data.path or data.sources must name a JSONL file")
        return data.sources
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data.path).stem)
    return (Source(name=stem or "data", path=data.path),)


HELD_OUT_FILE = "held_out.jsonl"


def held_out_path(config: Config) -> str | None:
    """The file of held-out prompts: `eval.path`, or else the one of `data.reasoning_gym`; None without either."""
    if config.eval is not None and config.eval.path is not None:
        return config.eval.path
    made = config.data.reasoning_gym
    return None if made is None else str(Path(made.folder) / HELD_OUT_FILE)


# The name of held-out prompts among sources, which that of a set follows. No source of the data can have it.
HELD_OUT = "held-out prompts"
# What `gspo-mega eval` writes every response to, in its attempt's folder.
RESPONSES_FILE = "responses.jsonl"
# The name of the one set of an `eval` without `sets`.
ONLY_SET = "held_out"


@dataclass(frozen=True)
class HeldOutSet:
    """A held-out set with every setting that it has of its own or takes from `eval`.

    `place`: its section in the configuration. `source`: the name of its prompts among sources. `episodes`: the prefix
    of its episodes' ids. `data`: how its rows are read and encoded.
    """

    name: str
    place: str
    source: str
    episodes: str
    path: str
    data: Data
    template: str | None
    template_keys: tuple[str, ...]
    reward: OwnReward | None
    num_prompts: int | None
    correct_threshold: float | None
    samples_per_prompt: int
    temperature: float
    max_new_tokens: int | None
    every_steps: int
    votes: str

    def is_due(self, step: int) -> bool:
        """Whether its cadence asks for a measurement after `step`."""
        return self.every_steps > 0 and step % self.every_steps == 0


def eval_sets(config: Config) -> tuple[HeldOutSet, ...]:
    """The held-out sets of a run: the entries of `eval.sets`, or the one that `eval` itself describes. None without
    `eval`, and where its file is missing (`config.rules` refuses that).
    """
    evaluation = config.eval
    if evaluation is None:
        return ()
    own = [(f"eval.sets.{index}", entry) for index, entry in enumerate(evaluation.sets)]
    if not own:
        path = held_out_path(config)
        own = [] if path is None else [("eval", EvalSet(name=ONLY_SET, path=path))]
    return tuple(_held_out_set(config, place, entry) for place, entry in own)


_OF_A_ROW = ("prompt_key", "answer_key", "answer_keys", "chat_template", "system_prompt")
_SHARED = (
    *("num_prompts", "correct_threshold", "samples_per_prompt", "temperature", "max_new_tokens", "every_steps"),
    "votes",
)


def _held_out_set(config: Config, place: str, entry: EvalSet) -> HeldOutSet:
    is_only = place == "eval"
    of_a_row = {key: value for key in _OF_A_ROW if (value := getattr(entry, key)) is not None}
    if entry.answer_key is not None and entry.answer_keys is None:
        of_a_row["answer_keys"] = ()  # those of `data` would go before it
    shared = {}
    for key in _SHARED:
        value = getattr(entry, key)
        shared[key] = getattr(config.eval, key) if value is None else value
    return HeldOutSet(
        name=entry.name,
        place=place,
        source=HELD_OUT if is_only else f"{HELD_OUT} {entry.name}",
        episodes="eval" if is_only else f"eval-{entry.name}",
        path=entry.path,
        data=config.data.model_copy(update=of_a_row),
        template=entry.template,
        template_keys=entry.template_keys,
        reward=held_out_reward(config) if entry.reward is None else entry.reward,
        **shared,
    )


def own_rewards(config: Config) -> list[OwnReward | None]:
    """The different rewards of `data.sources`; None stands for `reward`."""
    found: list[OwnReward | None] = []
    for source in config.data.sources:
        if source.reward not in found:
            found.append(source.reward)
    return found


def held_out_reward(config: Config) -> OwnReward | None:
    """The reward of held-out prompts where it is not `reward`: `eval.reward`, or else the own reward that all sources
    share.
    """
    if config.eval is not None and config.eval.reward is not None:
        return config.eval.reward
    own = own_rewards(config)
    return own[0] if len(own) == 1 else None


def source_rewards(config: Config) -> dict[str, OwnReward]:
    """The own reward of each source that has one, held-out prompts included; by source name."""
    own = {source.name: source.reward for source in (data_sources(config) if names_prompts(config.data) else ())}
    own |= {one.source: one.reward for one in eval_sets(config)}
    return {name: reward for name, reward in own.items() if reward is not None}


def reward_names(config: Config, own_reward: OwnReward | None) -> tuple[str, ...]:
    """The functions that score a source: its own, or those of `reward`."""
    return tuple(entry.function for entry in own_reward or config.reward.functions)


def data_sources(config: Config) -> tuple[Source, ...]:
    """The sources of a run's prompts, see `sources_of`."""
    return sources_of(config.data)
