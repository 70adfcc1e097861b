"""Quantised weights at both ends: the form in which they leave the trainer, and parameters that are stored in FP8.

`PublishedForm` says how weights leave the trainer for its servers: plain in the servers' dtype, or as FP8 blocks with
scales. It decides which tensors are quantised, by which rule, and under which names they are sent. Files and broadcasts
both use it, so a weight is quantised in one place only. `gspo_mega.algorithm` has the arithmetic.

The second part reads and writes the parameters that Transformer Engine stores in FP8 (`fp8.parameters`) as plain
tensors. Such a parameter is a tensor of another class. A slice of it is a copy, and writing into the slice silently
changes nothing, so it must be filled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import nn

from gspo_mega.algorithm.fp8 import quantize_blocks, quantize_published_blocks
from gspo_mega.algorithm.rounding import OnLoad
from gspo_mega.base.errors import PublishError
from gspo_mega.config.precision import ServerDtype, server_dtype
from gspo_mega.config.schema import Config, Server
from gspo_mega.models.block_fp8 import (
    is_quantized,
    scale_name,
    scale_shape,
    served_layout,
    stored_bytes,
)
from gspo_mega.models.spec import BlockFp8
from gspo_mega.models.tensors import TensorEntry

if TYPE_CHECKING:
    from gspo_mega.checkpoint.gather import PolicyTensors
    from gspo_mega.checkpoint.shard_check import ShardCheck

Rule = Literal["checkpoint", "float32", "power_of_two"]
"""How a block gets its scale: as in DeepSeek-V3's checkpoints (amax / 448), or as in Transformer Engine's blockwise
recipe, with any float32 as a scale or only powers of two.
"""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def quantize_weight(weight: torch.Tensor, rule: Rule, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a whole weight [n, m], float32 or bfloat16. Returns float8_e4m3fn [n, m] and scales float32
    [ceil n/b0, ceil m/b1].
    """
    if rule == "checkpoint":
        return quantize_published_blocks(weight, block)
    return quantize_blocks(weight, block, power_of_two=rule == "power_of_two")


@dataclass(frozen=True)
class PublishedForm:
    """The form of the weights that are sent.

    The trainer's tensors are put together in the dtype `gathered`, and quantised from it. Tensors that are sent plain
    have the dtype `plain`. `stored` is the layout of quantised tensors, or None if all are plain.
    """

    gathered: torch.dtype
    plain: torch.dtype
    stored: BlockFp8 | None = None
    rule: Rule = "checkpoint"

    def tensors(self, entry: TensorEntry, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is sent for one whole tensor of the trainer: itself, or its FP8 elements and their scales.

        tensor: [entry.shape], local. Plain tensors are in `plain` (a buffer stays fp32) and may share its memory.
        Raises PublishError for a weight that is not finite, which FP8 would round to a finite one, and for scales that
        do not have the shape of the tensor's blocks.
        """
        if self.stored is None or not is_quantized(self.stored, entry):
            yield entry.name, tensor if entry.is_buffer else tensor.to(self.plain)
            return
        if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor)):  # both are NaN if any value is NaN
            raise PublishError(f"{entry.name}: has a value that is not finite, which FP8 blocks would make finite")
        data, scales = quantize_weight(tensor, self.rule, self.stored.block)
        if tuple(scales.shape) != (wanted := scale_shape(entry.shape, self.stored.block)):
            raise PublishError(f"{scale_name(entry.name)}: has the shape {list(scales.shape)}, not {list(wanted)}")
        yield entry.name, data
        yield scale_name(entry.name), scales

    def described(self, entry: TensorEntry) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of what `tensors` yields, by name and in its order."""
        if self.stored is None or not is_quantized(self.stored, entry):
            return {entry.name: (torch.float32 if entry.is_buffer else self.plain, entry.shape)}
        return {
            entry.name: (torch.float8_e4m3fn, entry.shape),
            scale_name(entry.name): (torch.float32, scale_shape(entry.shape, self.stored.block)),
        }

    def owned(
        self,
        policy: PolicyTensors,
        check: ShardCheck | None = None,
        seen: Callable[[str, torch.Tensor], object] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is sent of the tensors that this rank owns, after `seen` was called with it. Collective over the
        tensor groups: run it to its end.

        Raises the PublishError of `tensors` and of `check`, on this rank only and after that end.
        """
        owned = policy.owned(self.gathered)
        for name, tensor in self._sent(owned if check is None else check.over(owned)):
            if seen is not None:
                seen(name, tensor)
            yield name, tensor

    def brought_to(
        self, policy: PolicyTensors, home: Callable[[TensorEntry], int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is sent of the tensors whose `home` is this rank, in table order.

        Collective over all ranks: run it to its end, even if the use of a tensor fails. Raises PublishError as `owned`
        does.
        """
        return self._sent(policy.brought_to(home, self.gathered))

    def passed_on(
        self,
        policy: PolicyTensors,
        home: Callable[[TensorEntry], int],
        check: ShardCheck | None = None,
        seen: Callable[[str, torch.Tensor], object] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is sent of the tensors whose `home` is this rank, in table order. Their owners check and make it,
        call `seen` with each part, and bring it here.

        Collective over all ranks: run it to its end, even if the use of a tensor fails. Raises PublishError as `owned`
        does, on the owner.
        """
        problems: list[PublishError] = []

        def made(entry: TensorEntry, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
            if check is not None:
                check.compare(entry, tensor)
            try:
                parts = list(self.tensors(entry, tensor))
            except PublishError as error:  # the rank that they are brought to waits for all of them
                problems.append(error)
                for name, (dtype, shape) in self.described(entry).items():
                    yield name, torch.zeros(shape, dtype=dtype, device=tensor.device)
                return
            for name, part in parts:
                if seen is not None:
                    seen(name, part)
                yield name, part

        yield from policy.passed_on(home, self.gathered, made, self.described)
        if check is not None and not problems:
            check.finish()
        if problems:
            raise problems[0]

    def _sent(self, tensors: Iterator[tuple[TensorEntry, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for entry, tensor in tensors:
                yield from self.tensors(entry, tensor)
        except Exception:
            for _ in tensors:  # other ranks take part in every tensor
                pass
            raise

    def num_bytes(self, policy: PolicyTensors) -> int:
        """Return the bytes of one version."""
        entries = [entry for fused in policy.table.values() for entry in fused]
        return stored_bytes(self.stored, entries, self.plain.itemsize)


def quantised_on_load(server: Server) -> OnLoad | None:
    """Return how servers quantise plain weights while they load them, or None if they do not."""
    kind = server.quantization
    return kind if kind in ("fp8", "int8") else None


def plain_form(dtype: torch.dtype) -> PublishedForm:
    """Return the form in which everything is plain, in the dtype in which it is gathered."""
    return PublishedForm(dtype, dtype)


def published_form(config: Config) -> PublishedForm:
    """Return the form that the run's servers hold."""
    trainer: ServerDtype = "fp32" if config.precision == "fp32" else "bf16"
    return form_of(trainer, server_dtype(config.server, config.precision), served_layout(config))


def form_of(trainer: ServerDtype, dtype: ServerDtype, layout: BlockFp8 | None) -> PublishedForm:
    """Return the form of weights that the trainer rounds to `trainer`, and that servers hold in `dtype`, or in the
    blocks of `layout`.
    """
    rule = "power_of_two" if layout is not None and layout.power_of_two else "float32"
    return PublishedForm(_DTYPES[trainer], _DTYPES[dtype], layout, rule)


class _Quantized(Protocol):
    """What Transformer Engine's tensors have in addition to torch's. It is not installed everywhere, so not
    imported.
    """

    def quantize_(self, tensor: torch.Tensor) -> object: ...


def is_fp8_parameter(parameter: torch.Tensor) -> bool:
    """Whether the parameter, this rank's part of any shape and nominal dtype, is stored as FP8 blocks with scales."""
    return type(parameter) not in (torch.Tensor, nn.Parameter) and hasattr(parameter, "quantize_")


def plain_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter's values in its local shape and (nominal) dtype, detached. They share the parameter's memory
    unless it is quantized.
    """
    return parameter.detach().dequantize() if is_fp8_parameter(parameter) else parameter.detach()


@contextmanager
def filled(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give a zeroed plain tensor of the parameter's local shape and (nominal) dtype, to fill slice by slice.

    At the end of the context, the parameter gets its content. A quantized parameter keeps it as `keep_exact` says.
    """
    values = (
        torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if is_fp8_parameter(parameter)
        else parameter.detach()
    )
    values.zero_()
    yield values
    if is_fp8_parameter(parameter):
        cast(_Quantized, parameter).quantize_(values)
        keep_exact(parameter, values)


def keep_exact(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Keep the loaded `values`, of the parameter's local shape and nominal dtype, on a quantized parameter that is
    trained, as `exact_values`, until the optimizer has made its fp32 copy of them (`engine/optimizer.py`).

    This does nothing for a plain parameter, which has these values itself, or for a frozen one, which has no copy.
    """
    if is_fp8_parameter(parameter) and parameter.requires_grad:
        cast(Any, parameter).exact_values = values
