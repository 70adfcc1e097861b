"""What a drill may do on this machine: a disk of its own, a network of its own, system calls that fail.

`missing_needs` tries each of these once and says why it is not there; the kinds of faults that need it are then left
out by name. `Disk` is a small file system under one run, which can fill up, turn read-only, fail, or lose what was not
flushed. `Network` is the network name space of one run, whose loopback device can be cut. All mounts are made in the
drill's own mount name space (`cli/drill.py` enters it), so nothing of them is left when the drill ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

# Words before a command that gives it a network of its own, in which it finds itself.
OWN_NETWORK = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN, for ext4 and others
_WITHOUT_FLUSH = struct.pack("I", 2)
_PROBE_BYTES = 2**25
_WAIT_SECONDS = 60.0


def missing_needs(has_own_mounts: bool) -> dict[str, str]:
    """{need: why this machine does not have it}, of `mounts`, `disk`, `network`, `sockets` and `strace`."""
    found: dict[str, str] = {}
    if not has_own_mounts:
        found["mounts"] = "it needs root, or user name spaces, to mount a small file system"
    with tempfile.TemporaryDirectory() as folder:
        if (why := found.get("mounts") or _problem_of_disk(Path(folder))) is not None:
            found["disk"] = why
    for name, words, what in (
        ("network", [*OWN_NETWORK, "ip", "link", "set", "lo", "down"], "it needs root and iproute2 (`ip`)"),
        ("sockets", [*OWN_NETWORK, "ss", "-K", "state", "established"], "it needs root and iproute2 (`ss`)"),
        ("strace", ["strace", "-D", "-f", "-e", "trace=fsync", "-e", "inject=fsync:delay_enter=1", "true"],
         "it needs strace, and the right to trace"),
    ):  # fmt: skip
        if (why := _problem_of(words)) is not None:
            found[name] = f"{what}: {why}"
    return found


def _problem_of_disk(folder: Path) -> str | None:
    try:
        disk = Disk(folder / "image", folder / "mount", _PROBE_BYTES)
        try:
            disk.make_read_only()
            with contextlib.suppress(OSError):
                (disk.mount / "file").touch()
                return "its file system did not turn read-only"
        finally:
            disk.close()
    except (OSError, subprocess.SubprocessError) as error:
        return f"it needs root, a loop device, and ext4: {_said(error)}"
    return None


def _problem_of(words: list[str]) -> str | None:
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=_WAIT_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return _said(error)
    return None


def _said(error: Exception) -> str:
    text = getattr(error, "stderr", None)
    text = text.decode(errors="replace").strip() if isinstance(text, bytes) else ""
    return (text or str(error)).splitlines()[0]


class Disk:
    """An ext4 file system in a file, mounted at `mount`. Raises OSError or subprocess.SubprocessError."""

    def __init__(self, image: Path, mount: Path, size: int) -> None:
        self.image, self.mount = image, mount
        self.filler = mount / ".drill-filler"
        with image.open("wb") as file:
            file.truncate(size)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        mount.mkdir(parents=True, exist_ok=True)
        self._mount()
        shutil.rmtree(mount / "lost+found", ignore_errors=True)

    def _mount(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.mount))

    def fill(self, left: int) -> None:
        """Leave `left` bytes free."""
        seen = os.statvfs(self.mount)
        size = seen.f_bavail * seen.f_frsize - left
        with self.filler.open("wb") as file:
            while size > 4096:  # the file system needs some blocks for the file's own tables
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                    break
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size -= 65536

    def free(self) -> None:
        with contextlib.suppress(OSError):
            self.filler.unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """What the kernel does when it finds an error: writing fails from now on, whoever has a file open."""
        device = subprocess.run(
            ["findmnt", "-no", "SOURCE", str(self.mount)], check=True, capture_output=True, text=True
        ).stdout.strip()
        with contextlib.suppress(OSError):  # this write meets the read-only file system itself
            Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("drill")

    def fail(self) -> None:
        """The device is gone: every write fails, and what was not flushed is lost."""
        descriptor = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _WITHOUT_FLUSH)
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Mount it again, after a check, with what it has. No process may use it."""
        self._unmount()
        done = subprocess.run(["e2fsck", "-fy", str(self.image)], capture_output=True, check=False)
        if done.returncode > 1:
            raise OSError(errno.EIO, f"e2fsck ended with {done.returncode}", str(self.image))
        self._mount()

    def _unmount(self) -> None:
        gc.collect()  # files that this process has read and not closed yet
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            done = subprocess.run(["umount", str(self.mount)], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                users = ", ".join(self._users()) or "nobody that can be seen"
                raise OSError(errno.EBUSY, f"{done.stderr.strip()}; used by {users}", str(self.mount))
            time.sleep(0.2)

    def _users(self) -> list[str]:
        """The processes that have a file of it open, or work in it."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            for link in (entry / "cwd", *_entries(entry / "fd")):
                with contextlib.suppress(OSError):
                    if os.readlink(link).startswith(str(self.mount)):
                        found.append(f"process {entry.name} ({os.readlink(link)})")
                        break
        return found

    def close(self) -> None:
        """Unmount it and remove its file."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _run("umount", "--lazy", str(self.mount))
        self.image.unlink(missing_ok=True)


class Network:
    """The network name space of a process that was started with `OWN_NETWORK`. It lives as long as this object."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)

    def cut(self) -> None:
        """No packet arrives, of any process of the run, to any process of the run."""
        self._inside("ip", "link", "set", "lo", "down")

    def mend(self) -> None:
        self._inside("ip", "link", "set", "lo", "up")

    def reset(self) -> int:
        """Reset all connections that are open. Returns how many ends of them were."""
        listed = self._inside("ss", "-Htn", "state", "established")
        self._inside("ss", "-Kt", "state", "established")
        return len(listed.splitlines())

    def close(self) -> None:
        os.close(self._descriptor)

    def _inside(self, *words: str) -> str:
        place = f"/proc/self/fd/{self._descriptor}"
        done = subprocess.run(
            ["nsenter", f"--net={place}", *words],
            check=True,
            capture_output=True,
            text=True,
            pass_fds=[self._descriptor],
            timeout=_WAIT_SECONDS,
        )
        return done.stdout


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=_WAIT_SECONDS)
