"""The steps of a Slurm job as srun commands: one of all ranks, one per server of the policy and of a reward model, one
per doctor, one batch node watch.

Owns the options of srun and the environment of a step. `job_supervisor.py` watches the steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_mega.base.run_folder import Attempt
from gspo_mega.launcher.children import ChildSpec
from gspo_mega.launcher.slurm.job_size import JobSize
from gspo_mega.launcher.slurm.scontrol import Allocation, Node, at
from gspo_mega.launcher.slurm.site_settings import Site
from gspo_mega.plan.server_places import RewardPlace
from gspo_mega.rollout.server.reward_server import make_reward_folder

_WATCH = Path(__file__).with_name("batch_node_watch.py")


def _in_order(nodes: Sequence[Node]) -> list[str]:
    """srun's options for a step on `nodes`, of one component of the job, whose tasks are numbered in their order."""
    return [f"--nodelist={','.join(node.name for node in nodes)}", *at(nodes[0])[1:], "--distribution=block:block"]


class Steps:
    """The steps of one attempt."""

    def __init__(self, allocation: Allocation, size: JobSize, site: Site, attempt: Attempt, tensor: int) -> None:
        """`tensor`: GPUs of one server on each of its nodes."""
        self._allocation, self._size, self._site, self._attempt, self._tensor = allocation, size, site, attempt, tensor

    @property
    def num_ranks(self) -> int:
        return self._size.num_trainer_nodes * self._size.ranks_per_node

    def ranks(self, command: str, master_port: int) -> ChildSpec:
        """One step of all ranks, node by node. `master_port` is free on the first node."""
        allocation, site = self._allocation, self._site
        nodes = allocation.trainer_nodes
        environment = {
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": str(master_port),
            "PYTHONUNBUFFERED": "1",
            **site.network_variables(),
        }
        if not site.gpus_per_node:
            # Ranks that each use all cores slow each other down.
            environment["OMP_NUM_THREADS"] = str(site.cpus_per_task)
        placement = [
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes) * self._size.ranks_per_node}",
            f"--ntasks-per-node={self._size.ranks_per_node}",
        ]
        placement += _in_order(nodes)
        worker = site.trainer.command(
            "-m",
            "gspo_mega.train.worker",
            "--config",
            str(self._attempt.config_file),
            "--attempt",
            str(self._attempt.path),
            "--command",
            command,
        )
        # A failed rank ends all ranks: the others would wait for it in a collective.
        options = [*placement, "--kill-on-bad-exit=1", *site.trainer.srun_options]
        return ChildSpec(
            "ranks",
            0,
            self._srun(options, worker, 0, self._size.ranks_per_node),
            self._attempt.logs_dir / "srun_ranks.log",
            environment,
        )

    def server(self, index: int) -> ChildSpec:
        """The step of one server, with one task on each of its nodes, which binds the node's address."""
        before, nodes = self._size.nodes_of(index)[1], self.server_nodes(index)
        behind_ranks = self._size.num_rollout_nodes == 0 and not self._size.colocated
        first_gpu = (self._size.ranks_per_node if behind_ranks else 0) + before * self._tensor
        serve = self._site.server.command(
            "-m",
            "gspo_mega",
            "serve",
            str(self._attempt.config_file),
            "--attempt",
            str(self._attempt.path),
            "--index",
            str(index),
            *(["--host"] if len(nodes) == 1 else ["--hosts"]),
            ",".join(node.address for node in nodes),
        )
        placement = self._one_task(nodes[0])
        if len(nodes) > 1:
            # The end of one `serve` ends the others: nothing would start it again, and they would wait for it.
            placement = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
            placement += [*_in_order(nodes), "--kill-on-bad-exit=1"]
        options = [*placement, *self._site.server.srun_options]
        return ChildSpec(
            "server",
            index,
            self._srun(options, serve, first_gpu, self._tensor),
            self._attempt.server_log(index),
            self._site.network_variables(),
        )

    def server_nodes(self, index: int) -> list[Node]:
        """The nodes of one server, its head's first."""
        return [self._allocation.rollout_nodes[number] for number in self._size.nodes_of(index)[0]]

    def reward_servers(self) -> dict[str, RewardSteps]:
        """The steps of the servers of reward models, by the model's name."""
        places: dict[str, list[RewardPlace]] = {}
        for place in self._size.rewards:
            places.setdefault(place.name, []).append(place)
        return {name: RewardSteps(self, own) for name, own in places.items()}

    def reward_server(self, place: RewardPlace) -> ChildSpec:
        """The step of one server of a reward model, which binds its node's address. Makes the folder of its log."""
        node = self.reward_node(place)
        serve = self._site.server.command(
            "-m",
            "gspo_mega",
            "serve",
            str(self._attempt.config_file),
            "--attempt",
            str(self._attempt.path),
            "--index",
            str(place.index),
            "--host",
            node.address,
            "--reward-model",
            place.name,
        )
        return ChildSpec(
            "reward server",
            place.index,
            self._srun(
                [*self._one_task(node), *self._site.server.srun_options], serve, place.first_gpu, place.num_gpus
            ),
            make_reward_folder(self._attempt, place.name).server_log(place.index),
            self._site.network_variables(),
            of=place.name,
        )

    def reward_node(self, place: RewardPlace) -> Node:
        return self._allocation.rollout_nodes[place.node]

    def _serves(self, node: Node) -> bool:
        serving = [node for index in range(self._size.num_servers) for node in self.server_nodes(index)]
        return node in serving or node in map(self.reward_node, self._size.rewards)

    def doctors(self, master_port: int, fp8: bool, requests: int = 1024) -> list[tuple[Node, ChildSpec]]:
        """One step per node, in the environment of the rank or server that will run there, and for a node that ranks
        and servers share, one more in the servers' container, where that is another one. `requests`: concurrent
        requests of the run.
        """
        allocation, site, attempt = self._allocation, self._site, self._attempt
        nodes, steps, more = allocation.nodes, [], []
        for index, node in enumerate(nodes):
            trains = node in allocation.trainer_nodes
            words = ["--role", "trainer"] if trains else ["--role", "server"]
            if trains and self._serves(node):
                if site.trainer.container == site.server.container:
                    words += ["--role", "server", "--server-python", site.server.python]
                else:
                    alone = ["--role", "server", "--index", str(index)]
                    more.append((node, self._doctor(node, len(nodes) + index, alone, fp8, requests)))
            words += [
                "--machines",
                str(len(nodes)),
                "--index",
                str(index),
                "--master",
                f"{nodes[0].address}:{master_port}",
                "--meet",
                str(attempt.path / "meeting"),
            ]
            steps.append((node, self._doctor(node, index, words, fp8, requests)))
        return steps + more

    def _doctor(self, node: Node, number: int, words: list[str], fp8: bool, requests: int) -> ChildSpec:
        """`words`: what this doctor checks, its first role first, in whose environment it runs."""
        site, attempt = self._site, self._attempt
        environment = site.trainer if words[1] == "trainer" else site.server
        doctor = environment.command(
            "-m",
            "gspo_mega",
            "doctor",
            *words,
            *(["--fp8"] if fp8 else []),
            "--folder",
            str(attempt.run_folder.path),
            "--gpus",
            str(site.gpus_per_node),
            "--address",
            node.address,
            "--requests",
            str(requests),
            "--versions",
            str(attempt.software_dir),
            "--patience",
            str(site.preflight_seconds),
        )
        name = f"doctor_{node.name}" + ("" if "--machines" in words else "_server")
        srun = self._srun([*self._one_task(node), *environment.srun_options], doctor, 0, site.gpus_per_node)
        return ChildSpec("doctor", number, srun, attempt.logs_dir / f"{name}.log", site.network_variables())

    def watch(self, node: Node) -> ChildSpec:
        """The step on `node` that requeues the job when the batch node is lost, and the supervisor with it."""
        words = [
            sys.executable,
            "-I",
            str(_WATCH),
            self._allocation.job_id,
            self._allocation.trainer_nodes[0].name,
            str(self._attempt.state_file),
        ]
        log = self._attempt.logs_dir / "watch.log"
        return ChildSpec("watch", 0, ["srun", "--overlap", *self._one_task(node), *words, str(log)], log)

    @staticmethod
    def _one_task(node: Node) -> list[str]:
        return ["--nodes=1", "--ntasks=1", *at(node)]

    def _srun(self, options: list[str], command: list[str], first_gpu: int, num_gpus: int) -> list[str]:
        """The whole srun command. Steps overlap: each sees all GPUs of its nodes, and a variable names its own."""
        srun = ["srun", "--overlap", f"--cpus-per-task={self._site.cpus_per_task}", *options]
        if not self._site.gpus_per_node:
            return [*srun, *command]
        own = ",".join(str(gpu) for gpu in range(first_gpu, first_gpu + num_gpus))
        # Set with `env`: in the step's environment Slurm would replace the list with its own.
        return [*srun, f"--gres=gpu:{self._site.gpus_per_node}", "env", f"CUDA_VISIBLE_DEVICES={own}", *command]


class RewardSteps:
    """The steps of the servers of one reward model, as `Steps` has them of the policy's."""

    def __init__(self, steps: Steps, places: Sequence[RewardPlace]) -> None:
        self._steps, self._places = steps, {place.index: place for place in places}

    @property
    def indices(self) -> list[int]:
        return sorted(self._places)

    def server(self, index: int) -> ChildSpec:
        return self._steps.reward_server(self._places[index])

    def server_nodes(self, index: int) -> list[Node]:
        return [self._steps.reward_node(self._places[index])]
