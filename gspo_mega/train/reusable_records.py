"""Which recorded episodes a run may use instead of sampling new ones: those of prompts that are due, made by the same
weights, rewards, code and settings.

`ReusableRecords` says why a record cannot be used, moves its file aside and tells the user; `sources.py` decides when
records are asked for. `made_by` and the functions after it compute the fingerprints of everything that determines a
run's episodes: weights, rewards and episode function with their source, tools, chat template, sampling. The journal
keeps them with the episodes. No user code is imported here; its source is found, read and hashed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from gspo_mega.agents.protocol import BUILTINS as EPISODES
from gspo_mega.base.episodes import Group, RolloutBatch
from gspo_mega.base.records import Prompt, distinct_values
from gspo_mega.base.untrusted import open_regular, read_bytes
from gspo_mega.base.user_functions import places
from gspo_mega.config.derived import has_sampling_masks, has_served_teacher, hooks_of, num_served_top, teachers
from gspo_mega.config.prompt_sources import sources_of
from gspo_mega.config.schema import (
    Config,
    Data,
    Episodes,
    Model,
    OwnReward,
    Reward,
    RewardFunction,
    Rollout,
    UserFunction,
)
from gspo_mega.data.journal.episode_log import FileBegin
from gspo_mega.data.journal.journal import Journal, PartGoneError
from gspo_mega.data.journal.steps import StepRecord
from gspo_mega.rewards.functions import BUILTINS
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.train.rollouts import open_numbers

# (step, group numbers) to the prompts that are due: `ContinuableSource.due`.
Due = Callable[[int, Iterable[int]], Mapping[int, Prompt]]

# Why records are not used if their fingerprint of a kind differs.
REASONS = {
    "weights": "other weights sampled them",
    "rewards": "another reward scored them: its source or its options are not the same",
    "sampling": "they were sampled with other settings",
    "teacher": "they lack what the teachers' servers of this run say of them, or other teachers scored them",
    "episode": "another episode made them: its source, its options or its limits are not the same",
    "tools": "other tools made them, or tools whose source is not the same",
    "template": "another chat template or tokenizer made them",
    "recorded rollouts": "they are of another recording",
    "advantage.function": "other advantages would be trained on: the source of advantage.function is not the same",
    "objective.function": "another term would be trained: the source of objective.function is not the same",
    "rollout.group_filter": "another filter chose their groups: the source of rollout.group_filter is not the same",
    "data.source": "another function chose their prompts: the source of data.source is not the same",
}
# Bytes that are hashed at the beginning, middle and end of each file of weights. They are enough to tell two trainings
# of one model apart.
_SAMPLE_BYTES = 64 * 1024
# The files of a tokenizer that decide the tokens of a message.
_TOKENIZER_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "tokenizer.json")
# The settings of `episodes` and `rollout` that are part of a fingerprint.
_EPISODE_KEYS = ("max_turns", "max_tokens", "tool_format", "environment", "network")
_SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "filter_constant_groups", "return_routed_experts")


@dataclass(frozen=True)
class RecordRequirements:
    """What a run requires of every record. `needs_routes`: a record without its routed experts is not used.
    `needs_masks`: nor is one without its sampling masks; `needs_top`: nor one without a teacher's most likely tokens.
    """

    group_size: int
    freshness: Freshness
    needs_routes: bool
    needs_masks: bool = False
    needs_top: bool = False


class ReusableRecords:
    """Finds the usable records of a journal. `say` shows a line to the user."""

    def __init__(self, journal: Journal, requirements: RecordRequirements, say: Callable[[str], None]) -> None:
        self._journal, self._requirements, self._say = journal, requirements, say

    def of_step(self, begin: FileBegin, due: Due) -> StepRecord | None:
        """The usable part of a step's record, or None. A record that is not used as a whole is moved aside. `begin`:
        what the step would be sampled with.
        """
        step = begin.step
        try:
            record = self._journal.read(step)
        except PartGoneError as error:  # `journal.keep_last` removed the part: treat the step as not recorded
            where = self._journal.put_aside(step)
            self._say(f"notice   step {step + 1}: {error}; the record is moved to {where.name}, and others sampled")
            return None
        if record is None:
            return None
        reason = self._reason_against(record, begin.weight_version, begin.made_by)
        if reason is not None:
            count = sum(len(group.episodes) for group in record.groups.values())
            where = self._journal.put_aside(step)
            self._say(
                f"notice   step {step + 1}: the journal's {count} trajectories are not used: {reason}; they are moved"
                f" to {where.name}, and others sampled"
            )
            return None
        prompts = due(step, record.groups)
        others = [number for number, group in record.groups.items() if prompts.get(number) != group.prompt]
        if others:
            count = sum(len(record.groups.pop(number).episodes) for number in others)
            where = self._journal.put_aside(step)
            record.batch = None
            self._say(
                f"notice   step {step + 1}: {count} of the journal's trajectories are not used: they are about other"
                " prompts than those that are due (or their answers have changed); the record is moved to"
                f" {where.name}, and these are sampled again"
            )
        for number, group in record.groups.items():
            group.prompt = prompts[number]  # equal, but with its messages, which the journal does not record
        return record

    def open_groups(
        self, begin: FileBegin, record: StepRecord | None, tickets: Mapping[str, Any], due: Due
    ) -> tuple[dict[int, Group], dict[int, int]]:
        """The groups that a step and later ones need not sample, and the weight versions that they were admitted under,
        both by group number.

        `record`: the usable part of the step's file. `tickets`: from the position before the step; groups that were
        sampled ahead are in the files from its `since` on. Only episodes with a reward are taken over: a failed scoring
        says nothing about the episode, and its cause may have been fixed.
        """
        step = begin.step
        found = record or StepRecord(step, begin.weight_version, self._requirements.group_size)
        num_torn = found.num_torn_bytes
        for earlier in reversed(range(tickets.get("since", step), step)):
            self._add_earlier(found, earlier, begin, tickets, due)
        num_recorded = sum(len(group.episodes) for group in found.groups.values())
        known = {number: Group(number, one.prompt, one.scored) for number, one in found.groups.items() if one.scored}
        if record is not None or known:
            num_known = sum(len(group.episodes) for group in known.values())
            lost = num_recorded - num_known
            again = f"; {lost} without a reward are sampled again" if lost else ""
            torn = f"; {num_torn} torn bytes are cut off" if num_torn else ""
            self._say(
                f"step {step + 1}: {num_known} trajectories of the journal, in {len(known)} groups, are taken"
                f" over{again}{torn}"
            )
        return known, found.admitted

    def _add_earlier(
        self, found: StepRecord, step: int, begin: FileBegin, tickets: Mapping[str, Any], due: Due
    ) -> None:
        """Add to `found` the usable groups that an earlier `step` sampled ahead."""
        record = self._journal.read_alone(step)
        if record is None:
            return
        numbers = open_numbers({"tickets": tickets}, record.groups)
        prompts = due(begin.step, numbers)
        made_by = {**begin.made_by, "weights": tickets.get("weights", {}).get(str(step), "")}
        reason = self._reason_against(record, begin.weight_version, made_by)
        usable: set[int] = set()
        for number in numbers:
            versions = [
                v
                for one in record.groups[number].episodes
                for node in one.turns
                for v in distinct_values(node.weight_versions)
            ]
            if prompts.get(number) == record.groups[number].prompt and self._requirements.freshness.admits_all(
                versions, begin.weight_version
            ):
                usable.add(number)
                record.groups[number].prompt = prompts[number]
        if reason is not None:
            usable = set()
        lost = sum(len(record.groups[number].episodes) for number in numbers - usable)
        if lost:
            why = reason or "their prompts are no longer due, or their weights too old"
            self._say(
                f"notice   step {begin.step + 1}: {lost} trajectories that were sampled ahead in step {step + 1} are"
                f" not used: {why}"
            )
        found.add_record(record, usable)

    def _reason_against(self, record: StepRecord, weight_version: int, made_by: Mapping[str, str]) -> str | None:
        """Why the record cannot be used, as the end of a sentence, or None if it can."""
        needed = self._requirements
        if not needed.freshness.admits(record.weight_version, weight_version):
            return f"weight version {record.weight_version} sampled them, and the run holds {weight_version}"
        if record.group_size != needed.group_size:
            return f"their groups are of {record.group_size} samples, the run's of {needed.group_size}"
        if not record.made_by:
            return "an earlier release recorded them without saying what made them"
        reasons = [
            REASONS.get(kind, f"another {kind} made them")
            for kind in made_by
            if record.made_by.get(kind) != made_by[kind]
        ]
        if needed.needs_routes and record.routes_pruned:
            reasons.append(
                "their routed experts were pruned (journal.prune_routes), and moe.routing_replay R3 needs them"
            )
        if needed.needs_masks and record.routes_pruned:
            reasons.append("their sampling masks were pruned (journal.prune_routes), and rollout.top_k needs them")
        if needed.needs_top and record.routes_pruned:
            reasons.append("the teacher's most likely tokens were pruned (journal.prune_routes)")
        return "; ".join(reasons) or None


def made_by(config: Config) -> dict[str, str]:
    """The fingerprints, by kind, of a run that samples and scores, except that of the weights, which change every step.

    Those of the episode function, tools and template exist only if an episode may have several turns. A single turn
    starts from its prompt's text and tokens, which are compared directly.
    """
    sampling = config.rollout.model_dump(include=set(_SAMPLING_KEYS))
    if config.rollout.on_publish == "continue_with_cache":  # the only value that changes what is sampled
        sampling["on_publish"] = config.rollout.on_publish
    if has_sampling_masks(config.rollout):  # an earlier release recorded no masks and other log-probs
        sampling["masks"] = {"min_p": config.rollout.min_p}
    found = {
        "rewards": reward_fingerprint(config.reward, config.data),
        "sampling": _digest({"rollout": sampling, "precision": config.precision}),
        **hook_fingerprints(hooks_of(config)),
    }
    if has_served_teacher(config.teacher):  # not where they are: a server may move
        served = [
            [one.source, one.settings.policy, one.settings.context] for one in teachers(config.teacher) if one.is_served
        ]
        found["teacher"] = _digest({"sources": served, "top": num_served_top(config.teacher)})
    if config.rollout.episode.function == "one_turn":
        most = config.episodes.max_tokens
        return found if most is None else found | {"episode": _digest(most)}
    return found | {
        "episode": episode_fingerprint(config.rollout, config.episodes),
        "tools": _digest([[name, source_digest(name)] for name in config.rollout.tools]),
        "template": template_fingerprint(Path(config.model.path)),
    }


def hook_fingerprints(hooks: Mapping[str, UserFunction], *, sampled: bool = True) -> dict[str, str]:
    """The fingerprints of the hooks (docs/hooks.md) by key: name, options, and the source of the function's module and
    of the user's own modules that it imports. Terms and advantages decide which weights sample the next step, so they
    are among them. `sampled`: False for a run that samples nothing itself, where nothing is filtered or chosen.
    """
    return {
        key: _digest([hook.model_dump(mode="json"), source_digest(hook.function)])
        for key, hook in hooks.items()
        if sampled or key in ("advantage.function", "objective.function")
    }


def first_weights(model: Model) -> str:
    """A fingerprint of the weights that a fresh run starts from. It covers the size and some bytes of config.json and
    of every file of weights.
    """
    folder = Path(model.weights or model.path)
    files = sorted(
        path
        for pattern in ("config.json", "*.safetensors", "*.distcp", "megatron/*.distcp")
        for path in folder.glob(pattern)
    )
    return _digest([[str(path.relative_to(folder)), path.stat().st_size, _sample_digest(path)] for path in files])


def next_history(history: str, batch: RolloutBatch, checksums: Mapping[str, int]) -> str:
    """The fingerprint of the weights after a step that trains on `batch`. `history`: the fingerprint of the weights
    before it. `checksums`: of the recorded episodes, by id.
    """
    return _digest([history, sorted((one.episode_id, checksums[one.episode_id]) for one in batch.episodes)])


def reward_fingerprint(reward: Reward, data: Data) -> str:
    """A fingerprint of every reward function: name, weight, options, and the source of its module and of the user's
    own modules that it imports.
    """
    functions = [[one.function, one.weight, one.options, source_digest(one.function)] for one in reward.functions]
    of_sources = [
        [source.name, *_own_reward_parts(source.reward)] for source in sources_of(data) if source.reward is not None
    ]
    return _digest([functions, of_sources])


def _own_reward_parts(reward: OwnReward) -> list[object]:
    """What determines a source's own reward. For a name without options that is the name and the digest of its
    source.
    """
    if len(reward) == 1 and reward[0] == RewardFunction(function=reward[0].function):
        return [reward[0].function, source_digest(reward[0].function)]
    return [[one.model_dump(mode="json"), source_digest(one.function)] for one in reward]


def episode_fingerprint(rollout: Rollout, episodes: Episodes) -> str:
    """A fingerprint of the episode function: name, options, limits, its source and the user's own modules that it
    imports, and the content of files that its options name, such as the program of a foreign agent.
    """
    episode = rollout.episode
    limits = episodes.model_dump(include=set(_EPISODE_KEYS), mode="json")
    files = sorted({text for text in _texts(episode.options) if os.path.isfile(text)})
    return _digest(
        [
            [episode.function, episode.options, limits, episodes.endpoint.ignore_sampling],
            source_digest(episode.function),
            [[name, _file_digest(Path(name))] for name in files],
        ]
    )


def template_fingerprint(folder: Path) -> str:
    """A fingerprint of the files of the tokenizer in `folder` that decide how messages become tokens."""
    return _digest([[name, _file_digest(folder / name)] for name in _TOKENIZER_FILES if (folder / name).is_file()])


def _texts(value: object) -> Iterator[str]:
    """Every text in JSON values, without keys, and every word of each text."""
    if isinstance(value, str):
        yield from {value, *value.split()}
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _file_digest(path: Path) -> str:
    with open_regular(path) as file:  # an option may name a file of any size
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_digest(function: str) -> str:
    """A digest of the source files of a reward, episode or tool, wherever they are. If the module is not found, it is
    the digest of no files. A built-in episode has the digest "", because it belongs to the release.
    """
    if function in EPISODES:
        return ""
    module = (
        function.partition(":")[0]
        if ":" in function
        else BUILTINS[function].__module__
        if function in BUILTINS
        else function
    )
    return _digest(sorted((name, _file_digest(path)) for name, path in _own_modules(module).items()))


def _own_modules(module: str) -> dict[str, Path]:
    """The files, by module name, of `module`, its parent packages and the modules that these import: those of the same
    top-level package, and others that are not installed.
    """
    found: dict[str, Path] = {}
    waiting, top = [module], module.partition(".")[0]
    while waiting:
        name = waiting.pop()
        for part in _with_packages(name):
            if part in found or (spec := _spec(part)) is None or spec.origin is None or not os.path.isfile(spec.origin):
                continue
            if part.partition(".")[0] != top and _is_installed(spec.origin):
                continue
            found[part] = Path(spec.origin)
            waiting += _imports(
                found[part], part if spec.submodule_search_locations is not None else part.rpartition(".")[0]
            )
    return found


def _with_packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _spec(name: str) -> ModuleSpec | None:
    """The spec of a module, found without running it or its parent packages."""
    path = places()
    spec = None
    for part in _with_packages(name):
        try:
            # A module may be known only to the finder of an editable installation. That finder is asked for top-level
            # names only, because it would import the parents of other names.
            spec = PathFinder.find_spec(part, path) or (importlib.util.find_spec(part) if "." not in part else None)
        except KeyError:
            # A folder without __init__.py in another such folder: to make its package, the finder needs the outer one
            # imported.
            spec = ModuleSpec(part, None, is_package=True)
            inner = part.rpartition(".")[2]
            spec.submodule_search_locations = [os.path.join(place, inner) for place in path]
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _is_installed(file: str) -> bool:
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(
        Path(os.path.realpath(file)).is_relative_to(os.path.realpath(place)) for place in places
    ) or file.startswith(str(Path(__file__).parents[1]))


def _imports(file: Path, package: str) -> Iterator[str]:
    """The names that a source file imports, including attributes that might be modules."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(read_bytes(file))
    except (SyntaxError, ValueError):  # the import of this file will fail and give the reason
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names) if base else ()


def _sample_digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with open_regular(path) as file:
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
