"""Check the inputs of a command before anything starts: data, rewards, episodes and tools, recorded rollouts.

What needs no tokenizer is checked here, on the first rows of data, and is said at once on a login node. Then a process
of its own reads everything as the ranks will (`trial_process.py`).
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from gspo_mega.agents.episode_pool import check_functions
from gspo_mega.agents.protocol import runs_in_worker
from gspo_mega.base.errors import ConfigError, DataError, EpisodeError, FolderError, JournalError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config.episode_lengths import is_one_turn
from gspo_mega.config.foreign_options import program_problem
from gspo_mega.config.loader import LoadedConfig
from gspo_mega.config.prompt_sources import HeldOutSet, data_sources, eval_sets, reward_names, source_rewards
from gspo_mega.config.schema import OwnReward
from gspo_mega.data.demonstrations import problem_of_response
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.jsonl import Row
from gspo_mega.data.procedural_rows import make_rows
from gspo_mega.data.prompts import answer_keys, answer_of, missing_key, problem_of_keys, problem_of_templated
from gspo_mega.data.row_files import check_first_rows
from gspo_mega.launcher.reward_trial import try_rewards
from gspo_mega.launcher.trial_process import try_inputs
from gspo_mega.metrics.sink_loading import sink_makers
from gspo_mega.rewards.functions import problem_of_answer
from gspo_mega.rewards.scoring_pool import check_reward

NUM_ROWS_CHECKED = 100


Command = Literal["train", "sft", "eval", "certify", "budget"]


def check_inputs(loaded: LoadedConfig, command: Command) -> list[str]:
    """Check what needs no tokenizer. Returns notices, such as where the command must run. Raises DataError,
    JournalError, EpisodeError or FolderError with the place of the key, or RewardError.
    """
    notices, _, left_out = _checked(loaded, command)
    return [*notices, *left_out]


def check_all_inputs(loaded: LoadedConfig, command: Command) -> list[str]:
    """As `check_inputs`, and then have a process read all that the ranks read. Raises ModelError, too."""
    notices, tools, _ = _checked(loaded, command)
    if command == "certify":
        return notices
    return [*notices, *_tried(loaded, command, tools, replays=is_replay(loaded, command))]


def _tried(loaded: LoadedConfig, command: Command, tools: Sequence[dict[str, Any]], *, replays: bool) -> list[str]:
    """Try the rewards and have a process read what the ranks read; of a replay, what remains of that. Notices."""
    if replays:
        return try_inputs(loaded, "replay", tools)
    return [*try_rewards(loaded, command), *try_inputs(loaded, command, tools)]


def _checked(loaded: LoadedConfig, command: Command) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """(notices, schemas of the tools, notices of rows left out among the first ones)"""
    if command == "certify":  # it makes its own batch, and neither samples nor scores
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
            f"{nodes} trainer nodes: `gspo-mega {command}` alone runs on one machine; submit launch/slurm/train.sbatch"
        ]
    return notices, tools, left_out


def check_before_job(
    loaded: LoadedConfig, command: Literal["train", "sft"], *, in_ranks_python: bool = True
) -> list[str]:
    """As `check_inputs`, for a run whose processes Slurm starts. Without `in_ranks_python`, what ranks import and read
    is not tried, which is one of the notices.
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
    return [*notices, *_tried(loaded, command, tools, replays=replays)]


def check_run_folder(loaded: LoadedConfig) -> None:
    """Raises FolderError, with the place, where the run's folder cannot be made or written."""
    run = loaded.config.run
    wanted = Path(run.dir) / run.name
    there = next(path for path in (wanted, *wanted.absolute().parents) if os.path.lexists(path))
    place = f"{loaded.where('run.dir')}: run.dir: {wanted} cannot be written: {there}"
    if not there.is_dir():
        raise FolderError(f"{place} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise FolderError(f"{place} may not be written by this user")


def check_users_functions(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Load every reward function, the episode and its tools, and the sinks of metrics once; look for the alerts'
    program. Returns the schemas of the tools. Raises RewardError; EpisodeError and ConfigError with the place.
    """
    config = loaded.config
    try:
        sink_makers(config)
    except ConfigError as error:
        key = str(error).partition(":")[0]
        raise ConfigError(f"{loaded.where(key)}: {error}") from None
    command = config.alerts.command
    if command is not None and shutil.which(command[0]) is None:
        raise ConfigError(
            f"{loaded.where('alerts.command')}: alerts.command: there is no program {command[0]!r} here; give a path,"
            " or a name that PATH finds"
        )
    check_reward(config.reward, source_rewards(config))
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


_MOST_CHECKED_BYTES = 2**30


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
    # The first that is missing, without counting to a number of any size.
    known = set(present)
    missing = [step for step in range(min(train.num_steps, len(known) + 1)) if step not in known][:1]
    if missing:
        raise JournalError(
            f"{loaded.where('train.from_rollouts')}: train.from_rollouts: {train.from_rollouts} has no rollouts of step"
            f" {missing[0] + 1}; train.num_steps asks for {train.num_steps}, {len(present)} are recorded"
        )
    # A rank reads them all, one by one; what it would refuse is refused now, where that takes seconds.
    journal.check(range(train.num_steps), _MOST_CHECKED_BYTES)
    pruned = (
        [step for step in range(train.num_steps) if journal.has_pruned_routes(step)]
        if loaded.config.moe.routing_replay == "R3"
        else []
    )
    if pruned:
        raise JournalError(
            f"{loaded.where('train.from_rollouts')}: train.from_rollouts: {train.from_rollouts} has no routed experts"
            f" of step {pruned[0] + 1} (journal.prune_routes removed them), which moe.routing_replay: R3 needs. Use R2"
            " or none"
        )
    return True


def _check_data(loaded: LoadedConfig, command: str) -> list[str]:
    """Check the first rows of each file. Returns notices of those that are left out. Raises DataError."""
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
    """(its key, the file, a check that returns what is wrong with a row, what that check has left out) of each file
    that the command reads.
    """
    config = loaded.config
    data = config.data

    def prompts(
        own_reward: OwnReward | None, left_out: list[str], held_out: HeldOutSet | None = None
    ) -> Callable[[Row], str | None]:
        names = reward_names(config, own_reward)
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
        has_turns = not is_one_turn(config)

        def demonstrations(row: Row) -> str | None:
            problem = missing_key(row, data.prompt_key, "data.prompt_key")
            return problem or problem_of_response(row, data, has_turns=has_turns)

        for index, source in enumerate(data_sources(config)):
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
    for one in eval_sets(config):
        left_out = []
        yield f"{one.place}.path", one.path, prompts(one.reward, left_out, one), left_out
