"""The kinds of faults of a drill, as a table: what each does, what it needs, and how it is undone during the run.

A kind is added as an entry of `KINDS`. Most are struck from outside, at the drawn moment, by a function that gets the
scene and the drawn fault, and says what it did. Others begin with the command: an operation that fails or ends the
process at a declared point (`base/failpoints.py`), or system calls that strace delays or lets fail.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.verify.drill.scene import NotThereError, Scene

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class Fault:
    """A drawn fault. `when`: "start", "steps" or "point". `place`, `victim`, `amount`: numbers from 0 to 1 that choose
    the moment in the start or in the steps, one of several processes, and a size. `point`, `hit`: a declared point, and
    how often it is reached before. `is_late`: a run reaches it only near its end. `seconds`: how long it lasts, of
    kinds that end by themselves.
    """

    kind: str
    when: str
    place: float = 0.0
    point: str = ""
    hit: int = 1
    is_late: bool = False
    victim: float = 0.0
    amount: float = 0.0
    seconds: float = 0.0

    @property
    def moment(self) -> str:
        if self.when == "point":
            return f"at {self.point}, time {self.hit}"
        return f"at {self.place:.0%} of the {self.when}"


@dataclass(frozen=True)
class Kind:
    """`what`: one line for people. `strike`: do it now, and return what was done; None if it begins with the command.
    `release`: undo it after a time drawn from `seconds`. `needs`: of `machine.missing_needs`, and of
    `program.missing_processes`. `is_live`: only runs that sample from servers have what it strikes. `points`: it is
    struck only at points with this beginning. `do`: of `failpoints`, `calls`: strace's injection, of kinds that begin
    with the command.
    """

    name: str
    what: str
    strike: Callable[[Scene, Fault], str] | None = None
    release: Callable[[Scene], None] | None = None
    seconds: tuple[float, float] = (0.0, 0.0)
    needs: tuple[str, ...] = ()
    is_live: bool = False
    points: str = ""
    do: str = ""
    calls: str = ""

    @property
    def begins_with_command(self) -> bool:
        return self.strike is None

    def is_repeated(self, fault: Fault) -> bool:
        """Whether the rank is killed at the point after each restart too, until the supervisor gives up."""
        return self.do == "kill" and fault.amount < _REPEATED

    def variable(self, fault: Fault, mark: Path) -> str:
        """The value of `failpoints.VARIABLE` for this fault. `mark`: a file that is made when it happens."""
        if not self.do:
            return ""
        once = int(not self.is_repeated(fault))
        return f"point={fault.point},hit={fault.hit},do={self.do},rank=0,mark={mark},once={once}"

    def prefix(self, fault: Fault, log: Path) -> list[str]:
        """The words before the command."""
        if not self.calls:
            return []
        names = self.calls.partition(":")[0]
        number = 1 + int(fault.amount * 60)
        inject = self.calls.format(number=number, delay=int(50_000 + fault.amount * 450_000))
        return ["strace", "-D", "-f", "--seccomp-bpf", "-qq", "-o", str(log), "-e", f"trace={names}", "-e",
                f"inject={inject}"]  # fmt: skip


def _one(scene: Scene, role: str, fault: Fault) -> int:
    pids = scene.pids(role)
    if not pids:
        raise NotThereError
    return pids[int(fault.victim * len(pids))]


def _send(
    role: str, number: signal.Signals, of_all: bool = False, for_good: bool = False
) -> Callable[[Scene, Fault], str]:
    """Send a signal to one process of a role, or to all."""

    def strike(scene: Scene, fault: Fault) -> str:
        pids = scene.pids(role) if of_all else [_one(scene, role, fault)]
        ranks = scene.pids(role) if role == "rank" else []
        scene.signal(pids, number, for_good)
        who = f"rank {ranks.index(pids[0])}" if ranks else role
        return f"{number.name} to {who}"

    return strike


def _interrupt_twice(scene: Scene, fault: Fault) -> str:
    for _ in range(2):
        scene.signal(scene.pids("supervisor"), signal.SIGINT)
    return "SIGINT to the supervisor, twice"


def _fill_disk(scene: Scene, fault: Fault) -> str:
    assert scene.disk is not None
    left = int(2**20 * 4 * fault.amount**3)
    scene.disk.fill(left)
    return f"{left // 1024} KiB left"


def _read_only(scene: Scene, fault: Fault) -> str:
    assert scene.disk is not None
    scene.must_mount_again = True
    scene.disk.make_read_only()
    return "the file system turned read-only"


def _lost_disk(scene: Scene, fault: Fault) -> str:
    assert scene.disk is not None
    scene.must_mount_again = True
    scene.disk.fail()
    return "every access to the disk fails"


def _power_cut(scene: Scene, fault: Fault) -> str:
    _lost_disk(scene, fault)
    scene.signal(scene.pids("everything"), signal.SIGKILL)
    return "what was not flushed is lost, and every process killed"


def _bound_memory(role: str) -> Callable[[Scene, Fault], str]:
    """Let a process have little more memory than it has."""

    def strike(scene: Scene, fault: Fault) -> str:
        pid = _one(scene, role, fault)
        more = int(fault.amount**2 * 2**26)
        try:
            used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * _PAGE_BYTES
            resource.prlimit(pid, resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
        except (OSError, ValueError):
            raise NotThereError from None
        return f"{more // 1024} KiB more for the {role}"

    return strike


def _bound_files(scene: Scene, fault: Fault) -> str:
    pid = _one(scene, "rank", fault)
    more = int(fault.amount * 6)
    try:
        used = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir())
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1 + more, hard))
    except (OSError, ValueError):
        raise NotThereError from None
    return f"{more} more open files for the rank"


def _cut(scene: Scene, fault: Fault) -> str:
    scene.own_network().cut()
    return f"no packet arrives for {fault.seconds:.1f} s"


def _reset(scene: Scene, fault: Fault) -> str:
    if not (ends := scene.own_network().reset()):
        raise NotThereError
    return f"reset {ends} ends of connections"


def _wake(scene: Scene) -> None:
    scene.wake()


def _mend_network(scene: Scene) -> None:
    scene.own_network().mend()


_PAUSE = (0.5, 8.0)
_REPEATED = 0.15  # the share of kills at a point that come again after each restart
_ALL = (
    Kind("kill the supervisor", "SIGKILL", _send("supervisor", signal.SIGKILL)),
    Kind("kill a rank", "SIGKILL", _send("rank", signal.SIGKILL)),
    Kind("kill every process", "SIGKILL to all at once", _send("everything", signal.SIGKILL, of_all=True)),
    Kind("kill gspo-mega serve", "SIGKILL", _send("serve", signal.SIGKILL), is_live=True),
    Kind("kill a server", "SIGKILL to SGLang's first process", _send("server", signal.SIGKILL), is_live=True),
    Kind("kill a scheduler", "SIGKILL", _send("scheduler", signal.SIGKILL), is_live=True),
    Kind("kill a detokenizer", "SIGKILL", _send("detokenizer", signal.SIGKILL), is_live=True),
    Kind("kill a scorer", "SIGKILL", _send("scorer", signal.SIGKILL), is_live=True),
    Kind("kill an episode worker", "SIGKILL", _send("episode worker", signal.SIGKILL), is_live=True,
         needs=("episode worker",)),
    Kind("kill a standby", "SIGKILL", _send("standby", signal.SIGKILL), needs=("standby",)),
    Kind("ask to stop", "SIGTERM to the supervisor", _send("supervisor", signal.SIGTERM)),
    Kind("Ctrl-C twice", "an end at once", _interrupt_twice),
    Kind("stop a rank a while", "SIGSTOP, later SIGCONT", _send("rank", signal.SIGSTOP), _wake, _PAUSE),
    Kind("stop a rank for good", "SIGSTOP", _send("rank", signal.SIGSTOP, for_good=True)),
    Kind("stop a standby for good", "SIGSTOP", _send("standby", signal.SIGSTOP, for_good=True), needs=("standby",)),
    Kind("stop the supervisor a while", "SIGSTOP, later SIGCONT", _send("supervisor", signal.SIGSTOP), _wake, _PAUSE),
    Kind("stop every process a while", "a machine that is suspended",
         _send("everything", signal.SIGSTOP, of_all=True), _wake, _PAUSE),
    Kind("stop a scheduler a while", "SIGSTOP, later SIGCONT", _send("scheduler", signal.SIGSTOP), _wake, _PAUSE,
         is_live=True),
    Kind("stop a scheduler for good", "SIGSTOP", _send("scheduler", signal.SIGSTOP, for_good=True), is_live=True),
    Kind("stop gspo-mega serve for good", "SIGSTOP", _send("serve", signal.SIGSTOP, for_good=True), is_live=True),
    Kind("stop a scorer for good", "SIGSTOP", _send("scorer", signal.SIGSTOP, for_good=True), is_live=True),
    Kind("kill at a declared point", "SIGKILL of rank 0 at one of `failpoints.POINTS`", do="kill"),
    Kind("kill inside a publish", "SIGKILL of rank 0 at a point of a publish", do="kill", points="publish.",
         is_live=True),
    Kind("no space at a declared point", "the operation fails with ENOSPC", do="disk_full"),
    Kind("no right at a declared point", "the operation fails with EACCES", do="denied"),
    Kind("full disk", "0 to 4 MiB are left", _fill_disk, needs=("disk",)),
    Kind("read-only disk", "the kernel mounts it read-only after an error", _read_only, needs=("disk",)),
    Kind("lost disk", "every access fails, what was not flushed is lost", _lost_disk, needs=("disk",)),
    Kind("power cut", "what was not flushed is lost, every process killed", _power_cut, needs=("disk",)),
    Kind("slow fsync", "the first 40 of each thread take 0.05 to 0.5 s more",
         calls="fsync,fdatasync:delay_enter={delay}:when=1..40", needs=("strace",)),
    Kind("failing fsync", "one of each thread's fails with EIO", calls="fsync,fdatasync:error=EIO:when={number}",
         needs=("strace",)),
    Kind("failing rename", "one of each thread's fails with EDQUOT",
         calls="rename,renameat,renameat2:error=EDQUOT:when={number}", needs=("strace",)),
    Kind("low memory of a rank", "an address space that is nearly used up", _bound_memory("rank")),
    Kind("low memory of a scheduler", "an address space that is nearly used up", _bound_memory("scheduler"),
         is_live=True),
    Kind("few open files of a rank", "0 to 5 more than it has open", _bound_files),
    Kind("cut network", "no packet of the run arrives", _cut, _mend_network, (0.5, 12.0), needs=("network",)),
    Kind("cut network inside a publish", "no packet of the run arrives", _cut, _mend_network, (0.5, 12.0),
         needs=("network",), is_live=True, points="publish."),
    Kind("reset connections", "all open ones, in the middle of whatever they carry", _reset,
         needs=("network", "sockets")),
)  # fmt: skip
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
