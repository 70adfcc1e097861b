"""Check the inputs of a command before anything starts: data, rewards, episodes and tools, recorded rollouts.

`check_all_inputs`, `check_inputs`, `check_before_job` and `check_what_is_read` are for `gspo-mega plan --command`, a
job's submission and the start of a run. They check here what needs no tokenizer, on the first rows of the data, so that
a login node answers at once. Then `try_rewards` calls the users' reward functions on one row, in a scoring process as
in the run, and a separate process reads everything as the ranks will (`trial_process.py`).

`try_rewards` does not ask services, judges and reward models, because their servers may not be up yet, nor with
`reward.try_first: false` any function of the user.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gspo_mega.agents.pool import check_functions
from gspo_mega.agents.protocol import runs_in_worker
from gspo_mega.base.errors import ConfigError, DataError, EpisodeError, FolderError, JournalError, RewardError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.user_functions import look_last_in
from gspo_mega.config.derived import command_name, has_sampling_masks, is_one_turn
from gspo_mega.config.loader import LoadedConfig
from gspo_mega.config.prompt_sources import (
    HeldOutSet,
    data_sources,
    eval_sets,
    names_prompts,
    reward_names,
    source_rewards,
)
from gspo_mega.config.schema import Config, Data, OwnReward, Reward
from gspo_mega.config.validate_episodes import program_problem
from gspo_mega.config.validate_rewards import services_by_name
from gspo_mega.data.demonstrations import problem_of_response
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.procedural_rows import make_rows
from gspo_mega.data.prompts import answer_keys, answer_of, missing_key, problem_of_keys, problem_of_templated
from gspo_mega.data.row_files import check_first_rows
from gspo_mega.data.rows import Row
from gspo_mega.launcher.trial_process import try_inputs
from gspo_mega.metrics.sink_loading import sink_makers
from gspo_mega.rewards.functions import BUILTINS, VERIFIERS, problem_of_answer
from gspo_mega.rewards.guarded_process import GuardedProcess
from gspo_mega.rewards.pool import check_reward, scoring_process
from gspo_mega.rewards.weighted_sum import no_verdict, table_of

Command = Literal["train", "sft", "eval", "certify", "budget"]
NUM_ROWS_CHECKED = 100
_MOST_CHECKED_BYTES = 2**30
# A first call may load what later calls already have, so it gets at least this long. If it takes longer than a scoring
# may, a notice says so.
_LEAST_CALL_SECONDS = 60.0


def check_inputs(loaded: LoadedConfig, command: Command) -> list[str]:
    """Check what needs no tokenizer. Returns notices, such as where the command must run. Raises DataError,
    JournalError, EpisodeError or FolderError with the place of the key, or RewardError.
    """
    notices, _, left_out = _check_without_tokenizer(loaded, command)
    return [*notices, *left_out]


def check_all_inputs(loaded: LoadedConfig, command: Command, read: list[str] | None = None) -> list[str]:
    """As `check_inputs`; then a process reads all that the ranks read. `read`: a list to which this appends lines that
    say what was read: rows, first prompts, and what each reward function gives for the first row. Raises also
    ModelError.
    """
    notices, tools, _ = _check_without_tokenizer(loaded, command)
    if command == "certify":
        return notices
    return [*notices, *_try_all(loaded, command, tools, replays=is_replay(loaded, command), read=read)]


def check_before_job(
    loaded: LoadedConfig, command: Literal["train", "sft"], *, in_ranks_python: bool = True
) -> list[str]:
    """Check the inputs of a run whose processes Slurm starts. Returns notices; raises as `check_what_is_read`. Without
    `in_ranks_python`, nothing is checked that ranks import or read, and a notice says so.
    """
    check_run_folder(loaded)
    if not in_ranks_python:
        return [
            "ranks have a Python or a container of their own (GSPO_TRAINER_PYTHON, GSPO_TRAINER_CONTAINER): rewards,"
            f" data, tokenizer and weights are not tried here; `gspo-mega plan CONFIG --command {command}` inside it"
            " does that"
        ]
    tools = check_users_functions(loaded)
    return check_what_is_read(loaded, command, tools, replays=is_replay(loaded, command))


def check_what_is_read(
    loaded: LoadedConfig,
    command: Literal["train", "sft", "eval", "budget"],
    tools: Sequence[dict[str, Any]],
    *,
    replays: bool,
) -> list[str]:
    """Check everything that the ranks of a command read. `tools`: schemas of the run's tools; `replays`: it trains on
    recorded rollouts. Returns notices. Raises DataError, RewardError, ModelError or EpisodeError with the place of the
    key.
    """
    notices = []
    if not replays:
        notices = make_rows(loaded.config.data)
        _check_data(loaded, command)
    return [*notices, *_try_all(loaded, command, tools, replays=replays)]


def _check_without_tokenizer(
    loaded: LoadedConfig, command: Command
) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Returns (notices, schemas of the tools, notices of rows that are left out among the first rows)."""
    if command == "certify":  # it makes its own batch; it neither samples nor scores
        return [], [], []
    check_run_folder(loaded)
    tools = check_users_functions(loaded)
    notices, left_out = [], []
    if not is_replay(loaded, command):
        notices = make_rows(loaded.config.data)
        left_out = _check_data(loaded, command)
    nodes = loaded.config.cluster.num_nodes
    if nodes > 1 and command != "eval":
        notices += [
            f"{nodes} trainer nodes: `gspo-mega {command_name(command)}` itself runs on one machine; submit"
            " launch/slurm/train.sbatch"
        ]
    return notices, tools, left_out


def _try_all(
    loaded: LoadedConfig,
    command: Command,
    tools: Sequence[dict[str, Any]],
    *,
    replays: bool,
    read: list[str] | None = None,
) -> list[str]:
    """Try the rewards, and have a process read what the ranks read; a replay only reads what it needs. Returns
    notices.
    """
    if replays:
        return try_inputs(loaded, "replay", tools, read)
    scores: list[str] | None = None if read is None else []
    notices = try_rewards(loaded, command, scores)
    notices += try_inputs(loaded, command, tools, read)
    if read is not None:
        read += scores or []
    return notices


def check_run_folder(loaded: LoadedConfig) -> None:
    """Raises FolderError, with the place of the key, if the run's folder cannot be made or written."""
    run = loaded.config.run
    wanted = Path(run.dir) / run.name
    there = next(path for path in (wanted, *wanted.absolute().parents) if os.path.lexists(path))
    place = f"{loaded.where('run.dir')}: run.dir: {wanted} cannot be written: {there}"
    if not there.is_dir():
        raise FolderError(f"{place} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise FolderError(f"{place} may not be written by this user")


def check_users_functions(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Load every reward function, the episode and its tools, and the metric sinks once, and find the alerts' program.
    Returns the schemas of the tools. Raises RewardError; EpisodeError and ConfigError with the place of the key.
    """
    config = loaded.config
    look_last_in(config.run.modules_dir)
    try:
        sink_makers(config.metrics)
    except ConfigError as error:
        key = str(error).partition(":")[0]
        raise ConfigError(f"{loaded.where(key)}: {error}") from None
    command = config.alerts.command
    if command is not None and shutil.which(command[0]) is None:
        raise ConfigError(
            f"{loaded.where('alerts.command')}: alerts.command: there is no program {command[0]!r} here; give a path,"
            " or a name that PATH finds"
        )
    try:
        check_reward(config.reward, source_rewards(config.eval, config.data))
    except RewardError as error:
        key = _key_in(config, str(error))
        raise RewardError(f"{loaded.where(key)}: {key}: {error}") from None
    episode = config.rollout.episode
    if episode.function == "foreign" and (problem := program_problem(episode.options["command"])) is not None:
        raise EpisodeError(f"{loaded.where('rollout.episode')}: rollout.episode.options.command: {problem}")
    if runs_in_worker(episode.function):
        try:
            return check_functions(config.episodes, config.rollout.episode, config.rollout.tools)
        except EpisodeError as error:
            key = "rollout.tools" if str(error).startswith("tool ") else "rollout.episode"
            raise EpisodeError(f"{loaded.where(key)}: {key}: {error}") from None
    return []


def is_replay(loaded: LoadedConfig, command: str) -> bool:
    """Whether the run trains on recorded rollouts and so has no servers.

    Raises ConfigError where the record is the run's own, JournalError where it is too short or incomplete.
    """
    train, run = loaded.config.train, loaded.config.run
    if command != "train" or train is None or train.from_rollouts is None:
        return False
    if Path(train.from_rollouts).resolve() == (Path(run.dir) / run.name).resolve():
        raise ConfigError(
            f"{loaded.where('train.from_rollouts')}: train.from_rollouts: {train.from_rollouts} is this run's own"
            " folder, whose journal the run would overwrite. Choose another run.name"
        )
    journal = Journal(RunFolder(train.from_rollouts).journal_dir)
    present = journal.steps()
    # The first missing step. num_steps may be huge, so this does not count up to it.
    known = set(present)
    missing = [step for step in range(min(train.num_steps, len(known) + 1)) if step not in known][:1]
    if missing:
        raise JournalError(
            f"{loaded.where('train.from_rollouts')}: train.from_rollouts: {train.from_rollouts} has no rollouts of step"
            f" {missing[0] + 1}; train.num_steps asks for {train.num_steps}, {len(present)} are recorded"
        )
    # A rank reads all of them, one by one. What it would refuse is refused now if reading takes only seconds.
    journal.check(range(train.num_steps), _MOST_CHECKED_BYTES)
    needed = []
    if loaded.config.moe.routing_replay == "R3":
        needed.append(("routed experts", "moe.routing_replay: R3 needs. Use R2 or none"))
    if has_sampling_masks(loaded.config.rollout):
        needed.append(("sampling masks", "rollout.top_k needs: its log-probs are over the tokens that were kept"))
    pruned = [step for step in range(train.num_steps) if journal.has_pruned_routes(step)] if needed else []
    for what, why in needed if pruned else ():
        raise JournalError(
            f"{loaded.where('train.from_rollouts')}: train.from_rollouts: {train.from_rollouts} has no {what}"
            f" of step {pruned[0] + 1} (journal.prune_routes removed them), which {why}"
        )
    return True


def _check_data(loaded: LoadedConfig, command: str) -> list[str]:
    """Check the first rows of each file. Returns notices of rows that are left out. Raises DataError."""
    problems, notices = [], []
    for key, path, check, left_out in _files(loaded, command):
        try:
            check_first_rows(path, check, NUM_ROWS_CHECKED)
            if left_out:
                notices.append(
                    f"{path}: {len(left_out)} of the first {NUM_ROWS_CHECKED} rows have answers that cannot be read and"
                    f" are left out (data.unreadable_answers: drop): {left_out[0]}"
                )
        except DataError as error:
            problems += [f"{loaded.where(key)}: {key}: {line}" for line in str(error).splitlines()]
    if problems:
        raise DataError("\n".join(problems))
    return notices


def _files(loaded: LoadedConfig, command: str) -> Iterator[tuple[str, str, Callable[[Row], str | None], list[str]]]:
    """For each file that the command reads: (its key, its path, a function that returns what is wrong with a row, a
    list to which that function appends the rows that are left out).
    """
    config = loaded.config
    data = config.data

    def prompts(
        own_reward: OwnReward | None, left_out: list[str], held_out: HeldOutSet | None = None
    ) -> Callable[[Row], str | None]:
        names = reward_names(config.reward, own_reward)
        keys = data if held_out is None else held_out.data
        place = "data" if held_out is None or held_out.place == "eval" else held_out.place
        needed = [(f"{place}.prompt_key", keys.prompt_key), *answer_keys(keys, place)]
        shown = " and ".join(repr(key) for _, key in answer_keys(keys))

        numbers = itertools.count(1)

        def check(row: Row) -> str | None:
            number = next(numbers)
            problem = problem_of_keys(row, needed)
            if problem is None and held_out is not None:
                problem = problem_of_templated(row, keys.prompt_key, held_out.template, held_out.template_keys)
            if problem is None and (unusable := problem_of_answer(answer_of(row, keys), names)) is not None:
                if data.unreadable_answers == "drop":
                    left_out.append(f"row {number}: {shown}: {unusable}")
                else:
                    problem = f"{shown}: {unusable} (data.unreadable_answers: drop leaves such rows out)"
            return problem

        return check

    if command != "eval":
        has_turns = not is_one_turn(config.rollout)

        def demonstrations(row: Row) -> str | None:
            problem = missing_key(row, data.prompt_key, "data.prompt_key")
            return problem or problem_of_response(row, data, has_turns=has_turns)

        for index, source in enumerate(data_sources(config.data)):
            left_out: list[str] = []
            rows = demonstrations if command == "sft" else prompts(source.reward, left_out)
            yield (
                "data.path"
                if data.path is not None
                else f"data.sources.{index}.path"
                if data.sources
                else "data.reasoning_gym",
                source.path,
                rows,
                left_out,
            )
    for one in eval_sets(config.eval, config.data):
        left_out = []
        yield f"{one.place}.path", one.path, prompts(one.reward, left_out, one), left_out


def try_rewards(loaded: LoadedConfig, command: str, scores: list[str] | None = None) -> list[str]:
    """Call each of the users' functions with which `command` scores, on the first row of a file, with an empty response
    and with the row's answer. Returns notices: what could not be tried, and what took longer than a scoring may.
    `scores`: a list to which this appends a line with the rewards that each gave; built-in functions are called for it,
    too.

    A prompt is given as the file has it, because rendering it needs the tokenizer. Rows that cannot be read are not
    tried; the check of the data refuses them. Do not call this inside an event loop. Raises RewardError, with the key,
    the row, and the line of the user's file that raised.
    """
    config = loaded.config
    if command not in ("train", "sft", "eval") or (config.train is not None and config.train.from_rollouts is not None):
        return []
    trains = command == "train" and names_prompts(config.data)
    samples = list(_samples(config.data if trains else None, eval_sets(config.eval, config.data)))
    own_rewards = source_rewards(config.eval, config.data)
    names = {name for one in samples for name in reward_names(config.reward, own_rewards.get(one.source))}
    services = services_by_name(config.reward)
    notices = []
    if asked := sorted(names & services.keys()):
        notices.append(
            f"rewards {', '.join(asked)} are services, judges or reward models: they are not tried before a run"
        )
    own = sorted(names - services.keys() - BUILTINS.keys())
    judged = {}
    if is_one_turn(config.rollout):  # other episodes can say themselves what is correct
        judged = {one.source: one for one in eval_sets(config.eval, config.data) if one.correct_threshold is None}
    unsure = BUILTINS.keys() - VERIFIERS if judged else set()
    built_in = sorted(names & (BUILTINS.keys() if scores is not None else unsure))
    if own and not config.reward.try_first:
        notices.append(f"rewards {', '.join(own)} are not tried before a run (reward.try_first: false)")
        own = []
    if own or built_in:
        silent: dict[str, set[str]] = {}
        notices += asyncio.run(_try_own_rewards(loaded, samples, frozenset(own + built_in), scores, silent))
        _check_verdicts(loaded, judged, silent)
    return notices


def _check_verdicts(loaded: LoadedConfig, judged: dict[str, HeldOutSet], silent: dict[str, set[str]]) -> None:
    """Raises RewardError, with the key, if a held-out set without a threshold has functions of which none said whether
    some tried response is correct. `judged`: these sets by their sources; `silent`: by the label of each function that
    was tried, the responses of which it did not say so. A set passes if one of its functions was not tried, or has
    conditions.
    """
    config = loaded.config
    _, _, entries, of_source = table_of(config.reward, source_rewards(config.eval, config.data))
    for source, held_out in judged.items():
        functions = of_source.get(source, entries)
        if any(one.is_verifier or one.only_if or one.label not in silent for one in functions):
            continue
        unjudged = set.intersection(*(silent[one.label] for one in functions))
        if unjudged:
            place = held_out.place
            said = no_verdict([one.label for one in functions], place)
            raise RewardError(f"{loaded.where(place)}: {place}: {said}. Tried on {' and '.join(sorted(unjudged))}")


async def _try_own_rewards(
    loaded: LoadedConfig,
    samples: list[_Sample],
    tried: frozenset[str],
    scores: list[str] | None,
    silent: dict[str, set[str]],
) -> list[str]:
    """`silent` gets, by its label, the responses of which each function did not say whether they are correct."""
    config = loaded.config
    setup, _, entries, of_source = table_of(config.reward, source_rewards(config.eval, config.data))
    process = await scoring_process(setup, config.reward)
    notices, done = [], set[str]()
    try:
        for sample in samples:
            for entry in of_source.get(sample.source, entries):
                asked = setup["functions"].get(entry.label)
                if asked is None or asked["function"] not in tried or entry.label in done:
                    continue
                done.add(entry.label)
                key = _key_of(config, sample.source, asked["function"])
                where = f"{loaded.where(key)}: {key}: {asked['function']}"
                given = []
                for what, response in sample.responses():
                    try:
                        seconds, value, verdict = await _call(
                            process, config.reward, entry.label, sample, response, f"{where}: tried on {what}"
                        )
                    except RewardError:
                        if asked["function"] not in BUILTINS:
                            raise
                        continue  # the check of the data says what a built-in function cannot read
                    given.append(f"{value:g} for {what}")
                    silent.setdefault(entry.label, set()).update({what} if verdict is None else ())
                    if seconds > config.reward.deadline_seconds:
                        notices.append(
                            f"{where}: its call on {what} took {seconds:.1f} s, and reward.deadline_seconds is"
                            f" {config.reward.deadline_seconds:g}: a scoring that takes so long fails"
                        )
                if scores is not None and given:
                    scores.append(f"reward {asked['function']} on row 1 of {sample.path}: {', '.join(given)}")
    finally:
        await process.end()
    return notices


async def _call(
    process: GuardedProcess, reward: Reward, label: str, sample: _Sample, response: str, what: str
) -> tuple[float, float, bool | None]:
    """Call one function once. Returns (the seconds that it took, the reward, whether the response is correct or None if
    the function does not say). Raises RewardError if it gives no reward.
    """
    row = f"row 1 of {sample.path}"
    began = time.monotonic()
    process.send(
        {
            "id": 0,
            "label": label,
            "prompt": sample.prompt,
            "response": response,
            "answer": sample.answer,
            "metadata": sample.metadata,
            "num_response_tokens": len(response.split()),
        }
    )
    most = max(_LEAST_CALL_SECONDS, reward.deadline_seconds)
    hint = (
        " It has to score any response. If it needs something that exists only in the run, such as a service, set"
        " reward.try_first: false"
    )
    try:
        reply = await process.receive(most)
    except TimeoutError:
        raise RewardError(f"{what} ({row}): no result within {most:g} s.{hint}") from None
    if reply is None:
        raise RewardError(f"{what} ({row}): its process ended ({await process.exit_text()}).{hint}")
    if "failure" in reply:
        raise RewardError(f"{what} ({row}): {reply['why']}.{hint}")
    return time.monotonic() - began, float(reply["value"]), reply["correct"]


@dataclass(frozen=True)
class _Sample:
    """The first row of a file. `source`: the name of the source that the file is."""

    source: str
    path: str
    prompt: str
    answer: Any
    metadata: dict[str, Any]

    def responses(self) -> list[tuple[str, str]]:
        """The responses to try, as (what it is, its text)."""
        answer = self.answer if isinstance(self.answer, str) else json.dumps(self.answer, default=str)
        return [("an empty response", ""), ("the row's answer as the response", answer)]


def _samples(data: Data | None, held_out: Sequence[HeldOutSet]) -> Iterator[_Sample]:
    """The first row of each file whose responses are scored. Files and rows that cannot be read are left out. `data`:
    the training data, or None if nothing is trained on.
    """
    if data is not None:
        for source in data_sources(data):
            yield from _first(source.name, source.path, data)
    for one in held_out:
        yield from _first(one.source, one.path, one.data)


def _first(source: str, path: str, data: Data) -> Iterator[_Sample]:
    rows: list[Row] = []

    def take(row: Row) -> str | None:
        rows.append(row)
        return None

    keys = [data.prompt_key, *(key for _, key in answer_keys(data))]
    try:
        check_first_rows(path, take, 1)
    except DataError:
        return
    if rows and all(key in rows[0] for key in keys):
        used = {*keys, data.response_key}
        metadata = {key: value for key, value in rows[0].items() if key not in used}
        yield _Sample(source, path, _text_of(rows[0][data.prompt_key]), answer_of(rows[0], data), metadata)


def _text_of(prompt: Any) -> str:
    """A prompt's text without a chat template: the contents of its messages."""
    if isinstance(prompt, list):
        said = [message.get("content") for message in prompt if isinstance(message, dict)]
        return "\n".join(one for one in said if isinstance(one, str))
    return str(prompt)


def _key_in(config: Config, text: str) -> str:
    """The key of the reward function that an error's text begins with, `reward 'NAME': ...`; else `reward`."""
    of_sources = source_rewards(config.eval, config.data)
    own = [(source, entry.function) for source, reward in of_sources.items() for entry in reward]
    for source, function in [*own, *(("", entry.function) for entry in config.reward.functions)]:
        if text.startswith(f"reward {function!r}:"):
            return _key_of(config, source, function)
    return "reward"


def _key_of(config: Config, source: str, function: str) -> str:
    """The configuration key that names a source's reward function."""
    for number, one in enumerate(config.data.sources):
        if one.name == source and one.reward is not None:
            return f"data.sources.{number}.reward"
    for one in eval_sets(config.eval, config.data):
        if one.source == source and config.eval is not None:
            if one.place != "eval" and config.eval.sets[int(one.place.rpartition(".")[2])].reward is not None:
                return f"{one.place}.reward"
            if config.eval.reward is not None:
                return "eval.reward"
    numbers = [number for number, one in enumerate(config.reward.functions) if one.function == function]
    return f"reward.functions.{numbers[0]}" if numbers else "reward"
