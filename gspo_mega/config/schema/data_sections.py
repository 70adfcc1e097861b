"""The sections about prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gspo_mega.config.schema.reward_sections import OwnReward
from gspo_mega.config.schema.section import MAY_CHANGE, Section


class Source(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Shown in metrics and prompt ids.")
    path: str = Field(
        min_length=1, description="JSONL or Parquet file, or a folder of Parquet files or one that `datasets` saved."
    )
    weight: float = Field(default=1.0, gt=0, description="Relative share of prompts drawn from this source.")
    reward: OwnReward | None = Field(
        default=None,
        description=(
            "Reward for this source's prompts instead of `reward`: a name, one function as in `reward.functions`, or a"
            " list of them."
        ),
    )


class ReasoningGymTask(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Name of the task in reasoning-gym.")
    weight: float = Field(default=1.0, gt=0, description="Relative share of prompts drawn from this task.")
    options: dict[str, Any] = Field(default_factory=dict, description="The task's own options, e.g. its difficulty.")


def _listed(tasks: Any) -> Any:
    """`{name: weight}` as the list that it is short for."""
    if not isinstance(tasks, dict):
        return tuple(tasks) if isinstance(tasks, list) else tasks
    return tuple({"name": name, "weight": weight} for name, weight in tasks.items())


_TASKS = BeforeValidator(_listed, json_schema_input_type=tuple[ReasoningGymTask, ...] | dict[str, float])


class ReasoningGym(Section):
    """Prompts made by the package reasoning-gym, instead of `path` and `sources`: written once as JSONL files, a train
    file for each task and one held-out file of all."""

    tasks: Annotated[tuple[ReasoningGymTask, ...], _TASKS] = Field(
        min_length=1, description="Tasks that prompts are made of: a list, or {name: weight}."
    )
    num_rows: int = Field(ge=1, description="Training prompts of each task.")
    num_held_out: int = Field(ge=1, description="Held-out prompts of each task.")
    seed: int = Field(default=0, ge=0, lt=2**30, description="Where the range of items begins.")
    folder: str = Field(
        default="data/reasoning_gym",
        min_length=1,
        description=(
            "Folder for the files: <task>.train.jsonl, and held_out.jsonl of all, which is read where `eval.path` is"
            " absent."
        ),
    )


class Data(Section):
    path: str | None = Field(
        default=None, description="File or folder of prompts and answers, as in `sources`; short for one entry there."
    )
    sources: tuple[Source, ...] = Field(default=(), description="Several files with weights, instead of `path`.")
    reasoning_gym: ReasoningGym | None = Field(
        default=None, description="Prompts made by the package reasoning-gym, instead of `path` and `sources`."
    )
    procedural_python: str | None = Field(
        default=None,
        min_length=1,
        description=("Python with the packages that make prompts; the run's own when absent."),
    )
    prompt_key: str = Field(
        default="prompt", description="Key of the prompt text (or list of chat messages) in a line."
    )
    answer_key: str = Field(default="answer", description="Key of what the verifier compares with.")
    answer_keys: tuple[str, ...] = Field(
        default=(),
        description="Several keys instead of `answer_key`: the answer is the object of their values, by key.",
    )
    response_key: str = Field(
        default="response",
        description=(
            "Key of the demonstration, for `gspo-mega sft`: a text, or a list of chat messages, of which the"
            " assistant's are learned."
        ),
    )
    chat_template: bool = Field(
        default=True, description="Apply the tokenizer's chat template; False feeds the text as it is."
    )
    system_prompt: str | None = Field(
        default=None, description="System message put before every prompt; needs chat_template."
    )
    max_prompt_tokens: int = Field(ge=1, description="Longer prompts are left out and counted.")
    unreadable_answers: Literal["refuse", "drop"] = Field(
        default="refuse",
        description=(
            "What happens to a row whose answer its reward cannot read, in held-out sets too. refuse: the file is"
            " refused, and the rows are named. drop: the rows are left out, and the start says how many there are and"
            " names the first of them."
        ),
    )
    shuffle: bool = Field(default=True, description="A new order every epoch, from the run's seed.")
    accept_changed: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{12,64}$")], ...] = Field(
        default=(),
        json_schema_extra=MAY_CHANGE,
        description=(
            "SHA-256 (its first 12 digits or more) of changed data files that a continued run accepts, for example with"
            " a repaired row. The number of rows must be the same."
        ),
    )
