"""Where the doctors of a job run, and what they recorded decides before a rank starts: with real processes in place of
srun.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo_mega.base import versions
from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.launcher.children import ChildSpec, ProcessFamily
from gspo_mega.launcher.slurm.scontrol import Allocation, Answers, SlurmNode
from gspo_mega.launcher.slurm.size import Site, job_size
from gspo_mega.launcher.slurm.steps import AttemptSteps, Starts, preflight

REPOSITORY = Path(__file__).parents[3]
CONFIG = REPOSITORY / "configs/quickstart.yaml"
SHAPE = REPOSITORY / "configs/models/quickstart_moe.json"
OURS = {"torch": "2.14.1", "NCCL": "2.30.7", "executable": "/opt/trainer/bin/python"}


@pytest.mark.parametrize(
    ("server", "by_nccl", "last"),
    [
        ({**OURS, "executable": "/opt/server/bin/python"}, True, "nothing is wrong on 1 nodes"),
        ({**OURS, "NCCL": "2.28.9"}, False, "nothing is wrong on 1 nodes"),
        ({**OURS, "NCCL": "2.28.9"}, True, "does not fit the trainer's"),
    ],
)
def test_servers_that_do_not_fit_the_trainer_end_the_job_before_it_starts(tmp_path, server, by_nccl, last):
    attempt, said, family = RunFolder(tmp_path / "run").new_attempt(), [], ProcessFamily()
    node = SlurmNode("n1", "10.0.0.1")
    doctors = [
        (node, ChildSpec("doctor", index, [sys.executable, "-c", ""], attempt.logs_dir / f"doctor_{index}.log", {}))
        for index in (0, 1)
    ]
    versions.record_versions(attempt.software_dir, 0, "trainer", OURS)
    versions.record_versions(attempt.software_dir, 1, "server", server)
    try:
        preflight(
            Starts(family, attempt, said.append),
            Answers(said.append),
            "7",
            doctors,
            60.0,
            said.append,
            lambda: versions.compare_records(Path(attempt.software_dir), by_nccl),
        )
    except RankError as error:
        said.append(str(error))
    finally:
        family.close(1.0)
    assert last in said[-1], said
    differs = [line for line in said if "NCCL is 2.30.7 in the trainer's" in line]
    assert len(differs) == (server["NCCL"] != OURS["NCCL"])
    assert all(line.startswith("doctor   wrong" if by_nccl else "doctor   note") for line in differs)


@pytest.fixture
def lines(tmp_path):
    """lines(**site): the doctors' command lines of a job whose two nodes have four ranks and some of three servers."""

    def call(**given: str) -> list[str]:
        overrides = ["cluster={num_nodes: 2, ranks_per_node: 4}", "server={num_servers: 3, tensor: 2}"]
        config = load_config(CONFIG, [f"model.path={SHAPE}", *overrides])
        site = Site.read({"GSPO_GPUS_PER_NODE": "8", "GSPO_CPUS_PER_TASK": "1", **given})
        nodes = SlurmNode("n1", "10.0.0.1"), SlurmNode("n2", "10.0.0.2")
        attempt = RunFolder(tmp_path / "run").new_attempt()
        steps = AttemptSteps(Allocation("7", 0, nodes, nodes), job_size(config, site), site, attempt, 2)
        specs = [spec for _, spec in steps.doctors(14_001, fp8=False)]
        assert len({spec.log for spec in specs}) == len({(spec.kind, spec.index) for spec in specs}) == len(specs)
        return [" ".join(spec.command) for spec in specs]

    return call


def test_the_doctor_of_a_shared_node_asks_the_servers_python_in_the_same_container(lines):
    first, second = lines(GSPO_SERVER_PYTHON="/opt/server/bin/python")
    for line in (first, second):
        assert "doctor --role trainer --role server --server-python /opt/server/bin/python --machines 2" in line
        assert "attempts/0001/software" in line.split("--versions ")[1]


def test_another_container_of_the_servers_gets_a_doctor_of_its_own(lines):
    of_ranks, _, *of_servers = lines(
        GSPO_TRAINER_CONTAINER="apptainer exec --nv t.sif",
        GSPO_SERVER_CONTAINER="--container-image=s.sqsh",
        GSPO_SERVER_PYTHON="python3",
    )
    assert " t.sif " in of_ranks and "--role server" not in of_ranks and "--meet" in of_ranks
    for index, line in zip((0, 1), of_servers, strict=True):
        assert f"python3 -m gspo_mega doctor --role server --index {index} " in line and "t.sif" not in line
        assert "--container-image=s.sqsh" in line and "--meet" not in line
