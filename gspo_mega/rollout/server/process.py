"""One start of SGLang on one machine: its process group, its scratch folder, and what it loads.

`RunningServer` starts it, ends it, and says how it ended. Restarts are in `supervise.py` and `multinode.py`.

The parts below it: `free_port` finds a port; the server itself binds it later. `start_group` and `end_group` start a
process as the head of its own process group, and end the whole group. `Scratch` is what one start leaves on its
machine: a temporary folder, and shared memory that SGLang names itself. Both are removed, also those of a server that
was killed together with its supervisor: the next server to start removes them. A folder belongs to its supervisor
while that holds a lock on a file in it (flock, which ends with its holder). A segment of shared memory belongs to the
server whose processes were seen to map it. Nothing else is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.network import address_problem, without_proxies
from gspo_mega.base.untrusted import open_regular
from gspo_mega.rollout.server.spec import ServerSpec

_PREFIX = "gspo-server-"

_NO_CACHE_MEMORY = re.compile(
    r"leave no GPU memory for the KV cache under --mem-fraction-static=([\d.]+\d)"
    r".* Raise --mem-fraction-static above ([\d.]+\d)"
)

_LOCK, _SEGMENTS = "lock", "segments"

# Names that SGLang, and Python's multiprocessing for it, give to segments. A killed server cannot remove its segments.
_SEGMENT = re.compile(r"(sglang_loads_|sgl_shm_|psm_|sem\.mp-)[\w.-]+")

SHARED_MEMORY = Path("/dev/shm")


_MOST_TAIL_BYTES = 256 * 1024

_MOST_WORD = 400

# An error as in the last line of a traceback: a class, perhaps with its module, and its message. One in parentheses is
# the reason for what its line says, as of a part that SGLang goes without.
_ERROR = re.compile(r"(?<![\w.(])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)\b:? .*$")


@dataclass(frozen=True)
class RunningServer:
    """A start of a server. The process is the head of a process group. Its standard output and error are appended to
    `log`.
    """

    process: subprocess.Popen[bytes]
    scratch: Scratch
    model_path: str
    log: Path
    log_start: int = 0  # where in its log this start begins, in bytes

    @classmethod
    def start(cls, entry: Sequence[str], log: Path, make_spec: Callable[[Path], ServerSpec]) -> RunningServer:
        """Run `entry` with the spec that `make_spec` makes for a new scratch folder. Call it from the main thread."""
        # A killed SGLang leaves sockets and marker files in its temporary folder: each start gets a folder of its own.
        scratch = Scratch()
        try:
            spec, spec_file = make_spec(scratch.path), scratch.path / "spec.json"
            spec.write(spec_file)
            command = [*entry, "--spec", str(spec_file), "--parent", str(os.getpid())]
            # SGLang asks itself whether it serves, and its parts ask each other. Neither may go through a proxy.
            environment = without_proxies(os.environ) | {"TMPDIR": str(scratch.path)}
            log_start = log.stat().st_size if log.exists() else 0
            process = start_group(command, log=log, environment=environment)
        except BaseException:
            scratch.remove()
            raise
        return cls(process, scratch, spec.model_path, log, log_start)

    def note_shared_memory(self) -> None:
        self.scratch.note_segments(self.process.pid)

    @property
    def how_it_ended(self) -> str | None:
        """Say how the process ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"SGLang {how} (see {self.log})"

    @property
    def log_end(self) -> int:
        """The length of the log now, in bytes."""
        return self.log.stat().st_size if self.log.exists() else 0

    def failure_line(self, ready_from: int | None) -> str | None:
        """Return the line of this start's log that best says why it failed: its last error, or else its last line.

        For a server that was ready, `ready_from` is where its log was then: only an error after that says why it ended,
        not what it said of optional parts while it started, and not the last request that it answered.
        """
        if ready_from is None:
            return failure_line(self.log, self.log_start)
        return failure_line(self.log, ready_from, errors_only=True)

    def end(self) -> None:
        self.note_shared_memory()
        # Its requests have left or are lost with it, and its scratch folder is removed, so nothing needs an orderly
        # end. At SIGTERM, SGLang takes the end of its own scheduler for a crash, and sleeps before it reports that.
        end_group(self.process, grace_seconds=0)
        self.scratch.remove()


def failure_line(log: Path, start: int = 0, errors_only: bool = False) -> str | None:
    """Return the last line from byte `start` on that names an error, or else, without `errors_only`, the last line;
    None if there is no such line.
    """
    try:
        text = _end_of(log, start)
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [found[0] for line in lines if (found := _ERROR.search(line)) is not None]
    last = named[-1] if named else lines[-1] if lines and not errors_only else None
    return None if last is None else _in_our_words(last)[:_MOST_WORD]


def _in_our_words(line: str) -> str:
    """SGLang's error of too little memory with the key that this package has for it; other lines as they are."""
    found = _NO_CACHE_MEMORY.search(line)
    if found is None:
        return line
    return (
        f"server.memory_fraction {found[1]} leaves no memory for the KV cache once the weights are loaded: above"
        f" {found[2]} is needed. Without a GPU it is a share of the machine's free memory, which ranks and others"
        f" use, too{_free_now()}"
    )


def _free_now() -> str:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return "" if found is None else f"; {int(found[1]) / 2**20:.1f} GiB are free now"


def log_tail(log: Path, num_lines: int = 30) -> str:
    """Return the last lines of a log; empty if there is no log."""
    try:
        lines = _end_of(log).splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


def _end_of(log: Path, start: int = 0) -> str:
    """Return the text at the end of a log, from byte `start` on, bounded because a log may have any size. Raises
    OSError.
    """
    with open_regular(log) as file:
        file.seek(max(start, log.stat().st_size - _MOST_TAIL_BYTES))
        return file.read(_MOST_TAIL_BYTES).decode("utf-8", errors="replace")


def free_port(host: str, beyond: int | None = None) -> int:
    """Return a port of `host` that is free now, above the port `beyond` if there is room. It is below the ephemeral
    range, so that no outgoing connection takes it. Raises ConfigError if `host` is not an address of this machine, or
    resolves to the wildcard address.
    """
    low, high = 20_000, 32_000
    start = (os.getpid() * 7919 if beyond is None else beyond + 1 - low) % (high - low)
    for offset in range(high - low):
        port = low + (start + offset) % (high - low)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
                if (problem := address_problem(probe.getsockname()[0])) is not None:
                    raise ConfigError(f"server.host: {host}: {problem}")
            except PermissionError:
                continue
            except OSError as error:
                if error.errno == 98:  # in use
                    continue
                raise ConfigError(f"server.host: cannot bind {host}: {error}") from error
            return port
    raise ConfigError(f"server.host: no free port of {host} between {low} and {high}")


def start_group(command: list[str], *, log: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start `command` in a new session, so that its pid names the group of all it spawns.

    Standard output and error are appended to `log`; standard input is empty. Call it from the main thread, because the
    kernel ties a child's parent-death signal to the thread that started it.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def group_members(group: int) -> list[int]:
    """Return the pids of the live (not zombie) processes in the process group or session `group`."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # "pid (command) state parent group session ...", and the command may hold spaces and parentheses.
        state, _parent, process_group, session = stat.rpartition(")")[2].split()[:4]
        if state not in "ZX" and group in (int(process_group), int(session)):
            members.append(int(entry.name))
    return members


def end_group(process: subprocess.Popen, grace_seconds: float) -> None:
    """End `process` and everything in its group or session: SIGTERM, then after `grace_seconds` SIGKILL. Wait until all
    are gone.

    It also works if the head is dead already and left children.
    """
    group = process.pid
    _signal_all(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline:
        process.poll()
        if not group_members(group):
            break
        time.sleep(0.05)
    while members := group_members(group):
        for pid in members:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _signal_all(group: int, number: int) -> None:
    for pid in group_members(group):
        _signal(pid, number)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended between the listing and the signal


class Scratch:
    """A folder for one start of a server, mode 0700, and the known names of its shared memory. Call `remove` when the
    server has ended.
    """

    def __init__(self) -> None:
        # Not below the run folder: its path may be too long for a socket.
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        draft = self.path / f".{_LOCK}"
        self._lock = draft.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The file gets its final name only now, so that it is always found locked.
        draft.rename(self.path / _LOCK)
        self._segments: set[str] = set()

    def note_segments(self, group: int) -> None:
        """Remember the segments that the processes of `group` map now. Segments of processes that end before the next
        call stay unknown.
        """
        found = {name for pid in group_members(group) for name in _mapped(pid)}
        if not found <= self._segments:
            self._segments |= found
            (self.path / _SEGMENTS).write_text("\n".join(sorted(self._segments)), encoding="utf-8")

    def remove(self) -> None:
        """Remove the folder and the segments. Call it when no process of the server runs any more."""
        _remove(self.path)
        self._lock.close()


def remove_abandoned() -> None:
    """Remove what servers of this user left in the temporary folder, if their supervisors have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except OSError:  # locked, not locked yet, or being removed by another process
            continue


def _remove(folder: Path) -> None:
    try:
        names = (folder / _SEGMENTS).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        names = []
    for name in names:
        if _SEGMENT.fullmatch(name):
            (SHARED_MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it ended
        return set()
    names = (line.rpartition(f" {SHARED_MEMORY}/")[2] for line in lines if f" {SHARED_MEMORY}/" in line)
    return {name for name in names if _SEGMENT.fullmatch(name)}
