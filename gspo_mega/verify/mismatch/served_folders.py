"""Make folders of weights from which servers start if `model.path` itself is not suitable.

`quantized`: FP8 blocks, for a server with `server.quantization: fp8_block` and a plain `model.path`. `rounded`: plain
weights, rounded as the servers round them, so that a plain server shows what rounding the weights does by itself.
Imports torch only to write.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gspo_mega.config import Config
from gspo_mega.config.precision import loads_quantized, server_dtype
from gspo_mega.config.schema import Run
from gspo_mega.models.huggingface import read_stored, weights_stamp

if TYPE_CHECKING:
    import torch

    from gspo_mega.models.tensors import TensorEntry

Kind = Literal["quantized", "rounded"]


class ServedFolders:
    """The folders that servers of one configuration start from. `config`: the run's own."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def path(self, kind: Kind) -> Path:
        """Return the path of the folder, whether it exists or not. Other weights or another rounding have another
        path.
        """
        config = self._config
        settings = (config.server.quantization, server_dtype(config.server, config.precision), str(config.fp8), kind)
        return _parent(config.run) / f"{kind}-{weights_stamp(config.model.path, *settings)}"

    def start(self) -> Path | None:
        """Return the folder that the run's servers start from; None if that is model.path."""
        if loads_quantized(self._config.server) and read_stored(self._config.model.path) is None:
            return self.path("quantized")
        return None

    def make(self, folder: Path) -> None:
        """Make `folder`, one of the paths, unless it exists. Raises ModelError, CheckpointError, OSError."""
        if (folder / "config.json").is_file():
            return
        from gspo_mega.checkpoint.convert import FILE_BYTES, to_huggingface
        from gspo_mega.checkpoint.quantized import published_form
        from gspo_mega.checkpoint.served_folders import to_form
        from gspo_mega.checkpoint.tensor_sources import open_checkpoint

        def progress(_done: int, _total: int, _name: str) -> None: ...

        folder.parent.mkdir(parents=True, exist_ok=True)
        source = open_checkpoint(Path(self._config.model.path))
        if folder == self.path("quantized"):
            to_form(source, folder, published_form(self._config), progress=progress)
        else:
            form = self._rounded_form(source)
            to_huggingface(source, folder, form=form, progress=progress, file_bytes=FILE_BYTES)

    def remove(self) -> None:
        """Remove the folders that `make` made: each is as large as the model, and can be made again."""
        shutil.rmtree(_parent(self._config.run), ignore_errors=True)

    def _rounded_form(self, source: Any) -> Any:
        import torch

        from gspo_mega.algorithm.fp8 import dequantize_blocks
        from gspo_mega.algorithm.rounding import dequantize_int8_rows, served_experts, served_linear
        from gspo_mega.checkpoint.quantized import PublishedForm, published_form, quantize_weight
        from gspo_mega.models.block_fp8 import is_quantized, is_rounded, served_layout
        from gspo_mega.models.tensors import hf_tensors

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[
            server_dtype(self._config.server, self._config.precision)
        ]
        layout, rule = served_layout(self._config), published_form(self._config).rule
        kind = self._config.server.quantization
        entries = {entry.name: entry for entry in hf_tensors(source.spec)}

        def values(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            """Return the values, [n, k] float32, of what SGLang keeps as [k, n] with a scale per output channel."""
            return (
                dequantize_int8_rows(data.t().contiguous(), scale.reshape(-1, 1))
                if kind == "int8"
                else (dequantize_blocks(data.t().contiguous(), scale.reshape(-1, 1), (1, data.shape[0])))
            )

        def rounded(entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
            if source.spec.stored is not None or not is_rounded(kind, entry):
                return tensor  # a quantized folder's values are rounded already
            if layout is not None:
                if not is_quantized(layout, entry):
                    return tensor
                return dequantize_blocks(*quantize_weight(tensor, rule, layout.block), layout.block)
            assert kind in ("fp8", "int8")
            partner = _partner(entry.name)
            if kind == "fp8" and ".experts." in entry.name:
                # An expert's gate and up share a scale, which follows from the larger of them.
                both = [tensor.flatten()]
                if partner in entries:
                    both.append(source.read(entries[partner], dtype).flatten())
                data, scale = served_experts(torch.cat(both)[None, None], "fp8")
                flat = dequantize_blocks(data[0], scale.reshape(1, 1), (1, data.shape[2]))
                return flat[0, : tensor.numel()].view(tensor.shape)
            return values(*served_linear(tensor, kind))

        class Rounded(PublishedForm):
            """Plain tensors with the values of the servers' quantized ones."""

            def tensors(self, entry: TensorEntry, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
                yield entry.name, tensor if entry.is_buffer else rounded(entry, tensor).to(self.plain)

        return Rounded(dtype, dtype)


def _parent(run: Run) -> Path:
    return Path(run.dir).absolute() / f"{run.name}-budget" / "weights"


def _partner(name: str) -> str:
    """Return the matrix that shares an expert's scale: up for gate, gate for up; otherwise an empty string."""
    for one, other in (("gate_proj", "up_proj"), ("up_proj", "gate_proj"), (".w1.", ".w3."), (".w3.", ".w1.")):
        if one in name:
            return name.replace(one, other)
    return ""
