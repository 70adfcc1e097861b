"""The prompt files of a run in one form, whichever way the configuration names them."""

from __future__ import annotations

import re
from pathlib import Path

from gspo_mega.config.schema import Config, Data, Source
from gspo_mega.errors import DataError


def sources_of(data: Data) -> tuple[Source, ...]:
    """`data.sources`, or `data.path` as a single source named after the file's stem.

    Characters that a source name may not hold become `-`. Raises DataError where neither is given.
    """
    if data.path is None:
        if not data.sources:
            raise DataError("no data: data.path or data.sources must name a JSONL file")
        return data.sources
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data.path).stem)
    return (Source(name=stem or "data", path=data.path),)


def data_sources(config: Config) -> tuple[Source, ...]:
    """The sources of a run's prompts, see `sources_of`."""
    return sources_of(config.data)
