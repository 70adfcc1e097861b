"""The FP8 state of a model: the scales of recipe `delayed`, when they change, and what of them a checkpoint holds.

`delayed` rounds a tensor with a scale that follows from the largest values of earlier passes. Transformer Engine
updates scales after each micro-batch, between the old pass and the training passes as well: an unchanged policy then
has an importance ratio that is not 1, by more than GSPO's clip range. Here the scales of forward passes are held from
the old pass to the last training pass that is compared with it, and the largest values recorded; without an old pass,
for a mini-batch. Those of gradients, on which no log-prob depends, are updated after each mini-batch. The other
recipes have no state: a tensor's scale follows from the tensor.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_context, get_fp8_recipe
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.algorithm.fp8 import E4M3_MAX

_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"
_FLAGS = "flags"
# A scale is 1 until it is measured, with which the small numbers of gradients round to 0. A pass therefore measures the
# last product of a branch rightly, the next pass the one before it; a branch has two.
MEASURING_PASSES = 3
# Quantised tensors of a product in its forward pass: input, weight, output.
_TENSORS_A_PRODUCT = 3


class Fp8Scales:
    """When the scales of one policy change. Does nothing unless the recipe is `delayed`.

    The methods are collective over the ranks of a pipeline stage, which share each tensor's largest value.
    """

    def __init__(self, config: TransformerConfig, chunks: Sequence[torch.nn.Module]) -> None:
        self._config, self._chunks, self.is_active = config, chunks, _is_delayed(config)
        self._forward_known = self._backward_known = self._has_trained = self._is_measuring = False

    def require_known(self) -> None:
        """Raise RuntimeError before a pass whose scales would be 1: nobody has begun a step."""
        if self.is_active and not (self._forward_known or self._is_measuring):
            raise RuntimeError("a pass with FP8 recipe `delayed` before its scales were measured; begin a step first")

    @torch.no_grad()
    def fit_parameters(self) -> None:
        """Round freshly loaded FP8 parameters again, each with the scale of its own largest value.

        They were filled with the scale 1, with which numbers below 2^-6 lose bits, before anything was measured. The
        loaded numbers are on the parameters still (`weights/quantized.py::keep_exact`).
        """
        if not self.is_active:
            return
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                exact = vars(parameter).get("exact_values")
                if exact is not None and float(largest := exact.abs().max().float()) > 0:
                    quantized: Any = parameter
                    quantized._get_quantizer().scale.fill_(E4M3_MAX / largest)
                    quantized.quantize_(exact)

    def begin_step(self, measure: Callable[[], object]) -> None:
        """Before the first pass with new weights: update the scales of forward passes; a second call does nothing.

        `measure`: a forward pass, carried out where there are no scales yet, because the run or its layout is new.
        """
        if not self.is_active:
            return
        if not self._forward_known:
            self._is_measuring = True
            try:
                for _ in range(MEASURING_PASSES):
                    measure()
                    _manager().reduce_and_update_fp8_tensors(forward=True)
            finally:
                self._is_measuring = False
            self._forward_known = True
        elif self._has_trained:
            _manager().reduce_and_update_fp8_tensors(forward=True)
        self._has_trained = False

    def before_gradients(self, measure: Callable[[], object]) -> None:
        """`measure`: a forward and a backward pass, carried out where gradients have no scales yet. The caller forgets
        what they accumulated.
        """
        if self.is_active and not self._backward_known:
            for _ in range(MEASURING_PASSES):
                measure()
                self.after_gradients()

    def after_gradients(self) -> None:
        """After a mini-batch's backward passes: update the scales of gradients."""
        if not self.is_active:
            return
        self._backward_known = self._has_trained = True
        _manager().reduce_and_update_fp8_tensors(forward=False)

    def forget(self) -> None:
        """As in a fresh run: what passes so far have measured counts for nothing. Load the weights again after it."""
        if not self.is_active:
            return
        self._forward_known = self._backward_known = self._has_trained = False
        for _, module in _modules(self._chunks):
            for direction in (_FORWARD, _BACKWARD):
                if hasattr(module.fp8_meta.get(direction), "amax_history"):
                    module.fp8_meta[direction].scale.fill_(1.0)
                    module.fp8_meta[direction].amax_history.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's FP8 state by name, on the host; empty if there is none.

        Per module and direction `scale` [n] and `amax_history` [steps, n], float32: one scale per tensor, and the
        largest values of past steps, those since the last update first. These are this rank's own until the next
        update shares them.
        """
        if not self.is_active:
            return {}
        tensors = {_FLAGS: torch.tensor([self._forward_known, self._backward_known, self._has_trained])}
        for name, module in _modules(self._chunks):
            for direction in (_FORWARD, _BACKWARD):
                if hasattr(module.fp8_meta.get(direction), "amax_history"):
                    part = module.fp8_meta[direction]
                    tensors[f"{name}/{direction}/scale"] = part.scale.cpu().clone()
                    tensors[f"{name}/{direction}/amax_history"] = part.amax_history.cpu().clone()
        return tensors

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue with a `state` of the same layout; with an empty one, as in a fresh run.

        Raises KeyError if it has a module that this rank does not have, RuntimeError for another shape.
        """
        if not self.is_active:
            return
        flags = tensors[_FLAGS].tolist() if _FLAGS in tensors else [False] * 3
        self._forward_known, self._backward_known, self._has_trained = flags
        modules = dict(_modules(self._chunks))
        with _held(self._config), get_fp8_context(self._config), torch.no_grad():
            for name, value in tensors.items():
                if name == _FLAGS:
                    continue
                place, direction, kind = name.rsplit("/", 2)
                meta = modules[place].fp8_meta
                # As in its first pass: until then a module has no scales, or none that is updated.
                modules[place].init_fp8_metadata(tensors[f"{place}/{_FORWARD}/scale"].numel() // _TENSORS_A_PRODUCT)
                _manager().add_fp8_tensors_to_global_buffer(meta)
                getattr(meta[direction], kind).copy_(value)


def held_scales(config: TransformerConfig) -> AbstractContextManager[None]:
    """Passes inside leave the scales of recipe `delayed` as they are, and record the largest values.

    Transformer Engine updates them at the end of an outermost context only, and those of gradients after the first
    module of one. Inside, this context is the outermost, and its first module is used up.
    """
    return _held(config) if _is_delayed(config) else contextlib.nullcontext()


@contextlib.contextmanager
def _held(config: TransformerConfig) -> Iterator[None]:
    # Without a recipe it would ask for the chip's default one, of whatever use.
    recipe = get_fp8_recipe(config)
    with importlib.import_module("transformer_engine.pytorch").fp8_autocast(enabled=False, fp8_recipe=recipe):
        _manager().is_first_fp8_module()
        yield


@contextlib.contextmanager
def without_extra_state(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, Transformer Engine's modules have no state beside their parameters, as in bf16.

    They would put a pickle into a checkpoint, which they then refuse to read, and Megatron 0.16 to 0.18 cannot divide
    the empty one of several experts. `Fp8Scales.state` has the same numbers, as tensors.
    """
    before = []
    for _, module in _modules(chunks):
        kept = {name: module.__dict__[name] for name in ("fp8", "fp8_calibration") if name in module.__dict__}
        before.append((module, kept, module.fp8_meta.get("fp8_checkpoint")))
        module.__dict__.update(dict.fromkeys(kept, False))
        module.fp8_meta["fp8_checkpoint"] = False
    try:
        yield
    finally:
        for module, kept, is_saved in before:
            module.__dict__.update(kept)
            module.fp8_meta["fp8_checkpoint"] = is_saved


def _is_delayed(config: TransformerConfig) -> bool:
    return bool(config.fp8) and config.fp8_recipe == "delayed"


def _modules(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if isinstance(getattr(module, "fp8_meta", None), dict):
                yield f"{index}.{name}", module


def _manager() -> Any:
    return importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
