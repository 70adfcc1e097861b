"""One Slurm for all tests here, of as many nodes as jobs that wait side by side need, and jobs of the quickstart's
model on it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]

from mini_slurm import MiniSlurm, why_not_here
from slurm_jobs import REPOSITORY, STAND_IN, Job

# tests/soak/slurm_nodes.sh asks for four, so that a job can need them all.
NUM_NODES = int(os.environ.get("SLURM_TEST_NODES", "12"))


def pytest_collection_modifyitems(items):
    lacking = why_not_here()
    without_sglang = "sglang is not installed" if importlib.util.find_spec("sglang") is None else None
    for item in items:
        # Handed over are the tests of the whole call, other folders' too.
        if Path(__file__).parent in item.path.parents:
            reason = lacking or (without_sglang if "submit" in item.fixturenames else None)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster():
    # Not pytest's folder: sockets' paths are short, and munged wants everybody to reach its own.
    with tempfile.TemporaryDirectory(prefix="gspo-slurm-") as folder:
        Path(folder).chmod(0o755)
        slurm = MiniSlurm(Path(folder) / "c", num_nodes=NUM_NODES, gpus=8)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()


@pytest.fixture(scope="session")
def quickstart_files(tmp_path_factory) -> Path:
    from run_support import make_quickstart

    return make_quickstart(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture
def jobs(cluster, tmp_path):
    """jobs(quickstart, *overrides, **site) submits one with launch/slurm/train.sbatch; none is left at the end."""
    started = []

    def start(quickstart: Path, *overrides: str, **site: str) -> Job:
        folder = tmp_path / f"job{len(started)}"
        folder.mkdir()
        started.append(Job(cluster, folder, quickstart, overrides, site))
        return started[-1]

    yield start
    for job in started:
        job.cancel()
    cluster.wait_gone()
    for node in range(1, cluster.num_nodes + 1):
        if f"node{node}" not in cluster.running_nodes:
            cluster.start_node(node)
    cluster.wait_idle()


@pytest.fixture
def submit(jobs, quickstart_files):
    """submit(*overrides, **site): a job of the quickstart's model, with real ranks and real SGLang servers."""
    return lambda *overrides, **site: jobs(quickstart_files, *overrides, **site)


@pytest.fixture
def submit_stand_ins(jobs):
    """The same with stand-ins for ranks and servers: the job's supervision in seconds."""
    shape = f"model.path={REPOSITORY / 'configs/models/quickstart_moe.json'}"
    pythons = {"GSPO_TRAINER_PYTHON": STAND_IN, "GSPO_SERVER_PYTHON": STAND_IN}
    return lambda *overrides, **site: jobs(Path("/nowhere"), shape, *overrides, **pythons, **site)
