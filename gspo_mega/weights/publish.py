"""Publish: the trainer's weights to the rollout servers, as one transaction under one deadline.

announce -> pause -> send -> verify -> commit -> resume. A server that fails stays paused, is named in the result, and
gets no work until it holds a committed version; the others go on; with none left the publish has failed. The trainer
never goes back.

Owns what all ranks do together: preparing the content, and gathering it as often as rank 0 sends. The steps on the
servers are `transaction.py`, sending through groups `broadcast.py`, writing files `hf_export.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gspo_mega.config.schema import Publish
from gspo_mega.errors import GspoMegaError, PublishError
from gspo_mega.model.spec import ModelSpec
from gspo_mega.weights.broadcast import GroupSender
from gspo_mega.weights.collectives import broadcast_json
from gspo_mega.weights.gather import PolicyTensors
from gspo_mega.weights.hf_export import export_policy, policy_digests
from gspo_mega.weights.server_tensors import ExpectedChecksums
from gspo_mega.weights.servers import Deadline, Fleet, ServerControl
from gspo_mega.weights.transaction import Content, Memory, Transaction
from gspo_mega.weights.versions import Versions

if TYPE_CHECKING:
    from gspo_mega.engine.process_groups import ParallelGroups

__all__ = ["PublishResult", "Publisher", "ServerControl"]


@dataclass(frozen=True)
class PublishResult:
    """One committed version. `path` is its folder, None when it went through groups and is not on disk.

    `committed` has (server_id, generation) of every server that holds it, verified, and serves it; `failed` the reason
    for each of the others. `phase_seconds` account for `seconds`.
    """

    weight_version: int
    path: str | None
    committed: tuple[tuple[str, int], ...]
    failed: dict[str, str]
    num_bytes: int
    seconds: float
    phase_seconds: dict[str, float]


class Publisher:
    """Publishes one policy. One on every rank; only rank 0 talks to servers.

    `chunks` are this rank's unwrapped GPT chunks, `dtype` what the servers hold, `source_folder` the Hugging Face
    folder whose configuration and tokenizer go with the weights, `weights_dir` the run's folder of versions (seen by
    all nodes), `address` rank 0's machine as the servers reach it (method distributed). Construction is collective.
    """

    def __init__(
        self,
        settings: Publish,
        spec: ModelSpec,
        groups: ParallelGroups,
        chunks: Sequence[nn.Module],
        dtype: torch.dtype,
        source_folder: str | Path,
        weights_dir: str | Path,
        address: str = "127.0.0.1",
    ) -> None:
        self.versions = Versions(weights_dir)
        self._settings = settings
        self._spec = spec
        self._groups = groups
        self._dtype = dtype
        self._source_folder = source_folder
        self._policy = PolicyTensors(spec, groups, chunks)
        self._memory = Memory()
        backend = "nccl" if next(iter(chunks[0].parameters())).is_cuda else "gloo"
        self._sender = GroupSender(address, backend, settings.bucket_bytes, settings.deadline_seconds)

    def publish(self, weight_version: int, servers: Sequence[ServerControl] = ()) -> PublishResult:
        """Bring `servers` (given on rank 0) to the trainer's present weights, as `weight_version`. Collective.

        Returns on every rank what was committed, servers that failed included. Raises PublishError on every rank when
        no server holds the version, or it cannot be written.
        """
        started = time.monotonic()
        deadline = Deadline(self._settings.deadline_seconds)
        content = self._prepare(weight_version)
        prepared = time.monotonic() - started
        if self._groups.world.rank != 0:
            return self._follow()

        def send(fleet: Fleet, targets: list[ServerControl]) -> None:
            if self._settings.method == "disk":
                self._send_folder(fleet, targets, weight_version)
            else:
                broadcast_json({"do": "send"}, self._groups.host)
                self._sender.send(fleet, targets, self._policy.stream(self._dtype), weight_version)

        transaction = Transaction(self._spec, self._memory, content, deadline, send)
        outcome: dict[str, Any] = {"error": f"rank 0 failed while it published version {weight_version}"}
        try:
            on_disk = self._settings.method == "disk"
            result = self._result(weight_version, on_disk, prepared, transaction, servers, self._commit if on_disk else _nothing)
            outcome = {"result": asdict(result)}
            return result
        except GspoMegaError as error:
            outcome = {"error": str(error)}
            raise
        finally:
            broadcast_json({"do": "end", **outcome}, self._groups.host)

    def catch_up(self, servers: Sequence[ServerControl]) -> PublishResult:
        """Bring servers that came back, or failed before, to the committed version, from disk. Rank 0 only, not collective.

        They are verified against what was committed. Raises PublishError when none of them holds it then, or the
        committed version is not on disk (method distributed: `snapshot_to_disk` first).
        """
        committed, current = self._memory.committed, self.versions.current()
        if committed is None or current is None or current.weight_version != committed.weight_version:
            raise PublishError(
                f"version {committed.weight_version if committed else None} is committed, and on disk is "
                f"{current.weight_version if current else None}: there is nothing to catch up from"
            )
        version = committed.weight_version
        deadline = Deadline(self._settings.deadline_seconds)
        transaction = Transaction(
            self._spec, self._memory, committed, deadline, lambda fleet, targets: self._send_folder(fleet, targets, version)
        )
        return self._result(version, True, 0.0, transaction, servers, _nothing)

    def snapshot_to_disk(self, weight_version: int) -> Path:
        """Write the trainer's present weights as `weight_version` and make that the current version on disk.

        For servers that (re)start from disk while publishing goes through groups. The caller vouches that the version
        is the one its servers hold. Collective. Raises PublishError, the same on every rank, when it cannot be written.
        """
        self._export(weight_version)
        self._on_rank_0(lambda: self._commit(weight_version))
        return self.versions.path(weight_version)

    def close(self) -> None:
        """Leave the servers' groups. Rank 0 waits for them a little; nothing to do elsewhere."""
        self._sender.close()

    # --- parts that are collective -------------------------------------------------------------------------

    def _prepare(self, weight_version: int) -> Content:
        """The content's checksums from the trainer's memory, independent of what servers are sent; its files, if any."""
        digests = None
        if self._settings.method == "disk":
            manifest = self._export(weight_version)
            digests = {name: tensor["sha256"] for name, tensor in manifest["tensors"].items()}
        if self._settings.verify == "replicas":
            return Content(weight_version, digests=digests or policy_digests(self._policy, self._dtype))
        expected = ExpectedChecksums(self._spec)
        for name, tensor in self._policy.stream(self._dtype):
            expected.add(name, tensor)
        return Content(weight_version, expected=expected.checksums())

    def _export(self, weight_version: int) -> dict[str, Any]:
        return export_policy(self._policy, self.versions.path(weight_version), self._dtype, self._source_folder, weight_version)

    def _follow(self) -> PublishResult:
        """Other ranks: help to gather as often as rank 0 sends, until it is done."""
        while (order := broadcast_json(None, self._groups.host))["do"] == "send":
            for _ in self._policy.stream(self._dtype):
                pass
        if "error" in order:
            raise PublishError(order["error"])
        result = order["result"]
        return PublishResult(**{**result, "committed": tuple((server, generation) for server, generation in result["committed"])})

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0; its PublishError is raised on every rank."""
        problem = None
        if self._groups.world.rank == 0:
            try:
                action()
            except PublishError as error:
                problem = str(error)
        problem = broadcast_json(problem, self._groups.host)
        if problem is not None:
            raise PublishError(problem)

    # --- parts of rank 0 -----------------------------------------------------------------------------------

    def _send_folder(self, fleet: Fleet, targets: list[ServerControl], weight_version: int) -> None:
        path = str(self.versions.path(weight_version))
        fleet.each(lambda s, left: s.update_from_disk(path, weight_version, deadline_seconds=left), targets)

    def _commit(self, weight_version: int) -> None:
        self.versions.commit(weight_version)
        self.versions.prune(self._settings.keep_last)

    def _result(
        self,
        weight_version: int,
        on_disk: bool,
        prepared_seconds: float,
        transaction: Transaction,
        servers: Sequence[ServerControl],
        commit: Callable[[int], None],
    ) -> PublishResult:
        started = time.monotonic()
        committed, failed = transaction.run(servers, lambda: commit(weight_version))
        num_elements = sum(entry.num_elements for entries in self._policy.table.values() for entry in entries)
        return PublishResult(
            weight_version=weight_version,
            path=str(self.versions.path(weight_version)) if on_disk else None,
            committed=committed,
            failed=failed,
            num_bytes=num_elements * self._dtype.itemsize,
            seconds=prepared_seconds + time.monotonic() - started,
            phase_seconds={"prepare": prepared_seconds, **transaction.phase_seconds},
        )


def _nothing(weight_version: int) -> None:
    """Nothing on disk changes with this commit."""
