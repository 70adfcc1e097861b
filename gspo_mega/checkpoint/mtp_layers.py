"""Layers for multi-token prediction, and other tensors that a policy's folder has in addition. They are read from
that folder, and copied unchanged into Hugging Face folders that are made from the policy.

Most families keep the layers after the last decoder layer; a family table names those of others by their beginnings.

They are neither loaded nor trained. A server that drafts with them drafts with the layers of the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gspo_mega.algorithm.fp8 import dequantize_blocks
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.hf_folder import INDEX_NAME, SINGLE_NAME, HuggingFaceFolder, read_scales
from gspo_mega.models.block_fp8 import SCALE_SUFFIX, scale_name
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors, is_ignored_tensor

KEY = "num_nextn_predict_layers"
_FP8 = "F8_E4M3"


class CarriedLayers:
    """The layers in a model's folder.

    There are none if config.json names none, or if the folder has none of their tensors: it has only a config, or
    transformers wrote it, which drops them. `entries` are their tensors in the folder's order.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelError naming what a layer lacks, and tensors whose shape differs from that in the last decoder
        layer, which these layers repeat.
        """
        self.spec = read_model_spec(folder)
        self.entries: list[TensorEntry] = []
        has_others = bool(FAMILIES[self.spec.family].carried)
        has_weights = any((folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))
        if not (self.spec.num_ignored_layers or has_others) or not has_weights:
            return
        self._folder = HuggingFaceFolder(folder)
        names = [name for name in self._folder.files if name != "lm_head.weight" and is_ignored_tensor(self.spec, name)]
        scales = {name for name in names if name.endswith(SCALE_SUFFIX)}
        held = {name: self._folder.shape(name) for name in names if name not in scales}
        if not held:
            return
        problems = list(_problems(self.spec, held))
        for name in held:
            is_fp8 = self._folder.stored_dtype(name) == _FP8
            if is_fp8 and (self.spec.stored is None or scale_name(name) not in scales):
                problems.append(f"missing: {scale_name(name)}, the scales of {name}")
        if problems:
            raise ModelError(
                f"{folder}: its layers for multi-token prediction ({KEY} {self.spec.num_ignored_layers}) are not whole;"
                f" repair the folder, or set {KEY} to 0 in its config.json to leave them out:\n  "
                + "\n  ".join(problems[:20])
            )
        self.entries = [_entry(name, shape) for name, shape in held.items()]

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        """Return the dtype of `read`: the stored one, or for FP8 blocks the one that config.json names."""
        if self._folder.stored_dtype(entry.name) == _FP8:
            return getattr(torch, self.spec.torch_dtype)
        return self._folder.read(entry.name, 0, 0, 0).dtype

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Return the whole tensor [entry.shape] as it is stored, on the host. FP8 blocks become the values that they
        represent.
        """
        tensor = self._folder.read(entry.name)
        if self._folder.stored_dtype(entry.name) != _FP8:
            return tensor
        assert self.spec.stored is not None
        scales = read_scales(self._folder.read(scale_name(entry.name)), self.spec.stored, scale_name(entry.name))
        return dequantize_blocks(tensor, scales, self.spec.stored.block).to(self.dtype(entry))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every tensor, one at a time."""
        return ((entry.name, self.read(entry)) for entry in self.entries)

    def config_json(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of a folder with these layers, from one that names none."""
        return carried_config(self.spec, raw) if self.entries else raw


def carried_config(spec: ModelSpec, raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw`, a config.json, with the number of layers that `spec` names."""
    return raw | {KEY: spec.num_ignored_layers} if spec.num_ignored_layers else raw


def carried_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Return the layers' names, and the beginnings of others', as `modules_to_not_convert` has them."""
    layers = tuple(f"model.layers.{spec.num_layers + place}" for place in range(spec.num_ignored_layers))
    return layers + tuple(beginning.rstrip(".") for beginning in FAMILIES[spec.family].carried)


def is_carried(entry: TensorEntry) -> bool:
    """Whether it is one of `CarriedLayers.entries`."""
    return entry.parameter == entry.name


def _problems(spec: ModelSpec, held: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what is wrong. Each layer must have the tensors of the last decoder layer, two norms and a projection
    of both.
    """
    last = spec.num_layers - 1
    like = {entry.name: entry.shape for entry in hf_tensors(spec) if entry.layer == last}
    wide = spec.hidden_size
    for place in range(spec.num_ignored_layers):
        here = f"model.layers.{spec.num_layers + place}."
        wanted = {name.replace(f"model.layers.{last}.", here): shape for name, shape in like.items()}
        wanted |= {f"{here}{norm}.weight": (wide,) for norm in ("enorm", "hnorm")}
        wanted[f"{here}eh_proj.weight"] = (wide, 2 * wide)
        for name, shape in wanted.items():
            if name not in held:
                yield f"missing: {name} {list(shape)}"
            elif held[name] != shape:
                yield f"wrong shape: {name} is {list(held[name])}, config.json makes it {list(shape)}"


def _entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    """Return the entry of a tensor that no parameter owns. It stays plain if others are quantised."""
    return TensorEntry(
        name=name,
        shape=shape,
        parameter=name,
        role="whole",
        sharding="replicated",
        stage="last",
        layer=None,
        expert=None,
        is_buffer=name.endswith("e_score_correction_bias"),
    )
