"""Reading a Hugging Face folder of safetensors: the file and shape of each tensor, and slices of it.

Owns the folder on disk, a single file or sharded with an index. Knows nothing of models or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gspo_mega.base.errors import ModelError
from gspo_mega.base.guarded_files import open_regular, read_json_file

# What safetensors calls the types that weights may have.
_FLOATS = ("BF16", "F16", "F32", "F64")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class HuggingFaceFolder:
    """The tensors of one folder. Files are opened on first use and memory-mapped, so a slice reads only its bytes."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ModelError if there are no safetensors or the index cannot be read."""
        self.path = Path(folder)
        self._open: dict[str, safe_open] = {}
        index = self.path / INDEX_NAME
        if index.is_file():
            self.files: dict[str, str] = _weight_map(index)
        elif (self.path / SINGLE_NAME).is_file():
            self.files = dict.fromkeys(self._file(SINGLE_NAME).keys(), SINGLE_NAME)
        else:
            raise ModelError(
                f"{self.path}: has neither {INDEX_NAME} nor {SINGLE_NAME}; only safetensors checkpoints are supported"
            )

    @property
    def all_files(self) -> dict[str, str]:
        """{tensor: file} of everything that is stored, `files` and what stands behind it."""
        return self.files

    def __enter__(self) -> HuggingFaceFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            try:
                open_regular(self.path / name).close()  # the library itself would wait for a pipe
                self._open[name] = safe_open(self.path / name, framework="pt")
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelError(f"{self.path / name}: cannot be read as safetensors: {error}") from error
        return self._open[name]

    def problems(self, may_be_there: Callable[[str], bool]) -> list[str]:
        """What is wrong with how the folder stores its tensors; `may_be_there`: true for names to ignore."""
        return []

    def file_of(self, name: str) -> str:
        """The name of the file that a tensor, which can be `read`, comes from."""
        return self.files[name]

    def type_problem(self, name: str) -> str | None:
        """What is wrong with the type that a tensor is stored in, or None. Raises ModelError as `shape` does."""
        kind = self.stored_dtype(name)
        if kind in _FLOATS:
            return None
        return f"wrong type: {name} is {kind}; weights are one of {', '.join(_FLOATS)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that the index names. Raises ModelError if its file lacks it."""
        return tuple(self._slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """What a tensor's file calls its dtype (`BF16`, `F8_E4M3`). Raises ModelError as `shape` does."""
        return self._slice(name).get_dtype()

    def _slice(self, name: str, file: str | None = None):
        file = self.files[name] if file is None else file
        try:
            return self._file(file).get_slice(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self.path / file}: the index names {name!r} there, the file lacks it ({error})"
            ) from error

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """The slice [start, start + length) along `dim` (0 or 1) of a whole stored tensor; all of it without `length`.

        Returns the tensor's shape but for `dim`, in the file's dtype, on the host, local to this rank.
        """
        part = self._slice(name)
        stop = part.get_shape()[dim] if length is None else start + length
        return part[start:stop] if dim == 0 else part[:, start:stop]


def not_finite(values: torch.Tensor, name: str, file: str) -> str | None:
    """The problem of a stored tensor, `name` in `file`, of which `values`, of any shape and floating dtype, is all or a
    part, where one of them is NaN or infinite; else None.
    """
    if values.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(values)):  # NaN is both ends
        return None
    kinds = [kind for kind, found in (("NaN", torch.isnan(values)), ("infinite", torch.isinf(values))) if found.any()]
    return f"not finite: {name} in {file} holds values that are {' and '.join(kinds)}"


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file beside the index}. Raises ModelError for other paths, which a downloaded folder may name."""
    try:
        found = read_json_file(index)["weight_map"]
        if not isinstance(found, dict):
            raise TypeError(f"weight_map is of the type {type(found).__name__}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{index}: not an index of safetensors files ({type(error).__name__}: {error}); it needs a 'weight_map'"
        ) from error
    for tensor, file in found.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise ModelError(
                f"{index}: weight_map: {tensor!r} has the file {file!r}; it must be the name of a file beside the index"
            )
    return found


def check_names_and_shapes(
    folder: HuggingFaceFolder, shapes: dict[str, tuple[int, ...]], may_be_there: Callable[[str], bool]
) -> list[str]:
    """The folder's problems for a model of these tensors: names that are missing, unexpected or of another shape or
    type, and its own `problems`.

    `may_be_there`: true for names to ignore.
    """
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in folder.files]
    for name in folder.files:
        if name not in shapes:
            if not may_be_there(name):
                problems.append(f"unexpected: {name}")
            continue
        try:
            found = folder.shape(name)
        except ModelError as error:
            problems.append(str(error))
            continue
        if found != shapes[name]:
            problems.append(f"wrong shape: {name} is {list(found)}, config.json makes it {list(shapes[name])}")
        if (wrong := folder.type_problem(name)) is not None:
            problems.append(wrong)
    return problems + folder.problems(may_be_there)
