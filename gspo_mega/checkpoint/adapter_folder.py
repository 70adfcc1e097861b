"""A policy's adapters as a PEFT folder: adapter_config.json and adapter_model.safetensors.

Owns writing one that Hugging Face's `peft` loads, or a server, and starting from one. Without experts these are the
same file. With experts PEFT and transformers 5 have one adapter for all experts of a layer (`adapter_experts.py`), and
SGLang an A and a B for each expert's matrix, as PEFT had with transformers 4. Merged weights are `hf_export.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gspo_mega.base import durable
from gspo_mega.base.errors import ModelError, PublishError
from gspo_mega.base.guarded_files import read_json_file
from gspo_mega.checkpoint.adapter_experts import from_peft, peft_settings, peft_shapes, shares_a, to_peft
from gspo_mega.checkpoint.adapter_tensors import AdapterTensors, fill_adapters
from gspo_mega.config.schema import Lora
from gspo_mega.engine.collectives import raise_together
from gspo_mega.models.low_rank import adapted, adapter_tensors, module_of
from gspo_mega.models.spec import ModelSpec

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.policy import PolicyEngine
    from gspo_mega.engine.process_groups import ParallelGroups

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
# Settings of PEFT that change what an adapter computes, with the value that leaves it B A alpha / rank.
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
# Those of them that a folder with `target_parameters` has for experts.
_OF_EXPERTS = ("rank_pattern", "alpha_pattern", "target_parameters")


def served_config(settings: Lora, spec: ModelSpec, base: str) -> dict[str, Any]:
    """What adapter_config.json says of adapters with an A and a B for each matrix, those of experts too."""
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
    """Write the adapters, in fp32, to `out_dir`, which appears complete or not at all; an older one is replaced.
    `served`: in the form that servers load. Collective. Raises PublishError, the same on every rank, if it cannot be
    written.
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
            durable.remove_tree(staging, at="publish.clear")
            durable.make_folder(staging, at="publish.folder")
            with durable.operation("publish.tensors"):
                save_file(tensors, staging / WEIGHTS_NAME, metadata={"format": "pt"})
            durable.sync(staging / WEIGHTS_NAME, at="publish.sync")
            durable.atomic_write_json(staging / CONFIG_NAME, config, at="publish.config")
            durable.remove_tree(replaced, at="publish.drop")
            if out_dir.exists():
                durable.rename(out_dir, replaced, at="publish.aside")
            durable.rename(staging, out_dir, at="publish.rename")
            durable.remove_tree(replaced, at="publish.drop")
        except (OSError, SafetensorError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    raise_together(problems, groups.host, PublishError, f"{out_dir} cannot be written")


def start_of_adapters(engine: PolicyEngine) -> None:
    """Fill the engine's adapters from `lora.path`, or anew: A random by the seed, B zero. Nothing without `lora`.
    Collective. Raises ModelError, the same on every rank, for a folder that does not hold these adapters.
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
    """The tensors of a PEFT folder by the names of `adapter_tensors`, checked against `lora` and the model. The folder
    is of transformers 5 (with `target_parameters` for experts) or has an A and a B for each matrix. Raises ModelError.
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
