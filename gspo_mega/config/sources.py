"""The prompt files of a run in one form, whichever way the configuration names them."""

from __future__ import annotations

import re
from pathlib import Path

from gspo_mega.config.schema import Config, Source


def data_sources(config: Config) -> tuple[Source, ...]:
    """`data.sources`, or `data.path` as a single source named after the file's stem.

    Characters that a source name may not hold become `-`.
    """
    if config.data.path is None:
        return config.data.sources
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.data.path).stem)
    return (Source(name=stem or "data", path=config.data.path),)
