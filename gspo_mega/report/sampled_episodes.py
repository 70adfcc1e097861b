"""The episodes of a run's journal with their tokens, chosen and made small enough for a page.

`sample_run` chooses the steps and groups that are shown; the functions after it write an episode with short keys. The
groups of a step are taken whole, so that a group can be compared, and always from the first group on. The mismatch of
single tokens is included if the run recorded it (`diagnostics.token_mismatch`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega.base.episodes import Episode, Group, Node
from gspo_mega.base.errors import ConfigError, JournalError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.config.derived import critic_of, least_of_group
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import StepRecord, TokenGaps, token_gaps_file

logger = logging.getLogger(__name__)

# Log-probs are written as whole numbers of this many nats. Otherwise a page of a million tokens would be mostly digits.
LOG_PROB_UNIT = 0.001
# A mismatch is written as its sign and the number of sixteenths of a decade by which it is above this many nats, which
# is exact to 7%.
GAP_FLOOR, GAP_STEPS = 1e-7, 16


@dataclass
class Sample:
    """The chosen episodes of a run.

    Attributes:
        episodes: JSON types, see `_episode`. `prompts`: by prompt id.
        vocabulary: the text of every token that occurs, if the run has a tokenizer.
        num_recorded: episodes in the shown steps. `num_steps`: steps in the journal.
        last_step: the last step of the journal that was read, counted from 1.
        problems: what could not be read or shown, and why.
    """

    episodes: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    vocabulary: dict[int, str] = field(default_factory=dict)
    num_recorded: int = 0
    num_steps: int = 0
    num_steps_shown: int = 0
    last_step: int = 0
    has_advantages: bool = False
    has_gaps: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.num_steps_shown == self.num_steps and len(self.episodes) == self.num_recorded


def sample_run(
    folder: RunFolder, most_tokens: int, most_steps: int = 200, *, after: int = 0, consumed: bool = False
) -> Sample:
    """A sample of at most about `most_tokens` sampled tokens, spread evenly over at most `most_steps` steps that
    include the first and the last. A step that cannot be read is named in `problems` and left out.

    `after`: only steps after this one. `consumed`: only steps whose batch the trainer has taken. Such steps get no more
    episodes, and the mismatch of their tokens is recorded if the run records it at all.
    """
    journal, sample = Journal(folder.journal_dir), Sample(last_step=after)
    steps = [step for step in journal.steps() if step + 1 > after]
    sample.num_steps = len(steps)
    chosen = evenly(steps, most_steps)
    share = most_tokens / max(1, len(chosen))
    config = _load_config(folder, sample) if chosen else None
    ids: set[int] = set()
    measured = config is not None and config.diagnostics.token_mismatch
    records = _records(journal, chosen, sample, consumed=consumed)
    for record, is_last in _with_last(records):
        if consumed and measured and is_last and not token_gaps_file(journal.folder, record.step).exists():
            break  # this step is being trained on
        sample.num_steps_shown += 1
        sample.last_step = record.step + 1
        _fill_advantages(record, config, sample)
        _add_step(record, share, sample, ids, _gaps(journal, record.step, sample))
    sample.vocabulary = texts_of(folder, sample, ids)
    return sample


def _records(journal: Journal, steps: Sequence[int], sample: Sample, *, consumed: bool) -> Iterator[StepRecord]:
    for step in steps:
        try:
            record = journal.read(step)
        except JournalError as error:
            sample.problems.append(str(error))
            continue
        if record is not None and not (consumed and record.batch is None):
            yield record


def _with_last(records: Iterator[StepRecord]) -> Iterator[tuple[StepRecord, bool]]:
    """Each record, and whether it is the last one."""
    held = next(records, None)
    while held is not None:
        following = next(records, None)
        yield held, following is None
        held = following


def _gaps(journal: Journal, step: int, sample: Sample) -> TokenGaps | None:
    try:
        return TokenGaps(journal.folder, step)
    except JournalError as error:
        sample.problems.append(str(error))
        return None


def evenly(values: list[int], most: int) -> list[int]:
    """At most `most` of the values, evenly chosen, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)] if most > 1 else values[-1:]


def _add_step(record: StepRecord, share: float, sample: Sample, ids: set[int], gaps: TokenGaps | None) -> None:
    groups = record.batch.groups if record.batch is not None else [record.groups[n] for n in sorted(record.groups)]
    sample.num_recorded += sum(len(group.episodes) for group in groups)
    room, shown = share, 0
    for group in groups:
        size = sum(len(node.token_ids) for episode in group.episodes for node in episode.nodes[1:])
        if shown and size > room:
            break
        room, shown = room - size, shown + 1
        _add_group(record.step + 1, group, sample, ids, gaps)


def _add_group(step: int, group: Group, sample: Sample, ids: set[int], gaps: TokenGaps | None) -> None:
    prompt = group.prompt
    sample.prompts.setdefault(
        prompt.prompt_id, {"text": prompt.text, "answer": _answer_text(prompt.answer), "source": prompt.source}
    )
    for episode in group.episodes:
        sample.episodes.append(_episode(step, prompt.prompt_id, episode))
        for node, values in (gaps.of(episode) if gaps is not None else {}).items():
            sample.episodes[-1]["n"][node - 1]["d"] = gap_codes(values)
            sample.has_gaps = True
        for node in episode.nodes[1:]:
            ids.update(node.token_ids)


def _episode(step: int, prompt_id: str, episode: Episode) -> dict[str, Any]:
    """An episode as JSON types. The keys are short, because there are thousands of episodes: s step, g group, p prompt,
    i id, r reward, c correct, a advantage, t number of sampled tokens, f finish reason, v weight versions, e why it
    failed or was not scored, n nodes, k calls of tools.
    """
    rows = episode.rows() if episode.failure is None else []
    turns = episode.turns
    value: dict[str, Any] = {
        "s": step,
        "g": episode.group_id,
        "p": prompt_id,
        "i": episode.episode_id,
        "r": episode.reward,
        "c": episode.correct,
        "a": rows[0].advantage if rows else None,
        "t": episode.num_sampled_tokens,
        "f": turns[-1].finish_reason if turns else "none",
        "v": sorted({version for turn in turns for version in turn.weight_versions}),
        "n": [_node(node) for node in episode.nodes[1:]],
    }
    advantages = {
        node: round(row.token_advantages[start], 5)
        for row in rows
        if row.token_advantages is not None
        for node, (start, _) in zip(row.turn_nodes, row.turns)
    }
    for shown, node in zip(value["n"], episode.nodes[1:]):
        if node.node_id in advantages:
            shown["a"] = advantages[node.node_id]
    if value["a"] is not None:
        value["a"] = round(value["a"], 5)
    if len(episode.reward_parts) > 1:
        value["parts"] = episode.reward_parts
    if failed := episode.failure or episode.reward_error:
        value["e"] = failed
    if episode.tool_calls:
        value["k"] = [vars(call) for call in episode.tool_calls]
    return value


def _node(node: Node) -> dict[str, Any]:
    """A node of an episode as JSON types: t token ids, p parent if it is not the node before, m messages, x text, l
    log-probs in `LOG_PROB_UNIT`, v weight versions as [version, count], f finish reason, r reward. `_add_group` adds d,
    the mismatch of each token (`gap_codes`), if it was recorded.
    """
    value: dict[str, Any] = {"t": list(node.token_ids)}
    if node.parent != node.node_id - 1:
        value["p"] = node.parent
    if not node.is_sampled:
        return value | {"m": node.messages}
    log_probs = np.asarray(node.log_probs, np.float64)
    value["x"] = node.text
    value["l"] = np.rint(log_probs / LOG_PROB_UNIT).astype(np.int64).tolist()
    value["v"] = run_lengths(list(node.weight_versions))
    value["f"] = node.finish_reason
    if node.reward is not None:
        value["r"] = node.reward
    return value


def gap_codes(values: np.ndarray) -> list[int | None]:
    """The codes of mismatches (`GAP_FLOOR`, `GAP_STEPS`): 0 below `GAP_FLOOR`, None for a value that was not measured.
    `values`: [n] nats.
    """
    size = np.minimum(np.abs(values.astype(np.float64)), np.finfo(np.float16).max)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(np.maximum(0.0, np.log10(size / GAP_FLOOR) * GAP_STEPS + 1)) * np.sign(values)
    return [None if np.isnan(value) else int(code) for value, code in zip(values, codes, strict=True)]


def run_lengths(values: list[int]) -> list[list[int]]:
    """The values as [value, number of times in a row]."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def _answer_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _load_config(folder: RunFolder, sample: Sample) -> Any | None:
    """The run's configuration. None if it is not one of this release; advantages are then not known."""
    try:
        return load_config(folder.config_file).config
    except ConfigError as error:
        first = str(error).splitlines()[0]
        sample.problems.append(
            f"advantages are not shown, because the configuration is not one of this release: {first}"
        )
        return None


def _fill_advantages(record: StepRecord, config: Any | None, sample: Sample) -> None:
    if record.batch is None or config is None:
        return
    try:
        # Imported here because it imports torch, which a login node may not have.
        from gspo_mega.train.batches import fill_advantages
    except ImportError:
        missing = "advantages are not shown: PyTorch is not installed here"
        if missing not in sample.problems:
            sample.problems.append(missing)
        return
    scored = record.batch.scored(least_of_group(config))
    if scored.groups and critic_of(config.algorithm, config.critic) is not None:
        missing = f"advantages are not shown: those of {config.algorithm} need its critic's values"
        if missing not in sample.problems:
            sample.problems.append(missing)
    elif scored.groups:
        fill_advantages(scored, config, record.step)
        sample.has_advantages = True


def texts_of(folder: RunFolder, sample: Sample, ids: set[int]) -> dict[int, str]:
    """The text of each token by its id, from the tokenizer of the run's exported or configured model; empty without
    one.
    """
    file = next((path for path in _tokenizer_files(folder) if path.exists()), None)
    if not ids or file is None:
        if ids:
            sample.problems.append(
                "tokens are shown by their ids: no tokenizer.json in the run's hf/ or its model.path"
            )
        return {}
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return {one: tokenizer.decode([one], skip_special_tokens=False) for one in sorted(ids)}
    except Exception as error:  # the library raises Exception itself for a damaged file
        sample.problems.append(f"tokens are shown by their ids: {file} cannot be read: {error}")
        return {}


def _tokenizer_files(folder: RunFolder) -> list[Path]:
    files = [folder.huggingface_dir / "tokenizer.json"]
    try:
        files.append(Path(load_config(folder.config_file).config.model.path) / "tokenizer.json")
    except ConfigError:
        logger.debug("%s names no model", folder.config_file)
    return files
