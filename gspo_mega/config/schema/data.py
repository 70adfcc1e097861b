"""The sections of prompts and rewards.

The reward comes first: the functions of the sum, the services that some of them ask, and the section `reward`. The
sources of prompts and the section `data` follow; a source may have a reward of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gspo_mega.config.schema.section import HUB_DATASET, HUB_MODEL, MAY_CHANGE, Hook, Section


def _conditions(given: Any) -> Any:
    """Turn a single condition into the list that it stands for."""
    return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given


_CONDITIONS = BeforeValidator(_conditions, json_schema_input_type=tuple[str, ...] | str)


class RewardFunction(Section):
    function: str = Field(
        min_length=1,
        description=(
            "Name of a built-in or of an entry of `reward.http`, `judge` or `model`; or package.module:function."
        ),
    )
    weight: float = Field(default=1.0, description="Weight in the sum.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed to the function as keyword arguments; sent to the endpoint of `reward.http`.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="What metrics and `only_if` call it; the function's own name when absent.",
    )
    only_if: Annotated[tuple[str, ...], _CONDITIONS] = Field(
        default=(),
        description=(
            "Conditions on functions above it, all of which must hold for this one to be asked and to count: NAME (it"
            " gave 1), or a comparison such as `NAME >= 0.5`."
        ),
    )


def _functions(given: Any) -> Any:
    """Turn a name, or one function, into the list that it stands for."""
    listed = given if isinstance(given, (list, tuple)) else [given]
    return tuple({"function": one} if isinstance(one, str) else one for one in listed)


OwnReward = Annotated[
    tuple[RewardFunction, ...],
    BeforeValidator(_functions, json_schema_input_type=str | RewardFunction | tuple[str | RewardFunction, ...]),
    Field(min_length=1),
]
"""A reward in place of `reward.functions`: a name, a function with its options, or a list of either."""


class RemoteReward(Section):
    """The keys that every service that is asked for rewards over HTTP has."""

    name: str = Field(
        min_length=1,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="What `function`, a source's `reward` and `eval.reward` call it, as they do a built-in.",
    )
    url: str = Field(
        min_length=1, description="http:// or https://; or $NAME of an environment variable that holds it."
    )
    api_key_variable: str | None = Field(
        default=None,
        description="Environment variable with the key, sent as `Authorization: Bearer KEY`; never written anywhere.",
    )
    deadline_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Maximum time of a request with all its attempts. After that the scoring has failed.",
    )
    retries: int = Field(
        default=2,
        ge=0,
        le=10,
        description=(
            "Further attempts of a request after a connection that failed or the status 408, 429, 500, 502, 503 or 504."
            " A service gets at most one retry per 5 requests, and 10 besides."
        ),
    )
    concurrency: int = Field(default=16, ge=1, description="Maximum requests to the service at a time.")


class HttpReward(RemoteReward):
    batch_size: int = Field(
        default=16, ge=1, description="Maximum responses per request. A request takes those that are waiting."
    )


class JudgeReward(RemoteReward):
    model: str = Field(min_length=1, description="The name under which the server knows the judge's model.")
    prompt: str = Field(
        min_length=1,
        description=(
            "What the judge is told, with {response}, {prompt}, {answer}, {num_response_tokens}, {metadata.KEY} and"
            " {options.KEY} replaced; other braces stay."
        ),
    )
    system_prompt: str | None = Field(
        default=None, description="System message before the prompt; it may have the same placeholders."
    )
    regex: str | None = Field(
        default=None,
        description=(
            "Pattern of RE2 with a group (?P<reward>...), whose last match in the judge's answer is the reward."
        ),
    )
    json_key: str | None = Field(
        default=None,
        min_length=1,
        description="Key of the reward, if the answer, or its last block between three backticks, is a JSON object.",
    )
    values: dict[str, float] = Field(
        default_factory=dict,
        description="Words that the judge may answer with, and the reward of each; {}: it answers with numbers.",
    )
    lowest: float | None = Field(default=None, description="A number below this is a failed scoring.")
    highest: float | None = Field(default=None, description="A number above this is a failed scoring.")
    temperature: float = Field(default=0.0, ge=0, description="Temperature of the judge's sampling.")
    max_tokens: int = Field(default=512, ge=1, description="Maximum tokens of the judge's answer.")
    body: dict[str, Any] = Field(
        default_factory=dict, description="Further keys of the request's body; a key that is set already is replaced."
    )


class ModelReward(RemoteReward):
    url: str = Field(
        default="",
        description="URL of a server that the run does not start, as in `reward.http`; empty if `path` is given.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=HUB_MODEL,
        description="Hugging Face folder of the model. The run then starts and supervises servers for it.",
    )
    num_servers: int = Field(default=1, ge=1, description="Servers that the run starts for the model.")
    tensor: int = Field(default=1, ge=1, description="GPUs of each of these servers.")
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Precision of these servers. auto: the same as the policy's servers."
    )
    context_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Maximum tokens of a text; when absent 4 times the policy's, or the model's positions if those are fewer."
        ),
    )
    memory_fraction: float = Field(default=0.85, gt=0, lt=1, description="SGLang's mem_fraction_static.")
    text: str = Field(
        default="{prompt}{response}",
        min_length=1,
        description=(
            "What the model reads, with the placeholders of a judge's prompt. Write it as the model was trained, chat"
            " template included."
        ),
    )
    label: int = Field(default=0, ge=0, description="Index of the output that is the reward, if the model has several.")
    batch_size: int = Field(
        default=16, ge=1, description="Maximum responses per request. A request takes those that are waiting."
    )


class Reward(Section):
    functions: tuple[RewardFunction, ...] = Field(
        default=(),
        description=(
            "Reward = what the episode itself returns + sum of weight x function. Needed by one_turn and tool_loop,"
            " which return nothing."
        ),
    )
    http: tuple[HttpReward, ...] = Field(
        default=(),
        json_schema_extra=MAY_CHANGE,
        description="Endpoints that score responses (docs/remote_rewards.md). `functions` name them.",
    )
    judge: tuple[JudgeReward, ...] = Field(
        default=(),
        description=(
            "Language models that judge responses, on OpenAI-compatible servers (docs/remote_rewards.md)."
            " `functions` name them."
        ),
    )
    model: tuple[ModelReward, ...] = Field(
        default=(),
        description=(
            "Sequence classifiers that score responses, on SGLang servers (docs/remote_rewards.md)."
            " `functions` name them."
        ),
    )
    deadline_seconds: float = Field(
        default=10.0,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description="Maximum time of one scoring; its process is killed after that.",
    )
    num_workers: int = Field(default=2, ge=1, json_schema_extra=MAY_CHANGE, description="Scoring processes.")
    recycle_after: int = Field(
        default=10_000, ge=1, json_schema_extra=MAY_CHANGE, description="Scorings after which a process is replaced."
    )
    permute_in_batch: bool = Field(
        default=False,
        description=(
            "Control of an experiment: permute the rewards inside the batch, so nothing can be learned from them."
        ),
    )
    memory_bytes: int = Field(
        default=2 * 1024**3,
        ge=64 * 1024**2,
        json_schema_extra=MAY_CHANGE,
        description="Maximum address space that a scoring process may add after its start.",
    )
    file_bytes: int = Field(default=1024**3, ge=0, description="Maximum size of a file that a scoring process writes.")
    try_first: bool = Field(
        default=True,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Call each of your own functions on a row of the data before anything starts (docs/rewards.md). Set it to"
            " false for a function that needs something that exists only in the run."
        ),
    )
    environment: tuple[str, ...] = Field(
        default=(),
        description=(
            "Environment variables that reward functions receive besides a short list of harmless ones"
            " (docs/rewards.md)."
        ),
    )
    network: bool = Field(
        default=True,
        description=(
            "False: reward functions run in a network namespace without any network; refused where the kernel does not"
            " allow that to this user."
        ),
    )
    max_failed_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description=(
            "Maximum share of a step's scorings that may fail; above it the run stops. One of several may always fail,"
            " except with 0. Responses without a score are not trained on."
        ),
    )


class Source(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Shown in metrics and prompt ids.")
    path: str = Field(
        min_length=1,
        json_schema_extra=HUB_DATASET,
        description="JSONL or Parquet file, or a folder of Parquet files or one that `datasets` saved.",
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
    """Turn `{name: weight}` into the list that it stands for."""
    if not isinstance(tasks, dict):
        return tuple(tasks) if isinstance(tasks, list) else tasks
    return tuple({"name": name, "weight": weight} for name, weight in tasks.items())


_TASKS = BeforeValidator(_listed, json_schema_input_type=tuple[ReasoningGymTask, ...] | dict[str, float])


class ReasoningGym(Section):
    """Prompts made by the package reasoning-gym, instead of `path` and `sources`. They are written once as JSONL files:
    a training file for each task, and one held-out file for all tasks."""

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
            "Folder for the files: <task>.train.jsonl, and held_out.jsonl for all tasks, which is read if"
            " `eval.path` is"
            " absent."
        ),
    )


class Data(Section):
    path: str | None = Field(
        default=None,
        json_schema_extra=HUB_DATASET,
        description=(
            "File or folder of prompts and answers, or the hub's id of a dataset in this machine's cache, with the"
            " file in it (openai/gsm8k/main/train-00000-of-00001.parquet); short for `sources` with one entry."
        ),
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Branch, tag or commit of datasets that `data` and `eval` name by id. The command may then download them."
        ),
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
    source: Hook | None = Field(
        default=None,
        description=(
            "Your own choice of the next prompt among the rows of all files, such as a curriculum (docs/hooks.md):"
            " package.module:function, or {function, options}. When absent: every row once per epoch."
        ),
    )
    prompt_key: str = Field(
        default="prompt", description="Key of the prompt text (or list of chat messages) in a line."
    )
    answer_key: str = Field(default="answer", description="Key of what the verifier compares with.")
    answer_keys: tuple[str, ...] = Field(
        default=(),
        description="Several keys instead of `answer_key`: the answer is an object with their values.",
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
            "SHA-256 (at least its first 12 digits) of changed data files that a continued run accepts, for example a"
            " file with a repaired row. The number of rows must be the same."
        ),
    )
