"""A Hugging Face folder of random weights in a model's shape, for certifying a layout or measuring.

Written tensor by tensor from the family table; no torch module is built.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from gspo_mega.base.guarded_files import read_text
from gspo_mega.models.families import TensorEntry
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.stacked import checkpoint_tensors

# Large enough that experts are distinguishable and log-probs differ from those of a uniform distribution.
_MATRIX_STD, _VECTOR_STD = 0.08, 0.1
_FILE_BYTES = 2 * 1024**3


def make_random_folder(shape_file: str | Path, folder: Path, seed: int) -> Path:
    """Write `folder` with the config.json in `shape_file` and fp32 weights drawn from `seed`; returns it.

    An existing folder with the same shape and seed is kept. Raises ModelError for a shape that is not supported.
    """
    spec = read_model_spec(shape_file)
    stamp = json.dumps({"shape": spec.raw, "seed": seed}, sort_keys=True)
    stamp_file = folder / "random.json"
    if stamp_file.is_file() and read_text(stamp_file) == stamp:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(shape_file, folder / "config.json")
    entries = checkpoint_tensors(spec)
    shards: list[list[TensorEntry]] = [[]]
    room = _FILE_BYTES
    for entry in entries:
        if shards[-1] and entry.num_elements * 4 > room:
            shards.append([])
            room = _FILE_BYTES
        shards[-1].append(entry)
        room -= entry.num_elements * 4
    names = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {entry.name: _draw(entry, index + len(names), seed) for index, entry in enumerate(shard)}, folder / file
        )
        names |= {entry.name: file for entry in shard}
    size = sum(entry.num_elements * 4 for entry in entries)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": names}), encoding="utf-8"
    )
    stamp_file.write_text(stamp, encoding="utf-8")
    return folder


def _draw(entry: TensorEntry, index: int, seed: int) -> np.ndarray:
    values = np.random.default_rng((seed, index)).standard_normal(entry.shape, dtype=np.float32)
    if len(entry.shape) > 1:
        return _MATRIX_STD * values
    return _VECTOR_STD * values if entry.name.endswith("bias") else 1 + _VECTOR_STD * values
