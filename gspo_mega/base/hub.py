"""Ids of the Hugging Face hub (`Qwen/Qwen3-0.6B`) in place of folders: found in this machine's cache, or downloaded.

Where the cache is, and whether the network may be asked, is decided as by every program that uses `huggingface_hub`:
HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. Without that package no id is known.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gspo_mega.base.errors import FolderError
from gspo_mega.base.near_paths import did_you_mean

Kind = Literal["model", "dataset"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights in other formats than safetensors, and what other programs keep in a model's repository.
_NOT_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite", "original/*", "onnx/*")
_WEIGHTS = ("*.safetensors",)
_ROW_FILES = (".parquet", ".jsonl")


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of an id, `organisation/name`. A relative path of two parts has it, too."""
    return _ID.fullmatch(text) is not None


def missing_hint(path: str | Path, kind: Kind = "model") -> str:
    """What to add to "no such folder": the nearest path that exists, and how to get `path` from the hub if it may be an
    id, or of a dataset a file in one. It is none if its first folder exists here.
    """
    near = did_you_mean(path)
    repository, inside = (str(path), "") if kind == "model" else _split(str(path))
    if not is_hub_id(repository) or Path(path).parts[0] in (".", "..") or Path(Path(path).parts[0]).is_dir():
        return near
    key, what = ("model", "") if kind == "model" else ("data", " --repo-type dataset")
    return (
        f"{near or '.'} If it is {'a file of a dataset' if inside else 'an id'} of the Hugging Face hub, it is not in"
        f" this machine's cache: run hf download {repository}{what}, or name a revision (`{key}.revision: main`),"
        " which lets the command download it"
    )


def find_model(model_id: str, revision: str | None, *, needs_weights: bool) -> Path | None:
    """The folder of a model in the cache; None if it is not there.

    `revision`: a branch, tag or commit, which may be downloaded first; without one, what the cache has as main.
    Without `needs_weights` only the files that describe the model are downloaded. Raises FolderError, saying why, if a
    download fails and the cache has nothing.
    """
    left_out = _NOT_WEIGHTS if needs_weights else (*_NOT_WEIGHTS, *_WEIGHTS)
    return _snapshot(model_id, "model", revision, left_out)


def find_rows(name: str, revision: str | None) -> Path | None:
    """The file or folder of a dataset in the cache; None if it is not there. `revision`: as in `find_model`.

    `name`: an id with the path of a file or folder in it (`openai/gsm8k/main/test-00000-of-00001.parquet`), which has
    the form of any relative path: it is not there unless there is a dataset of that id. An id by itself is refused,
    because the only file in a cache need not be the only one of the dataset. Raises FolderError as `find_model` does,
    and if the file is not in the dataset.
    """
    dataset, inside = _split(name)
    if any(part in ("", "..") for part in inside.split("/")) and inside:
        raise FolderError(f"{inside} is no path inside the dataset {dataset}")
    folder = _snapshot(dataset, "dataset", revision, (), must_exist=not inside)
    if folder is None:
        return None
    if inside:
        if (folder / inside).exists():
            return folder / inside
        raise FolderError(f"the dataset {dataset} has no {inside}; {_files_of(dataset, folder)}")
    raise FolderError(f"{dataset} does not say which of its files is meant; {_files_of(dataset, folder)}")


def _split(name: str) -> tuple[str, str]:
    """(id, path inside)"""
    organisation, _, rest = name.partition("/")
    short, _, inside = rest.partition("/")
    return f"{organisation}/{short}", inside


def _row_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in _ROW_FILES)


def _files_of(dataset: str, folder: Path) -> str:
    found = _row_files(folder)
    if not found:
        return "it has no JSONL or Parquet file"
    more = f" and {len(found) - 6} more" if len(found) > 6 else ""
    return f"valid: {', '.join(f'{dataset}/{name}' for name in found[:6])}{more}"


def _snapshot(
    repository: str,
    kind: Kind,
    revision: str | None,
    left_out: Sequence[str],
    must_exist: bool = True,
) -> Path | None:
    """`must_exist`: a download of what the hub does not have is an error."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError:
        return None
    arguments = dict(repo_type=kind, revision=revision, ignore_patterns=list(left_out))
    failure: Exception | None = None
    if revision is not None:
        try:
            return Path(hub.snapshot_download(repository, **arguments))
        except Exception as error:  # of the hub, of its HTTP client, of the disk
            failure = error
    # Without a network, also for a commit, the cache is the answer.
    try:
        return Path(hub.snapshot_download(repository, **arguments, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        # The hub's refusal of a dataset that it has is said; a path may be none of its ids, with or without a network.
        answered = isinstance(failure, errors.HfHubHTTPError) and not isinstance(
            failure, errors.RepositoryNotFoundError
        )
        if failure is None or not (must_exist or answered):
            return None
        raise FolderError(f"{repository} cannot be downloaded: {_reason(failure)}") from None
    except (OSError, ValueError) as error:
        raise FolderError(f"{repository}: this machine's cache of it cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
