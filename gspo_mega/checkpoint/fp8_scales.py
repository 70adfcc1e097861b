"""FP8 scales of recipe `delayed` in a checkpoint: one file per rank, which any layout can read.

A tensor is rounded with one scale, which follows from the largest values of past passes. All ranks of a pipeline stage
share a tensor's largest value at each update, so a tensor's scale and history belong to its layer, and not to the way
in which ranks divide it. Only the largest values since the last update are a rank's own; of those, another layout takes
the largest of all ranks of the stage, which is what the next update would have made of them. (Experts on different
expert ranks with the same local number share their values, too; each goes on with what it had.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gspo_mega.checkpoint.folders import rank_file

_HISTORY = "amax_history"
_SEQUENTIAL_EXPERT = re.compile(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERTS = re.compile(r".+\.experts\.linear_fc[12]")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def read_scales(
    folder: Path,
    modules: Collection[str],
    saved: Mapping[str, int],
    here: Mapping[str, int],
    *,
    rank: int,
    expert_rank: int,
    num_experts: int,
) -> dict[str, torch.Tensor]:
    """Return this rank's state for `Fp8Scales.load` from the folder with all ranks' files.

    `modules`: names of this rank's modules. `saved`, `here`: sizes of the parallel groups then and now (`layout_of`).
    Empty if nothing was saved, or if another layout was saved by a version that did not number layers through the
    model. Raises OSError or SafetensorError for a file that is missing or damaged.
    """
    if not folder.is_dir():
        return {}
    if saved == here:
        tensors = load_file(rank_file(folder, rank))
        if _is_old(tensors) or _layers(tensors) == _layers(modules):
            return tensors
    slots_then, slots_now = (max(num_experts // sizes["expert"], 1) for sizes in (saved, here))
    first_expert = expert_rank * slots_now
    sources = {module: _source(module, first_expert, slots_then) for module in modules}
    found: dict[str, torch.Tensor] = {}
    stage_size = saved["world"] // saved["pipeline"]
    for start in range(0, saved["world"], stage_size):
        files = [rank_file(folder, start + other) for other in range(stage_size)]
        found |= _of_stage(files, {*sources.values()})
    if _is_old(found):
        return {}
    state = {name: tensor for name, tensor in found.items() if "/" not in name}
    for module, source in sources.items():
        for name, tensor in found.items():
            if not name.startswith(f"{source}/"):
                continue
            if _GROUPED_EXPERTS.fullmatch(module):
                slots = tensor.chunk(slots_then, dim=-1)
                tensor = torch.cat([slots[(first_expert + local) % slots_then] for local in range(slots_now)], dim=-1)
            state[module + name.removeprefix(source)] = tensor
    return state


def _is_old(names: Collection[str]) -> bool:
    """Whether the names are those of a version that numbered a rank's layers from 0, after the number of its chunk."""
    return any(name[0].isdigit() for name in names)


def _layers(names: Collection[str]) -> set[str]:
    return {match[1] for name in names if (match := _LAYER.match(name))}


def _source(module: str, first_expert: int, num_saved_slots: int) -> str:
    """Return the name under which the scales of this rank's `module` were saved."""
    match = _SEQUENTIAL_EXPERT.fullmatch(module)
    if match is None:
        return module
    return f"{match[1]}local_experts.{(first_expert + int(match[2])) % num_saved_slots}.{match[3]}"


def _of_stage(files: list[Path], modules: Collection[str]) -> dict[str, torch.Tensor]:
    """Return what the ranks of one pipeline stage saved of `modules`, by name, with the flags; of old names only the
    names.
    """
    with safe_open(files[0], "pt") as first:
        names = [*first.keys()]
        if _is_old(names):
            return {name: torch.empty(0) for name in names}
        chosen = [name for name in names if name.rsplit("/", 2)[0] in modules]
        if not chosen:
            return {}
        found = {name: first.get_tensor(name) for name in names if "/" not in name or name in set(chosen)}
    for file in files[1:]:
        with safe_open(file, "pt") as other:
            for name in chosen:
                if name.endswith(f"/{_HISTORY}"):
                    latest = found[name][0]
                    torch.maximum(latest, other.get_slice(name)[0:1][0], out=latest)
    return found


def by_tensor(
    state: Mapping[str, torch.Tensor], *, expert_rank: int, num_local_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the numbers of a rank's state under names that belong to no layout: experts have their number in the
    model.
    """
    first = expert_rank * num_local_experts
    for name, tensor in state.items():
        module, _, kind = name.partition("/")
        if match := _SEQUENTIAL_EXPERT.fullmatch(module):
            yield f"{match[1]}{first + int(match[2])}.{match[3]}/{kind}", tensor
        elif _GROUPED_EXPERTS.fullmatch(module):
            start, _, linear = module.rpartition(".")
            for local, part in enumerate(tensor.chunk(num_local_experts, dim=-1)):
                yield f"{start}.{first + local}.{linear}/{kind}", part
        else:
            yield name, tensor
