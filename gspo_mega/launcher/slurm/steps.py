"""The steps of a Slurm job: their srun commands, their starts, the servers among them, and the doctors before them.

`AttemptSteps` makes the srun commands with their options and environments: one step of all ranks, one per server of the
policy and of a reward model (`RewardSteps`), one per doctor, one batch node watch. `Starts` starts steps, and starts
again those that srun could not start: a failed call of Slurm is not the failure of a rank or server. `StepServers` is
the set of servers that a run still has, the policy's or those of one reward model. `preflight` runs the doctor on every
node before anything else starts there. `job.py` watches the steps and handles failures.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.base.versions import Finding, render
from gspo_mega.launcher.children import Child, ChildSpec, ProcessFamily, StandbySpec
from gspo_mega.launcher.slurm.scontrol import ASK_AGAIN_SECONDS, Allocation, Answers, LostNodes, SlurmNode, at, job_runs
from gspo_mega.launcher.slurm.size import JobSize, Site
from gspo_mega.plan.servers import RewardPlace
from gspo_mega.rollout.registration import Registration, State
from gspo_mega.rollout.server.reward_server import make_reward_folder

_WATCH = Path(__file__).with_name("batch_node_watch.py")
_POLL_SECONDS = 0.2
# A server ends its process group within 2 s of the signal.
_GRACE_SECONDS = 5.0
# Most starts of one step in a row while Slurm answers, so that an option that srun never accepts is reported soon.
_MOST_STARTS = 3
# srun's lines about a task or its node, which show that the step had begun.
_OF_A_TASK = re.compile(r"^srun: error: (\S+: tasks? \d|Node failure)", re.MULTILINE)
# Time for srun and Python to start and end, beyond the doctor's own time limit.
MARGIN_SECONDS = 120.0


class AttemptSteps:
    """The steps of one attempt, as srun commands."""

    def __init__(self, allocation: Allocation, size: JobSize, site: Site, attempt: Attempt, tensor: int) -> None:
        """`tensor`: the number of GPUs of one server on each of its nodes."""
        self._allocation, self._size, self._site, self._attempt, self._tensor = allocation, size, site, attempt, tensor

    @property
    def num_ranks(self) -> int:
        return self._size.num_trainer_nodes * self._size.ranks_per_node

    def ranks(self, command: str, master_port: int, has_standby: bool = False) -> ChildSpec:
        """One step of all ranks, node by node. `master_port` is free on the first node. `has_standby`: another step of
        as many tasks is prepared to take over.
        """
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
        attempt = self._attempt
        arguments = ["--config", str(attempt.config_file), "--attempt", str(attempt.path), "--command", command]
        # A failed rank must end all ranks, because the others would wait for it in a collective.
        options = [*placement, "--kill-on-bad-exit=1", *site.trainer.srun_options]

        def step(module: str) -> list[str]:
            words = site.trainer.command("-m", module, *arguments)
            return self._srun(options, words, 0, self._size.ranks_per_node)

        standby = None
        if has_standby:  # srun passes its input on to every task
            log = attempt.logs_dir / "srun_standby.log"
            standby = StandbySpec(step("gspo_mega.train.standby"), arguments, log, range(self.num_ranks))
        log = attempt.logs_dir / "srun_ranks.log"
        return ChildSpec("ranks", 0, step("gspo_mega.train.worker"), log, environment, standby=standby)

    def server(self, index: int) -> ChildSpec:
        """The step of one server, with one task on each of its nodes, which binds the node's address."""
        before, nodes = self._size.nodes_of(index)[1], self.server_nodes(index)
        after_ranks = self._size.num_rollout_nodes == 0 and not self._size.colocated
        first_gpu = (self._size.ranks_per_node if after_ranks else 0) + before * self._tensor
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
            # The end of one `serve` must end the others, which would wait for it: nothing starts it again.
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

    def server_nodes(self, index: int) -> list[SlurmNode]:
        """The nodes of one server, the head's node first."""
        return [self._allocation.rollout_nodes[number] for number in self._size.nodes_of(index)[0]]

    def reward_servers(self) -> dict[str, RewardSteps]:
        """The steps of the servers of each reward model, by the model's name."""
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

    def reward_node(self, place: RewardPlace) -> SlurmNode:
        return self._allocation.rollout_nodes[place.node]

    def _serves(self, node: SlurmNode) -> bool:
        serving = [node for index in range(self._size.num_servers) for node in self.server_nodes(index)]
        return node in serving or node in map(self.reward_node, self._size.rewards)

    def doctors(self, master_port: int, fp8: bool, requests: int = 1024) -> list[tuple[SlurmNode, ChildSpec]]:
        """One step per node, in the environment of the rank or server that will run there. A node that ranks and
        servers share gets another step in the servers' container if that differs from the ranks'. `requests`:
        concurrent requests of the run.
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
                    server_only = ["--role", "server", "--index", str(index)]
                    more.append((node, self._doctor(node, len(nodes) + index, server_only, fp8, requests)))
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

    def _doctor(self, node: SlurmNode, number: int, words: list[str], fp8: bool, requests: int) -> ChildSpec:
        """`words`: the doctor's arguments, which begin with the role in whose environment it runs."""
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

    def watch(self, node: SlurmNode) -> ChildSpec:
        """The step on `node` that requeues the job when the batch node is lost and the supervisor with it."""
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
    def _one_task(node: SlurmNode) -> list[str]:
        return ["--nodes=1", "--ntasks=1", *at(node)]

    def _srun(self, options: list[str], command: list[str], first_gpu: int, num_gpus: int) -> list[str]:
        """The whole srun command. Steps overlap, so each sees all GPUs of its nodes; a variable names those it uses."""
        srun = ["srun", "--overlap", f"--cpus-per-task={self._site.cpus_per_task}", *options]
        if not self._site.gpus_per_node:
            return [*srun, *command]
        own = ",".join(str(gpu) for gpu in range(first_gpu, first_gpu + num_gpus))
        # Set by `env` because Slurm would replace the variable in the step's environment.
        return [*srun, f"--gres=gpu:{self._site.gpus_per_node}", "env", f"CUDA_VISIBLE_DEVICES={own}", *command]


class RewardSteps:
    """The steps of the servers of one reward model."""

    def __init__(self, steps: AttemptSteps, places: Sequence[RewardPlace]) -> None:
        self._steps, self._places = steps, {place.index: place for place in places}

    @property
    def indices(self) -> list[int]:
        return sorted(self._places)

    def server(self, index: int) -> ChildSpec:
        return self._steps.reward_server(self._places[index])

    def server_nodes(self, index: int) -> list[SlurmNode]:
        return [self._steps.reward_node(self._places[index])]


def _in_order(nodes: Sequence[SlurmNode]) -> list[str]:
    """srun's options for a step on `nodes`, all of one component of the job, with tasks numbered in the nodes'
    order.
    """
    return [f"--nodelist={','.join(node.name for node in nodes)}", *at(nodes[0])[1:], "--distribution=block:block"]


class Starts:
    """Starts steps as processes of `family`. `say` shows a line in the job's log."""

    def __init__(self, family: ProcessFamily, attempt: Attempt, say: Callable[[str], None]) -> None:
        self._family, self._attempt, self._say = family, attempt, say
        self._failed: Counter[Path] = Counter()

    def start(self, spec: ChildSpec) -> Child:
        return self._family.start(spec)

    def restart(self, child: Child) -> Child | None:
        """Start the step again after a pause, and return it. None if it had begun, or failed to start too often."""
        if not self.never_began(child):
            return None
        key = child.spec.log  # each step has one of its own
        self._failed[key] += 1
        if self._failed[key] >= _MOST_STARTS:
            return None
        self._say(f"warning  srun could not start {child.name}; trying again: {_last_line(child)}")
        time.sleep(ASK_AGAIN_SECONDS)
        return self.start(child.spec)

    def never_began(self, child: Child) -> bool:
        """Whether srun failed before the step had a task: no task left a log, and srun mentions no task."""
        if not child.exit_code or (child.spec.kind == "ranks" and any(self._attempt.logs_dir.glob("rank_*.log"))):
            return False
        output = _output(child)
        return (
            all(line.startswith("srun:") for line in output.splitlines() if line.strip())
            and _OF_A_TASK.search(output) is None
        )


def _output(child: Child) -> str:
    try:
        return child.spec.log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _last_line(child: Child) -> str:
    lines = _output(child).split("\n")
    return next((line for line in reversed(lines) if line.strip()), child.end_described)


class ServerSteps(Protocol):
    """The step of each server, and the nodes on which it runs."""

    def server(self, index: int) -> ChildSpec: ...

    def server_nodes(self, index: int) -> list[SlurmNode]: ...


class StepServers:
    """The servers of one attempt: the policy's, or those of one reward model. The run continues while each set has one.

    `gspo-mega serve` restarts its server; nothing restarts `serve`. A server that was asked to end registers `stopped`
    and exits with 0: it has left, and nothing failed. `gave_up`: the step of the last server that ended although its
    node was not lost. `has_left`: whether the last server left as it was asked to; others may have joined then, and the
    pool decides by `rollout.no_server_deadline_seconds`.
    """

    def __init__(
        self,
        attempt: Attempt,
        steps: ServerSteps,
        nodes: LostNodes,
        starts: Starts,
        say: Callable[[str], None],
        indices: Iterable[int],
        of: str = "",
    ) -> None:
        """Start the servers `indices`. `attempt`: the folder in which they register (a reward model has its own). `of`:
        a suffix for their names, empty for the policy's.
        """
        self._attempt, self._steps, self._nodes, self._starts, self._say = attempt, steps, nodes, starts, say
        self.of = of
        self._children = {index: starts.start(steps.server(index)) for index in indices}
        self.gave_up: Child | None = None
        self.has_left = False

    def __len__(self) -> int:
        return len(self._children)

    @property
    def children(self) -> list[Child]:
        return list(self._children.values())

    @property
    def ended(self) -> list[Child]:
        return [child for child in self._children.values() if child.exit_code is not None]

    def drop_ended(self) -> None:
        """Drop the servers that ended, and start those again that srun could not start. Raises NoAnswerError."""
        ended = self.ended
        self._nodes.update()
        for child in ended:
            index = child.spec.index
            lost = [node.name for node in self._steps.server_nodes(index) if node in self._nodes.known]
            self.has_left = child.exit_code == 0 and self._record(index).get("state") == "stopped"
            if self.has_left:
                del self._children[index]
                asked = f"has left, as it was asked to (its log: {child.spec.log})"
                self._say(f"server-{index}{self.of} {asked}; {self._left()}")
            elif lost:
                del self._children[index]
                # Ranks do not wait at their start for a failed server. The last one registers as `stopped`, so that the
                # ranks save a checkpoint and stop instead of failing.
                self._withdraw(index, "failed" if self._children else "stopped", f"node {lost[0]} is lost")
                self._say(f"warning  node {lost[0]} is lost, and server-{index}{self.of} with it; {self._left()}")
                self.gave_up = None
            elif (again := self._starts.restart(child)) is not None:
                self._children[index] = again
            else:
                del self._children[index]
                self.gave_up = child
                why = self._withdraw(index, "failed", f"its step {child.end_described}")
                if self._children:
                    self._say(
                        f"warning  server-{index}{self.of} gave up: {why.splitlines()[0]} (its log: {child.spec.log});"
                        f" {self._left()}"
                    )

    def _left(self) -> str:
        return f"{len(self._children)} servers{self.of} are left"

    def _withdraw(self, index: int, state: State, error: str) -> str:
        """Register the end of a server whose process is gone, unless it registered its failure itself. Returns why it
        ended.
        """
        name = f"server-{index}"
        record = self._record(index)
        known = Registration(**record) if record else Registration(name, "", 0, "starting", 0, 0, time.time())
        if known.state == "failed":
            return known.error or error
        replace(known, state=state, error=error).write(self._attempt.servers_dir)
        return error

    def _record(self, index: int) -> dict:
        return read_json(self._attempt.server_file(f"server-{index}")) or {}


def end_all(fleets: Iterable[StepServers]) -> None:
    """Ask the servers of all sets to end, and wait up to `_GRACE_SECONDS` for all of them together."""
    children = [child for fleet in fleets for child in fleet.children]
    for child in children:
        if child.exit_code is None:
            child.send_signal(signal.SIGUSR1)  # srun forwards this signal
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(child.exit_code is None for child in children):
        time.sleep(_POLL_SECONDS)


def preflight(
    starts: Starts,
    answers: Answers,
    job_id: str,
    doctors: Sequence[tuple[SlurmNode, ChildSpec]],
    patience_seconds: float,
    say: Callable[[str], None],
    compare: Callable[[], Iterable[Finding]] = tuple,
) -> None:
    """Start all `doctors`, wait for them, and show their findings. `patience_seconds`: the time limit of each one's
    checks. `compare`: the findings on the versions that they recorded. Raises a RankError of one line if something is
    wrong.
    """
    children = [(node, starts.start(spec)) for node, spec in doctors]
    deadline = time.monotonic() + patience_seconds + MARGIN_SECONDS
    over: set[int] = set()
    while time.monotonic() < deadline and len(over) < len(children):
        for index, (node, child) in enumerate(children):
            if child.exit_code is None or index in over:
                continue
            if starts.never_began(child):
                answers.demand(lambda: job_runs(job_id))  # while Slurm is silent, no step starts
                if (again := starts.restart(child)) is not None:
                    children[index] = (node, again)
                    continue
            over.add(index)
        time.sleep(_POLL_SECONDS)
    bad = []
    for node, child in children:
        output = child.spec.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in output:
            if line.split(": ", 1)[-1].startswith(("wrong", "note")):
                say(f"doctor   {line}")
        if child.exit_code != 0:
            bad.append(node.name)
            if not any(": wrong" in line for line in output):
                what = (
                    f"did not end within {patience_seconds + MARGIN_SECONDS:.0f} s"
                    if child.exit_code is None
                    else child.end_described
                )
                say(f"doctor   {node.name}: {what}: {output[-1] if output else 'no output'}")
    if bad:
        raise RankError(
            f"error: something is wrong on {', '.join(bad)}. See the doctor's lines above (full reports:"
            f" {children[0][1].spec.log.parent}/doctor_*.log)"
        )
    found = [finding for finding in compare() if finding.level != "ok"]
    for line in render(found).splitlines():
        say(f"doctor   {line}")
    if any(finding.level == "wrong" for finding in found):
        raise RankError("error: the servers' Python does not fit the trainer's. See the doctor's lines above")
    say(f"doctor   nothing is wrong on {len({node.name for node, _ in children})} nodes")
