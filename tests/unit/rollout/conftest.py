"""An attempt folder, fake servers, pools and collectors over them for the unit tests of rollout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from collector_support import SPEC, collector_config, collector_of, random_score
from fake_server import FakeServer

from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.rollout.pool import ServerPool


@pytest.fixture
def attempt(tmp_path):
    attempt = RunFolder(tmp_path / "run").new_attempt()
    atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
    return attempt


@pytest.fixture
def fakes(attempt):
    """Factory of fake servers, registered with the attempt and closed at the end."""
    made = []

    def make(name: str, **options) -> FakeServer:
        made.append(FakeServer(name, attempt.servers_dir, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def pools(attempt):
    """Factory of pools over the attempt, closed at the end."""
    made = []

    def make(**rollout) -> ServerPool:
        made.append(ServerPool(collector_config(**rollout).rollout, SPEC, attempt))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def collect(pools):
    """Collector over a pool with the same settings."""

    def make(score=random_score, stream=None, runner=None, **settings):
        pool = pools(**settings)
        return collector_of(pool, score, stream, runner, **settings), pool

    return make
