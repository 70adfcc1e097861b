"""`gspo-mega train` whose servers get weights of fewer mantissa bits: `tolerance_dose.py BITS CONFIG [key=value ...]`.

The dose of `tolerance.py`. The trainer is untouched; what it publishes is rounded to BITS explicit mantissa bits, to
nearest even, before checksums are taken and files are written, so every publish is verified as always. Only the
matrices that FP8 would round are: norms, embedding, LM head and router stay exact. The result in `hf/` is exact too.

The launcher starts this file once more as a rank: `tolerance_dose.py BITS --config ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator

import torch

from gspo_mega.algorithm.rounding import round_mantissa
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.config import load_config
from gspo_mega.launcher.local import launch
from gspo_mega.models.tensors import TensorEntry
from gspo_mega.sync import publish
from gspo_mega.train import worker

_EXACT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")


def dosed(name: str, tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """The tensor of that Hugging Face name, any shape and dtype, as a server of the dose gets it."""
    if tensor.dim() < 2 or any(part in name for part in _EXACT):
        return tensor
    return round_mantissa(tensor, bits).to(tensor.dtype)


def tensors_of_dose(bits: int) -> type[PolicyTensors]:
    class Dosed(PolicyTensors):
        def owned(self, dtype: torch.dtype) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
            for entry, tensor in super().owned(dtype):
                yield entry, dosed(entry.name, tensor, bits)

        def shares(
            self, dtype: torch.dtype, names: Collection[str]
        ) -> Iterator[tuple[list[TensorEntry], torch.Tensor]]:
            for entries, share in super().shares(dtype, names):
                yield entries, dosed(entries[0].name, share, bits)

        def brought_to(
            self, home: Callable[[TensorEntry], int], dtype: torch.dtype
        ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
            for entry, tensor in super().brought_to(home, dtype):
                yield entry, dosed(entry.name, tensor, bits)

    return Dosed


def main(bits: int, arguments: list[str]) -> int:
    if arguments[0] == "--config":
        publish.PolicyTensors = tensors_of_dose(bits)
        worker.main(arguments)  # does not return
    loaded = load_config(arguments[0], arguments[1:], "train")
    return launch(loaded, "train", print, worker_command=[sys.executable, __file__, str(bits)])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
