"""What of a run must not depend on how often it was disturbed, and the differences between two runs in it.

`outcome` reads a run that has ended: the weights, optimizer and random states of its latest checkpoint, its counters,
the exported folders, every trajectory of its journal, and its metrics but for those of time. Two runs that trained on
the same rollouts must have the same outcome, to the bit. `journal_problems` says what a journal must not say, whatever
became of its run: a sample that was recorded twice with different tokens, a group that is not whole, a prompt that was
not due.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.records import Trajectory
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import open_regular, read_json_file, read_text
from gspo_mega.data.journal.frames import FrameFile
from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics

# Metrics of how long something took, of what a publish sent, of how often the run was started, and of copies in memory,
# of which a new start has none that an earlier one made.
_APART = ("time", "run/num_restarts", "run/num_standby_ranks", "run/num_kept_servers", "checkpoint/peer_bytes")
_APART_PREFIXES = ("time/", "speed/")
# Megatron's .metadata is a pickle that holds the same in another order of references; all tensors are in other files.
_NOT_COMPARED = ("state.json", "megatron/.metadata", "critic/.metadata")
_EXPORTS = ("hf", "hf_steps", "adapter", "critic")
_MOST_SHOWN = 8


def outcome(run: RunFolder) -> dict[str, Any]:
    """All that must be equal, by name. Raises OSError, ValueError or GspoMegaError if the run has no whole end."""
    checkpoint = run.checkpoints_dir / read_text(run.latest_checkpoint_file).strip()
    found: dict[str, Any] = {
        f"checkpoint/{name}": digest for name, digest in digests(checkpoint).items() if name not in _NOT_COMPARED
    }
    state = read_json_file(checkpoint / "state.json")["state"]
    totals = state["summary"].get("totals", {})
    found["state"] = {**state, "summary": _without_time(totals)}
    for place in _EXPORTS:
        found |= {f"{place}/{name}": digest for name, digest in digests(run.path / place).items()}
    journal = Journal(run.journal_dir)
    found |= {f"journal/{file.name}": file.read_bytes() for file in sorted(journal.folder.glob("*.gaps"))}
    for step in journal.steps():
        record = journal.read(step)
        groups = record.batch.groups if record is not None and record.batch is not None else []
        found[f"journal/step {step + 1}"] = [[_row(one) for one in group.trajectories] for group in groups]
    for line in read_metrics(run.metrics_file):
        found[f"metrics/step {line['step']}"] = _without_time(line)
    found["metrics/steps"] = [line["step"] for line in read_metrics(run.metrics_file)]
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any], same_source: bool = True) -> list[str]:
    """The names under which two outcomes differ; for metrics and state with the inner name.

    `same_source`: both runs took their rollouts from the same place. Without it one sampled from servers and the other
    trained on its journal: metrics that only one of them has are left out, and so are the totals of the state, which
    have them too.
    """
    found = []
    for name in sorted(one.keys() | other.keys()):
        first, second = one.get(name), other.get(name)
        if isinstance(first, dict) and isinstance(second, dict):
            keys = first.keys() | second.keys() if same_source else (first.keys() & second.keys()) - {"summary"}
            found += [f"{name}: {key}" for key in sorted(keys) if first.get(key) != second.get(key)]
        elif first != second:
            found.append(name)
    return found


def journal_problems(run: RunFolder, group_size: int, reference: RunFolder | None = None) -> list[str]:
    """What is wrong with the journal of a run that has ended. `reference`: a run whose steps were about the prompts
    that were due; None if they need not be the same, as in a run that samples ahead or filters groups.
    """
    journal = Journal(run.journal_dir)
    problems = [f"{path.name}: recorded rollouts were of no use" for path in journal.folder.glob("*.old-*")]
    problems += _sampled_twice(journal)
    wanted = None if reference is None else Journal(reference.journal_dir)
    trained: Counter[int] = Counter()
    for step in journal.steps():
        try:
            record = journal.read(step)
        except GspoMegaError as error:
            problems.append(str(error))
            continue
        if record is None or record.batch is None:
            problems.append(f"step {step + 1} has no batch")
            continue
        names = Counter(row.trajectory_id for row in record.batch.trajectories)
        problems += [
            f"step {step + 1}: {name} is {count} times in the batch" for name, count in names.items() if count > 1
        ]
        problems += [
            f"step {step + 1}: group {group.group_id} has {len(group.episodes)} samples of {group_size}"
            for group in record.batch.groups
            if len(group.episodes) != group_size
        ]
        if "tickets" in (record.prompts or {}):  # groups are numbered through
            trained.update(group.group_id for group in record.batch.groups)
        if wanted is not None:
            due = wanted.read(step)
            if due is None or due.batch is None:
                problems.append(f"step {step + 1} is not in the reference")
            elif _prompts(record.batch.groups) != _prompts(due.batch.groups):
                problems.append(f"step {step + 1}: its prompts are not those that were due")
    if wanted is not None and journal.steps() != wanted.steps():
        problems.append(f"{len(journal.steps())} steps instead of {len(wanted.steps())}")
    return [*problems, *(f"group {number} was trained on {n} times" for number, n in trained.items() if n > 1)]


def _sampled_twice(journal: Journal) -> list[str]:
    """Samples that are recorded again with other tokens, in a file from which the same group goes on. Groups of a run
    that samples ahead are numbered through; those of another begin at 0 in each file.
    """
    tokens: dict[tuple[int, str], list[int]] = {}
    goes_on, found = False, []
    for step in journal.steps():
        if not goes_on:
            tokens.clear()
        for values, arrays in FrameFile(journal.file(step), past_damage=True).frames():
            if values["kind"] == "episode" and values.get("reward_error") is None and values.get("failure") is None:
                sample = (values["group_id"], values["episode_id"].rpartition("-s")[2])
                own = arrays["token_ids"].tolist()
                if tokens.setdefault(sample, own) != own:
                    found.append(f"step {step + 1}: {values['episode_id']} was sampled again")
            elif values["kind"] == "batch":
                goes_on = "tickets" in values["prompts"]
    return found


def digests(folder: Path) -> dict[str, str]:
    """{name inside `folder`: SHA-256} of every file below it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open_regular(path, 2**63) as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def shorten(texts: list[str]) -> list[str]:
    """The first few of many texts, and how many there are."""
    more = len(texts) - _MOST_SHOWN
    return texts if more <= 0 else [*texts[:_MOST_SHOWN], f"and {more} more"]


def _prompts(groups: list[Any]) -> Counter[str]:
    return Counter(group.prompt.prompt_id for group in groups)


def _row(trajectory: Trajectory) -> str:
    """A digest of a trajectory's values; masks as lists, which compare as a whole."""
    masks = trajectory.sampling_masks
    plain = None if masks is None else (masks.counts.tolist(), masks.codes.tolist())
    text = json.dumps({**asdict(trajectory), "sampling_masks": plain}, default=_plain)
    return f"{trajectory.trajectory_id} {hashlib.sha256(text.encode()).hexdigest()}"


def _plain(value: Iterable[Any]) -> list[Any]:
    """The values of a column or a set, whole: its text would leave most of a long one out."""
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value)


def _without_time(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if name not in _APART and not name.startswith(_APART_PREFIXES)
    }
