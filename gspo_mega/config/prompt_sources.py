"""The prompt files of a run in one form, however the configuration names them, and the reward that each of them has.

`data_sources` lists the sources to train on, `eval_sets` the held-out sets with all their settings, and the functions
at the end say which reward scores which source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.errors import DataError
from gspo_mega.config.schema import Data, Eval, EvalSet, OwnReward, Reward, Source

HELD_OUT_FILE = "held_out.jsonl"
# The name of held-out prompts among sources; the name of a set is appended to it. No source of the data can have it.
HELD_OUT = "held-out prompts"
# The file that `gspo-mega eval` writes every response to, in its attempt's folder.
RESPONSES_FILE = "responses.jsonl"
# The name of the only set if `eval` has no `sets`.
ONLY_SET = "held_out"
# Of each evaluation of a held-out set, responses to so many prompts are kept in the run folder, each text of so many
# characters.
MOST_KEPT_PROMPTS, MOST_KEPT_CHARACTERS = 16, 4000
_ROW_KEYS = ("prompt_key", "answer_key", "answer_keys", "chat_template", "system_prompt")
_SHARED_KEYS = (
    "num_prompts",
    "correct_threshold",
    "samples_per_prompt",
    "temperature",
    "max_new_tokens",
    "every_steps",
    "votes",
)


def names_prompts(data: Data) -> bool:
    """Return whether any prompts to train on are named. Only `gspo-mega eval` runs without them."""
    return data.path is not None or bool(data.sources) or data.reasoning_gym is not None


def data_sources(data: Data) -> tuple[Source, ...]:
    """Return the sources of a run's prompts, see `sources_of`."""
    return sources_of(data)


def sources_of(data: Data) -> tuple[Source, ...]:
    """Return `data.sources`, `data.path` as a single source named after the file's stem, or the files of
    `data.reasoning_gym`, one source per task.

    Characters that a source's name may not have become `-`. Raises DataError if none of them is given.
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


@dataclass(frozen=True)
class HeldOutSet:
    """A held-out set with all its settings, its own or those of `eval`.

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
        """Return whether the set is to be measured after `step`."""
        return self.every_steps > 0 and step % self.every_steps == 0


def eval_sets(evaluation: Eval | None, data: Data) -> tuple[HeldOutSet, ...]:
    """Return the held-out sets of a run: the entries of `eval.sets`, or the one that `eval` itself describes. The
    result is empty without `eval`, and if its file is not named, which `validate_held_out` refuses.
    """
    if evaluation is None:
        return ()
    own = [(f"eval.sets.{index}", entry) for index, entry in enumerate(evaluation.sets)]
    if not own:
        path = held_out_path(evaluation, data)
        own = [] if path is None else [("eval", EvalSet(name=ONLY_SET, path=path))]
    return tuple(_held_out_set(evaluation, data, place, entry) for place, entry in own)


def _held_out_set(eval: Eval | None, data: Data, place: str, entry: EvalSet) -> HeldOutSet:
    is_only = place == "eval"
    row_settings = {key: value for key in _ROW_KEYS if (value := getattr(entry, key)) is not None}
    if entry.answer_key is not None and entry.answer_keys is None:
        row_settings["answer_keys"] = ()  # the answer_keys of `data` would take precedence
    shared = {}
    for key in _SHARED_KEYS:
        value = getattr(entry, key)
        shared[key] = getattr(eval, key) if value is None else value
    return HeldOutSet(
        name=entry.name,
        place=place,
        source=HELD_OUT if is_only else f"{HELD_OUT} {entry.name}",
        episodes="eval" if is_only else f"eval-{entry.name}",
        path=entry.path,
        data=data.model_copy(update=row_settings),
        template=entry.template,
        template_keys=entry.template_keys,
        reward=held_out_reward(eval, data) if entry.reward is None else entry.reward,
        **shared,
    )


def held_out_path(evaluation: Eval | None, data: Data) -> str | None:
    """Return the file of held-out prompts: `eval.path`, else that of `data.reasoning_gym`, else None."""
    if evaluation is not None and evaluation.path is not None:
        return evaluation.path
    made = data.reasoning_gym
    return None if made is None else str(Path(made.folder) / HELD_OUT_FILE)


def own_rewards(data: Data) -> list[OwnReward | None]:
    """Return the different rewards of `data.sources`; None stands for `reward`."""
    found: list[OwnReward | None] = []
    for source in data.sources:
        if source.reward not in found:
            found.append(source.reward)
    return found


def held_out_reward(eval: Eval | None, data: Data) -> OwnReward | None:
    """Return the reward of held-out prompts if it is not `reward`: `eval.reward`, else the own reward that all sources
    share, else None.
    """
    if eval is not None and eval.reward is not None:
        return eval.reward
    own = own_rewards(data)
    return own[0] if len(own) == 1 else None


def source_rewards(evaluation: Eval | None, data: Data) -> dict[str, OwnReward]:
    """Return the own reward of each source that has one, held-out prompts included, by source name."""
    own = {source.name: source.reward for source in (data_sources(data) if names_prompts(data) else ())}
    own |= {one.source: one.reward for one in eval_sets(evaluation, data)}
    return {name: reward for name, reward in own.items() if reward is not None}


def reward_names(reward: Reward, own_reward: OwnReward | None) -> tuple[str, ...]:
    """Return the names of the functions that score a source: those of its own reward, or those of `reward`."""
    return tuple(entry.function for entry in own_reward or reward.functions)
