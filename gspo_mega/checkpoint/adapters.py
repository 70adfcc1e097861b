"""A policy's adapters (`lora`) as a PEFT folder: adapter_config.json and adapter_model.safetensors.

The first part writes a folder that Hugging Face's `peft` or a server loads, and starts a policy from one.
`hf_export.py` writes merged weights instead. Without experts, PEFT and SGLang load the same file. With experts, SGLang
has an A and a B for each expert's matrix, as PEFT had with transformers 4, while PEFT with transformers 5 has one
adapter for all experts of a layer. The second part, from `AdapterTensors` on, gathers whole tensors from the ranks, and
fills the ranks' parts from them, in any layout. The third part, from `AdapterStack` on, converts experts to PEFT's form
and back:

transformers 5 has the experts of a layer in two tensors, `gate_up_proj` [experts, 2 width, hidden] and `down_proj`
[experts, hidden, width]. PEFT names such a tensor in `target_parameters` and gives it one A and one B. With s the rank
of one expert:

    A [experts s, in]    rows e s .. e s + s are expert e's A
    B [out, s experts]   column j experts + e is column j of expert e's B

In this project gate and up each have their own A and B of rank r. PEFT gets one adapter of rank s = 2 r for both, with
A = [A_gate; A_up] and B = [[B_gate, 0], [0, B_up]]. Its alpha is doubled with the rank, because PEFT divides by s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import ModelError, PublishError
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.checkpoint.collectives import raise_together
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.config.schema import Lora
from gspo_mega.models.low_rank import PREFIX, adapted, adapter_tensors, half_name, module_of
from gspo_mega.models.parameter_names import tensor_group
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, parameter_blocks

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.policy import PolicyEngine
    from gspo_mega.engine.process_groups import ParallelGroups

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
# Settings of PEFT that change what an adapter computes. With these values it computes B A alpha / rank.
_PLAIN = {
    "use_rslora": False,
    "use_dora": False,
    "use_qalora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
# The settings among them that a folder with `target_parameters` has for experts.
_OF_EXPERTS = ("rank_pattern", "alpha_pattern", "target_parameters")

# The parameters of a layer's experts in transformers 5.
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_PATTERN = rf".*\.experts\.{_GATE_UP}"


def served_config(settings: Lora, spec: ModelSpec, base: str) -> dict[str, Any]:
    """Return the adapter_config.json of adapters with an A and a B for each matrix, including those of experts."""
    modules = {module_of(entry) for found in adapted(spec, settings.targets).values() for entry in found}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted(modules),
        "inference_mode": True,
        **{key: value for key, value in _PLAIN.items() if key in ("bias", "fan_in_fan_out", "use_rslora", "use_dora")},
    }


def export_adapters(
    out_dir: Path,
    settings: Lora,
    spec: ModelSpec,
    groups: ParallelGroups,
    chunks: Sequence[PolicyModel],
    base: str,
    *,
    served: bool = False,
) -> None:
    """Write the adapters in fp32 to `out_dir`, which appears complete or not at all and replaces an older one.

    `served`: write the form that servers load. Collective. Raises PublishError, the same on every rank, if the folder
    cannot be written.
    """
    stream = AdapterTensors(settings, spec, groups, chunks).stream(torch.float32)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in stream}
    problems = []
    if groups.is_lead:
        config = served_config(settings, spec, base)
        if not served:
            tensors, config = to_peft(settings, spec, tensors), config | peft_settings(settings, spec)
        staging, replaced = (out_dir.with_name(out_dir.name + end) for end in (".writing", ".replaced"))
        try:
            atomic_io.remove_tree(staging, at="publish.clear")
            atomic_io.make_folder(staging, at="publish.folder")
            with atomic_io.operation("publish.tensors"):
                save_file(tensors, staging / WEIGHTS_NAME, metadata={"format": "pt"})
                atomic_io.follow_umask(staging / WEIGHTS_NAME)
            atomic_io.sync(staging / WEIGHTS_NAME, at="publish.sync")
            atomic_io.atomic_write_json(staging / CONFIG_NAME, config, at="publish.config")
            atomic_io.remove_tree(replaced, at="publish.drop")
            if out_dir.exists():
                atomic_io.rename(out_dir, replaced, at="publish.aside")
            atomic_io.rename(staging, out_dir, at="publish.rename")
            atomic_io.remove_tree(replaced, at="publish.drop")
        except (OSError, SafetensorError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    raise_together(problems, groups.host, PublishError, f"{out_dir} cannot be written")


def init_adapters(engine: PolicyEngine) -> None:
    """Fill the engine's adapters from `lora.path`, or without it with new values: A random by the seed, B zero.

    Does nothing without `lora`. Collective. Raises ModelError, the same on every rank, if the folder does not have
    these adapters.
    """
    settings, spec = engine.config.lora, engine.spec
    if settings is None:
        return
    if settings.path is None:
        engine.start_adapters()
        return
    tensors, problems = {}, []
    try:
        tensors = read_adapters(Path(settings.path), settings, spec)
    except ModelError as error:
        problems.append(str(error))
    raise_together(problems, engine.groups.host, ModelError, "lora.path")
    fill_adapters(settings, spec, engine.groups, engine.chunks, tensors)


def read_adapters(folder: Path, settings: Lora, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the tensors of a PEFT folder by the names of `adapter_tensors`, checked against `lora` and the model.

    The folder is one of transformers 5 (with `target_parameters` for experts) or has an A and a B for each matrix.
    Raises ModelError.
    """
    try:
        config = read_json_file(folder / CONFIG_NAME)
        tensors = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{folder}: no PEFT folder ({CONFIG_NAME}, {WEIGHTS_NAME}) can be read: {error}") from None
    wanted = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.alpha, **_PLAIN}
    stacked, shared = bool(config.get("target_parameters")) and spec.moe is not None, False
    if stacked:
        wanted = {key: value for key, value in wanted.items() if key not in _OF_EXPERTS}
    problems = [
        f"{key} is {config.get(key)!r}; valid here: {value!r}"
        + {"r": " (lora.rank)", "lora_alpha": " (lora.alpha)"}.get(key, "")
        for key, value in wanted.items()
        if (config.get(key) or None) != (value or None)
    ]
    try:
        shared = stacked and shares_a(config, settings, spec)
    except ModelError as error:
        problems.append(str(error))
    if problems:
        raise ModelError("\n  ".join([f"{folder / CONFIG_NAME} describes other adapters:", *problems]))
    if stacked:
        shapes = peft_shapes(settings, spec, shared)
    else:
        shapes = {entry.name: entry.shape for entry in adapter_tensors(spec, settings.rank, settings.targets)}
    problems = [f"missing: {name}" for name in shapes if name not in tensors]
    problems += [f"unexpected: {name}" for name in tensors if name not in shapes]
    problems += [
        f"{name} is {list(tensors[name].shape)}, the model makes it {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        more = [f"... and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise ModelError(
            "\n  ".join([f"{folder / WEIGHTS_NAME} does not fit lora.targets and the model:", *problems[:5], *more])
        )
    if not stacked:
        return tensors
    try:
        return from_peft(settings, spec, tensors, shared)
    except ModelError as error:
        raise ModelError(f"{folder / WEIGHTS_NAME}: {error}") from None


class AdapterTensors(PolicyTensors):
    """Every A and B of the policy, spread over the ranks as its weights are. Construction is collective."""

    def __init__(
        self,
        settings: Lora,
        spec: ModelSpec,
        groups: ParallelGroups,
        chunks: Sequence[PolicyModel],
        values: Callable[[nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        """`values` selects what to gather instead of a parameter's values, as for `PolicyTensors`."""
        self._settings = settings
        super().__init__(spec, groups, chunks, values)

    def _find(self) -> dict[str, torch.Tensor]:
        return dict(_halves(self._chunks))

    def _table(self) -> dict[str, list[TensorEntry]]:
        return _by_parameter(self.spec, self._settings)


def fill_adapters(
    settings: Lora,
    spec: ModelSpec,
    groups: ParallelGroups,
    chunks: Sequence[PolicyModel],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Set this rank's parts from whole tensors by PEFT's names, each with the shape that `adapter_tensors` gives it."""
    table = _by_parameter(spec, settings)
    with torch.no_grad():
        for name, parameter in _halves(chunks).items():
            parameter.zero_()
            for entry in table[name]:
                group = tensor_group(groups, entry)
                for block in parameter_blocks(spec, entry, group.size, group.rank):
                    values = tensors[entry.name].narrow(block.dim, block.start, block.length)
                    parameter.narrow(block.dim, block.local_start, block.length).copy_(values)


def _halves(chunks: Sequence[PolicyModel]) -> dict[str, nn.Parameter]:
    return {name: half for chunk in chunks for one in chunk.low_rank() for name, half in one.halves().items()}


def _by_parameter(spec: ModelSpec, settings: Lora) -> dict[str, list[TensorEntry]]:
    table: dict[str, list[TensorEntry]] = {}
    for entry in adapter_tensors(spec, settings.rank, settings.targets):
        table.setdefault(entry.parameter, []).append(entry)
    return table


@dataclass(frozen=True)
class AdapterStack:
    """One adapter of PEFT: that of `parameter` of one layer's experts. `matrices[e]` are expert e's, gate before up.

    PEFT's names begin with `path`. PEFT wraps the module once for each parameter. If both have an adapter, that of
    `gate_up_proj` is the inner one.
    """

    path: str
    parameter: str
    matrices: tuple[tuple[TensorEntry, ...], ...]

    def name(self, half: Literal["A", "B"]) -> str:
        return f"{self.path}.lora_{half}.weight"

    def rank(self, settings: Lora, shares_a: bool) -> int:
        """Return s of the equations above. With `shares_a`, gate and up have one A, and PEFT's adapter has its rank."""
        return settings.rank * (1 if shares_a else len(self.matrices[0]))

    def shapes(self, settings: Lora, shares_a: bool) -> dict[str, tuple[int, int]]:
        rows, columns = self.matrices[0][0].shape
        size = len(self.matrices) * self.rank(settings, shares_a)
        return {
            self.name("A"): (size, columns),
            self.name("B"): (rows * (2 if self.parameter == _GATE_UP else 1), size),
        }


def stacks(spec: ModelSpec, targets: Sequence[str]) -> list[AdapterStack]:
    """Return the adapters that PEFT has for experts, in the order of the model; none if no expert has one."""
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
            above = experts[0][0].name.partition("layers.")[0]
            path = f"{PREFIX}{above}layers.{layer}.mlp.experts{inner}"
            found.append(AdapterStack(path, parameter, tuple(experts[expert] for expert in range(len(experts)))))
    return found


def peft_settings(settings: Lora, spec: ModelSpec) -> dict[str, Any]:
    """Return what adapter_config.json says about the targets: `target_modules`, and for a model with experts the rest.

    In a model with experts, PEFT takes `gate_proj` among `target_modules` for that of the experts, whatever precedes
    it. The matrices of dense layers and shared experts are therefore named as parameters too. PEFT has no dropout for
    parameters; dropout matters only in training.
    """
    entries = [entry for found in adapted(spec, settings.targets).values() for entry in found]
    found = stacks(spec, settings.targets)
    if not found:
        return {"target_modules": sorted({module_of(entry) for entry in entries})}
    of_experts = {module_of(entry) for entry in entries if entry.expert is not None}
    others = [entry for entry in entries if entry.expert is None]
    as_parameters = {".".join(entry.name.split(".")[-3:]) for entry in others if module_of(entry) in of_experts}
    more: dict[str, Any] = {
        "target_modules": sorted({module_of(entry) for entry in others} - of_experts),
        "target_parameters": sorted(as_parameters | {f"experts.{stack.parameter}" for stack in found}),
        "lora_dropout": 0.0,
    }
    if _fuses(found):
        more |= {"rank_pattern": {_PATTERN: 2 * settings.rank}, "alpha_pattern": {_PATTERN: 2 * settings.alpha}}
    return more


def _fuses(found: Sequence[AdapterStack]) -> bool:
    return any(len(stack.matrices[0]) == 2 for stack in found)


def shares_a(config: Mapping[str, Any], settings: Lora, spec: ModelSpec) -> bool:
    """Whether gate and up have one A in a folder with `target_parameters`, as if PEFT made it with one rank for all.

    Raises ModelError if the folder's `config` has other parameters of experts, or other ranks, than `lora` asks for.
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
    """Return the shapes of the tensors of a folder in PEFT's form. `shared` is the result of `shares_a`."""
    shapes: dict[str, tuple[int, ...]] = {
        entry.name: entry.shape
        for entry in adapter_tensors(spec, settings.rank, settings.targets)
        if entry.expert is None
    }
    for stack in stacks(spec, settings.targets):
        shapes |= stack.shapes(settings, shared)
    return shapes


def to_peft(settings: Lora, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert from one A and B for each matrix (by the names of `adapter_tensors`) to PEFT's form, by PEFT's names."""
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


def _whole_b(stack: AdapterStack, matrices: Sequence[TensorEntry], halves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return B of one expert, [out of the parameter, s]."""
    if stack.parameter == _DOWN:
        return halves[0]
    if len(halves) == 2:
        return torch.block_diag(*halves)
    zero = torch.zeros_like(halves[0])
    return torch.cat([halves[0], zero] if matrices[0].role == "gate" else [zero, halves[0]])


def from_peft(
    settings: Lora, spec: ModelSpec, tensors: Mapping[str, torch.Tensor], shared: bool
) -> dict[str, torch.Tensor]:
    """Convert from PEFT's form, with the shapes of `peft_shapes`, to one A and B for each matrix.

    Raises ModelError if B has numbers that no separate A and B of gate and up can give.
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
                            f"{stack.name('B')}: gate and up of an expert share numbers of A; here each must have its"
                            f" own {settings.rank} (lora.rank), so that B has zeros outside two blocks"
                        )
                found[half_name(entry, "A")] = parts[place].contiguous()
                found[half_name(entry, "B")] = own.contiguous()
    return found
