"""Delta publish: what changed between two versions of the weights, as records of places and values.

At a small learning rate most bf16 or FP8 values do not change in a step. With `publish.full_every` above 1, ranks that
send keep a copy of what they sent last (`SentCopy`), and `PublishedChanges` turns the tensors of the next version into
records of what differs in the servers' dtype. A server applies them to a copy of its own
(`rollout/server/held_weights.py`). The values are absolute, so nothing is added and nothing is rounded: the result has
the bits of a full publish, and is verified like one.

A record is a tensor of bytes: a header, the new values, and the distances between their places. It names the version
that it changes and the one that it makes, and has a SHA-256 of all this. A tensor of which so much changed that the
record would be larger is sent whole, as a record too. The same records go through groups and into files, so nothing is
pickled.

With `publish.method: disk` a folder of records stands in place of a folder of weights. All ranks that own tensors write
their own safetensors files of records, and rank 0 writes `DELTA_FILE`, which names them, the version that the records
change and the one that they make. The folder appears complete or not at all. Servers import this file as well:
`read_changes` is their side.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import PublishError
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.checkpoint.collectives import all_gather_json, raise_together

if TYPE_CHECKING:
    from gspo_mega.checkpoint.gather import PolicyTensors
    from gspo_mega.checkpoint.quantized import PublishedForm
    from gspo_mega.checkpoint.shard_check import ShardCheck

CHANGE = "gspo_mega:change:"
"""The record of tensor X is sent under the name CHANGE + X."""
BEGIN, END = "gspo_mega:begin", "gspo_mega:end"
"""Each sender's first and last message, in JSON: which version it sends, and then the number of tensors."""

_MAGIC = b"gmdelta1"
# magic, base version, version, number of elements, of changed ones, of distances, bytes of an element and of a distance
_HEADER = struct.Struct("<8sqqqqqqq")
_DIGEST_BYTES = 32
_OVERHEAD = _HEADER.size + _DIGEST_BYTES
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAP_DTYPES = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class Change:
    """What a record says of one tensor of `num_elements` elements.

    places: [changed] int64, ascending, or None if the tensor is whole. values: [changed] or [num_elements], the
    elements' bits as integers of their size.
    """

    base: int
    version: int
    num_elements: int
    places: torch.Tensor | None
    values: torch.Tensor

    def put_into(self, tensor: torch.Tensor) -> None:
        """Make `tensor`, contiguous and in the host's memory, what the sender has. Raises PublishError if it has
        another size.
        """
        bits = _bits(tensor)
        if bits.numel() != self.num_elements or bits.element_size() != self.values.element_size():
            raise PublishError(
                f"a change of {self.num_elements} elements of {self.values.element_size()} bytes is not one of a tensor"
                f" of {bits.numel()} elements of {bits.element_size()} bytes"
            )
        if self.places is None:
            bits.copy_(self.values)
        else:
            bits[self.places] = self.values


def make_record(
    name: str, before: torch.Tensor | None, after: torch.Tensor, base: int, version: int
) -> tuple[torch.Tensor | None, int]:
    """Return the record that makes `after` of `before`, [bytes] uint8 in the host's memory, and the number of elements
    that changed. The record is None if none did.

    after: a local tensor of any shape and dtype of 1, 2, 4 or 8 bytes, on any device. before: the same shape and dtype;
    None if it is not known, and the record then has the whole tensor. Values are compared as bits: -0.0 differs from
    0.0, and a NaN from no other NaN with its bits.
    """
    new = _bits(after)
    size = new.element_size()
    places = values = gaps = None
    changed, width = new.numel(), 0
    if before is not None:
        places = (_bits(before).to(new.device) != new).nonzero().view(-1)
        changed = places.numel()
        if changed == 0:
            return None, 0
        distances = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
        costs = {w: w * (changed + int((distances // _most(w)).sum())) for w in _GAP_DTYPES}
        width = min(costs, key=lambda w: costs[w])
        if changed * size + costs[width] < new.numel() * size:
            values, gaps = new[places], _pack(distances, width)
        else:
            width = 0
    values = new if values is None else values
    parts = [as_bytes(values.cpu()), *([] if gaps is None else [as_bytes(gaps.cpu())])]
    num_gaps = 0 if gaps is None else gaps.numel()
    header = _HEADER.pack(_MAGIC, base, version, new.numel(), values.numel(), num_gaps, size, width)
    digest = _digest(name, header, parts)
    start = torch.frombuffer(bytearray(header + digest), dtype=torch.uint8)
    return torch.cat([start, *parts]), changed


def read_record(name: str, record: torch.Tensor) -> Change:
    """Return what a record, [bytes] uint8 in the host's memory, says of tensor `name`.

    Raises PublishError if it is damaged, or not a record of that tensor.
    """
    if record.numel() < _OVERHEAD:
        raise PublishError(f"{name}: a change of {record.numel()} bytes, fewer than its header has")
    start = bytes(record[:_OVERHEAD].numpy())
    header, digest, payload = start[: _HEADER.size], start[_HEADER.size :], record[_OVERHEAD:]
    if _digest(name, header, [payload]) != digest:
        raise PublishError(f"{name}: the change is damaged: its SHA-256 is another")
    magic, base, version, num_elements, num_values, num_gaps, size, width = _HEADER.unpack(header)
    if magic != _MAGIC or payload.numel() != num_values * size + num_gaps * width or size not in _BITS:
        raise PublishError(f"{name}: the change has a form that this version of gspo_mega does not know")
    # Copies, because a part may begin at any byte.
    values = payload[: num_values * size].clone().view(_BITS[size])
    places = None
    if width:
        places = _unpack(payload[num_values * size :].clone().view(_GAP_DTYPES[width]), width)
        if places.numel() != num_values or (num_values and int(places[-1]) >= num_elements):
            raise PublishError(f"{name}: the change has other places than values, or places outside of the tensor")
    elif num_values != num_elements:
        raise PublishError(f"{name}: the change says that it is whole, and is not")
    return Change(base, version, num_elements, places, values)


def message(**value: Any) -> torch.Tensor:
    """Return a JSON value as bytes, [bytes] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def read_message(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the value of a `message`. Raises PublishError if it is none."""
    try:
        return dict(json.loads(bytes(tensor.cpu().numpy())))
    except ValueError as error:
        raise PublishError(f"a message of a publish cannot be read: {error}") from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous local tensor, [bytes] uint8, in its memory."""
    return tensor.view(-1).view(torch.uint8)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_BITS[flat.element_size()])


def _digest(name: str, header: bytes, parts: list[torch.Tensor]) -> bytes:
    running = hashlib.sha256(name.encode() + b"\0" + header)
    for part in parts:
        running.update(part.numpy().data)
    return running.digest()


def _most(width: int) -> int:
    """Return the number that means: go on by this many elements, none of which changed."""
    return 2 ** (8 * width) - 1


def _pack(distances: torch.Tensor, width: int) -> torch.Tensor:
    """Return `distances` ([changed] int64: how many unchanged elements are before each changed one) as numbers of
    `width` bytes. One that is too large is preceded by as many `_most` as it has.
    """
    most = _most(width)
    ends = torch.cumsum(distances // most + 1, 0) - 1
    packed = torch.full((int(ends[-1]) + 1,), most, dtype=torch.int64, device=distances.device)
    packed[ends] = distances % most
    return packed.to(_GAP_DTYPES[width])


def _unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the places, [changed] int64, of distances that `_pack` made."""
    most = _most(width)
    numbers = packed.to(torch.int64) & most
    ends = torch.cumsum(numbers + (numbers != most), 0)
    return ends[numbers != most] - 1


class SentCopy:
    """This rank's copy, in the host's memory, of the tensors that it sent last. `version` is theirs, or None if a
    publish of them failed or has not ended.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of a tensor, or None if there is none of its shape and dtype."""
        held = self._tensors.get(name)
        return held if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype) else None

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a whole local tensor of any shape and dtype."""
        if (held := self.get(name, tensor)) is not None:
            as_bytes(held).copy_(as_bytes(tensor.detach().contiguous()))
        else:
            self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())


class PublishedChanges:
    """One rank's part in publishes that may send only what changed.

    Every rank has one. `begin` and `end` surround a publish; in between, what the rank sends goes through `messages`
    (groups) or `record` (files), or through `keep` if the version is written in full.
    `num_changed`, `num_values` and `num_bytes` count the values that changed, all values, and the bytes of records, in
    this rank's part of the publish.
    """

    def __init__(self, full_every: int, sender: int | None, num_senders: int, device: torch.device) -> None:
        """`sender` is this rank's number among the `num_senders` that send through groups, from `device`; None if it
        does not send.
        """
        self._full_every, self._sender, self._num_senders = full_every, sender, num_senders
        self._device = device
        self._copy = SentCopy()
        self._num_since_full = 0
        self._num_sends = 0
        self._was_sent = False
        self._base: int | None = None
        self._version = -1
        self.num_changed = self.num_values = self.num_bytes = 0

    def next_base(self) -> int | None:
        """Return the version that the next publish may send the changes of, or None if a full one is due."""
        return None if self._num_since_full + 1 >= self._full_every else self._copy.version

    @property
    def base(self) -> int | None:
        """The version of which the running publish sends the changes; None if it is a full one."""
        return self._base

    def begin(self, base: int | None, version: int) -> None:
        """Begin to publish `version`: in full, or the changes since `base`. The copy is not valid until `end`."""
        self._copy.version, self._base, self._version, self._was_sent = None, base, version, False
        self.num_changed = self.num_values = self.num_bytes = 0

    def end(self, *, counts: bool = True) -> None:
        """The version is committed. `counts`: as one of the `full_every`."""
        if counts:
            self._num_since_full = 0 if self._base is None else self._num_since_full + 1
        self._copy.version, self._base = self._version, None

    def record(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the record of a tensor's changes, or None if it has not changed, and keep the tensor as what was sent
        last. `tensor` is local, and whole as servers load it.
        """
        assert self._base is not None, "a full publish has no records"
        found, changed = make_record(name, self._copy.get(name, tensor), tensor, self._base, self._version)
        self.num_changed += changed
        self.num_values += tensor.numel()
        if found is not None:
            self.num_bytes += found.numel()
            self._copy.keep(name, tensor)
        return found

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor of a full publish."""
        self.num_changed += tensor.numel()
        self.num_values += tensor.numel()
        self._copy.keep(name, tensor)

    def messages(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what goes through the groups for `tensors`: (name, local tensor of any shape), between `BEGIN` and
        `END`. The servers apply all that comes in one send, from all senders, or nothing.

        A second send of the same publish has all tensors whole. Every rank calls this for every send; on one that does
        not send, the tensors pass as they are.
        """
        self._num_sends += 1
        base = None if self._was_sent else self._base
        self._was_sent = True
        if self._sender is None:
            yield from tensors
            return
        about = {"base": base, "version": self._version, "send": self._num_sends, "sender": self._sender}
        about["num_senders"] = self._num_senders
        count = 0
        try:
            yield BEGIN, message(**about).to(self._device)
            for name, tensor in tensors:
                if base is None:
                    self.keep(name, tensor)
                    yield name, tensor
                    count += 1
                elif (found := self.record(name, tensor)) is not None:
                    yield CHANGE + name, found.to(self._device)
                    count += 1
            yield END, message(**about, num_tensors=count).to(self._device)
        finally:
            for _ in tensors:  # other ranks take part in every tensor
                pass


DELTA_FILE = "delta.json"
_MAX_FILE_BYTES = 4 * 1024**3


def export_changes(
    policy: PolicyTensors,
    out_dir: Path,
    form: PublishedForm,
    changes: PublishedChanges,
    weight_version: int,
    digest: Callable[[str, torch.Tensor], object],
    check: ShardCheck | None = None,
) -> None:
    """Write what changed in the policy since the version `changes.base`, in `form`, to the folder `out_dir`, which all
    ranks share. Collective over all ranks.

    `digest` gets every whole tensor that this rank owns, in the order of the table, and `check` compares what is
    gathered with what the ranks hold. Raises PublishError, the same on every rank, if a tensor cannot be sent in that
    form, if `check` finds a difference, or if a file cannot be written.
    """
    host, staging = policy.groups.host, out_dir.with_name(out_dir.name + ".writing")
    failed = f"{out_dir} cannot be written"
    problems: list[str] = []
    if policy.groups.is_lead:
        try:
            atomic_io.remove_tree(staging, at="publish.clear")
            atomic_io.make_folder(staging, at="publish.folder")
        except OSError as error:
            problems = [str(error)]
    raise_together(problems, host, PublishError, failed)
    files = _Files(staging, policy.groups.world.rank)
    try:
        for name, tensor in form.owned(policy, check):
            digest(name, tensor)
            found = changes.record(name, tensor)
            if found is not None and not problems:
                problems = _problems(files.add, CHANGE + name, found)
    except PublishError as error:  # raised by the iterator itself, after its end
        problems = [str(error)]
    if not problems:
        problems = _problems(files.write)
    raise_together(problems, host, PublishError, failed)
    counts = {file: count for part in all_gather_json(files.counts, host) for file, count in part.items()}
    if policy.groups.is_lead:
        about = {"base": changes.base, "weight_version": weight_version, "files": counts}
        try:
            atomic_io.atomic_write_json(staging / DELTA_FILE, about, at="publish.manifest")
            atomic_io.sync(staging, at="publish.sync")
            atomic_io.remove_tree(out_dir, at="publish.drop")
            atomic_io.rename(staging, out_dir, at="publish.rename")
        except OSError as error:
            problems = [str(error)]
    raise_together(problems, host, PublishError, failed)


class _Files:
    """One rank's files of records. `counts` has the number of records of each."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._pending: dict[str, torch.Tensor] = {}
        self._num_bytes = 0
        self.counts: dict[str, int] = {}

    def add(self, name: str, record: torch.Tensor) -> None:
        if self._pending and self._num_bytes + record.numel() > _MAX_FILE_BYTES:
            self.write()
        self._pending[name] = record
        self._num_bytes += record.numel()

    def write(self) -> None:
        if self._pending:
            file = f"rank{self._rank:05d}-{len(self.counts):05d}.safetensors"
            with atomic_io.operation("publish.tensors"):
                save_file(self._pending, self._folder / file)
                atomic_io.follow_umask(self._folder / file)
            atomic_io.sync(self._folder / file, at="publish.sync")
            self.counts[file] = len(self._pending)
            self._pending, self._num_bytes = {}, 0


def _problems(action: Callable[..., None], *arguments: object) -> list[str]:
    try:
        action(*arguments)
    except (OSError, SafetensorError) as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def read_changes(folder: Path) -> tuple[int, int, Iterator[tuple[str, torch.Tensor]]]:
    """Return of a folder of changes: the version that it changes, the version that it makes, and (tensor's name,
    record [bytes] uint8) of every change.

    Raises PublishError, the iterator too, if a file is missing, cannot be read, or has another number of records.
    """
    try:
        about = read_json_file(folder / DELTA_FILE)
        base, version = int(about["base"]), int(about["weight_version"])
        files = {str(file): int(count) for file, count in about["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PublishError(f"{folder / DELTA_FILE}: cannot be read: {error!r}") from error

    def records() -> Iterator[tuple[str, torch.Tensor]]:
        for file, count in files.items():
            try:
                with safe_open(folder / Path(file).name, framework="pt") as opened:
                    names = list(opened.keys())
                    if len(names) != count or not all(name.startswith(CHANGE) for name in names):
                        raise PublishError(f"{folder / file}: has {len(names)} records where {count} were written")
                    for name in names:
                        yield name.removeprefix(CHANGE), opened.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise PublishError(f"{folder / file}: cannot be read: {error}") from error

    return base, version, records()
