"""Make sure that only one supervisor uses a run folder, on any file system and from any machine.

Two fences keep others out. The first is an flock, which the kernel releases however its holder ends. It has no effect
between machines if locks are local to a node, and fails on file systems without locks. The second is a lease that
consists only of files:

    lease/<8 digits>    a holder's record: host, boot, process, and a heartbeat that it changes every few seconds

The record with the highest number is the holder's. A process takes the folder by creating the next number, which only
one process can do (`link` refuses an existing name). It may do so once the holder has released the folder, once the
holder's process on this machine is dead, or once it has itself seen no change of the heartbeat for `LEASE_SECONDS`; so
no clock is compared with another machine's. Numbers only grow, so a slow process cannot displace a newer holder. A
supervisor that finds a higher number than its own has lost the folder and stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import ConfigError, FolderError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import parse_json, read_bytes

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
# Shared folders show a change late, some by half a minute.
LEASE_SECONDS = 60.0
_POLL_SECONDS = 0.5
# Records have a fixed length, so that one can be rewritten in place, even on a full disk.
_RECORD_BYTES = 1024
_NUMBER = re.compile(r"\d{8}")


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder. `boot` and `pid_space` identify its kernel and container, in which `pid` counts;
    `process_start`: clock ticks since boot, because process numbers are reused. `beat` changes while the process lives.
    """

    host: str
    boot: str
    pid_space: str
    pid: int
    process_start: int
    beat: int = 0
    is_released: bool = False

    @classmethod
    def this_process(cls) -> Holder:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pid = os.getpid()
        return cls(socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"), pid, _process_start(pid) or 0)

    @property
    def described(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_alive(self) -> bool | None:
        """Whether the process lives; None if it cannot be seen from this machine or container."""
        here = Holder.this_process()
        if (self.boot, self.pid_space) != (here.boot, here.pid_space):
            return None
        return _process_start(self.pid) == self.process_start


class Lease:
    """The holder's lease of a folder, with the thread that renews it."""

    def __init__(self, folder: Path, number: int, holder: Holder, beat_seconds: float) -> None:
        self._folder, self._number, self._holder, self._beat_seconds = folder, number, holder, beat_seconds
        self._lost: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def raise_if_lost(self) -> None:
        """Raises FolderError once another supervisor holds the folder. This one may then write nothing more to it."""
        if self._lost is not None:
            raise FolderError(self._lost)

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        if self._lost is None:
            self._write(replace(self._holder, is_released=True))

    def _renew(self) -> None:
        while not self._over.wait(self._beat_seconds):
            try:
                newest = _newest(self._folder)
            except OSError as error:
                logger.warning("%s cannot be read: %s", self._folder, error.strerror)
                continue
            if newest is not None and newest > self._number:
                other = _read(self._folder, newest)
                self._lost = (
                    f"{self._folder.parent} was taken over by {other.described if other else 'another supervisor'},"
                    f" which saw no sign of life from this one ({self._holder.described}). This one ends and writes"
                    " nothing more"
                )
                return
            self._holder = replace(self._holder, beat=self._holder.beat + 1)
            self._write(self._holder)

    def _write(self, holder: Holder) -> None:
        try:
            _write(self._folder / f"{self._number:08d}", holder, os.O_WRONLY)
        except OSError as error:
            logger.warning("the lease in %s cannot be written: %s", self._folder, error.strerror)


@contextlib.contextmanager
def hold(
    folder: RunFolder,
    say: Callable[[str], None] = lambda line: None,
    lease_seconds: float = LEASE_SECONDS,
    beat_seconds: float = BEAT_SECONDS,
) -> Iterator[Lease]:
    """Hold the run folder for this process while the context lasts; makes the folder if it is missing. `say` announces
    a long wait.

    Raises ConfigError if another process holds the folder or it cannot be made, FolderError if it cannot be written.
    """
    try:
        atomic_io.make_folder(folder.path)
        lock = folder.lock_file.open("a+", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"run.dir, run.name: cannot write the run folder {folder.path}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            newest = _newest(folder.lease_dir)
            raise _in_use(folder, None if newest is None else _read(folder.lease_dir, newest)) from None
        except OSError as error:
            # The file system has no locks, or no room for another one. The lease is enough.
            logger.warning("%s: no lock: %s; only the lease keeps others out", folder.lock_file, error.strerror)
        lease = _take(folder, say, lease_seconds, beat_seconds)
        try:
            yield lease
        finally:
            lease.release()


def refuse_if_held(folder: RunFolder) -> str | None:
    """Raise ConfigError if a living process of this machine holds the run folder. Takes, waits for and writes nothing:
    a lock taken for a moment would turn away a run that starts then. Returns a notice about a holder that cannot be
    seen from this machine, and otherwise None.
    """
    newest = _newest(folder.lease_dir)
    holder = None if newest is None else _read(folder.lease_dir, newest)
    if holder is None or holder.is_released:
        return None
    alive = holder.is_alive()
    if alive:
        raise _in_use(folder, holder)
    if alive is None:
        return (
            f"run folder {folder.path} is held by {holder.described}, which cannot be seen from here: a start waits"
            f" {LEASE_SECONDS:.0f} s for a sign of life, and is refused if there is one"
        )
    return None


def _take(folder: RunFolder, say: Callable[[str], None], lease_seconds: float, beat_seconds: float) -> Lease:
    try:
        folder.lease_dir.mkdir(exist_ok=True)
        while True:
            newest = _newest(folder.lease_dir)
            if newest is not None:
                _wait_until_free(folder, newest, say, lease_seconds)
            number, holder = (newest or 0) + 1, Holder.this_process()
            if _make(folder.lease_dir, number, holder):
                break
            # Another process was faster and is the holder now.
        for old in folder.lease_dir.iterdir():
            if _NUMBER.fullmatch(old.name) and int(old.name) < number:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(f"run folder {folder.path} cannot be written: {error.strerror}") from error
    return Lease(folder.lease_dir, number, holder, beat_seconds)


def _wait_until_free(folder: RunFolder, number: int, say: Callable[[str], None], lease_seconds: float) -> None:
    """Return once the holder of record `number` is certain to be gone. Raises ConfigError if it lives."""
    first, since, is_announced = _read(folder.lease_dir, number), time.monotonic(), False
    while True:
        now = _read(folder.lease_dir, number)
        if now is not None:
            if now.is_released:
                return
            alive = now.is_alive()
            if alive or (first is not None and now.beat != first.beat):
                raise _in_use(folder, now)
            if alive is False:
                return
            first = first or now
        if time.monotonic() - since > lease_seconds:
            return
        if not is_announced:
            who = now.described if now is not None else "an unknown process"
            say(f"run folder {folder.path} was held by {who}; waiting {lease_seconds:.0f} s for a sign of life")
            is_announced = True
        time.sleep(min(_POLL_SECONDS, lease_seconds / 10))


def _in_use(folder: RunFolder, holder: Holder | None) -> ConfigError:
    who = holder.described if holder is not None else "an unknown process"
    return ConfigError(
        f"run folder {folder.path} is in use by another run ({who}). Stop that run, or choose another run.name"
    )


def _newest(folder: Path) -> int | None:
    try:
        return max((int(entry) for entry in os.listdir(folder) if _NUMBER.fullmatch(entry)), default=None)
    except FileNotFoundError:
        return None


def _read(folder: Path, number: int) -> Holder | None:
    """The record of that number; None if it is gone or just being written."""
    try:
        return Holder(**parse_json(read_bytes(folder / f"{number:08d}")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _make(folder: Path, number: int, holder: Holder) -> bool:
    """Create the record of that number. Returns False if it exists already. Raises OSError."""
    final = folder / f"{number:08d}"
    draft = folder / f".{number:08d}.{holder.host}.{holder.pid}"
    try:
        _write(draft, holder, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        atomic_io.sync(draft)
        try:
            os.link(draft, final)
        except FileExistsError:
            return False
        except OSError:
            # The file system has no links. The process that creates the file holds the folder; its record follows.
            try:
                _write(final, holder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                return False
        atomic_io.sync(folder)
        return True
    finally:
        draft.unlink(missing_ok=True)


def _write(path: Path, holder: Holder, flags: int) -> None:
    # Opened anew each time, because a shared file system shows a change to others only after a close.
    descriptor = os.open(path, flags, 0o644)
    try:
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode().ljust(_RECORD_BYTES - 1) + b"\n", 0)
    finally:
        os.close(descriptor)


def _process_start(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None if it is gone or a zombie."""
    try:
        fields = (
            Path("/proc", str(pid), "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
