"""A real Slurm of several nodes on this machine, for tests: munged, slurmctld and one slurmd a node, in a private
folder.

Needs slurmctld, slurmd, slurm-client and munge, and the right to unshare(2): every node has a process table, a host
name and a loopback address of its own (node1 is 127.0.0.11), so that a crash takes a node's processes along and two
nodes may use one port. Reads and writes nothing below /etc; no database, no cgroups, no systemd. GPUs are links to
/dev/null: Slurm counts and hands them out, and nothing sees a device. The kernel ends all of it with the process that
started it, however that ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
_TIED_TO_PARENT = (
    sys.executable,
    "-I",
    "-S",
    str(Path(__file__).parents[2] / "gspo_mega/launcher/exec_tied_to_parent.py"),
)
# With --kill-child, a node's process table ends with unshare itself.
_OWN_TABLES = ("unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")

# What a production site counts in minutes is seconds here. cred_expire is also how long a requeued job is held back.
_CONFIG = """\
ClusterName=mini
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=1
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=600
MessageTimeout=10
ReturnToService=2
JobRequeue=1
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.[11-{last}] Port=[{first_port}-{last_port}] CPUs=8 RealMemory=65536 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 OverSubscribe=NO State=UP
"""


def why_not_here() -> str | None:
    """What this machine lacks for a Slurm of its own, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_SEARCH) is None]
    if missing:
        return f"slurm: {', '.join(missing)} not found; install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0 or subprocess.run([*_OWN_TABLES, "hostname", "probe"], capture_output=True).returncode != 0:
        return "slurm: needs root and the right to unshare(2), to give every node its own process table"
    return None


class MiniSlurm:
    """One cluster. `start()` it, run commands in `environment`, `stop()` it: then none of its processes is left."""

    def __init__(self, folder: Path, num_nodes: int = 4, gpus: int = 0) -> None:
        """`folder`: to be made, with a path far shorter than a socket's 108 characters. `gpus`: pretended on every
        node.
        """
        self.folder, self.num_nodes = folder, num_nodes
        self._daemons: dict[str, subprocess.Popen] = {}
        ports = _free_ports(num_nodes + 1)
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)  # munged refuses parents that a group can write
        (folder / "state").mkdir()
        (folder / "dev").mkdir()
        self.temporary.mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (folder / "slurm.conf").write_text(
            _CONFIG.format(
                machine=socket.gethostname(),
                folder=folder,
                port=ports,
                nodes=num_nodes,
                last=10 + num_nodes,
                first_port=ports + 1,
                last_port=ports + num_nodes,
                gpus=gpus,
            )
        )
        for index in range(gpus):
            (folder / "dev" / f"gpu{index}").symlink_to("/dev/null")
        devices = f"Name=gpu Flags=nvidia_gpu_env File={folder}/dev/gpu[0-{gpus - 1}]\n" if gpus else ""
        (folder / "gres.conf").write_text(devices)
        hosts = [
            f"127.0.0.1 localhost {socket.gethostname()}",
            *(f"{self.address(n)} node{n}" for n in range(1, num_nodes + 1)),
        ]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")

    @staticmethod
    def address(node: int) -> str:
        return f"127.0.0.{10 + node}"

    @property
    def temporary(self) -> Path:
        """A temporary folder for jobs that goes with the cluster; short, too: sockets are made in it."""
        return self.folder / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        """Of commands that talk to this cluster."""
        return {**os.environ, "PATH": _SEARCH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        munged = ["munged", "--foreground", f"--socket={self.folder}/munge.sock", f"--key-file={self.folder}/munge.key"]
        munged += [
            f"--pid-file={self.folder}/munged.pid",
            f"--seed-file={self.folder}/munged.seed",
            f"--log-file={self.folder}/munged.log",
        ]
        self._spawn("munged", munged)
        wait_until("munged answers", lambda: self._ends_well("munge", "-S", f"{self.folder}/munge.sock", "-n"), 60)
        self._spawn("slurmctld", ["slurmctld", "-D", "-c"])
        for node in range(1, self.num_nodes + 1):
            self.start_node(node)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Until every node is up and has nothing to do."""
        wait_until(
            "all nodes are idle",
            lambda: self.run("sinfo", "-hN", "-o", "%T").split().count("idle") == self.num_nodes,
            180,
        )

    @property
    def running_nodes(self) -> set[str]:
        return {name for name in self._daemons if name.startswith("node")}

    def start_node(self, node: int) -> None:
        """Boot a node, or boot it again after `crash_node`."""
        (self.folder / f"spool-node{node}").mkdir(exist_ok=True)
        # slurmd is process 1 of its own table: with it, the kernel ends all the rest.
        boot = 'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && exec slurmd -D -N "$1"'
        self._spawn(f"node{node}", [*_OWN_TABLES, "sh", "-c", boot, "sh", f"node{node}", str(self.folder)])

    def crash_node(self, node: int, noticed: bool = True) -> None:
        """Pull a node's plug. Slurm finds out by itself in about half a minute; `noticed` tells it at once."""
        self._kill(f"node{node}")
        if noticed:
            self.run("scontrol", "update", f"NodeName=node{node}", "State=DOWN", "Reason=crashed")

    def stop(self) -> None:
        """Cancel all jobs, end all daemons and whatever still runs on a node."""
        if "slurmctld" in self._daemons:
            self.run("scancel", "--user=root", "--full", check=False)
            wait_until("all jobs are gone", lambda: not self.run("squeue", "-h", check=False).strip(), 15, fails=False)
        for name in list(self._daemons):
            self._kill(name)

    def run(self, *command: str, check: bool = True, timeout: float = 60, **more) -> str:
        """Standard output of a command, as a user of the cluster."""
        environment = {**self.environment, **more.pop("env", {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, **more)
        assert not check or done.returncode == 0, (
            f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by name."""
        text = self.run("scontrol", "show", "job", "-o", job_id).splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def processes(self) -> list[tuple[int, str]]:
        """(pid, command line) of everything that runs on the nodes beside Slurm's own daemons."""
        found = []
        tables = {
            os.readlink(f"/proc/{child}/ns/pid") for daemon in self._daemons.values() for child in _children(daemon.pid)
        }
        ours = os.readlink("/proc/self/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.readlink(entry / "ns/pid") not in tables - {ours}:
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                name = (entry / "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if command and name not in ("slurmd", "slurmstepd"):
                found.append((int(entry.name), command))
        return found

    def wait_gone(self) -> None:
        """Until nothing runs on the nodes but Slurm's own daemons."""
        try:
            wait_until("the nodes are empty", lambda: not self.processes(), 120)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.processes()}") from None

    def _ends_well(self, *command: str) -> bool:
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*_TIED_TO_PARENT, str(os.getpid()), str(int(signal.SIGKILL)), *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        for child in _children(daemon.pid):  # process 1 of a node's table
            os.kill(child, signal.SIGKILL)
        daemon.kill()
        daemon.wait()


def wait_until(what: str, happened: Callable[[], bool], seconds: float, fails: bool = True) -> None:
    """Until `happened()`; after `seconds` the test fails, unless it need not happen."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            assert not fails, f"{what}: not within {seconds:g} s"
            return
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nothing listens on."""
    for first in range(17_000 + os.getpid() % 500 * 5, 20_000):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("0.0.0.0", first + offset))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        return first
    raise AssertionError("no free ports")
