"""Read once, with the ranks' own functions, what the ranks of a run read before they work.

    python -m gspo_mega.launcher.trial_process      gets one line of JSON on standard input, answers with one

It reads the tokenizer, the chat template, the stored tensors' names and shapes, the prompts, demonstrations and
held-out sets with their answers, and the tools' format. `CHECKS` is the list: everything that a rank would refuse in
its inputs has an entry there that calls the rank's function. The process imports transformers and torch, so that
commands need not; `trial_process.py` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gspo_mega.agents.demonstrated import demonstration_encoder
from gspo_mega.base import errors
from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.records import Prompt
from gspo_mega.base.user_functions import look_last_in
from gspo_mega.config import Config, load_config
from gspo_mega.config.derived import critic_of, is_one_turn, penalises_kl, teachers
from gspo_mega.config.prompt_sources import eval_sets, names_prompts, sources_of
from gspo_mega.config.schema import Data
from gspo_mega.data.chat import check_vocabulary, load_tokenizer
from gspo_mega.data.demonstrations import DemonstrationSource
from gspo_mega.data.prompts import PromptSource, RowSource, encoder_of, fits_teacher
from gspo_mega.data.templates import check_taught_end, run_end_tokens
from gspo_mega.models.end_tokens import planned_end_tokens
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.value_models import SCORE, critic_tensors, is_ignored_critic_tensor, read_critic_spec
from gspo_mega.rollout.server.spec import argument_names, check_options_sglang
from gspo_mega.rollout.teacher_server import first_look
from gspo_mega.train.held_out import LoadedSet, row_check
from gspo_mega.train.hook_trial import try_hooks
from gspo_mega.train.rollouts import episode_driver

# All files together are read for this many seconds, and of each file at least this many rows.
READING_SECONDS = 8.0
FEWEST_ROWS = 1_000
# Of a long text, this many characters of its beginning and its end are shown.
_HEAD, _TAIL = 200, 100


@dataclass
class Trial:
    """What has been read so far.

    `command`: the command whose ranks read this, or "replay" for a `train` on recorded rollouts. `tools`: schemas of
    the run's tools. `keeps_weights`: the run goes on from a checkpoint, so the weights of model.path are not read.
    `problems`: each a dict of "key", "kind" (the name of a class of `base/errors.py`) and "text". `tokenizer`: None if
    it cannot be loaded; `can_encode`: whether it can encode prompts; `end_token_ids`: the tokens that end a response.
    `sources`: the files of prompts that could be read. `read`: lines that say what was read, for a person who wants to
    see that it is what was meant.
    """

    config: Config
    command: str
    tools: Sequence[dict[str, Any]] = ()
    keeps_weights: bool = False
    problems: list[dict[str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    tokenizer: Any = None
    can_encode: bool = False
    end_token_ids: tuple[int, ...] = ()
    sources: list[PromptSource] = field(default_factory=list)
    seconds_per_file: float = READING_SECONDS

    @contextlib.contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Record an error of the block as a problem of `key`, and go on."""
        try:
            yield
        except GspoMegaError as error:
            text = str(error).removeprefix(f"{key}: ")
            self.problems.append({"key": key, "kind": _kind_of(error), "text": text})
        except OSError as error:  # a file that may not be read, a folder that is gone
            self.problems.append({"key": key, "kind": "DataError", "text": str(error)})

    def enough(self) -> Callable[[int], bool]:
        """A function that says, given the number of rows read, when to stop reading one file."""
        end = time.monotonic() + self.seconds_per_file
        return lambda num_rows: num_rows >= FEWEST_ROWS and time.monotonic() > end

    def note_rows(self, source: RowSource[Any]) -> None:
        """Say which rows of a file were not checked, and which are left out."""
        if (left_out := source.unreadable_line()) is not None:
            self.notices.append(left_out)
        if not source.is_whole:
            self.notices.append(
                f"{source.path}: its first {len(source)} rows were checked; the run checks the others when it starts"
            )

    def describe(self, what: str, source: RowSource[Any], num_used: int | None = None) -> None:
        """Add to `read` how many rows of a file there are and are left out, and its first prompt as the model sees it.
        `num_used`: how many are used, if not all.
        """
        rows = f"{len(source)} row{'s' * (len(source) != 1)}" + (
            "" if source.is_whole else " and more, which were not read yet"
        )
        if source.num_overlong:
            examined = "" if source.num_examined == len(source) else f" of the first {source.num_examined}"
            rows += f", {source.num_overlong}{examined} left out as too long ({source.limits()})"
        if source.num_unreadable:
            rows += f", {source.num_unreadable} left out for their answers"
        if num_used is not None:
            rows += f", {num_used} used"
        self.read.append(f"{what} {source.path}: {rows}")
        first = next(iter(source.items(1)), None)
        if isinstance(first, Prompt):
            through = " (through the chat template)" if first.messages else ""
            self.read.append(f"  first prompt{through}, {len(first.token_ids)} tokens: {_shown(first.text)}")
            if first.answer is not None:
                text = _shown(first.answer) if isinstance(first.answer, str) else _short(json.dumps(first.answer))
                self.read.append(f"  its answer: {text}" + _metadata_text(first.metadata))


def _shown(text: str) -> str:
    """A text in one line, without its middle if it is long: how it ends matters as much as how it begins."""
    return json.dumps(_short(text), ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


def _metadata_text(metadata: dict[str, Any]) -> str:
    return f"; metadata: {', '.join(metadata)}" if metadata else ""


def _kind_of(error: GspoMegaError) -> str:
    """The name of the error's class in `base/errors.py`, or of the class there from which it derives."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


class Check(NamedTuple):
    """One check. `commands`: the commands whose ranks read what it checks."""

    name: str
    commands: tuple[str, ...]
    run: Callable[[Trial], None]


def _tokenizer(trial: Trial) -> None:
    with trial.at("model.path"):
        trial.tokenizer = load_tokenizer(trial.config.model.path)
        trial.notices += check_vocabulary(trial.tokenizer, read_model_spec(trial.config.model.path))


def _template(trial: Trial) -> None:
    if trial.tokenizer is None:
        return
    data, path = trial.config.data, trial.config.model.path
    with trial.at("data.chat_template" if data.chat_template else "model.path"):
        spec = read_model_spec(path)
        ends = run_end_tokens(
            encoder_of(data, trial.tokenizer),
            trial.tokenizer,
            spec.eos_token_ids,
            spec.vocab_size,
            calls=not is_one_turn(trial.config.rollout),
        )
        planned = planned_end_tokens(Path(path), spec.eos_token_ids, spec.vocab_size)
        trial.end_token_ids = ends.ids
        trial.notices += [notice for notice in ends.notices if notice not in planned.notices]
        trial.can_encode = True


def _episodes(trial: Trial) -> None:
    if not trial.can_encode:
        return
    config, tokenizer = trial.config, trial.tokenizer
    with trial.at("rollout.episode"):
        driver = episode_driver(config, tokenizer, trial.end_token_ids, tokenizer.decode)
        with trial.at("episodes.tool_format"):
            driver.check_tools(list(trial.tools))


def _held_out(trial: Trial) -> None:
    for one in eval_sets(trial.config.eval, trial.config.data) if trial.can_encode else ():
        with trial.at(f"{one.place}.path"):
            read = LoadedSet(one, trial.config.reward, trial.tokenizer, trial.enough())
            trial.note_rows(read.source)
            trial.describe("held-out", read.source, len(read.prompts))


def _prompts(trial: Trial) -> None:
    config = trial.config
    if not (trial.can_encode and names_prompts(config.data)):
        return
    demonstrates = trial.command == "sft"
    encoder = encoder_of(config.data, trial.tokenizer)
    for index, source in enumerate(sources_of(config.data)):
        with trial.at(_source_key(config.data, index)):
            check = row_check(config.reward, source.reward, config.data)
            read = PromptSource(
                source.name,
                source.path,
                config.data,
                encoder,
                check if not demonstrates else lambda row: None,
                enough=trial.enough(),
                needs_answers=not demonstrates,
                fits=fits_teacher(teachers(config.teacher) if trial.command == "train" else (), source.name, encoder),
            )
            trial.note_rows(read)
            trial.describe("data", read)
            trial.sources.append(read)


def _hooks(trial: Trial) -> None:
    for key, attempt in try_hooks(trial.config, trial.sources):
        with trial.at(key):
            attempt()


def _demonstrations(trial: Trial) -> None:
    config = trial.config
    if not trial.can_encode:
        return
    conversation = None
    with trial.at("episodes.tool_format"):
        conversation = demonstration_encoder(config, trial.tokenizer, trial.end_token_ids, list(trial.tools))
    encoder = encoder_of(config.data, trial.tokenizer)
    with trial.at("model.path"):
        check_taught_end(encoder, trial.end_token_ids, config.model.path)
    for index, source in enumerate(sources_of(config.data)):
        with trial.at(_source_key(config.data, index)):
            DemonstrationSource(
                source.name,
                source.path,
                config.data,
                encoder,
                config.rollout.max_new_tokens,
                conversation,
                trial.enough(),
            )


def _source_key(data: Data, index: int) -> str:
    if data.path is not None:
        return "data.path"
    return f"data.sources.{index}.path" if data.sources else "data.reasoning_gym"


def _stored_tensors(trial: Trial) -> None:
    for key, folder, is_critic in folders_of(trial):
        with trial.at(key):
            from gspo_mega.checkpoint.hf_import import check_folder
            from gspo_mega.checkpoint.mtp_layers import CarriedLayers

            check_folder(folder, *tensors_of(folder, is_critic=is_critic), values=False)
            if not is_critic:
                CarriedLayers(Path(folder))


def folders_of(trial: Trial) -> list[tuple[str, str, bool]]:
    """(key, folder, whether it is a critic's) of each folder whose weights the ranks load."""
    config, found = trial.config, []
    if not trial.keeps_weights and config.model.weights is None and Path(config.model.path).is_dir():
        found.append(("model.path", config.model.path, False))
    trains = trial.command in ("train", "replay")
    if (
        trains
        and (config.kl.coefficient > 0 or penalises_kl(config.algorithm, config.critic))
        and config.kl.reference_path is not None
    ):
        found.append(("kl.reference_path", config.kl.reference_path, False))
    if trains:
        models = [(f"{one.key}.path", one.settings.path) for one in teachers(config.teacher)]
        found += [(key, path, False) for key, path in models if path is not None]
    critic = critic_of(config.algorithm, config.critic)
    if trains and not trial.keeps_weights and critic is not None and critic.path is not None:
        found.append(("critic.path", critic.path, True))
    return found


def tensors_of(folder: str, *, is_critic: bool) -> tuple[Any, Any, Any]:
    """The arguments of `check_folder` for a folder: its model, a function from what the folder holds to the tensors
    that it must hold, and one that says whether it may hold another name.
    """
    from gspo_mega.models.tensors import hf_tensors, is_ignored_tensor

    if not is_critic:
        spec = read_model_spec(folder)
        return spec, lambda source: hf_tensors(spec), is_ignored_tensor
    spec = read_critic_spec(folder)
    return (
        spec,
        lambda source: [entry for entry in critic_tensors(spec) if SCORE in source.files or entry.name != SCORE],
        is_ignored_critic_tensor,
    )


def _server_options(trial: Trial) -> None:
    server = trial.config.server
    package = importlib.util.find_spec("sglang")
    if server.options and server.python is None and package is not None and package.origin is not None:
        with trial.at("server.options"):
            check_options_sglang(server.options, argument_names(Path(package.origin).parent))


def _teacher_servers(trial: Trial) -> None:
    """Compare the tokenizers of teachers' servers that are up."""
    config = trial.config
    recorded = config.train is not None and config.train.from_rollouts is not None
    if trial.tokenizer is None or recorded:
        return
    for one in teachers(config.teacher):
        if one.settings.url is None:
            continue
        with trial.at(f"{one.key}.url"):
            spec = read_model_spec(config.model.path)
            if (notice := asyncio.run(first_look(one, trial.tokenizer, spec.vocab_size))) is not None:
                trial.notices.append(notice)


_SAMPLES = ("train", "sft", "eval", "budget")

CHECKS: tuple[Check, ...] = (
    Check("the tokenizer, and whether the model knows its ids", _SAMPLES, _tokenizer),
    Check("the chat template and the end token", _SAMPLES, _template),
    Check("turns and tool calls in the template", _SAMPLES, _episodes),
    Check("held-out sets", ("train", "sft", "eval"), _held_out),
    Check("prompts and answers", _SAMPLES, _prompts),
    Check("functions in place of built-in parts", ("train", "replay"), _hooks),
    Check("demonstrations", ("sft",), _demonstrations),
    Check("arguments for SGLang, where it is installed here", _SAMPLES, _server_options),
    Check("tokenizers of teachers' servers", ("train",), _teacher_servers),
    Check("names, shapes and types of the stored tensors", (*_SAMPLES, "replay"), _stored_tensors),
)


def run_checks(trial: Trial) -> dict[str, Any]:
    """Run all checks of the trial's command. Returns {"problems": ..., "notices": ..., "read": ...}."""
    config = trial.config
    num_files = len(eval_sets(config.eval, config.data)) + (
        len(sources_of(config.data)) if names_prompts(config.data) else 0
    )
    trial.seconds_per_file = READING_SECONDS / max(1, num_files)
    for check in CHECKS:
        if trial.command in check.commands:
            check.run(trial)
    return {"problems": trial.problems, "notices": trial.notices, "read": trial.read}


def read_weights(trial: Trial) -> dict[str, Any]:
    """Read every value of the weights of every folder. Returns {"problems": ..., "notices": ...}; the notices say how
    much was read.
    """
    from gspo_mega.checkpoint.hf_import import check_folder

    for key, folder, is_critic in folders_of(trial):
        with trial.at(key):
            trial.notices.append(check_folder(folder, *tensors_of(folder, is_critic=is_critic), values=True))
    return {"problems": trial.problems, "notices": trial.notices}


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    command = asked["command"]
    loaded = load_config(asked["config"], command="train" if command == "replay" else command)
    look_last_in(loaded.config.run.modules_dir)
    answer_to = sys.stdout
    sys.stdout = sys.stderr  # libraries and tokenizers may print
    trial = Trial(loaded.config, command or "train", asked["tools"], asked["keeps_weights"])
    answer = read_weights(trial) if asked["read_weights"] else run_checks(trial)
    answer_to.write(json.dumps(answer) + "\n")
    answer_to.flush()
