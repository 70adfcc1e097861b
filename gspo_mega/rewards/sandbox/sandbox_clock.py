"""Measure whose time passes while a program from a response runs: its own, or the machine's. Imports no module of
gspo_mega.

A program's own time is the time in which it computed or slept of its own accord. Time in which it wanted a processor or
a page from a disk and did not get it is the machine's, and so is time in which somebody stopped it. The kernel measures
computing exactly; the rest follows from the states of its threads, which are sampled every tenth of a second.
"""

import os
import time

# Seconds between two looks. A much longer gap means that this process was held up, and the program with it.
LOOK_SECONDS = 0.1
_LATE_SECONDS = 0.5
_MOST_THREADS = 64
# Runnable, waiting for a disk, stopped: not asleep. Each letter is a state of /proc/PID/task/TID/stat.
_HELD_UP = b"RDTt"


def open_proc():
    """Open the machine's /proc. Call this before entering a root without it."""
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def name_in(proc):
    """Return the calling process's pid in this /proc, as text. In a PID name space it differs from `os.getpid()`."""
    return os.readlink("self", dir_fd=proc)


class OwnTime:
    """The time of one program. Attributes: computed and own, in seconds."""

    def __init__(self, process, name, proc):
        """`process`: a child of this process. `name`: its pid in `proc`, a descriptor of /proc."""
        self._process, self._name, self._proc = process, name, proc
        self.computed = self.own = 0.0
        self._last = time.monotonic()

    def look(self, least_seconds=0.0):
        """Add the time since the last look if it is at least `least_seconds`."""
        passed = time.monotonic() - self._last
        if passed < least_seconds:
            return
        self._last += passed
        before = self.computed
        self.computed = max(before, self._processor_seconds())
        worked = self.computed - before
        held_up = passed > _LATE_SECONDS or self._is_held_up()
        self.own += worked if held_up else max(worked, passed)

    def _processor_seconds(self):
        """Return the processor time of the whole process, ended threads included; 0 once the process has ended."""
        try:
            return time.clock_gettime((~self._process << 3) | 2)  # the process's clock, as clock_getcpuclockid has it
        except OSError:
            return 0.0

    def _is_held_up(self):
        try:
            tasks = os.open(f"{self._name}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return False
        try:
            return any(self._state(tasks, name) in _HELD_UP for name in os.listdir(tasks)[:_MOST_THREADS])
        finally:
            os.close(tasks)

    def _state(self, tasks, name):
        try:
            file = os.open(f"{name}/stat", os.O_RDONLY, dir_fd=tasks)
        except OSError:
            return b"X"
        try:
            # "pid (command) state ...", and the command may hold anything.
            return os.read(file, 512).rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            return b"X"
        finally:
            os.close(file)
