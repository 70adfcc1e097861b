"""Make a Hugging Face folder of a GGUF file: `python tools/gguf_to_hf.py FILE.gguf OUT_DIR`.

OUT_DIR gets config.json, model.safetensors, the tokenizer with its chat template, generation_config.json, and
gguf.json, which says what was read. The weights are those of the file, dequantised: they are not the published ones if
the file is quantised. What can be read is what transformers reads. OUT_DIR exists only once it is complete. Exit code
0: complete; 2: the file cannot be used; 6: OUT_DIR cannot be written.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from conversion_tool import guarded

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import GspoMegaError, ModelError
from gspo_mega.base.untrusted import printable_output
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters

_MAGIC = b"GGUF"


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gguf_to_hf", description="Make a Hugging Face folder of a GGUF file.")
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="what to read")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to create; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the weights in OUT_DIR (default: float32, in which every dequantised number is exact)",
    )
    options = parser.parse_args(arguments)

    def run() -> int:
        out_dir = options.out_dir.absolute()
        to_huggingface(options.file, out_dir, getattr(torch, options.dtype))
        print(f"{out_dir}: written and complete; tensors in the file: {_types_line(out_dir)}, dequantised here")
        try:
            spec = read_model_spec(out_dir)
        except GspoMegaError as error:
            print(f"{out_dir}: a run cannot train it: {error}")
        else:
            print(
                f"{out_dir}: a run can train it: {spec.family}, {count_parameters(spec).total / 1e6:.1f} M parameters"
            )
        return 0

    return guarded(run)


def to_huggingface(file: Path, out_dir: Path, dtype: torch.dtype) -> None:
    """Write the Hugging Face folder `out_dir`, with weights in `dtype`. Raises ModelError: `file` is none that
    transformers reads, or `out_dir` exists.
    """
    if out_dir.exists():
        raise ModelError(f"{out_dir}: exists already; name a folder that does not exist")
    read = _described(file)
    model, tokenizer = _loaded(file, dtype)
    atomic_io.make_folder(out_dir.parent)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as name:
        folder = Path(name, out_dir.name)
        model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            atomic_io.follow_umask(path)
        tokenizer.save_pretrained(folder)
        (folder / "gguf.json").write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")
        for path in [*folder.iterdir(), folder]:
            atomic_io.sync(path)
        folder.rename(out_dir)
        atomic_io.sync(out_dir.parent)


def _described(file: Path) -> dict[str, Any]:
    """Name, SHA-256, and number of tensors of each type. Raises ModelError for what is no whole GGUF file."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise ModelError(f"{file}: does not begin with {_MAGIC.decode()}, so it is not a GGUF file")
            opened.seek(0)
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        from gguf import GGUFReader

        tensors = GGUFReader(file).tensors
    except Exception as error:  # the reader maps arrays where the file says, and numpy raises what it likes
        raise ModelError(f"{file}: is damaged or cut short: {_first_line(error)}") from error
    types = collections.Counter(tensor.tensor_type.name for tensor in tensors)
    return {"file": file.name, "sha256": digest, "tensors": dict(types), "gguf": importlib.metadata.version("gguf")}


def _loaded(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model, its weights plain, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    place: dict[str, Any] = dict(gguf_file=file.name, local_files_only=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **place)
    except Exception as error:  # transformers has no error of its own for what it cannot read
        known = ", ".join(sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"}))
        raise ModelError(
            f"{file}: transformers {importlib.metadata.version('transformers')} cannot read it: {_first_line(error)}"
            f" (the architectures that it reads: {known})"
        ) from error
    # The weights are plain from here on, and a folder that calls them quantised would be refused by what loads it.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _types_line(folder: Path) -> str:
    types = json.loads((folder / "gguf.json").read_text(encoding="utf-8"))["tensors"]
    return ", ".join(f"{name} ({number})" for name, number in sorted(types.items()))


if __name__ == "__main__":
    sys.exit(main())
