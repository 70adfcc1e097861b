"""Servers over several nodes without a Slurm: which nodes they are on, and the command line of their step."""

from __future__ import annotations

import pytest
from slurm_answers import loaded, scontrol, site  # noqa: F401  the fixture is automatic

from gspo_mega.base.errors import PlanError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.launcher.slurm import scontrol as calls
from gspo_mega.launcher.slurm.size import job_size
from gspo_mega.launcher.slurm.steps import AttemptSteps

OVER_TWO = "server={num_servers: 2, tensor: 8, num_nodes: 2}"


def test_a_server_over_several_nodes_is_on_neighbours():
    nodes = "cluster={num_nodes: 2, ranks_per_node: 8, num_rollout_nodes: 4}"
    size = job_size(loaded(OVER_TWO, nodes), site())
    assert size.servers_by_node == ((0,), (0,), (1,), (1,))
    assert (size.num_servers, size.nodes_of(0), size.nodes_of(1)) == (2, ([0, 1], 0), ([2, 3], 0))
    assert (size.rollout_gpus, size.trainer_gpus) == (4, 8)
    # Two of them side by side on the same pair of nodes; a pair of trainer nodes.
    both = job_size(loaded(OVER_TWO, "cluster={num_nodes: 2, ranks_per_node: 8, num_rollout_nodes: 2}"), site())
    assert (both.servers_by_node, both.nodes_of(1), both.rollout_gpus) == (((0, 1), (0, 1)), ([0, 1], 1), 8)
    shared = job_size(loaded("server={tensor: 4, num_nodes: 2}", "cluster={num_nodes: 2, ranks_per_node: 6}"), site())
    assert (shared.servers_by_node, shared.trainer_gpus) == (((0,), (0,)), 8)
    with pytest.raises(
        PlanError, match="needs 16 GPUs .* server.num_servers 2 x server.tensor 16 / server.num_nodes 2"
    ):
        job_size(loaded("server={num_servers: 2, tensor: 16, num_nodes: 2}", "cluster.num_rollout_nodes=2"), site())


def test_the_step_of_a_server_over_several_nodes_has_a_task_on_each(tmp_path):
    config = loaded(OVER_TWO, "cluster={num_nodes: 1, ranks_per_node: 8, num_rollout_nodes: 2}")
    allocation = calls.read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}, 1, 2)
    attempt = RunFolder(tmp_path / "run").new_attempt()
    steps = AttemptSteps(allocation, job_size(config, site()), site(), attempt, 4)
    assert [node.name for node in steps.server_nodes(1)] == ["n2", "n3"]
    line = " ".join(steps.server(1).command)
    options = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n2,n3 --distribution=block:block"
    assert f"{options} --kill-on-bad-exit=1" in line
    # The second server of the pair has the second half of each node's GPUs.
    assert "env CUDA_VISIBLE_DEVICES=4,5,6,7" in line and line.endswith("--index 1 --hosts 10.0.0.2,10.0.0.3")
    roles = {node.name: spec.command[spec.command.index("--role") + 1] for node, spec in steps.doctors(1, fp8=False)}
    assert roles == {"n1": "trainer", "n2": "server", "n3": "server"}
