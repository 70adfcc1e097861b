"""What a job asks Slurm: its nodes and their addresses, lost nodes, the time left; and its requeue.

The functions call `scontrol` and `srun true`, and `read_allocation` reads the SLURM_* variables. They start no rank or
server. `Answers` bridges the time in which Slurm's controller does not answer, with one time limit for all questions of
a job: ranks and servers need the controller only to start and to end. `LostNodes` knows which nodes are lost and
whether a lost node explains a failure; it outlives an attempt, because a lost node does not return to its job.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from gspo_mega.base.errors import PlanError, RankError

_ASK_SECONDS = 60.0
_PROBE_SECONDS = 30.0
# A job that would start so soon would find free nodes.
_SOON_SECONDS = 30.0
# How long a run continues without an answer: the controller may be restarted or moved.
NO_ANSWER_SECONDS = 600.0
ASK_AGAIN_SECONDS = 5.0
_POLL_SECONDS = 1.0
# Slurm checks for silent nodes at intervals. A node that is still in the job this long after Slurm's own limit stays.
_MARGIN_SECONDS = 30.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class SlurmNode:
    """A node of the job. `address`: the one that other nodes use (NodeAddr). `het_group`: the node's component of a
    heterogeneous job, None in any other job.
    """

    name: str
    address: str
    het_group: int | None = None


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job by role. `rollout_nodes` are the trainer nodes if the job has no separate rollout nodes.

    The batch script and rank 0 run on the first trainer node. `num_restarts`: how often the job was requeued.
    """

    job_id: str
    num_restarts: int
    trainer_nodes: tuple[SlurmNode, ...]
    rollout_nodes: tuple[SlurmNode, ...]

    @property
    def nodes(self) -> tuple[SlurmNode, ...]:
        """Each node once, trainer nodes first."""
        return tuple(dict.fromkeys((*self.trainer_nodes, *self.rollout_nodes)))


def read_allocation(environment: Mapping[str, str], num_trainer_nodes: int, num_rollout_nodes: int) -> Allocation:
    """The job whose batch script runs this process. `num_rollout_nodes` 0: servers run on the trainer nodes.

    Raises PlanError outside a job, and for a job with too few nodes.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        raise PlanError("SLURM_JOB_ID is not set: this is not a Slurm job. Submit one with launch/slurm/train.sbatch")
    is_het = int(environment.get("SLURM_HET_SIZE", "1")) > 1
    if is_het:
        lists = [environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in (0, 1)]
        trainers, rollouts = (_nodes(nodes, group) for group, nodes in enumerate(lists))
        # Commands about the job name its leader, component 0.
        job_id = environment.get("SLURM_JOB_ID_HET_GROUP_0", job_id)
        enough = len(trainers) >= num_trainer_nodes and len(rollouts) >= num_rollout_nodes > 0
    else:
        nodes = _nodes(environment["SLURM_JOB_NODELIST"], None)
        enough = len(nodes) >= num_trainer_nodes + num_rollout_nodes
        trainers, rollouts = nodes[:num_trainer_nodes], nodes[num_trainer_nodes:]
    if not enough:
        had = f"{len(trainers)} and {len(rollouts)}" if is_het else str(len(trainers) + len(rollouts))
        raise PlanError(
            f"job {job_id} has {had} nodes; the configuration needs {num_trainer_nodes} for the trainer"
            f" (cluster.num_nodes) and {num_rollout_nodes} for servers (cluster.num_rollout_nodes)"
        )
    trainers = trainers[:num_trainer_nodes]
    return Allocation(
        job_id,
        int(environment.get("SLURM_RESTART_COUNT", "0")),
        tuple(trainers),
        tuple(rollouts[:num_rollout_nodes] if num_rollout_nodes else trainers),
    )


def free_trainer_nodes(environment: Mapping[str, str], num_rollout_nodes: int) -> int:
    """The nodes of this job that ranks may have: all but those of the servers. Raises PlanError outside a job."""
    het = "_HET_GROUP_0" if int(environment.get("SLURM_HET_SIZE", "1")) > 1 else ""
    nodes = environment.get(f"SLURM_JOB_NODELIST{het}")
    if nodes is None:
        raise PlanError(
            "SLURM_JOB_NODELIST is not set: this is no Slurm job. Submit one with launch/slurm/train.sbatch"
        )
    return len(_host_names(nodes)) - (0 if het else num_rollout_nodes)


def could_start(options: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether Slurm would start a job with these options of sbatch about now. Submits nothing."""
    # The variables of this job do not apply to another one.
    kept = {name: text for name, text in environment.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    kept.pop("SLURM_TIME_FORMAT", None)
    command = ["sbatch", "--test-only", *options, "--wrap=true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, env=kept)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(f"{shlex.join(command)}: {error}") from error
    # Slurm's answer, also that there is no such job now, is on standard error.
    found = re.search(r"to start at (\d\S+)", done.stderr)
    return found is not None and datetime.fromisoformat(found[1]).timestamp() < time.time() + _SOON_SECONDS


def lost_nodes(job_id: str, nodes: Iterable[SlurmNode]) -> list[SlurmNode]:
    """Those of `nodes` that Slurm has removed from the job because they no longer answer.

    A failed node leaves the job's list if the job may continue without it (--no-kill).
    """
    # A heterogeneous job has one line per component.
    left = {
        name
        for line in _scontrol("show", "job", "-o", job_id).splitlines()
        if (listed := re.search(r"(?<!\w)NodeList=(\S+)", line)) is not None and listed[1] != "(null)"
        for name in _host_names(listed[1])
    }
    return [node for node in nodes if node.name not in left]


def job_runs(job_id: str) -> bool:
    """Whether the job runs. False once Slurm ends it (cancelled, preempted) and its nodes leave one by one."""
    return set(re.findall(r"\bJobState=(\w+)", _scontrol("show", "job", "-o", job_id))) == {"RUNNING"}


def seconds_left(job_id: str) -> float | None:
    """Seconds until the job's time limit, of a heterogeneous job the earliest one; None without a limit."""
    # Times have Slurm's own format unless the user's shell sets another one.
    shown = _output(["env", "-u", "SLURM_TIME_FORMAT", "scontrol", "show", "job", "-o", job_id])
    ends = re.findall(r"\bTimeLimit=(?!UNLIMITED)\S+.*?\bEndTime=(\d\S+)", shown)
    return min(datetime.fromisoformat(end).timestamp() for end in ends) - time.time() if ends else None


def silent_nodes(nodes: Iterable[SlurmNode]) -> list[SlurmNode]:
    """Those of `nodes` on which Slurm cannot start a process now. Takes up to half a minute."""
    probes = []
    for node in nodes:
        command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", *at(node), "true"]
        probes.append(
            (
                node,
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ),
            )
        )
    silent = []
    for node, probe in probes:
        try:
            if probe.wait(_PROBE_SECONDS) != 0:
                silent.append(node)
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.wait()
            silent.append(node)
    return silent


def slurmd_timeout_seconds() -> float:
    """Seconds after which Slurm removes a silent node from its jobs."""
    found = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", _scontrol("show", "config"), re.MULTILINE)
    return float(found[1]) if found else 300.0


def at(node: SlurmNode) -> list[str]:
    """srun's options for a step on `node`."""
    return [f"--nodelist={node.name}", *([] if node.het_group is None else [f"--het-group={node.het_group}"])]


def requeue(job_id: str) -> None:
    """Make Slurm end this job and queue it again under the same id. Raises NoAnswerError with Slurm's answer."""
    _scontrol("requeue", job_id)


def _nodes(node_list: str, het_group: int | None) -> list[SlurmNode]:
    names = _host_names(node_list)
    addresses = _addresses(names)
    return [SlurmNode(name, addresses[name], het_group) for name in names]


def _host_names(node_list: str) -> list[str]:
    return _scontrol("show", "hostnames", node_list).split()


def _addresses(names: Sequence[str]) -> dict[str, str]:
    described = _scontrol("show", "node", "-o", ",".join(names)).splitlines()
    pairs = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in described]
    return {pair["NodeName"]: pair["NodeAddr"] for pair in pairs if "NodeName" in pair}


def _scontrol(*arguments: str) -> str:
    return _output(["scontrol", *arguments])


def _output(command: list[str]) -> str:
    shown = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(f"{shown}: {error}") from error
    if done.returncode != 0:
        raise NoAnswerError(f"{shown}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


class NoAnswerError(RankError):
    """Slurm did not answer, or answered with an error. Steps that run are not affected."""


class Answers:
    """Bridges the time in which Slurm's controller does not answer. `say` shows a line in the job's log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._missing_since: float | None = None

    @property
    def are_missing(self) -> bool:
        """Whether the last question had no answer."""
        return self._missing_since is not None

    @contextmanager
    def or_later(self) -> Iterator[None]:
        """A context for questions that the caller repeats later. Without an answer, the block ends; the first time, a
        warning is shown. Raises NoAnswerError once Slurm has not answered for `NO_ANSWER_SECONDS`.
        """
        try:
            yield
        except NoAnswerError as error:
            now = time.monotonic()
            if self._missing_since is None:
                self._missing_since = now
                self._say(
                    f"warning  Slurm does not answer; the run continues without it for {NO_ANSWER_SECONDS / 60:.0f} min"
                    f" ({error})"
                )
            elif now - self._missing_since > NO_ANSWER_SECONDS:
                raise
        else:
            if self._missing_since is not None:
                self._missing_since = None
                self._say("Slurm answers again.")

    def demand(self, question: Callable[[], _T]) -> _T:
        """Ask until Slurm answers, and return the answer. Raises NoAnswerError as `or_later` does."""
        while True:
            with self.or_later():
                return question()
            time.sleep(ASK_AGAIN_SECONDS)

    def insist(self, question: Callable[[], _T], unless: Callable[[], bool]) -> _T | None:
        """As `demand`, but returns None once `unless()` is true."""
        while not unless():
            with self.or_later():
                return question()
            time.sleep(ASK_AGAIN_SECONDS)
        return None


class LostNodes:
    """The lost nodes of a job. `known`: those whose loss is handled or about to be. Methods raise NoAnswerError."""

    def __init__(self, allocation: Allocation, say: Callable[[str], None]) -> None:
        self._allocation, self._say = allocation, say
        self.known: set[SlurmNode] = set()

    def update(self) -> None:
        """Add the nodes that are lost now to `known`."""
        self.known |= set(lost_nodes(self._allocation.job_id, self._allocation.nodes))

    def lost_trainers(self) -> list[SlurmNode]:
        """The trainer nodes that are lost. The ranks of the others may wait in a collective for half an hour."""
        return lost_nodes(self._allocation.job_id, self._allocation.trainer_nodes)

    def explain_failure(self) -> list[SlurmNode]:
        """The nodes whose loss explains that ranks failed just now. Ranks fail before Slurm notices the loss, so this
        waits for Slurm.
        """
        nodes = self._allocation.nodes
        lost = lost_nodes(self._allocation.job_id, nodes)
        if not lost and (silent := self._silent(nodes)):
            names = ", ".join(node.name for node in silent)
            self._say(f"warning  {names} does not answer; waiting for Slurm to confirm the loss")
            deadline = time.monotonic() + slurmd_timeout_seconds() + _MARGIN_SECONDS
            while not (lost := lost_nodes(self._allocation.job_id, silent)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            lost = lost or self._silent(silent)
        # A node that was known to be lost does not explain a new failure, unless ranks ran on it.
        return lost if set(lost) - self.known or set(lost) & set(self._allocation.trainer_nodes) else []

    def _silent(self, nodes: Sequence[SlurmNode]) -> list[SlurmNode]:
        """The nodes that are silent twice in a row: one failed step may be due to Slurm's controller or the network."""
        silent = silent_nodes([node for node in nodes if node not in self.known])
        return silent_nodes(silent) if silent else []
