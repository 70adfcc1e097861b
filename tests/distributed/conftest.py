"""Shared by the distributed tests: pools of ranks that live for the whole session, and a converted model."""

from pathlib import Path

import pytest
from conversions import there_and_back
from family_models import make_family_folder
from forked_workers import ForkedWorkers
from rank_pool import RankPools


@pytest.fixture(scope="session")
def rank_pools():
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def forked_workers():
    workers = ForkedWorkers()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Source, converted, back."""
    root = tmp_path_factory.mktemp("mixtral")
    source = make_family_folder(root / "source", "mixtral")
    return source, *there_and_back(source, root)
