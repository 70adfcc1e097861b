"""Users' reward functions, tried on a row of the data before a run starts anything.

`gspo-mega plan --command train` and the start of `train` call `try_rewards`. A scoring process runs the functions, as
in the run. Services, judges and reward models are not asked, because their servers may not be up yet; nor is a function
of the user's own, where `reward.try_first` is false.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gspo_mega.base.errors import DataError, RewardError
from gspo_mega.config.loader import LoadedConfig
from gspo_mega.config.prompt_sources import data_sources, eval_sets, names_prompts, reward_names, source_rewards
from gspo_mega.config.remote_rules import services_of
from gspo_mega.config.schema import Config, Data
from gspo_mega.data.jsonl import Row
from gspo_mega.data.prompts import answer_keys, answer_of
from gspo_mega.data.row_files import check_first_rows
from gspo_mega.rewards.functions import BUILTINS
from gspo_mega.rewards.guarded_process import GuardedProcess
from gspo_mega.rewards.scoring_pool import scoring_process
from gspo_mega.rewards.weighted_sum import table_of

# A first call may load what later ones have: more than a scoring may take, which is then said.
_LEAST_SECONDS = 60.0


@dataclass(frozen=True)
class _Sample:
    """The first row of a file. `source`: its name among sources."""

    source: str
    path: str
    prompt: str
    answer: Any
    metadata: dict[str, Any]

    def responses(self) -> list[tuple[str, str]]:
        """(what it is, the text)."""
        answer = self.answer if isinstance(self.answer, str) else json.dumps(self.answer, default=str)
        return [("an empty response", ""), ("the row's answer as the response", answer)]


def try_rewards(loaded: LoadedConfig, command: str) -> list[str]:
    """Call each of the users' functions that `command` scores with, on the first row of a file, with an empty response
    and with the row's answer. Returns notices: what could not be tried, and what took longer than a scoring may.

    A prompt is given as the file has it, not rendered: that needs the tokenizer. Rows that cannot be read are not tried
    here; the check of the data refuses them. Not to be called inside an event loop. Raises RewardError, with the key,
    the row, and the line of the user's file that raised.
    """
    config = loaded.config
    if command not in ("train", "sft", "eval") or (config.train is not None and config.train.from_rollouts is not None):
        return []
    samples = list(_samples(config, command))
    names = {name for source in samples for name in _names_of(config, source.source)}
    services = services_of(config.reward)
    notices = []
    if asked := sorted(names & services.keys()):
        notices.append(
            f"rewards {', '.join(asked)} are services, judges or reward models: they are not tried before a run"
        )
    own = sorted(names - services.keys() - BUILTINS.keys())
    if own and not config.reward.try_first:
        notices.append(f"rewards {', '.join(own)} are not tried before a run (reward.try_first: false)")
    elif own:
        notices += asyncio.run(_tried(loaded, samples))
    return notices


async def _tried(loaded: LoadedConfig, samples: list[_Sample]) -> list[str]:
    config = loaded.config
    setup, _, entries, of_source = table_of(config.reward, source_rewards(config))
    process = await scoring_process(setup, config.reward)
    notices, done = [], set[str]()
    try:
        for sample in samples:
            for entry in of_source.get(sample.source, entries):
                asked = setup["functions"].get(entry.label)
                if asked is None or asked["function"] in BUILTINS or entry.label in done:
                    continue
                done.add(entry.label)
                key = _key_of(config, sample.source, asked["function"])
                where = f"{loaded.where(key)}: {key}: {asked['function']}"
                for what, response in sample.responses():
                    seconds = await _call(process, config, entry.label, sample, response, f"{where}: tried on {what}")
                    if seconds > config.reward.deadline_seconds:
                        notices.append(
                            f"{where}: its call on {what} took {seconds:.1f} s, and reward.deadline_seconds is"
                            f" {config.reward.deadline_seconds:g}: a scoring that takes so long fails"
                        )
    finally:
        await process.end()
    return notices


async def _call(
    process: GuardedProcess, config: Config, label: str, sample: _Sample, response: str, what: str
) -> float:
    """The seconds that one call took. Raises RewardError."""
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
    most = max(_LEAST_SECONDS, config.reward.deadline_seconds)
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
    return time.monotonic() - began


def _samples(config: Config, command: str) -> Iterator[_Sample]:
    """The first row of each file that is scored. Files and rows that cannot be read are left out."""
    if command == "train" and names_prompts(config.data):
        for source in data_sources(config):
            yield from _first(source.name, source.path, config.data)
    for one in eval_sets(config):
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
    """A prompt's text without a tokenizer: of messages, what they say."""
    if isinstance(prompt, list):
        said = [message.get("content") for message in prompt if isinstance(message, dict)]
        return "\n".join(one for one in said if isinstance(one, str))
    return str(prompt)


def _names_of(config: Config, source: str) -> tuple[str, ...]:
    return reward_names(config, source_rewards(config).get(source))


def _key_of(config: Config, source: str, function: str) -> str:
    """The key by which a source's function is named."""
    for number, one in enumerate(config.data.sources):
        if one.name == source and one.reward is not None:
            return f"data.sources.{number}.reward"
    for one in eval_sets(config):
        if one.source == source and config.eval is not None:
            if one.place != "eval" and config.eval.sets[int(one.place.rpartition(".")[2])].reward is not None:
                return f"{one.place}.reward"
            if config.eval.reward is not None:
                return "eval.reward"
    numbers = [number for number, one in enumerate(config.reward.functions) if one.function == function]
    return f"reward.functions.{numbers[0]}" if numbers else "reward"
