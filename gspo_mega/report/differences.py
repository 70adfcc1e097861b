"""Where two runs part: configuration, versions, prompts, sampled tokens, log-probs, rewards, metrics, weights.

`compare` compares to the bit what two run folders record. Rollouts are compared step by step up to the first step in
which they differ, because everything after it differs as a consequence. `cause` says in words what made the runs part,
as far as the records show it, and `lines` gives the whole comparison as text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gspo_mega.base.episodes import Group
from gspo_mega.base.errors import CheckpointError, JournalError, ModelError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import StepRecord, TokenGaps
from gspo_mega.report.run_record import RunRecord, schema_defaults, shown

# What is compared, in the order in which a step reaches it.
Stage = Literal["prompts", "tokens", "versions", "log-probs", "rewards", "trainer", "metrics", "weights"]
STAGES: tuple[Stage, ...] = ("prompts", "tokens", "versions", "log-probs", "rewards", "trainer", "metrics", "weights")
# The keys that name a run and its folder. They do not affect what it computes.
_PLACES = ("run.name", "run.dir")
# Metrics that depend on the machine and on time.
_NOT_COMPARED = ("time/", "speed/", "run/", "rollout/", "publish/", "checkpoint/", "memory/")
MOST_LINES = 10
# The keys of the configuration, or their beginnings, that affect a stage. All other keys affect training.
_KEYS_OF_STAGE: dict[Stage, tuple[str, ...]] = {
    "prompts": ("run.seed", "data.", "batch.", "rollout.filter", "rollout.max_staleness"),
    "tokens": ("run.seed", "rollout.", "episodes.", "server.", "model.", "precision", "publish."),
    "versions": ("rollout.", "publish."),
    "log-probs": ("server.", "model.", "precision", "publish.", "rollout."),
    "rewards": ("reward", "data."),
}
# Keys that only say where a run is, how it is watched, or what it keeps.
_KEYS_WITHOUT_EFFECT = ("run.name", "run.dir", "checkpoint.", "journal.", "eval.", "watchdog.", "cluster.", "metrics.")
_STAGE_TEXTS = {
    "prompts": "the prompts, or their order",
    "tokens": "the sampled tokens, from the same prompts",
    "versions": "the weight versions that sampled the same tokens",
    "log-probs": "the servers' log-probs of the same tokens",
    "rewards": "the rewards of the same responses",
    "trainer": "the trainer's log-probs of the same rollouts",
    "metrics": "what training computed from the same rollouts",
    "weights": "the weights, after the same metrics",
}


@dataclass(frozen=True)
class RunDifference:
    """The first difference in one stage. `step` counts from 1. `place`: where in the step. `one`, `other`: what the
    runs have there. `count`: how much of this stage differs in the step.
    """

    stage: Stage
    step: int
    place: str
    one: str
    other: str
    count: str = ""


@dataclass
class RunComparison:
    """How two runs differ.

    Attributes:
        configuration: (key, one, other) of the keys that differ. `versions`: (one, other) of the lines that differ.
        made_by: the kinds of fingerprints that differ in the first compared step.
        found: the first difference of each stage.
        metrics: (name, step, one, other) where each metric first differs, the earliest first.
        tensors: lines about the earliest checkpoint whose weights differ.
        notes: what was not compared, and why. `compared`: how many of each thing were compared.
    """

    configuration: list[tuple[str, str, str]] = field(default_factory=list)
    versions: list[tuple[str, str]] = field(default_factory=list)
    made_by: list[str] = field(default_factory=list)
    found: dict[Stage, RunDifference] = field(default_factory=dict)
    metrics: list[tuple[str, int, float | None, float | None]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)

    @property
    def first(self) -> RunDifference | None:
        """The earliest difference, by step and by the order of a step's stages."""
        return min(self.found.values(), key=lambda one: (one.step, STAGES.index(one.stage)), default=None)

    @property
    def is_same(self) -> bool:
        """Whether everything that was compared and that a run computes is the same."""
        return not self.found


def compare(one: RunRecord, other: RunRecord, *, tensors: bool = True) -> RunComparison:
    """Compare two runs. `tensors`: also read checkpoints and exported weights, which takes long for large models."""
    found = RunComparison()
    keys, defaults = dict.fromkeys([*one.settings, *other.settings]), schema_defaults()
    for key in keys:
        # A run of an earlier release, which does not know the key, has the default.
        a, b = (shown(run.settings.get(key, defaults.get(key, "(not given)"))) for run in (one, other))
        if key not in _PLACES and a != b:
            found.configuration.append((key, a, b))
    found.versions = _line_differences(one.versions, other.versions)
    _compare_rollouts(one, other, found)
    _compare_metrics(one, other, found)
    if tensors:
        _compare_weights(RunFolder(one.path), RunFolder(other.path), found)
    return found


def _line_differences(one: str, other: str) -> list[tuple[str, str]]:
    lines = one.splitlines(), other.splitlines()
    pairs = itertools.zip_longest(
        *([line for line in own if line not in set(rest)] for own, rest in (lines, lines[::-1]))
    )
    return [(a or "", b or "") for a, b in pairs]


# --- rollouts -------------------------------------------------------------------------------------------------


def _compare_rollouts(one: RunRecord, other: RunRecord, found: RunComparison) -> None:
    journals = [Journal(RunFolder(record.path).journal_dir) for record in (one, other)]
    common = sorted(set(journals[0].steps()) & set(journals[1].steps()))
    if not common:
        found.notes.append("no step's rollouts are recorded in both runs")
    for step in common:
        try:
            records = [journal.read(step) for journal in journals]
        except JournalError as error:
            found.notes.append(f"rollouts from step {step + 1} on are not compared: {error}")
            return
        a, b = records
        if a is None or b is None:
            continue
        if step == common[0]:
            kinds = dict.fromkeys([*a.made_by, *b.made_by])
            found.made_by = [kind for kind in kinds if a.made_by.get(kind) != b.made_by.get(kind)]
        found.compared["steps of rollouts"] = found.compared.get("steps of rollouts", 0) + 1
        for difference in _step_differences(step + 1, _groups(a), _groups(b)):
            found.found.setdefault(difference.stage, difference)
        if not found.found and (apart := _trainer_difference(step, journals, a)) is not None:
            found.found["trainer"] = apart
        if found.found:
            return


def _groups(record: StepRecord) -> list[Group]:
    return list(record.batch.groups) if record.batch is not None else [record.groups[n] for n in sorted(record.groups)]


def _step_differences(step: int, one: Sequence[Group], other: Sequence[Group]) -> Iterator[RunDifference]:
    """The first difference of each stage in one step. Episodes are compared if both have the same prompt."""
    pairs = list(itertools.zip_longest(one, other))
    texts = [(_prompt(a), _prompt(b)) for a, b in pairs]
    apart = [place for place, (a, b) in enumerate(texts) if a != b]
    if apart:
        first = apart[0]
        count = f"{len(apart)} of {len(pairs)} prompts differ"
        yield RunDifference("prompts", step, f"group {first + 1}", *texts[first], count)
    # Stage -> (place, one, other) of every episode that differs in it, in order.
    apart_in: dict[Stage, list[tuple[str, str, str]]] = {}
    episodes = 0
    for a, b in (pair for pair, (x, y) in zip(pairs, texts, strict=True) if x == y):
        for x, y in zip(a.episodes, b.episodes):
            episodes += 1
            for stage, where, own, others in _episode_differences(x, y):
                apart_in.setdefault(stage, []).append((where, own, others))
    for stage, all_of_it in apart_in.items():
        yield RunDifference(stage, step, *all_of_it[0], f"{len(all_of_it)} of {episodes} episodes differ")


def _prompt(group: Group | None) -> str:
    return "(none)" if group is None else f"{group.prompt.prompt_id}: {group.prompt.text}"


def _episode_differences(one: Any, other: Any) -> Iterator[tuple[Stage, str, str, str]]:
    """(stage, place, one, other) of the differences of two episodes. After tokens that differ nothing more is compared,
    because it follows from them.
    """
    sampled = [[node for node in episode.nodes if node.is_sampled] for episode in (one, other)]
    for turn, (a, b) in enumerate(itertools.zip_longest(*sampled)):
        where = one.episode_id if len(sampled[0]) < 2 else f"{one.episode_id}, turn {turn + 1}"
        tokens = [[] if node is None else list(node.token_ids) for node in (a, b)]
        if tokens[0] != tokens[1]:
            place = next(i for i, pair in enumerate(itertools.zip_longest(*tokens)) if pair[0] != pair[1])
            yield "tokens", f"{where}, token {place + 1}", _token(a, place), _token(b, place)
            return
        versions = list(a.weight_versions), list(b.weight_versions)
        if versions[0] != versions[1]:
            place = next(i for i, pair in enumerate(zip(*versions)) if pair[0] != pair[1])
            x, y = (f"weight version {values[place]}" for values in versions)
            yield "versions", f"{where}, token {place + 1}", x, y
        log_probs = np.asarray(a.log_probs), np.asarray(b.log_probs)
        if not np.array_equal(*log_probs):
            gaps = np.abs(log_probs[0] - log_probs[1])
            place = int(np.flatnonzero(gaps)[0])
            values = [f"{float(values[place]):.9g}" for values in log_probs]
            yield "log-probs", f"{where}, token {place + 1} (largest gap {gaps.max():.3g} nats)", values[0], values[1]
    if (one.reward, one.correct) != (other.reward, other.correct):
        yield "rewards", one.episode_id, _reward(one), _reward(other)


def _trainer_difference(step: int, journals: Sequence[Journal], record: StepRecord) -> RunDifference | None:
    """The first token to which the trainers gave different log-probs, in a step whose rollouts are the same. None if
    there is none, or if a run did not record them (`diagnostics.token_mismatch`).
    """
    try:
        one, other = (TokenGaps(journal.folder, step) for journal in journals)
    except JournalError:  # the run's own report says so
        return None
    first: tuple[str, str, str] | None = None
    episodes = apart = 0
    for episode in (episode for group in _groups(record) for episode in group.episodes):
        a, b = one.of(episode), other.of(episode)
        episodes += bool(a and b)
        is_apart = False
        for turn, node in enumerate(node for node in a if node in b):
            unlike = np.flatnonzero(~((a[node] == b[node]) | (np.isnan(a[node]) & np.isnan(b[node]))))
            if len(unlike) and first is None:
                where = episode.episode_id if len(a) < 2 else f"{episode.episode_id}, turn {turn + 1}"
                own, others = (f"{float(gaps[node][unlike[0]]):+.4g} nats from the server's" for gaps in (a, b))
                first = f"{where}, token {unlike[0] + 1}", own, others
            is_apart = is_apart or len(unlike) > 0
        apart += is_apart
    return (
        None if first is None else RunDifference("trainer", step + 1, *first, f"{apart} of {episodes} episodes differ")
    )


def _token(node: Any, place: int) -> str:
    if node is None or place >= len(node.token_ids):
        return "(ended)"
    return f"token {node.token_ids[place]} at log-prob {float(node.log_probs[place]):.6g}"


def _reward(episode: Any) -> str:
    failed = episode.failure or episode.reward_error
    return f"not scored: {failed}" if episode.reward is None else f"{episode.reward:g}"


# --- metrics and weights ------------------------------------------------------------------------------------------


def _compare_metrics(one: RunRecord, other: RunRecord, found: RunComparison) -> None:
    places = [{step: place for place, step in enumerate(record.steps)} for record in (one, other)]
    common = sorted(set(places[0]) & set(places[1]))
    found.compared["steps of metrics"] = len(common)
    if max(one.every, other.every) > 1:
        found.notes.append(f"of the metrics, one of {max(one.every, other.every)} steps is compared")
    for name in sorted({*one.series, *other.series}):
        if name.startswith(_NOT_COMPARED):
            continue
        for step in common:
            a, b = (
                record.series[name][place[step]] if name in record.series else None
                for record, place in zip((one, other), places, strict=True)
            )
            if a != b:
                found.metrics.append((name, step, a, b))
                break
    found.metrics.sort(key=lambda metric: (metric[1], metric[0]))
    if found.metrics:
        name, step, a, b = found.metrics[0]
        count = f"{sum(metric[1] == step for metric in found.metrics)} metrics differ there"
        found.found["metrics"] = RunDifference("metrics", step, name, _value(a), _value(b), count)


def _compare_weights(one: RunFolder, other: RunFolder, found: RunComparison) -> None:
    """Compare the checkpoints that both runs have up to the first that differs, or without any the exported weights."""
    try:
        # Imported here because it imports torch, which a login node may not have.
        from gspo_mega.checkpoint.compare import differences
        from gspo_mega.checkpoint.tensor_sources import open_checkpoint
    except ImportError:
        found.notes.append("weights are not compared: PyTorch is not installed here")
        return
    pairs = [(step, one.checkpoint_dir(step), other.checkpoint_dir(step)) for step in _common_checkpoints(one, other)]
    if not pairs and all((run.huggingface_dir / "config.json").is_file() for run in (one, other)):
        pairs = [(_exported_step(one), one.huggingface_dir, other.huggingface_dir)]
    for step, a, b in pairs:
        try:
            lines = list(
                differences(
                    open_checkpoint(a, _exported_folder(one)), open_checkpoint(b, _exported_folder(other)), _silent
                )
            )
        except (CheckpointError, ModelError) as error:
            found.notes.append(f"the weights of step {step} are not compared: {error}")
            continue
        found.compared["checkpoints"] = found.compared.get("checkpoints", 0) + 1
        if lines:
            found.tensors = lines
            found.found["weights"] = RunDifference(
                "weights", step, a.name, lines[0], "", f"{len(lines)} tensors differ"
            )
            return


def _silent(done: int, total: int, name: str) -> None:
    """No progress is shown."""


def _common_checkpoints(one: RunFolder, other: RunFolder) -> list[int]:
    steps = [
        {int(path.name.removeprefix("step_")) for path in run.checkpoints_dir.glob("step_*") if path.name[5:].isdigit()}
        for run in (one, other)
    ]
    return sorted(steps[0] & steps[1])


def _exported_folder(run: RunFolder) -> Path | None:
    return run.huggingface_dir if (run.huggingface_dir / "config.json").is_file() else None


def _exported_step(run: RunFolder) -> int:
    steps = Journal(run.journal_dir).steps()
    return steps[-1] + 1 if steps else 0


# --- in words -------------------------------------------------------------------------------------------------


def acting_keys(comparison: RunComparison, stage: Stage) -> list[str]:
    """The differing keys that may have caused a difference in this stage."""
    keys = [key for key, _, _ in comparison.configuration if not key.startswith(_KEYS_WITHOUT_EFFECT)]
    return [key for key in keys if stage not in _KEYS_OF_STAGE or key.startswith(_KEYS_OF_STAGE[stage])]


def cause(comparison: RunComparison) -> str:
    """A sentence about why the runs part where they do, or that the records do not show it."""
    first = comparison.first
    if first is None:
        if comparison.configuration:
            return "What was compared is the same, although the configurations differ."
        return "What was compared is the same."
    keys = acting_keys(comparison, first.stage)
    named = ", ".join(keys[:MOST_LINES])
    if first.stage == "tokens" and "weights" in comparison.made_by:
        return (
            "They start from other weights: model.path, model.weights, or files that have changed under the same path."
        )
    if keys:
        return f"It follows from the configuration: {named}."
    if first.stage == "rewards" and "rewards" in comparison.made_by:
        return "The source of the reward, or of a module that it imports, is not the same."
    if first.stage == "prompts":
        return "No key explains it: the prompt file has other rows, or one run began at another place in it."
    if first.stage == "tokens":
        changed = [kind for kind in comparison.made_by if kind in ("episode", "tools", "template")]
        if changed:
            return f"What makes an episode is not the same: {', '.join(changed)} (source, options or files)."
        return (
            "Nothing recorded differs before this: SGLang's sampling is not reproducible, so two runs of one"
            " configuration part at their first sampled tokens. To compare only training: gspo-mega train ..."
            " --from-rollouts RUN."
        )
    if comparison.versions:
        return f"The configurations agree; versions do not: {comparison.versions[0][0]} | {comparison.versions[0][1]}."
    if first.stage in ("trainer", "metrics", "weights"):
        return (
            "The configurations and versions agree, and the rollouts up to there: what is left is the machine, code"
            " that changed between releases, or damaged memory."
        )
    return (
        "The configurations and versions agree: what is left is the servers' machines, or weights that were not"
        " completely published."
    )


def lines(comparison: RunComparison, one: str, other: str) -> list[str]:
    """The comparison as text. `one`, `other`: the runs' names."""
    text = [f"one      {one}", f"other    {other}"]
    first = comparison.first
    compared = ", ".join(f"{number} {what}" for what, number in comparison.compared.items() if number) or "nothing"
    if first is None:
        text.append(f"same     {compared} compared")
    else:
        text += [
            f"parted   in step {first.step}: {_STAGE_TEXTS[first.stage]} ({compared} compared)",
            *_described_difference(first),
        ]
    text.append(f"cause    {cause(comparison)}")
    text += _section("config", [f"{key}: {a} | {b}" for key, a, b in comparison.configuration])
    text += _section("versions", [f"{a} | {b}" for a, b in comparison.versions])
    later = [found for stage in STAGES if (found := comparison.found.get(stage)) is not None and found is not first]
    if later:
        text += ["", "also"]
        for found in later:
            text += [f"         step {found.step}: {found.stage}", *_described_difference(found)]
    metrics = [f"step {step}  {name}: {_value(a)} | {_value(b)}" for name, step, a, b in comparison.metrics]
    text += _section("metrics, each where it first differs", metrics)
    text += _section("tensors", comparison.tensors)
    return [*text, *(["", *(f"note     {note}" for note in comparison.notes)] if comparison.notes else [])]


def _described_difference(found: RunDifference) -> list[str]:
    both = (
        [f"           one    {found.one}", f"           other  {found.other}"]
        if found.other
        else [f"           {found.one}"]
    )
    return [f"           {found.place}; {found.count}", *both]


def _section(title: str, rows: list[str]) -> list[str]:
    if not rows:
        return []
    more = [f"         ... and {len(rows) - MOST_LINES} more (--json has all)"] if len(rows) > MOST_LINES else []
    return ["", title, *(f"         {row}" for row in rows[:MOST_LINES]), *more]


def _value(value: float | None) -> str:
    return "(none)" if value is None else f"{value:.9g}"
