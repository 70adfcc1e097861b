"""Which weights are in a folder, as far as names, sizes and times of its files tell.

Owns the digest by which copies that are made of a folder are named, so that a copy is used for its own source only. It
reads no weights: a file that is written again has another time. `content_stamp` is for a folder that may be copied: it
reads the ends of each file. Standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from gspo_mega.base.guarded_files import open_regular


def weights_stamp(folder: str | Path, *settings: object) -> str:
    """12 hex digits: of the folder's absolute path, its safetensors and config.json (names, sizes, times of the last
    change), and of `settings`, by their `repr`, which a copy depends on besides. Raises OSError.
    """
    path = Path(folder)
    files = sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    found = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return hashlib.sha256(repr((str(path.absolute()), found, settings)).encode()).hexdigest()[:12]


_END_BYTES = 64 * 1024


def content_stamp(folder: str | Path) -> str:
    """12 hex digits of the weights in a Hugging Face folder or beside a `megatron` folder: of each file's name and size
    and of its first and last 64 KiB, wherever the folder lies. Raises OSError.
    """
    digest = hashlib.sha256()
    for file in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("megatron/*.distcp")]):
        size = file.stat().st_size
        digest.update(repr((file.name, size)).encode())
        with open_regular(file) as opened:
            digest.update(opened.read(_END_BYTES))
            opened.seek(max(0, size - _END_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()[:12]
