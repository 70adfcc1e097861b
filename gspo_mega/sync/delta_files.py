"""A delta publish through files (`publish.method: disk`): a folder of records instead of a folder of weights.

All ranks that own tensors write their own safetensors files of records (`delta.py`), and rank 0 writes `DELTA_FILE`,
which names them, the version that the records change and the one that they make. The folder appears complete or not at
all. `read_changes` is the servers' side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import PublishError
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.checkpoint.collectives import all_gather_json, raise_together
from gspo_mega.sync.delta import CHANGE, PublishedChanges

if TYPE_CHECKING:
    from gspo_mega.checkpoint.gather import PolicyTensors
    from gspo_mega.checkpoint.quantized import PublishedForm
    from gspo_mega.checkpoint.shard_check import ShardCheck

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
