"""Adapters of a model with experts in PEFT's form, and back.

transformers 5 holds the experts of a layer in two tensors, `gate_up_proj` [experts, 2 width, hidden] and `down_proj`
[experts, hidden, width]. PEFT names such a tensor in `target_parameters` and gives it one A and one B. With s the rank
of one expert:

    A [experts s, in]    rows e s .. e s + s are expert e's A
    B [out, s experts]   column j experts + e is column j of expert e's B

Here gate and up have an A and a B of their own, of rank r each. Of both PEFT makes one adapter of rank s = 2 r, with
A = [A_gate; A_up] and B = [[B_gate, 0], [0, B_up]]; its alpha is doubled with the rank, because PEFT divides by s.

Owns the two forms of the tensors and what adapter_config.json says of the second; the files are `adapter_folder.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gspo_mega.base.errors import ModelError
from gspo_mega.config.schema import Lora
from gspo_mega.models.families import TensorEntry
from gspo_mega.models.low_rank import PREFIX, adapted, adapter_tensors, half_name, module_of
from gspo_mega.models.spec import ModelSpec

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_PATTERN = rf".*\.experts\.{_GATE_UP}"


@dataclass(frozen=True)
class Stack:
    """One adapter of PEFT: that of `parameter` of one layer's experts. `matrices[e]` are expert e's, gate before up.

    `path`: what PEFT's names begin with. PEFT wraps the module once for each parameter: where both have an adapter,
    that of `gate_up_proj` is the inner one.
    """

    path: str
    parameter: str
    matrices: tuple[tuple[TensorEntry, ...], ...]

    def name(self, half: Literal["A", "B"]) -> str:
        return f"{self.path}.lora_{half}.weight"

    def rank(self, settings: Lora, shares_a: bool) -> int:
        """s above. `shares_a`: gate and up have one A, and PEFT's adapter the rank of one."""
        return settings.rank * (1 if shares_a else len(self.matrices[0]))

    def shapes(self, settings: Lora, shares_a: bool) -> dict[str, tuple[int, int]]:
        rows, columns = self.matrices[0][0].shape
        size = len(self.matrices) * self.rank(settings, shares_a)
        return {
            self.name("A"): (size, columns),
            self.name("B"): (rows * (2 if self.parameter == _GATE_UP else 1), size),
        }


def stacks(spec: ModelSpec, targets: Sequence[str]) -> list[Stack]:
    """The adapters that PEFT has for experts, in the order of the model; none if no expert has one."""
    layers: dict[int, dict[str, dict[int, tuple[TensorEntry, ...]]]] = {}
    for entries in adapted(spec, targets).values():
        layer, expert = entries[0].layer, entries[0].expert
        if layer is not None and expert is not None:
            parameter = _DOWN if entries[0].role == "whole" else _GATE_UP
            layers.setdefault(layer, {}).setdefault(parameter, {})[expert] = tuple(entries)
    found = []
    for layer, parameters in layers.items():
        for parameter, experts in parameters.items():
            inner = ".base_layer" if parameter == _GATE_UP and _DOWN in parameters else ""
            path = f"{PREFIX}model.layers.{layer}.mlp.experts{inner}"
            found.append(Stack(path, parameter, tuple(experts[expert] for expert in range(len(experts)))))
    return found


def peft_settings(settings: Lora, spec: ModelSpec) -> dict[str, Any]:
    """What adapter_config.json says of the targets: `target_modules`, and for a model with experts the rest.

    PEFT takes `gate_proj` among `target_modules` of such a model for its experts' whatever stands before it. The
    matrices of a dense layer and of shared experts are therefore parameters there, too. PEFT has no dropout for
    parameters; it is of training alone.
    """
    entries = [entry for found in adapted(spec, settings.targets).values() for entry in found]
    found = stacks(spec, settings.targets)
    if not found:
        return {"target_modules": sorted({module_of(entry) for entry in entries})}
    of_experts = {module_of(entry) for entry in entries if entry.expert is not None}
    others = [entry for entry in entries if entry.expert is None]
    beside = {".".join(entry.name.split(".")[-3:]) for entry in others if module_of(entry) in of_experts}
    more: dict[str, Any] = {
        "target_modules": sorted({module_of(entry) for entry in others} - of_experts),
        "target_parameters": sorted(beside | {f"experts.{stack.parameter}" for stack in found}),
        "lora_dropout": 0.0,
    }
    if _fuses(found):
        more |= {"rank_pattern": {_PATTERN: 2 * settings.rank}, "alpha_pattern": {_PATTERN: 2 * settings.alpha}}
    return more


def _fuses(found: Sequence[Stack]) -> bool:
    return any(len(stack.matrices[0]) == 2 for stack in found)


def shares_a(config: Mapping[str, Any], settings: Lora, spec: ModelSpec) -> bool:
    """Have gate and up one A in a folder with `target_parameters`, as where PEFT itself made it with one rank for all?

    Raises ModelError if the folder's `config` has other experts' parameters or other ranks than `lora` asks for.
    """
    found = stacks(spec, settings.targets)
    own = {stack.parameter for stack in found}
    named = {str(name).rpartition(".")[2] for name in config["target_parameters"]} & {_GATE_UP, _DOWN}
    problems = []
    if named != own:
        valid = ", ".join(sorted(own)) or "none of experts"
        problems.append(f"target_parameters is {config['target_parameters']!r}; valid here: {valid}")
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    doubled = _fuses(found) and set(ranks.values()) == {2 * settings.rank}
    doubled = doubled and set(alphas.values()) == {2 * settings.alpha} and ranks.keys() == alphas.keys()
    if (ranks or alphas) and not (doubled and all(key.endswith(_GATE_UP) for key in ranks)):
        valid = f"none, or {{{_PATTERN!r}: {2 * settings.rank}}} and alpha {2 * settings.alpha:g} with gate and up"
        problems.append(f"rank_pattern is {ranks!r} and alpha_pattern {alphas!r}; valid here: {valid}")
    if problems:
        raise ModelError("\n  ".join(problems))
    return _fuses(found) and not doubled


def peft_shapes(settings: Lora, spec: ModelSpec, shared: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder in PEFT's form. `shared`: as `shares_a` says."""
    alone: dict[str, tuple[int, ...]] = {
        entry.name: entry.shape
        for entry in adapter_tensors(spec, settings.rank, settings.targets)
        if entry.expert is None
    }
    for stack in stacks(spec, settings.targets):
        alone |= stack.shapes(settings, shared)
    return alone


def to_peft(settings: Lora, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From one A and B for each matrix (the names of `adapter_tensors`) to PEFT's form, by its names."""
    found = dict(tensors)
    for stack in stacks(spec, settings.targets):
        each_a, each_b = [], []
        for matrices in stack.matrices:
            halves = [[found.pop(half_name(entry, half)) for entry in matrices] for half in ("A", "B")]
            each_a.append(torch.cat(halves[0]))
            each_b.append(_whole_b(stack, matrices, halves[1]))
        found[stack.name("A")] = torch.cat(each_a)
        found[stack.name("B")] = torch.stack(each_b, dim=-1).flatten(1)
    return found


def _whole_b(stack: Stack, matrices: Sequence[TensorEntry], halves: Sequence[torch.Tensor]) -> torch.Tensor:
    """[out of the parameter, s]: B of one expert."""
    if stack.parameter == _DOWN:
        return halves[0]
    if len(halves) == 2:
        return torch.block_diag(*halves)
    zero = torch.zeros_like(halves[0])
    return torch.cat([halves[0], zero] if matrices[0].role == "gate" else [zero, halves[0]])


def from_peft(
    settings: Lora, spec: ModelSpec, tensors: Mapping[str, torch.Tensor], shared: bool
) -> dict[str, torch.Tensor]:
    """From PEFT's form, of the shapes `peft_shapes`, to one A and B for each matrix. Raises ModelError where B has
    numbers that no A and B of gate and of up have.
    """
    found = dict(tensors)
    for stack in stacks(spec, settings.targets):
        size = stack.rank(settings, shared)
        all_a = found.pop(stack.name("A")).unflatten(0, (-1, size))
        all_b = found.pop(stack.name("B")).unflatten(1, (size, -1)).movedim(2, 0)
        for a, b, matrices in zip(all_a, all_b, stack.matrices, strict=True):
            parts = [a] * len(matrices) if shared else a.split(settings.rank)
            for place, entry in enumerate(matrices):
                own = b if shared else b[:, place * settings.rank : (place + 1) * settings.rank]
                if stack.parameter == _GATE_UP:
                    gate, up = own.chunk(2)
                    own, rest = (gate, up) if entry.role == "gate" else (up, gate)
                    if not shared and rest.any():
                        raise ModelError(
                            f"{stack.name('B')}: gate and up of an expert share numbers of A; here each has"
                            f" {settings.rank} (lora.rank) of its own, so that B has zeros outside two blocks"
                        )
                found[half_name(entry, "A")] = parts[place].contiguous()
                found[half_name(entry, "B")] = own.contiguous()
    return found
