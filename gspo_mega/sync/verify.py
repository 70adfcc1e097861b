"""Verification: does every server hold what the trainer holds?

Owns the comparison of the servers' reports. SGLang reports success for unknown names and changes nothing, so an answer
proves nothing; only the server's tensors after the update do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from gspo_mega.sync.server_tensors import ServerTensors, differences
from gspo_mega.sync.servers import Fleet, ServerControl

# One mapping from tensor name to checksum for each rank of a server.
Reported = list[dict[str, str]]


@dataclass
class Baseline:
    """The last verified publish: the trainer's digests, and the servers' reports by their tensor-parallel size."""

    digests: dict[str, str] = field(default_factory=dict)
    reported: dict[int, Reported] = field(default_factory=dict)


def read_reports(fleet: Fleet, weight_version: int) -> dict[str, Reported]:
    """Every server's checksums, by server id; servers that report another version leave the fleet."""
    for server_id, version in fleet.each(lambda s, left: s.weight_version(deadline_seconds=left)).items():
        if version != weight_version:
            fleet.fail(
                _server(fleet, server_id),
                f"{server_id}: holds weight_version {version} after version {weight_version} was sent",
            )
    return cast(dict[str, Reported], fleet.each(lambda s, left: s.checksums(deadline_seconds=left)))


def check_tensors(fleet: Fleet, reports: dict[str, Reported], expected: dict[str, str]) -> None:
    """Check that every server has exactly the expected tensors and checksums; others leave the fleet."""
    for server_id, reported in reports.items():
        found = reported[0] if len(reported) == 1 else {}
        wrong = differences(found, expected)
        if len(reported) != 1:
            wrong = (
                f"it has {len(reported)} ranks, and checksums can be predicted for one only; set publish.verify: auto"
                " or replicas"
            )
        if wrong:
            fleet.fail(_server(fleet, server_id), f"{server_id}: does not hold the weights that were sent: {wrong}")


def check_replicas(
    fleet: Fleet, tensors: ServerTensors, reports: dict[str, Reported], digests: dict[str, str], baseline: Baseline
) -> Baseline:
    """Check that servers agree, and that exactly the trainer's changed tensors changed since the last verified publish.

    This cannot detect a part of a fused tensor that reached no server while the rest did. `transaction.py` proves once
    per server start that updates reach every part.

    What servers quantise themselves may stay as it was although the trainer's tensor changed: a small change is rounded
    away there. It may not change otherwise. `digests` are the trainer's, by the names that are sent. Servers that fail
    leave the fleet. Returns the new baseline, which is valid if a server is left.
    """
    changed_here = {tensors.names[n] for n, digest in digests.items() if baseline.digests.get(n) != digest}
    for server_id, reported in reports.items():
        server = _server(fleet, server_id)
        problem = _names_problem(reported, tensors.expected)
        before = baseline.reported.get(server.tensor_parallel)
        if problem is None and before is not None:
            problem = _change_problem(reported, before, changed_here, tensors.own_scales)
        if problem:
            fleet.fail(server, f"{server_id}: {problem}")
    _check_agreement(fleet, reports)
    # Reports of sizes without a server here stay valid while the weights are unchanged.
    kept = baseline.reported if digests == baseline.digests else {}
    return Baseline(digests, {**kept, **{s.tensor_parallel: reports[s.server_id] for s in fleet.active}})


def _names_problem(reported: Reported, expected: set[str]) -> str | None:
    for rank, found in enumerate(reported):
        if found.keys() != expected:
            odd = sorted(found.keys() ^ expected)
            return f"rank {rank} holds other tensors than the model has: {', '.join(odd[:5])}"
    return None


def _change_problem(
    reported: Reported, before: Reported, changed_here: set[str], own_scales: Mapping[str, str]
) -> str | None:
    """A changed tensor must change on at least one rank of the server, unless the server rounds it; any other tensor on
    none.
    """
    changed_there = {
        own_scales.get(name, name)
        for now, then in zip(reported, before, strict=True)
        for name in now
        if now[name] != then[name]
    }
    parts = [
        f"{words}: {', '.join(sorted(found)[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''}"
        for words, found in (
            ("changed in the trainer and not there", changed_here - changed_there - set(own_scales.values())),
            ("changed there and not in the trainer", changed_there - changed_here),
        )
        if found
    ]
    return "; ".join(parts) or None


def _check_agreement(fleet: Fleet, reports: dict[str, Reported]) -> None:
    """Servers of one tensor-parallel size must agree. Those outside the majority fail; all fail if there is none."""
    for size in {s.tensor_parallel for s in fleet.active}:
        alike = {
            s.server_id: json.dumps(reports[s.server_id], sort_keys=True)
            for s in fleet.active
            if s.tensor_parallel == size
        }
        (most, count), *others = Counter(alike.values()).most_common(2)
        no_majority = bool(others) and others[0][1] == count
        for server_id, report in alike.items():
            if no_majority:
                fleet.fail(
                    _server(fleet, server_id),
                    f"{server_id}: servers hold different weights, and no majority says which are right",
                )
            elif report != most:
                fleet.fail(
                    _server(fleet, server_id), f"{server_id}: holds other weights than {count} of {len(alike)} servers"
                )


def _server(fleet: Fleet, server_id: str) -> ServerControl:
    return next(s for s in fleet.active if s.server_id == server_id)
