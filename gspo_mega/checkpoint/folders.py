"""The checkpoints of a run as folders: which are complete, which are intact, and which are kept.

Folders are created and removed in such an order that one complete checkpoint exists at every moment. `load.py`
describes their content. Only rank 0 changes folders; any rank may read.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.base.untrusted import open_regular, read_text

# Format 2 adds `files`, the checksums, to format 1.
FORMAT_VERSION = 2
_COMPLETE = re.compile(r"step_(\d{8})")


def draft_folder(final: Path, token: str) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name.

    `token` identifies this process, because writers that a killed process started may still be writing.
    """
    return final.with_name(f"{final.name}.{token}.part")


def rank_file(folder: str | Path, rank: int) -> Path:
    """Return the path inside a checkpoint of one rank's file in the folder `rng` or in one of FP8 scales."""
    return Path(folder) / f"rank_{rank:05d}.safetensors"


def remove_drafts(run_folder: RunFolder) -> None:
    """Remove the drafts and half-removed folders that interrupted saves left."""
    for pattern in ("step_*.part", ".step_*.removed"):
        for leftover in run_folder.checkpoints_dir.glob(pattern):
            atomic_io.remove_tree(leftover, at="save.clear")


def commit_draft(run_folder: RunFolder, draft: Path, final: Path) -> None:
    """Give a complete draft its name and make it `latest`. Only then replace an earlier checkpoint of the same step."""
    aside = _aside(final)
    atomic_io.remove_tree(aside, at="save.drop")
    if final.exists():
        atomic_io.rename(final, aside, at="save.aside")
    atomic_io.rename(draft, final, at="save.rename")
    atomic_io.remove_tree(aside, at="save.drop")
    make_latest(run_folder, final)


def make_latest(run_folder: RunFolder, folder: Path) -> None:
    """Make `latest` name a checkpoint."""
    atomic_io.atomic_write_text(run_folder.latest_checkpoint_file, folder.name, at="save.latest")


def restore_moved_aside(run_folder: RunFolder) -> None:
    """Give a checkpoint its name back if an interrupted save had moved it aside."""
    for aside in run_folder.checkpoints_dir.glob(".step_*.aside"):
        final = aside.with_name(aside.name.removeprefix(".").removesuffix(".aside"))
        if not final.exists():
            atomic_io.rename(aside, final, at="save.rename")


def prune(run_folder: RunFolder, step: int, keep_last: int, keep_every: int) -> None:
    """Remove checkpoints up to `step`, except the newest `keep_last` and multiples of `keep_every` (unless 0).

    Checkpoints of later steps stay: the run went back to an earlier one, by hand or after damage.
    """
    past = [folder for folder in complete_checkpoints(run_folder) if step_of(folder) <= step]
    for folder in past[:-keep_last]:
        if keep_every == 0 or step_of(folder) % keep_every:
            atomic_io.remove_tree(folder, at="save.prune")


def candidates(run_folder: RunFolder) -> list[Path]:
    """Return the folder that `latest` names, whether it exists or not, then complete ones of earlier steps, newest
    first.

    Returns nothing for a run without checkpoints. Raises CheckpointError if `latest` names something else.
    """
    try:
        named = run_folder.checkpoints_dir / read_text(run_folder.latest_checkpoint_file).strip()
    except FileNotFoundError:
        return []
    if not _COMPLETE.fullmatch(named.name):
        raise CheckpointError(
            f"{run_folder.latest_checkpoint_file} names {named.name!r}, which is not a checkpoint's name"
        )
    return [
        named,
        *(folder for folder in reversed(complete_checkpoints(run_folder)) if step_of(folder) < step_of(named)),
    ]


def complete_checkpoints(run_folder: RunFolder) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    if not run_folder.checkpoints_dir.is_dir():
        return []
    return sorted(
        f for f in run_folder.checkpoints_dir.iterdir() if _COMPLETE.fullmatch(f.name) and (f / "state.json").is_file()
    )


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def set_aside_damaged(folder: Path) -> None:
    """Rename a damaged checkpoint, so that it is not considered again. Its files stay for inspection."""
    if folder.is_dir():
        names = (f"{folder.name}.damaged{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        atomic_io.rename(
            folder, next(target for name in names if not (target := folder.with_name(name)).exists()), at="save.aside"
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Return `state.json`. Raises ValueError if it is missing or damaged, CheckpointError if a newer version wrote
    it.
    """
    record = read_json(folder / "state.json")
    if not isinstance(record, dict) or not isinstance(record.get("format_version"), int):
        raise ValueError("state.json is missing" if record is None else "state.json is not a checkpoint's")
    if record["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} was written by a newer gspo_mega (checkpoint format {record['format_version']}; this one reads"
            f" up to {FORMAT_VERSION}); continue the run with the newer one"
        )
    return record


def checksums(folder: Path, files: list[Path]) -> dict[str, list[Any]]:
    """Read the given files back. Returns {name inside `folder`: [size in bytes, SHA-256 in hex]}."""
    return {str(file.relative_to(folder)): [file.stat().st_size, _digest(file)] for file in files}


def checksum_problems(folder: Path, files: dict[str, list[Any]], share: int, num_shares: int) -> list[str]:
    """Return the differences from the checksums in this share of the files. The ranks' shares together cover all
    files.
    """
    problems = []
    for name, (size, digest) in sorted(files.items())[share::num_shares]:
        file = folder / name
        try:
            if file.stat().st_size != size:
                problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
            elif _digest(file) != digest:
                problems.append(f"{name} has other bytes than were written")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems


def _digest(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.aside")
