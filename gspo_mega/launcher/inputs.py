"""Check the inputs of a command before anything starts: data, rewards, recorded rollouts.

Reads only the first rows of data, without tokenising them, so it answers at once on a login node without torch. The run
itself reports errors in later rows when it opens its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from gspo_mega.config import LoadedConfig, data_sources
from gspo_mega.config.prompt_sources import held_out_reward, reward_names, source_rewards
from gspo_mega.data.jsonl import Row, check_first_rows
from gspo_mega.data.prompts import missing_key
from gspo_mega.errors import ConfigError, DataError, JournalError
from gspo_mega.journal.journal import Journal
from gspo_mega.reward.functions import problem_of_answer
from gspo_mega.reward.scoring_pool import check_reward
from gspo_mega.run_folder import RunFolder

NUM_ROWS_CHECKED = 100


def check_inputs(loaded: LoadedConfig, command: Literal["train", "sft", "eval", "certify", "budget"]) -> list[str]:
    """Notices about where the command must run. Raises DataError or JournalError with the place of the key, or
    RewardError.
    """
    if command == "certify":  # it makes its own batch, and neither samples nor scores
        return []
    check_rewards(loaded)
    if not is_replay(loaded, command):
        _check_data(loaded, command)
    nodes = loaded.config.cluster.num_nodes
    if nodes > 1 and command != "eval":
        return [
            f"{nodes} trainer nodes: `gspo-mega {command}` alone runs on one machine; submit launch/slurm/train.sbatch"
        ]
    return []


def check_rewards(loaded: LoadedConfig) -> None:
    """Load every reward function once. Raises RewardError."""
    check_reward(loaded.config.reward, source_rewards(loaded.config))


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
    missing = sorted(set(range(train.num_steps)) - set(present))
    if missing:
        raise JournalError(
            f"{loaded.where('train.from_rollouts')}: train.from_rollouts: {train.from_rollouts} has no rollouts of step"
            f" {missing[0] + 1}; train.num_steps asks for {train.num_steps}, {len(present)} are recorded"
        )
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


def _check_data(loaded: LoadedConfig, command: str) -> None:
    problems = []
    for key, path, check in _files(loaded, command):
        try:
            check_first_rows(path, check, NUM_ROWS_CHECKED)
        except DataError as error:
            problems += [f"{loaded.where(key)}: {key}: {line}" for line in str(error).splitlines()]
    if problems:
        raise DataError("\n".join(problems))


def _files(loaded: LoadedConfig, command: str) -> Iterator[tuple[str, str, Callable[[Row], str | None]]]:
    """(its key, the file, a check that returns what is wrong with a row) of each file that the command reads."""
    config = loaded.config
    data = config.data

    def prompts(own_reward: str | None) -> Callable[[Row], str | None]:
        names = reward_names(config, own_reward)
        has = _has(("data.prompt_key", data.prompt_key), ("data.answer_key", data.answer_key))

        def check(row: Row) -> str | None:
            problem = has(row)
            if problem is None and (unusable := problem_of_answer(row[data.answer_key], names)) is not None:
                problem = f"{data.answer_key!r}: {unusable}"
            return problem

        return check

    if command != "eval":
        demonstrations = _has(("data.prompt_key", data.prompt_key), ("data.response_key", data.response_key))
        for index, source in enumerate(data_sources(config)):
            rows = demonstrations if command == "sft" else prompts(source.reward)
            yield "data.path" if data.path is not None else f"data.sources.{index}.path", source.path, rows
    if config.eval is not None:
        yield "eval.path", config.eval.path, prompts(held_out_reward(config))


def _has(*keys: tuple[str, str]) -> Callable[[Row], str | None]:
    return lambda row: next(
        (problem for setting, key in keys if (problem := missing_key(row, key, setting)) is not None), None
    )
