"""A job of the quickstart's model on the test's Slurm: submitting it as a user does, watching and disturbing it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from mini_slurm import MiniSlurm, wait_until
from run_support import REPOSITORY, environment, small_overrides

from gspo_mega.base.run_folder import RunFolder

CONFIG = str(REPOSITORY / "configs/quickstart.yaml")
SCRIPT = str(REPOSITORY / "launch/slurm/train.sbatch")
STAND_IN = str(REPOSITORY / "tests/slurm/stand_in.py")
PATIENCE_SECONDS = 600.0
SITE = {
    "GSPO_SBATCH": "--exclusive --mem=16000 --time=30",
    "GSPO_GPUS_PER_NODE": "0",
    "GSPO_CPUS_PER_TASK": "1",
    "GSPO_PREFLIGHT": "0",
    "GSPO_SIGNAL_SECONDS": "120",
}


class Job:
    """One submitted job, by default of two trainer nodes with a rank each and one server on a third."""

    def __init__(
        self, cluster: MiniSlurm, folder: Path, quickstart: Path, overrides: Sequence[str], site: dict[str, str]
    ) -> None:
        self.cluster = cluster
        self.run = RunFolder(folder / "runs" / "run")
        reward = f"reward.functions=[{{function: 'run_support:score', options: {{log: {folder / 'scores'}}}}}]"
        # Few requests at a time: a rollout takes seconds and can be met in its midst. At log level info SGLang logs its
        # arguments.
        common = [
            "rollout.max_concurrent_requests=4",
            "server.log_level=info",
            "eval=null",
            "cluster.num_nodes=2",
            "cluster.ranks_per_node=1",
        ]
        self.arguments = [
            CONFIG,
            *small_overrides(quickstart, folder / "runs", "run"),
            reward,
            *common,
            "cluster.num_rollout_nodes=1",
            *overrides,
        ]
        # As a user's shell has it: what the tests' own Slurm needs, and nothing of a Slurm around.
        sbatch = ["sbatch", "--mem=1000"] if site.pop("through_sbatch", None) else []
        # Servers on a node that crashes leave theirs behind.
        self.environment = {**environment(), "TMPDIR": str(cluster.temporary), **SITE, **site}
        self._first_log = folder / "slurm-%s.out"
        # It tries the run's inputs and makes its plan before it submits.
        self.submitted = cluster.run(
            *sbatch, SCRIPT, *self.arguments, env=self.environment, cwd=folder, timeout=PATIENCE_SECONDS
        )
        found = re.search(r"Submitted batch job (\d+)", self.submitted)
        assert found, self.submitted
        self.id = found[1]

    @property
    def log(self) -> str:
        paths = [self.run.path / f"slurm-{self.id}.log", Path(str(self._first_log) % self.id)]
        return "".join(path.read_text() for path in paths if path.exists())

    def follow(self) -> None:
        """On to the job that this one submitted in its stead."""
        self.id = re.findall(r"Submitted batch job (\d+)", self.log)[-1]

    @property
    def state(self) -> str:
        return self.cluster.job(self.id)["JobState"]

    def wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        try:
            wait_until(
                what,
                lambda: happened() or self.state in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"),
                PATIENCE_SECONDS,
            )
            assert happened(), f"{what}: the job is {self.state} before that"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def wait_for_line(self, beginning: str, times: int = 1) -> None:
        # The number of a step is padded to the width of the last one's.
        pattern = re.compile("^" + re.escape(beginning).replace("\\ ", " +"), re.MULTILINE)
        self.wait_for(f"a line {beginning!r} ({times})", lambda: len(pattern.findall(self.log)) >= times)

    def finish(self) -> str:
        """Until the job is over; its state then."""
        wait_until(
            "the job is over",
            lambda: self.state not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD"),
            PATIENCE_SECONDS,
        )
        return self.state

    def nodes(self, kind: Literal["ranks", "servers"]) -> list[int]:
        """Numbers of the nodes that Slurm chose for the job's last start to have `kind` on."""
        self.wait_for_line("job ")
        (line,) = re.findall(r"^job .*$", self.log, re.MULTILINE)[-1:]
        found = re.search(rf"{kind}(?: and servers)? on ((?:node\d+ ?)+)", line)
        assert found, line
        return [int(name.removeprefix("node")) for name in found[1].split()]

    def steps(self) -> list[int]:
        """The steps that were shown as done, in the order of their lines."""
        return [int(number) for number in re.findall(r"^step +(\d+)/", self.log, re.MULTILINE)]

    def cancel(self) -> None:
        self.cluster.run("scancel", "--full", self.id, check=False)


def listening(pid: int) -> set[str]:
    """Addresses (IPv4, or IPv6 in hexadecimal) that a process listens on."""
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, state, inode = words[1].split(":")[0], words[3], words[9]
            if state == "0A" and inode in inodes:
                found.add(
                    ".".join(str(byte) for byte in reversed(bytes.fromhex(address))) if table == "tcp" else address
                )
    return found


def variables(pid: int) -> bytes:
    """A process's environment, as the kernel shows it."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
