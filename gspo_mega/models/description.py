"""The files of a Hugging Face folder that describe a model, without weights and code: an export or a conversion copies
them.

Owns which files these are and which links among them are followed. A downloaded folder is not trusted: a link in it
could carry any file that this user can read into a folder that is then published.
"""

from __future__ import annotations

import os
from pathlib import Path

from gspo_mega.base.errors import ModelError

# Configuration, generation configuration, tokenizer, chat template, model card. Never code: nothing here runs it.
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".bpe", ".vocab", ".md")
_WITHOUT_SUFFIX = ("LICENSE", "LICENCE", "NOTICE", "README", "COPYING")
# Lists of the weights; whoever writes weights writes these anew.
_OF_WEIGHTS = (".index.json", "manifest.json")


def description_files(folder: Path) -> list[Path]:
    """The files of `folder` that describe its model, by name.

    A link is followed inside the folder, into the blobs of a Hugging Face cache that the folder belongs to, and to the
    file of the same name in another model's folder. Raises ModelError naming a link that leads elsewhere.
    """
    files = sorted(entry for entry in folder.iterdir() if entry.is_file() and _describes(entry.name))
    for file in files:
        if file.is_symlink() and not _may_lead_to(file, folder):
            raise ModelError(
                f"{file}: this link leads to {os.path.realpath(file)}, outside the model's folder; its content would be"
                " copied into every export. Put the file itself there, or remove the link"
            )
    return files


def _describes(name: str) -> bool:
    if name.startswith(".") or name.endswith(_OF_WEIGHTS):
        return False
    return name.endswith(_SUFFIXES) or (name.partition(".")[0] in _WITHOUT_SUFFIX and not name.endswith((".py", ".sh")))


def _may_lead_to(link: Path, folder: Path) -> bool:
    target, home = Path(os.path.realpath(link)), Path(os.path.realpath(folder))
    if target.is_relative_to(home):
        return True
    # models--org--name/snapshots/REVISION/FILE -> models--org--name/blobs/HASH
    if home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs":
        return True
    return target.name == link.name and (target.parent / "config.json").is_file()
