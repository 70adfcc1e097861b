"""What a traced rank does: live bytes by phase and holder, collectives, FLOPs, and where the host waits for the device.

`Ledger` is a dispatch mode over FakeTensorMode, so that it sees every operation of PyTorch, those of autograd included,
and every storage on the fake device. A storage counts from the operation that returns it until it is freed, in blocks
of 512 bytes as PyTorch's allocator gives them. Fake tensors on the host, which are copies of the device's and large
ones, count in the same way; those in page-locked memory as torch rounds it. Small tensors that come from the host keep
their numbers beside them, and so do simple operations on them; other numbers are not known, and a read of one is
answered (`_answer`).
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from gspo_mega.cpu.fake_kernels import FLEX_ATTENTION, flex_attention_flops
from gspo_mega.plan.state import pinned_bytes

_BLOCK = 512
# A tensor of at most this many elements keeps the numbers that came from the host.
_KNOWN_ELEMENTS = 2**21
# On the host, a tensor of more bytes is fake, too.
_REAL_HOST_BYTES = 2**26
# A stack is kept for storages from this size on.
_STACK_BYTES = 2**22
_STACK_FRAMES = 8
# The live storages are written down again when the peak has grown by this share.
_PEAK_GROWTH = 1.002
_OURS = ("/gspo_mega/", "/megatron/core/", "/transformer_engine/")
_NOT_SHOWN = ("/site-packages/torch/", "/gspo_mega/verify/trace/ledger.py", "/gspo_mega/cpu/")
_MATRIX = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Operations whose result is known if their arguments are.
_FOLLOWED = {
    f"aten::{name}"
    for name in [
        "_to_copy",
        "add",
        "alias",
        "arange",
        "cat",
        "clone",
        "cumsum",
        "detach",
        "diff",
        "div",
        "expand",
        "floor_divide",
        "index_select",
        "max",
        "min",
        "mul",
        "neg",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "squeeze",
        "stack",
        "sub",
        "sum",
        "to",
        "transpose",
        "unsqueeze",
        "view",
    ]
}


@dataclass
class Held:
    """One storage. `holder`: who holds it, in words; `where`: the line that made it."""

    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    holder: str
    where: str
    stack: tuple[str, ...] = ()


@dataclass
class Phase:
    """What one part of a step did. `before`, `peak`, `after`: live bytes on the device; `host_...`: on the host.
    `at_peak`, `host_at_peak`: copies of what was live then.
    """

    name: str
    before: int
    peak: int
    after: int = 0
    host_before: int = 0
    host_peak: int = 0
    host_after: int = 0
    seconds: float = 0.0
    flops: dict[str, float] = field(default_factory=dict)
    flops_by_module: dict[str, float] = field(default_factory=dict)
    collectives: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    at_peak: list[Held] = field(default_factory=list)
    host_at_peak: list[Held] = field(default_factory=list)
    left: list[Held] = field(default_factory=list)


class Ledger(TorchDispatchMode):
    """Sees every operation of this process. Enter it inside of `fake_tensors()`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Phase] = []
        self._live: dict[int, Held] = {}
        self._host: dict[int, Held] = {}
        self._now = self._host_now = 0
        self._phase = Phase("start", 0, 0)
        self._written_at = self._host_written_at = 0
        self._inside = 0
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._groups: dict[str, str] = {}
        self._numbers: Any = WeakIdKeyDictionary()  # fake tensor -> real one on the host
        self._hooks: list[Any] = []

    # --- what the run is told ----------------------------------------------------------------------------------

    def name_modules(self, chunks: Sequence[torch.nn.Module], prefix: str = "") -> None:
        """Name modules as they are named in the model, without the numbers of layers. `prefix`: of a second model."""
        for chunk in chunks:
            for name, module in chunk.named_modules():
                plain = ".".join("*" if part.isdigit() else part for part in name.split("."))
                self._names[id(module)] = prefix + (plain or "model")

    def name_groups(self, groups: dict[str, dist.ProcessGroup]) -> None:
        """Name process groups; the first name of a group counts."""
        for name, group in groups.items():
            self._groups.setdefault(group.group_name, name)

    def mark(self, part: str, tensors: Iterator[torch.Tensor]) -> None:
        """Say which part of the state these tensors belong to; the first mark of a storage counts."""
        for tensor in tensors:
            for one in _device_tensors(tensor):
                held = self._live.get(one.untyped_storage()._cdata)
                if held is not None and not held.holder.startswith("state: "):
                    held.holder = f"state: {part}"

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether this storage is a fake one. Those have no address; the ledger's key stands for it."""
        return storage._cdata in self._live or storage._cdata in self._host

    def live(self) -> list[Held]:
        """Copies of what is on the device: later marks and sizes do not change them."""
        return _copies(self._live)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Account for what happens inside as one phase."""
        self._phase = phase = Phase(name, self._now, self._now, host_before=self._host_now, host_peak=self._host_now)
        self._written_at = self._host_written_at = 0
        started = time.monotonic()
        phase.at_peak, phase.host_at_peak = self.live(), _copies(self._host)
        yield phase
        phase.after, phase.seconds = self._now, time.monotonic() - started
        phase.host_after = self._host_now
        phase.left = self.live()
        self.phases.append(phase)

    # --- Account (fake_kernels) ------------------------------------------------------------------------------------

    def flops(self, kind: str, number: float) -> None:
        for sums, key in ((self._phase.flops, kind), (self._phase.flops_by_module, self._module())):
            sums[key] = sums.get(key, 0.0) + number

    @contextlib.contextmanager
    def inside_kernel(self) -> Iterator[None]:
        """Allocations inside are not counted; `made` counts the results."""
        before = self._inside
        self._inside += 1
        try:
            yield
        finally:
            self._inside = before

    def made(self, result: Any) -> None:
        """Count the tensors of a kernel's result."""
        for one in tree_iter(result):
            self._see(one, pinned=False)

    def wait(self, what: str) -> None:
        self._phase.waits[f"{what} ({_where()})"] += 1

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        return self._numbers.get(tensor)

    # --- the mode --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Ledger:
        hooks = torch.nn.modules.module

        def entered(module: torch.nn.Module, *_: object) -> None:
            self._modules.append(self._names.get(id(module), ""))

        def left(module: torch.nn.Module, *_: object) -> None:
            if self._modules:
                self._modules.pop()

        self._hooks = [
            hooks.register_module_forward_pre_hook(entered),
            hooks.register_module_forward_hook(left),
        ]
        _answer_reads(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            return self._run_kernel(func, args, kwargs)
        name = func._schema.name
        if name.startswith("c10d::"):
            self._note_collective(name.removeprefix("c10d::"), args)
            if name == "c10d::allgather_":
                _gather_own(args)
            return _done(func, args)
        pins = kwargs.pop("pin_memory", None) or _copies_to_page_locked(name, args, kwargs)
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        is_plain = not to_device and not pins and all(_is_real(one) for one in tensors)
        if is_plain and (tensors or _is_small_on_host(args, kwargs)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if name in _READS or _copies_to_host(name, tensors, kwargs):
            self.wait(name.removeprefix("aten::"))
        if name == "aten::_local_scalar_dense":
            return _answer(self.known(args[0]), args[0])
        if name == "aten::equal":
            return args[0].shape == args[1].shape
        if name in _INDEXED:
            args = (args[0], [self._as_places(one, name) for one in args[1]], *args[2:])
        out = func(*args, **kwargs)
        if name in _MATRIX:
            left, right = (args[index] for index in _MATRIX[name])
            self.flops(f"products, {str(left.dtype).removeprefix('torch.')}", 2.0 * left.numel() * right.shape[-1])
        self._follow(name, func, args, kwargs, tensors, out)
        for one in tree_iter(out):
            self._see(one, bool(pins))
        return out

    def _run_kernel(self, operator: HigherOrderOperator, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator that torch.compile makes one kernel of; what it returns stays for the backward pass."""
        self.flops(FLEX_ATTENTION, flex_attention_flops(operator.name(), args))
        with self.inside_kernel():
            out = operator(*args, **kwargs)
        inside, self._inside = self._inside, 0
        self.made(out)
        self._inside = inside
        return out

    def _as_places(self, index: torch.Tensor | None, name: str) -> torch.Tensor | None:
        """A mask as the places that it chooses, which have a shape; all of them if the mask's numbers are not known."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return index
        known = self.known(index)
        if index.dim() != 1 or (known is None and name != "aten::index"):
            if name == "aten::index":
                raise NotImplementedError("an index by a mask of several dimensions")
            return index  # the shape of the result does not depend on it
        with _disable_current_modes():
            return torch.arange(len(index)) if known is None else known.nonzero().flatten()

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> None:
        """Keep the numbers of a small result whose arguments are known."""
        if func._schema.is_mutable:
            for one in tensors[:1]:
                self._numbers.pop(one, None)
            return
        if name not in _FOLLOWED or not tensors:
            return
        found = [self.known(one) for one in tensors]
        if any(one is None for one in found):
            return
        numbers = {id(one): number for one, number in zip(tensors, found, strict=True)}
        plain = {key: value for key, value in kwargs.items() if key != "device"}
        args, plain = tree_map(lambda one: numbers.get(id(one), one), (args, plain))
        with _disable_current_modes():
            result = func(*args, **plain)
        for fake, real in zip(tree_iter(out), tree_iter(result)):
            if isinstance(fake, FakeTensor) and real.numel() <= _KNOWN_ELEMENTS:
                self._numbers[fake] = real

    def _see(self, one: Any, pinned: bool) -> None:
        if not isinstance(one, torch.Tensor):
            return
        if one.device.type == "cpu":
            if isinstance(one, FakeTensor):
                self._see_host(one, pinned)
            return
        if one.device.type != "cuda" or self._inside:
            return
        storage = one.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        num_bytes = -(-storage.nbytes() // _BLOCK) * _BLOCK
        stack = _stack() if num_bytes >= _STACK_BYTES else ()
        self._live[key] = Held(num_bytes, tuple(one.shape), str(one.dtype), self._module(), _where(), stack)
        self._change(num_bytes)
        weakref.finalize(storage, self._gone, key)

    def _see_host(self, one: torch.Tensor, pinned: bool) -> None:
        storage = one.untyped_storage()
        if storage._cdata not in self._host:
            num_bytes = pinned_bytes(storage.nbytes()) if pinned and storage.nbytes() else storage.nbytes()
            holder = "page-locked" if pinned else "host"
            self._host[storage._cdata] = Held(num_bytes, tuple(one.shape), str(one.dtype), holder, _where())
            self._host_now += num_bytes
            phase = self._phase
            if self._host_now > phase.host_peak:
                phase.host_peak = self._host_now
                if self._host_now > self._host_written_at * _PEAK_GROWTH:
                    self._host_written_at = self._host_now
                    phase.host_at_peak = _copies(self._host)
            weakref.finalize(storage, self._gone_host, storage._cdata)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> bool:
        """Note that a storage on the device has this size now. Return whether it is one of the device."""
        held = self._live.get(storage._cdata)
        if held is None:
            return False
        change, held.num_bytes = num_bytes - held.num_bytes, num_bytes
        self._change(change)
        return True

    def _change(self, num_bytes: int) -> None:
        self._now += num_bytes
        phase = self._phase
        if self._now > phase.peak:
            phase.peak = self._now
            if self._now > self._written_at * _PEAK_GROWTH:
                self._written_at = self._now
                phase.at_peak = self.live()

    def _gone(self, key: int) -> None:
        held = self._live.pop(key, None)
        if held is not None:
            self._now -= held.num_bytes

    def _gone_host(self, key: int) -> None:
        held = self._host.pop(key, None)
        if held is not None:
            self._host_now -= held.num_bytes

    def _module(self) -> str:
        return next((name for name in reversed(self._modules) if name), "outside of modules")

    def _note_collective(self, name: str, args: Any) -> None:
        sizes = [
            sum(
                _num_bytes(one) for one in tree_iter(arg) if isinstance(one, torch.Tensor) and one.device.type == "cuda"
            )
            for arg in args
        ]
        label, size = "", 0
        for one in (one for one in tree_iter(args) if isinstance(one, torch.ScriptObject)):
            with contextlib.suppress(RuntimeError, TypeError):
                found = dist.ProcessGroup.unbox(one)
                label, size = self._groups.get(found.group_name, "other"), found.size()
                break
        count = self._phase.collectives.setdefault((name.rstrip("_"), label, size), [0, 0])
        count[0] += 1
        count[1] += max(sizes, default=0)


def fake_tensors() -> FakeTensorMode:
    """The mode to enter before a `Ledger`."""
    mode: Any = FakeTensorMode
    mode.avoid_device_init = property(lambda self: True)  # a copy to the device is fake from the start
    return FakeTensorMode(allow_non_fake_inputs=True)


def _copies(held: dict[int, Held]) -> list[Held]:
    # A list first: while copies are made, the garbage collector may free storages, which then leave `held`.
    return [Held(**vars(one)) for one in list(held.values())]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _device_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a tensor, which may be one of Transformer Engine's with several buffers."""
    if isinstance(tensor, FakeTensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        yield tensor
        return
    for value in vars(tensor).values():
        if isinstance(value, FakeTensor):
            yield value


def _gather_own(args: Any) -> None:
    """Fill a gather on the host as if every rank had what this one has."""
    for outputs, given in zip(args[0], args[1], strict=True):
        if _is_real(given):
            with _disable_current_modes():
                for one in outputs:
                    one.copy_(given)


def _done(func: Any, args: Any) -> Any:
    """What a collective returns that is done at once."""
    results = [FakeWork().boxed() if "Work" in str(one.type) else args[0] for one in func._schema.returns]
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def _is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def _is_small_on_host(args: Any, kwargs: Any) -> bool:
    """Whether a new tensor on the host is small enough to be real."""
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
        return False
    sizes = next((one for one in args if isinstance(one, list | tuple)), ())
    number = 1
    for size in sizes:
        number *= size if isinstance(size, int) else 1
    return number * 8 <= _REAL_HOST_BYTES


def _copies_to_page_locked(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result is in page-locked memory, as torch takes it for a copy to the host that nobody waits for."""
    to = kwargs.get("device")
    if name != "aten::_to_copy" or to is None or not kwargs.get("non_blocking"):
        return False
    return torch.device(to).type == "cpu" and args[0].device.type == "cuda"


def _copies_to_host(name: str, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits until this copy is there: one from the device to memory of the host, at once."""
    if name == "aten::_to_copy" and kwargs.get("device") is not None:
        to_host = torch.device(kwargs["device"]).type == "cpu" and tensors[0].device.type == "cuda"
        return to_host and not kwargs.get("non_blocking")
    return name == "aten::copy_" and tensors[0].device.type == "cpu" and tensors[1].device.type == "cuda"


def _answer(known: torch.Tensor | None, asked: torch.Tensor) -> Any:
    """The number that a read gets: its own if known; else False (the engine's alarms are such reads), 0.0 or 1."""
    if known is not None:
        with _disable_current_modes():
            return known.item()
    if asked.dtype == torch.bool:
        return False
    return 0.0 if asked.dtype.is_floating_point else 1


def _answer_reads(ledger: Ledger) -> None:
    """Answer `tolist` and `numpy` of fake tensors, which are not dispatched: known numbers, or zeros (bool: True). All
    single numbers are finite.
    """
    tensor_class: Any = torch.Tensor
    if getattr(tensor_class, "_gspo_mega_reads", None) is not None:
        tensor_class._gspo_mega_reads[0] = ledger
        return
    current = tensor_class._gspo_mega_reads = [ledger]
    tolist, numpy, resize = tensor_class.tolist, tensor_class.numpy, torch.UntypedStorage.resize_
    isfinite = tensor_class.isfinite

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cuda":
            current[0].wait("read")
        known = current[0].known(tensor)
        with _disable_current_modes():
            return (
                known if known is not None else torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype)
            )

    def read_finite(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor) or self.dim():
            return isfinite(self)
        current[0].wait("isfinite")
        with _disable_current_modes():
            return torch.tensor(True)

    def read_list(self: torch.Tensor) -> Any:
        return tolist(values(self) if isinstance(self, FakeTensor) else self)

    def read_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return numpy(values(self) if isinstance(self, FakeTensor) else self, *args, **kwargs)

    def resized(self: torch.UntypedStorage, size: int) -> Any:
        if not current[0].resized(self, size):
            return resize(self, size)
        return self

    fake_class: Any = FakeTensor  # which has a `tolist` of its own, one read for each element
    tensor_class.tolist = fake_class.tolist = read_list
    tensor_class.numpy = read_numpy
    tensor_class.isfinite = fake_class.isfinite = read_finite
    address = torch.UntypedStorage.data_ptr

    def data_ptr(self: torch.UntypedStorage) -> int:
        return self._cdata if current[0].holds(self) else address(self)

    storage_class: Any = torch.UntypedStorage
    storage_class.resize_, storage_class.data_ptr = resized, data_ptr


def is_shown(file: str) -> bool:
    """Whether a line of this file says something: not PyTorch's, Python's own, or the ledger's."""
    return not (file.startswith(("<", sys.base_prefix)) or any(part in file for part in _NOT_SHOWN))


def _short(file: str) -> str:
    for part in _OURS:
        if part in file:
            return part.strip("/").split("/")[0] + "/" + file.rpartition(part)[2]
    return file


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        if is_shown(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _where() -> str:
    """The innermost line outside of PyTorch."""
    for frame in _frames():
        return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def _stack() -> tuple[str, ...]:
    found: list[str] = []
    for frame in _frames():
        found.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})")
        if len(found) == _STACK_FRAMES:
            break
    return tuple(found)
