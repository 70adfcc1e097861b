"""Which recorded episodes may stand for new ones: made by what would make the new ones, about the prompts that are due.

Owns the reasons against a record, what becomes of it (its file is moved aside) and what the user is told. Fingerprints
are `provenance.py`'s. When records are asked for is `journalled.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_mega.base.records import Prompt
from gspo_mega.base.rollout_batch import Group
from gspo_mega.base.token_columns import distinct
from gspo_mega.data.journal.episode_log import FileBegin
from gspo_mega.data.journal.journal import Journal, PartGoneError
from gspo_mega.data.journal.step_record import StepRecord
from gspo_mega.rollout.freshness import Freshness
from gspo_mega.train.provenance import REASONS
from gspo_mega.train.source import open_numbers

Due = Callable[[int, Iterable[int]], Mapping[int, Prompt]]


@dataclass(frozen=True)
class Standard:
    """What a run asks of every record. `needs_routes`: one without its routed experts is not used."""

    group_size: int
    freshness: Freshness
    needs_routes: bool


class Records:
    """The usable records of a journal. `say` shows a line to the user."""

    def __init__(self, journal: Journal, standard: Standard, say: Callable[[str], None]) -> None:
        self._journal, self._standard, self._say = journal, standard, say

    def of_step(self, begin: FileBegin, due: Due) -> StepRecord | None:
        """The usable part of a step's record, if there is any; the rest is moved aside. `begin`: what the step would
        be sampled with.
        """
        step = begin.step
        try:
            record = self._journal.read(step)
        except PartGoneError as error:  # `journal.keep_last` removed it: as if the step's own file were gone
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
            group.prompt = prompts[number]  # equal, and with its messages, which are not recorded
        return record

    def open_groups(
        self, begin: FileBegin, record: StepRecord | None, tickets: Mapping[str, Any], due: Due
    ) -> tuple[dict[int, Group], dict[int, int]]:
        """(groups that a step and those behind it need not sample, the versions they were admitted under), by number.

        `record`: the usable part of the step's file. `tickets`: of the position before the step; groups that were
        sampled ahead are in the files from its `since` on. Only episodes with a reward are taken over: a failed scoring
        says nothing about the episode, and its cause may have been mended.
        """
        step = begin.step
        found = record or StepRecord(step, begin.weight_version, self._standard.group_size)
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
        """Add the groups that a step before `begin.step` sampled ahead."""
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
                for v in distinct(node.weight_versions)
            ]
            if prompts.get(number) == record.groups[number].prompt and self._standard.freshness.admits_all(
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
        standard = self._standard
        if not standard.freshness.admits(record.weight_version, weight_version):
            return f"weight version {record.weight_version} sampled them, and the run holds {weight_version}"
        if record.group_size != standard.group_size:
            return f"their groups are of {record.group_size} samples, the run's of {standard.group_size}"
        if not record.made_by:
            return "an earlier release recorded them without saying what made them"
        reasons = [
            REASONS.get(kind, f"another {kind} made them")
            for kind in made_by
            if record.made_by.get(kind) != made_by[kind]
        ]
        if standard.needs_routes and record.routes_pruned:
            reasons.append(
                "their routed experts were pruned (journal.prune_routes), and moe.routing_replay R3 needs them"
            )
        return "; ".join(reasons) or None
