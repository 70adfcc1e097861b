"""Publish: the trainer's weights go to the rollout servers as one transaction under one deadline.

The steps are pause -> send -> prove -> verify -> commit -> resume. A server that fails stays paused, is named in the
result, and gets no work until it holds a committed version; the others continue. The publish fails if no server is
left. The trainer never goes back to earlier weights.

`Publisher` does the collective part: it decides what is verified (`hashes.py`), and gathers the content for every
send of rank 0. The first send of a publish is hashed (`hashes.py`), and compared with what each rank holds
(`checkpoint/shard_check.py`). `transaction.py` takes the servers through the steps, `broadcast.py` sends through
process groups, and `checkpoint/hf_export.py` writes files, of which `versions.py` keeps the newest. With
`publish.full_every`, most publishes send only what changed (`delta.py`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gspo_mega.algorithm.rounding import OnLoad
from gspo_mega.base import failpoints, progress
from gspo_mega.base.errors import GspoMegaError, PublishError
from gspo_mega.checkpoint.collectives import all_gather_json, broadcast_json, raise_together
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_export import export_policy, policy_digests
from gspo_mega.checkpoint.quantized import PublishedForm, published_form, quantised_on_load
from gspo_mega.checkpoint.shard_check import ShardCheck
from gspo_mega.config.derived import resolve_verification
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry
from gspo_mega.sync.broadcast import GroupSender
from gspo_mega.sync.broadcast_group import OwnTensors
from gspo_mega.sync.delta import PublishedChanges, export_changes
from gspo_mega.sync.hashes import Hashed, Hashes, Rotation, SentChecksums, SentDigests
from gspo_mega.sync.remote_sender import OrderChannel, RemoteSender, serve_send_orders
from gspo_mega.sync.servers import Deadline, Fleet, ServerControl, check_same_versions, loaded_versions
from gspo_mega.sync.transaction import PublishContent, PublishMemory, Send, Transaction
from gspo_mega.sync.verify import ExpectedChecksums, server_tensor_name, server_tensors
from gspo_mega.sync.versions import PublishedVersions

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.process_groups import ParallelGroups

__all__ = ["PublishResult", "Publisher", "ServerControl"]


@dataclass(frozen=True)
class PublishResult:
    """One committed version. `path` is its folder, or None if it was sent through groups and is not on disk.

    `verified` has (server_id, generation) of every server that serves the version, and `failed` the reason for each
    other server. `num_bytes` is the size of the version. `bytes_sent_by_rank` is what each rank gave to the servers'
    groups; it does not depend on how many servers share a group. The `phase_seconds` add up to `seconds`.
    `num_bytes_hashed` is what all ranks hashed together, and `hash_seconds` the time of the rank that took longest,
    most of it during the send. `num_tensors_compared` counts the tensors of a server that were compared.
    `is_full`: all values were sent, and not only those that changed. Of a delta publish, `changed_share` is the share
    of values that changed, and `num_delta_bytes` the size of their records. `fallback`: why a delta publish failed
    before this full one.
    """

    weight_version: int
    path: str | None
    verified: tuple[tuple[str, int], ...]
    failed: dict[str, str]
    num_bytes: int
    bytes_sent_by_rank: dict[int, int]
    seconds: float
    phase_seconds: dict[str, float]
    num_bytes_hashed: int = 0
    hash_seconds: float = 0.0
    num_tensors_compared: int = 0
    is_full: bool = True
    changed_share: float = 1.0
    num_delta_bytes: int = 0
    fallback: str | None = None

    @property
    def num_bytes_sent(self) -> int:
        """The bytes that all ranks together gave to the servers' groups."""
        return sum(self.bytes_sent_by_rank.values())


def _nothing(_: object) -> None:
    """A commit, an announcement or a note that does nothing."""


class Publisher:
    """Publishes one policy. Every rank has one; only rank 0 talks to servers.

    `chunks` are this rank's unwrapped GPT chunks. `weights_dir` is the run's folder of versions, visible to all nodes.
    `address` is rank 0's machine as the servers reach it (for method distributed; `server.host` by default). Servers
    have the precision that the configuration gives them; the model's configuration and tokenizer come from
    `model.path`. `held` returns the versions that servers are loading, which stay on disk. `note_group` gets the name
    of each group that servers are asked to join. Construction is collective.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        groups: ParallelGroups,
        chunks: Sequence[PolicyModel],
        weights_dir: str | Path,
        address: str | None = None,
        held: Callable[[], Collection[int]] = tuple,
        note_group: Callable[[str], object] = _nothing,
    ) -> None:
        self.versions = PublishedVersions(weights_dir)
        self._held = held
        self._settings = config.publish
        self._source_folder = config.model.path
        self._form = published_form(config)
        self._spec = spec
        self._groups = groups
        self._chunks = chunks
        self._policy = PolicyTensors(spec, groups, chunks)
        self._memory = PublishMemory()
        on_gpu = next(iter(chunks[0].parameters())).is_cuda
        self._on_load: OnLoad | None = quantised_on_load(config.server)
        self._tensors = server_tensors(spec, self._form.stored, self._on_load, reports_scales=not on_gpu)
        self._verification = resolve_verification(config.publish.verify, config.server.tensor, on_gpu)
        self._rotation = Rotation(self._server_bytes(), config.publish.verify_all_every)
        self._turn = 0
        # What the next send hashes and checks; None if the content is hashed already.
        self._unhashed: tuple[Hashes, ShardCheck] | None = None
        self._hashed = Hashed({}, 0, 0.0)
        # With `publish.full_every`: what this rank sent last, and what it sends of the next version.
        self._changes: PublishedChanges | None = None
        self._only_changes_on_disk = False
        # What this rank found wrong with tensors that it brought to a sender.
        self._problem: str | None = None
        self._backend = backend = "nccl" if on_gpu else "gloo"
        settings = config.publish
        owners = sorted({self._policy.owner(entry) for entry, _ in self._policy.stored()})
        # The parts of a stack of experts have several owners, and already travel to the first of them.
        self._sender_of = senders_of(owners, len(owners) if self._policy.is_stacked else settings.max_senders)
        self._senders = sorted(set(self._sender_of.values()))
        if settings.full_every > 1:
            me = groups.world.rank
            number = self._senders.index(me) if me in self._senders else None
            device = next(iter(chunks[0].parameters())).device
            self._changes = PublishedChanges(settings.full_every, number, len(self._senders), device)
        self._own = OwnTensors(groups.world.rank)
        self._to_lead = OrderChannel(groups.host, 0)
        self._sender = GroupSender(
            address or config.server.host,
            backend,
            settings.bucket_bytes,
            settings.deadline_seconds,
            settings.servers_per_group,
            self._own,
            [RemoteSender(rank, OrderChannel(groups.host, rank)) for rank in self._senders if rank != 0],
            note_group,
        )

    def publish(
        self,
        weight_version: int,
        servers: Sequence[ServerControl] = (),
        announce: Callable[[int], None] = _nothing,
        keeps_requests: bool = False,
    ) -> PublishResult:
        """Bring `servers` (given on rank 0) to the trainer's current weights, as `weight_version`. Collective.

        Rank 0 calls `announce` with the version when it is committed, before any server serves it. With
        `keeps_requests`, open requests go on over the cache of the earlier weights; otherwise the servers end them.

        With `publish.full_every`, only what changed is sent if all servers hold the version before. If no server takes
        that, all is sent within a new deadline, and the result says why.

        Returns the committed version on every rank, with the servers that failed. Raises PublishError on every rank if
        no server holds the version, or if it cannot be written.
        """
        base, fallback = self._next_base(servers), None
        if base is not None:
            try:
                return self._publish(weight_version, servers, announce, keeps_requests, base)
            except GspoMegaError as error:  # other ranks get a PublishError with its words
                fallback = str(error)
                progress.beat()
        return replace(self._publish(weight_version, servers, announce, keeps_requests, None), fallback=fallback)

    def _publish(
        self,
        weight_version: int,
        servers: Sequence[ServerControl],
        announce: Callable[[int], None],
        keeps_requests: bool,
        base: int | None,
    ) -> PublishResult:
        """Publish once, in full or as changes since version `base`. As `publish`."""
        deadline = Deadline(self._settings.deadline_seconds)
        self._hashed, self._unhashed = Hashed({}, 0, 0.0), None
        if self._changes is not None:
            self._changes.begin(base, weight_version)
        content = self._prepare(weight_version, self._choose(servers))
        on_disk = self._settings.method == "disk"

        def commit(version: int) -> None:
            if on_disk:
                self._commit(version)
            announce(version)

        self._memory.current = set()
        result = self._lead_or_follow(content, servers, deadline, commit, keeps_requests)
        self._memory.current = set(result.verified)
        self._turn += bool(result.verified) and content.chosen is not None
        if not result.verified:
            reasons = "".join(f"\n  {why}" for why in result.failed.values()) or " there is none"
            raise PublishError(f"no server holds weight version {weight_version}:{reasons}")
        return self._with_changes(result)

    def publish_again(self, weight_version: int, servers: Sequence[ServerControl] = ()) -> PublishResult:
        """Bring servers that restarted, or that failed before, to the committed version. Collective.

        `servers` is given on rank 0. The trainer's weights must still be the published ones. All tensors of the servers
        are verified against the committed content, which is hashed again if only a part of it was. Even if all of them
        fail, the version stays committed on the other servers.

        Returns what `publish` returns. Raises PublishError, the same on every rank, if another version is the committed
        one.
        """
        problem, is_whole = None, True
        committed = self._memory.committed
        if self._groups.is_lead:
            if committed is None or committed.weight_version != weight_version:
                problem = (
                    f"weight version {weight_version} cannot be published again:"
                    f" {committed and committed.weight_version} is committed"
                )
            else:
                is_whole = self._is_whole(committed)
        problem, is_whole = broadcast_json([problem, is_whole], self._groups.host)
        if problem is not None:
            raise PublishError(problem)
        self._hashed, self._unhashed = Hashed({}, 0, 0.0), None
        commit = _nothing
        if self._changes is not None:
            self._changes.begin(None, weight_version)
        if self._only_changes_on_disk:  # these servers need all of it
            content, commit = self._prepare(weight_version, None), self._commit
        elif is_whole:
            content = replace(committed or PublishContent(weight_version), chosen=None)
        elif self._settings.method == "disk":
            content = self._hash_all(weight_version)
        else:
            content = PublishContent(weight_version)
            self._unhashed = self._hashes(None), self._shard_check(None)
        deadline = Deadline(self._settings.deadline_seconds)
        self._memory.current -= {(server.server_id, server.generation) for server in servers}
        result = self._lead_or_follow(content, servers, deadline, commit)
        self._memory.current |= set(result.verified)
        return self._with_changes(result, counts=False)

    def check_servers(self, software_dir: Path) -> None:
        """Check on rank 0, before the first publish, that servers have this process's PyTorch and NCCL, if NCCL is
        used.

        `software_dir` has the versions that the servers recorded. Raises PublishError naming the servers that differ.
        """
        if self._settings.method == "distributed" and self._backend == "nccl":
            check_same_versions(software_dir, loaded_versions())

    def close(self) -> None:
        """Leave the servers' groups. This waits a few seconds at most."""
        self._sender.close()
        self._own.close()

    # --- parts that are collective -------------------------------------------------------------------------

    def _choose(self, servers: Sequence[ServerControl]) -> frozenset[str] | None:
        """Return the names of the server's tensors that this publish verifies; None for all of them. Collective.

        All are verified if a server is not known to hold the last committed version in full: it has just started, it
        failed, or this process has not published yet.
        """
        if self._settings.verify_all_every == 1:
            return None
        starts = {(server.server_id, server.generation) for server in servers}
        turn = self._turn if starts and starts <= self._memory.current else None
        turn = broadcast_json(turn, self._groups.host)
        if turn is None:
            return None
        # Replicas are compared with what they were. So each tensor is verified in two publishes in a row: one that
        # keeps an old value would otherwise differ from that of an even earlier publish, and look changed.
        return self._rotation.part(turn, 2 if self._verification == "replicas" else 1)

    def _next_base(self, servers: Sequence[ServerControl]) -> int | None:
        """Return the version of which this publish sends the changes, or None if it sends all. Collective.

        All is sent if a full publish is due, and if some server is not known to hold what was committed last: it has
        just started, it failed, or this process has not published yet.
        """
        if self._changes is None:
            return None
        starts = {(server.server_id, server.generation) for server in servers}
        committed = self._memory.committed
        held = committed.weight_version if committed is not None and starts and starts <= self._memory.current else None
        bases = set(all_gather_json(self._changes.next_base(), self._groups.host))
        held = broadcast_json(held, self._groups.host)
        return held if bases == {held} else None

    def _with_changes(self, result: PublishResult, *, counts: bool = True) -> PublishResult:
        """Record that the version is committed, and return the result with what all ranks sent of it. Collective."""
        if (own := self._changes) is None:
            return result
        is_delta = own.base is not None
        parts = all_gather_json([own.num_changed, own.num_values, own.num_bytes], self._groups.host)
        own.end(counts=counts)
        self._only_changes_on_disk = is_delta and self._settings.method == "disk"
        changed, values, size = (sum(column) for column in zip(*parts, strict=True))
        if not is_delta:
            return result
        return replace(result, is_full=False, changed_share=changed / max(1, values), num_delta_bytes=size)

    def _prepare(self, weight_version: int, chosen: frozenset[str] | None) -> PublishContent:
        """Return the content, of which `chosen` is verified. With method disk, write its files and hash them. Otherwise
        the first send fills in its hashes.
        """
        content = PublishContent(weight_version, chosen=chosen)
        hashes, check = self._hashes(chosen), self._shard_check(chosen)
        if self._settings.method == "disk":
            changes = self._changes
            if changes is not None and changes.base is not None:
                folder = self.versions.delta_path(weight_version)
                export_changes(self._policy, folder, self._form, changes, weight_version, hashes.add, check)
            else:

                def seen(name: str, tensor: torch.Tensor) -> str | None:
                    if changes is not None:
                        changes.keep(name, tensor)
                    return hashes.add(name, tensor)

                export_policy(
                    self._policy,
                    self.versions.path(weight_version),
                    self._form,
                    self._source_folder,
                    weight_version,
                    digest=seen,
                    check=check,
                )
            self._collect(hashes, content)
        else:
            self._unhashed = hashes, check
        return content

    def _hashes(self, chosen: frozenset[str] | None) -> Hashes:
        if self._verification == "replicas":
            return SentDigests(self._policy, self._tensors, chosen)
        expected = ExpectedChecksums(self._spec, self._form.stored, self._on_load)
        return SentChecksums(self._policy, self._form, expected, chosen)

    def _shard_check(self, chosen: frozenset[str] | None) -> ShardCheck:
        """Sum what this rank holds of the tensors that are verified. Collective."""
        names = None
        if chosen is not None:
            names = {e.name for e, _ in self._policy.stored() if server_tensor_name(self._spec, e) in chosen}
        return ShardCheck(self._policy, self._form.gathered, names)

    def _to_send(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this rank sends: its own, and those that owners that do not send hand over. The first
        send is hashed and checked on the way. Collective.
        """
        hashes, check = self._unhashed or (None, None)
        seen = None if hashes is None else hashes.add
        if len(self._senders) < len(self._sender_of):
            tensors = self._form.passed_on(self._policy, self._sends, check, seen)
        else:
            tensors = self._form.owned(self._policy, check, seen)
        return tensors if self._changes is None else self._changes.messages(tensors)

    def _sends(self, entry: TensorEntry) -> int:
        """Return the rank that sends a tensor."""
        return self._sender_of[self._policy.owner(entry)]

    def _collect(self, hashes: Hashes, content: PublishContent) -> None:
        """Fill in the hashes of all ranks. Collective."""
        self._hashed, self._unhashed = hashes.collect(), None
        if self._verification == "replicas":
            content.digests = self._hashed.hashes
        else:
            content.expected = self._hashed.hashes

    def _collect_sent(self, content: PublishContent) -> str | None:
        """Fill in the hashes of the first send. Returns what a rank found wrong with the tensors that it handed to a
        sender, or None. Collective.
        """
        assert self._unhashed is not None, "a send is collected once"
        (hashes, _), self._unhashed = self._unhashed, None
        problems = [problem for problem in all_gather_json(self._problem, self._groups.host) if problem is not None]
        self._problem = None
        if problems:
            return problems[0]
        self._collect(hashes, content)
        return None

    def _take_part(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take part in gathering, on a rank that does not send. Rank 0 is told of a problem after the send."""
        try:
            for _ in tensors:
                pass
        except PublishError as error:
            if self._unhashed is None:
                raise
            self._problem = str(error)

    def _hash_all(self, weight_version: int) -> PublishContent:
        """Gather and hash all tensors without sending them, and return them as content. Collective."""
        begun, content = time.perf_counter(), PublishContent(weight_version)
        if self._verification == "replicas":
            content.digests = policy_digests(self._policy, self._form)
        else:
            expected = ExpectedChecksums(self._spec, self._form.stored, self._on_load)
            content.expected = expected_checksums(self._policy, self._form, expected)
        self._hashed = Hashed({}, self._form.num_bytes(self._policy), time.perf_counter() - begun)
        return content

    def _is_whole(self, content: PublishContent) -> bool:
        """Whether the content has a hash of every tensor."""
        if self._verification == "replicas":
            return self._tensors.names.keys() <= (content.digests or {}).keys()
        return self._tensors.expected <= (content.expected or {}).keys()

    def _server_bytes(self) -> dict[str, int]:
        """Return the bytes that are sent for each of the server's tensors, in the order of the table."""
        sizes: Counter[str] = Counter()
        for entry, _ in self._policy.stored():
            for name, (dtype, shape) in self._form.described(entry).items():
                sizes[self._tensors.names[name]] += math.prod(shape) * dtype.itemsize
        return {**sizes, **dict.fromkeys(self._tensors.own_scales, 0)}

    def _lead_or_follow(
        self,
        content: PublishContent,
        servers: Sequence[ServerControl],
        deadline: Deadline,
        commit: Callable[[int], None],
        keeps_requests: bool = False,
    ) -> PublishResult:
        """Run the transaction on rank 0, while the other ranks gather once per send.

        All ranks return its result or raise its error.
        """
        if not self._groups.is_lead:
            while (order := broadcast_json(None, self._groups.host))["do"] != "end":
                if order["do"] == "collect":
                    self._collect_sent(content)
                    continue
                tensors = self._to_send()
                if self._groups.world.rank in self._senders:
                    serve_send_orders(self._own, self._to_lead, tensors, self._settings.bucket_bytes)
                else:
                    self._take_part(tensors)
            if "error" in order:
                raise PublishError(order["error"])
            result = order["result"]  # JSON has turned tuples into lists, and numbers as keys into text
            result["verified"] = tuple((server, generation) for server, generation in result["verified"])
            result["bytes_sent_by_rank"] = {int(rank): sent for rank, sent in result["bytes_sent_by_rank"].items()}
            return PublishResult(**result)
        outcome: dict[str, Any] = {"error": f"rank 0 failed while it published weight version {content.weight_version}"}
        try:
            result = self._lead(content, servers, deadline, commit, keeps_requests)
            outcome = {"result": asdict(result)}
            return result
        except GspoMegaError as error:
            outcome = {"error": str(error)}
            raise
        finally:
            broadcast_json({"do": "end", **outcome}, self._groups.host)

    # --- parts of rank 0 -----------------------------------------------------------------------------------

    def _lead(
        self,
        content: PublishContent,
        servers: Sequence[ServerControl],
        deadline: Deadline,
        commit: Callable[[int], None],
        keeps_requests: bool,
    ) -> PublishResult:
        version = content.weight_version
        folder = self._folder(version)
        more = {"keeps_cache": True} if keeps_requests else {}
        sent_before = self._sender.bytes_by_rank.copy()

        def send(fleet: Fleet, targets: list[ServerControl]) -> None:
            if self._settings.method == "disk":
                fleet.each(lambda s, left: self._load(s, str(folder), version, left, **more), targets)
            else:
                broadcast_json({"do": "send"}, self._groups.host)
                self._sender.send(fleet, targets, self._to_send(), version)
                if self._unhashed is not None:
                    broadcast_json({"do": "collect"}, self._groups.host)
                    if (problem := self._collect_sent(content)) is not None:
                        raise PublishError(problem)

            failpoints.reached("publish.sent")

        transaction = self._transaction(content, deadline, send, keeps_requests)
        verified, failed = transaction.run(servers, lambda: commit(version))
        return PublishResult(
            weight_version=version,
            path=str(folder) if self._settings.method == "disk" else None,
            verified=verified,
            failed=failed,
            num_bytes=self._version_bytes(),
            bytes_sent_by_rank=dict(self._sender.bytes_by_rank - sent_before),
            seconds=sum(transaction.phase_seconds.values()),
            phase_seconds=transaction.phase_seconds,
            num_bytes_hashed=self._hashed.num_bytes,
            hash_seconds=self._hashed.seconds,
            num_tensors_compared=len(self._tensors.expected if content.chosen is None else content.chosen),
        )

    def _load(self, server: ServerControl, path: str, version: int, seconds: float, **more: bool) -> None:
        """Make the server load the version's folder and report the version."""
        server.update_from_disk(path, version, deadline_seconds=seconds, **more)

    def _transaction(
        self, content: PublishContent, deadline: Deadline, send: Send, keeps_requests: bool
    ) -> Transaction:
        return Transaction(self._tensors, self._memory, content, deadline, send, keeps_requests)

    def _version_bytes(self) -> int:
        return self._form.num_bytes(self._policy)

    def _folder(self, weight_version: int) -> Path:
        """Return the folder that servers load, of all weights or of what changed."""
        if self._changes is not None and self._changes.base is not None:
            return self.versions.delta_path(weight_version)
        return self.versions.path(weight_version)

    def _commit(self, weight_version: int) -> None:
        if self._folder(weight_version) == self.versions.path(weight_version):
            self.versions.commit(weight_version)
        self.versions.prune(self._settings.keep_last, self._held())


def senders_of(owners: Sequence[int], most: int) -> dict[int, int]:
    """Return, for each rank that owns tensors, the rank that sends them: itself, or with more than `most` owners one of
    `most`, each for as many neighbours as another, give or take one. `owners`: in ascending order.
    """
    count = min(most, len(owners))
    return {
        owner: owners[-(-(place * count // len(owners)) * len(owners) // count)] for place, owner in enumerate(owners)
    }


def expected_checksums(policy: PolicyTensors, form: PublishedForm, expected: ExpectedChecksums) -> dict[str, str]:
    """Return the checksum that every tensor of a server must have, by the server's tensor names, on every rank.

    Collective. If one rank gets a PublishError while it computes them, all ranks raise it. A server's tensor is hashed
    on the rank that has its first part, so only parts that another rank owns, such as those of experts, travel.
    """
    homes: dict[str, int] = {}
    for entry, _ in policy.stored():
        homes.setdefault(server_tensor_name(policy.spec, entry), policy.owner(entry))
    stream, problems = form.brought_to(policy, lambda entry: homes[server_tensor_name(policy.spec, entry)]), []
    try:
        for name, tensor in stream:
            expected.add(name, tensor)
    except PublishError as error:
        problems = [str(error)]
        with suppress(PublishError):
            for _ in stream:  # run to the end, because other ranks take part in every tensor
                pass
    raise_together(problems, policy.groups.host, PublishError, "the weights cannot be published")
    parts = all_gather_json(expected.checksums(), policy.groups.host)
    return {name: checksum for part in parts for name, checksum in part.items()}
