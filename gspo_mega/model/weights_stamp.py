"""Which weights are in a folder, as far as names, sizes and times of its files tell.

Owns the digest by which copies that are made of a folder are named, so that a copy is used for its own source only. It
reads no weights: a file that is written again has another time. Standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_stamp(folder: str | Path, *settings: object) -> str:
    """12 hex digits: of the folder's absolute path, its safetensors and config.json (names, sizes, times of the last
    change), and of `settings`, by their `repr`, which a copy depends on besides. Raises OSError.
    """
    path = Path(folder)
    files = sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    found = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return hashlib.sha256(repr((str(path.absolute()), found, settings)).encode()).hexdigest()[:12]
