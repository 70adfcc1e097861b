"""Shared by the distributed tests: pools of ranks that live for the whole session."""

import pytest
from rank_pool import RankPools


@pytest.fixture(scope="session")
def rank_pools():
    pools = RankPools()
    yield pools
    pools.close()
