"""A server's copy of the weights that it was sent last, to which a delta publish applies (`publish.full_every`).

SGLang loads whole tensors only, and turns them into its own: it fuses, divides among ranks, pads, transposes and
quantises them. So a change cannot be put into its parameters, and what arrives is put into a copy of the weights as
they were sent. Then SGLang loads the copy with its own code, as it loads a checkpoint. The copy is in the host's
memory, one for each server and node: an anonymous file in memory that the server's entry makes, that its ranks share,
and that the kernel frees when the last of them has ended. The first rank of a node writes it.

`HeldWeights` is the copy and what it holds; it needs no SGLang. `install` lets SGLang's weight updates pass by it, in
memory: nothing of SGLang is changed on disk, and without `publish.full_every` nothing at all. Three methods of SGLang
0.5.23 are replaced by ones that call them (`WeightUpdater.load_weights_from_distributed`,
`WeightUpdater.update_weights_from_disk`, `SchedulerWeightUpdaterManager.end_weight_update`), and so is the function
that chooses a loader for the second one.
"""

from __future__ import annotations

import importlib
import mmap
import os
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gspo_mega.base.errors import PublishError
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.cpu.sglang_hooks import after_import
from gspo_mega.sync.delta import BEGIN, CHANGE, DELTA_FILE, END, as_bytes, read_changes, read_message, read_record

MODEL_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
SCHEDULER_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_ALIGNMENT = 64
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
# The copy may be larger than the folder that the server starts from: fp32 where that has FP8, and some padding.
_MOST_TIMES_LARGER, _MOST_MORE = 4, 2**30

Named = tuple[str, torch.Tensor]


class HeldWeights:
    """The copy, as one rank sees it. `version` is that of its content, or None if it is not the whole of one version.
    `problem`: why what came since the last `loaded` cannot be used.

    All ranks of a node are told the same in the same order, so each knows where each tensor is.
    """

    def __init__(self, memory: torch.Tensor, writes: bool) -> None:
        """memory: [bytes] uint8, shared by the ranks of this node. `writes`: this rank is the one that writes it."""
        self._memory, self._writes = memory, writes
        self._places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._num_bytes = 0
        self._send: list[Any] = []
        self._begun: list[Any] = []
        self._base: int | None = None
        self._got: set[str] = set()
        self._ends: dict[int, int] = {}
        self.version: int | None = None
        self.is_complete = False
        self.problem: str | None = None

    def tensors(self) -> Iterator[Named]:
        """Yield (name, tensor) of everything held, in the copy's own memory."""
        for name in self._places:
            yield name, self._tensor(name)

    def take(self, bucket: Iterable[Named]) -> list[Named]:
        """Take what came in one broadcast, and return the whole tensors of it, which can be loaded at once.

        Raises PublishError, and holds no version any more, if a change is damaged, or is not one of the version that is
        held.
        """
        try:
            return self._take(list(bucket))
        except PublishError as error:
            self._forget()
            self.problem = self.problem or str(error)
            raise

    def _take(self, bucket: list[Named]) -> list[Named]:
        for name, tensor in bucket:
            if name == BEGIN:
                self._begin(read_message(tensor))
        whole = []
        for name, tensor in bucket:
            if name.startswith(CHANGE):
                self._change(name.removeprefix(CHANGE), tensor.cpu())
            elif name == END:
                end = read_message(tensor)
                self._ends[end["sender"]] = end["num_tensors"]
                self.is_complete = len(self._ends) == end["num_senders"]
                self.is_complete = self.is_complete and sum(self._ends.values()) == len(self._got)
            elif name != BEGIN:
                self.put(name, tensor)
                whole.append((name, tensor))
        return whole

    def _begin(self, about: dict[str, Any]) -> None:
        send = [about["base"], about["version"], about["send"]]
        if send == self._send:  # another sender's message of the same send, or the same one again
            return
        if send == self._begun:  # a bucket that was refused is sent a second time
            raise PublishError(self.problem or "this send was refused before")
        self._send, self._base, self._begun = send, about["base"], send
        self._start(about["base"], about["version"])

    def _start(self, base: int | None, version: int) -> None:
        """Begin to receive a version. Raises PublishError if it is the change of a version that is not held."""
        held, self.version, self.problem = self.version, None, None
        self._got, self._ends, self.is_complete = set(), {}, False
        if base is None:
            self._places, self._num_bytes = {}, 0
        elif held != base:
            raise PublishError(
                f"this server was sent the changes of version {base} to version {version}, and holds"
                f" {'no whole version' if held is None else f'version {held}'}; it needs a full publish"
            )

    def _change(self, name: str, record: torch.Tensor) -> None:
        if not self._send or self._base is None:
            raise PublishError(self.problem or f"{name}: a change came without the beginning of its publish")
        change = read_record(name, record)
        if (change.base, change.version) != (self._base, self._send[1]):
            raise PublishError(f"{name}: the change is of version {change.base} to version {change.version}")
        self._apply(name, change.put_into)

    def _apply(self, name: str, put: Callable[[torch.Tensor], None]) -> None:
        if name not in self._places:
            raise PublishError(f"{name}: a change of a tensor that is not held")
        self._got.add(name)
        if self._writes:
            put(self._tensor(name))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Hold a whole tensor of any shape and dtype, from any device."""
        self._place(name, tensor.dtype, tuple(tensor.shape))
        if self._writes:
            as_bytes(self._tensor(name)).copy_(as_bytes(tensor.detach().contiguous()))

    def _place(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._got.add(name)
        if name in self._places:
            return
        size = dtype.itemsize * torch.Size(shape).numel()
        if self._num_bytes + size > self._memory.numel():
            raise PublishError(
                f"{name}: the copy of the weights would have more than {self._memory.numel()} bytes, four times the"
                " size of the folder that this server started from; set publish.full_every: 1"
            )
        self._places[name] = (self._num_bytes, dtype, shape)
        self._num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def _tensor(self, name: str) -> torch.Tensor:
        offset, dtype, shape = self._places[name]
        size = dtype.itemsize * torch.Size(shape).numel()
        return self._memory[offset : offset + size].view(dtype).view(shape)

    def read_folder(self, folder: Path) -> bool:
        """Read a published folder, of all weights or of changes, into the copy. Returns False for a folder that no
        publish wrote; the copy then has no version.

        Records are all read and checked before the first is applied. Raises PublishError, and holds no version any
        more, if the folder cannot be read, or is not the change of the version that is held.
        """
        try:
            if (folder / DELTA_FILE).exists():
                self._read_changes(folder)
                return True
            self._start(None, -1)
            version = _published_version(folder)
            if version is None:
                return False
            self._read_weights(folder)
            self._send, self.is_complete = [None, version, 0], True
            return True
        except (PublishError, OSError, SafetensorError) as error:
            self._forget()
            if isinstance(error, PublishError):
                raise
            raise PublishError(f"{folder} cannot be read: {error}") from error

    def _read_changes(self, folder: Path) -> None:
        base, version, records = read_changes(folder)
        self._start(base, version)
        changes = []
        for name, record in records:
            change = read_record(name, record)
            if (change.base, change.version) != (base, version):
                raise PublishError(f"{name}: the change is of version {change.base} to version {change.version}")
            changes.append((name, change))
        for name, change in changes:
            self._apply(name, change.put_into)
        self._send, self.is_complete = [base, version, 0], True

    def _read_weights(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no dict
                    if self._writes:
                        self.put(name, opened.get_tensor(name))
                    else:
                        part = opened.get_slice(name)
                        self._place(name, _DTYPES[part.get_dtype()], tuple(part.get_shape()))

    @property
    def is_change(self) -> bool:
        """Whether what was received last is the change of a version, which SGLang has not loaded yet."""
        return bool(self._send) and self._send[0] is not None

    def loaded(self, is_right: bool) -> None:
        """SGLang has loaded what was received; `is_right` if all ranks say so."""
        self.version = self._send[1] if is_right and self.is_complete and self._send else None
        if self.version is None:
            self._forget()
        self._send, self._begun, self._base, self.problem = [], [], None, None

    def _forget(self) -> None:
        self.version, self.is_complete, self._send, self._base = None, False, [], None


def _published_version(folder: Path) -> int | None:
    """Return the version that a publish wrote into the folder; None if none did."""
    try:
        return int(read_json_file(folder / "manifest.json")["weight_version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- in a server's processes ---------------------------------------------------------------------------------------


def reserve(model_path: str, ranks_per_node: int) -> str:
    """Make the copy's memory in this process, the parent of the server's ranks. No memory is used before something is
    written. Returns where it is, for `install` in the ranks' processes: its size, how many ranks share it, its path.
    """
    stored = sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
    size = _MOST_TIMES_LARGER * stored + _MOST_MORE
    descriptor = os.memfd_create("gspo_mega_held_weights")
    os.ftruncate(descriptor, size)
    return f"{size}:{ranks_per_node}:/proc/{os.getpid()}/fd/{descriptor}"


def open_reserved(reserved: str, rank: int) -> HeldWeights:
    """Return the copy that `reserve` made, as the server's rank sees it."""
    size, ranks, path = reserved.split(":", 2)
    descriptor = os.open(path, os.O_RDWR)
    try:
        mapped = mmap.mmap(descriptor, int(size))
    finally:
        os.close(descriptor)
    return HeldWeights(torch.frombuffer(mapped, dtype=torch.uint8), writes=rank % int(ranks) == 0)


def install(reserved: str, *, is_imported: bool) -> None:
    """Let SGLang's weight updates pass by the copy that `reserve` made, in this process and those that it forks. If
    SGLang is not imported yet, this happens when it is.
    """
    _Rank.reserved = reserved
    actions = {MODEL_UPDATER: use_in_model_updater, SCHEDULER_UPDATER: use_in_scheduler_updater}
    if not is_imported:
        after_import(actions)
        return
    for name, use in actions.items():
        use(importlib.import_module(name))


class _Rank:
    """This process's rank: its copy, opened when it is first needed."""

    reserved = ""
    held: HeldWeights | None = None
    loads_copy = False


def _held(updater: Any) -> HeldWeights:
    if _Rank.held is None:
        _Rank.held = open_reserved(_Rank.reserved, updater.tp_rank)
    return _Rank.held


def _agreed(problem: str | None) -> str | None:
    """Return this rank's problem, or that another rank of the server has one. Collective over the server's ranks."""
    from sglang.srt.runtime_context import get_parallel

    failed = torch.tensor([problem is not None], dtype=torch.int32)
    get_parallel().tp_group.cpu_group.allreduce([failed]).wait()
    return problem or ("another rank of this server cannot apply the publish" if int(failed) else None)


def _told(action: Callable[[], object]) -> str | None:
    """Run an action. Returns its problem in words, or None."""
    try:
        action()
    except Exception as error:  # it would end the server
        return str(error) if isinstance(error, PublishError) else f"{type(error).__name__}: {error}"
    return None


def use_in_model_updater(module: types.ModuleType) -> None:
    """Replace what loads weights into one rank's model."""
    updater = module.WeightUpdater
    load, from_disk = updater.load_weights_from_distributed, updater.update_weights_from_disk
    loader_of = module.get_model_loader

    class CopyLoader(module.DefaultModelLoader):
        """SGLang's loader of a checkpoint, from the copy."""

        def _get_weights_iterator(self, source: Any, **_options: Any) -> Iterator[Named]:
            assert _Rank.held is not None
            return _Rank.held.tensors()

    def get_model_loader(load_config: Any, *arguments: Any, **named: Any) -> Any:
        return CopyLoader(load_config) if _Rank.loads_copy else loader_of(load_config, *arguments, **named)

    def load_weights_from_distributed(self: Any, named_tensors: list[Named]) -> tuple[bool, str]:
        whole: list[Named] = []
        problem = _told(lambda: whole.extend(_held(self).take(named_tensors)))
        if problem is not None:
            return False, problem
        return load(self, whole) if whole else (True, "Succeeded to update parameter online.")

    def update_weights_from_disk(self: Any, model_path: str, *arguments: Any, **named: Any) -> tuple[bool, str]:
        is_published = []
        problem = _agreed(_told(lambda: is_published.append(_held(self).read_folder(Path(model_path)))))
        if problem is not None:
            _held(self).loaded(False)
            return False, problem
        if not is_published[0]:
            return from_disk(self, model_path, *arguments, **named)
        _Rank.loads_copy = True
        try:
            success, words = from_disk(self, model_path, *arguments, **named)
        finally:
            _Rank.loads_copy = False
        _held(self).loaded(_agreed(None if success else words) is None)
        return success, words

    vars(module)["get_model_loader"] = get_model_loader
    updater.load_weights_from_distributed = load_weights_from_distributed
    updater.update_weights_from_disk = update_weights_from_disk


def use_in_scheduler_updater(module: types.ModuleType) -> None:
    """Replace the method that ends a weight update on one rank: when all changes have arrived, it loads them."""
    manager = module.SchedulerWeightUpdaterManager
    end = manager.end_weight_update

    def end_weight_update(self: Any, recv_req: Any) -> Any:
        if self._session is None or self._session.selector == "draft":
            return end(self, recv_req)
        runner = self.tp_worker.model_runner
        held = _held(runner.weight_updater)
        problem = held.problem
        if problem is None and held.is_change and not held.is_complete:
            problem = "not all changes of the publish have come"
        # Without a problem, all ranks have received the same.
        if (problem := _agreed(problem)) is None and held.is_change:
            problem = _agreed(_told(lambda: runner.model.load_weights(held.tensors())))
        held.loaded(problem is None)
        answer = end(self, recv_req)
        if problem is None or not answer.success:
            return answer
        return type(answer)(success=False, message=problem)

    manager.end_weight_update = end_weight_update
