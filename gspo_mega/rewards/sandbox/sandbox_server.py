"""Run programs from responses in a sandbox: `PYTHON sandbox_server.py SETTINGS`. This is run as a file, possibly by
another Python than the run's, and imports no module of gspo_mega.

It speaks JSON lines on standard input and output. SETTINGS is JSON: {"walls": "auto", "namespaces", "landlock" or
"none", "memory_bytes", "file_bytes", "folder_bytes", "output_bytes"}. The first line out is {"ready": walls in words}
or {"error": text}. Each further line in is {"program", "seconds", "wall_seconds"} with one of {"input": text}, {"call":
{"function", "arguments"}} and {"asserts": text}, optionally with "most_seconds", and with a "prelude" that runs before
the program. The answer is one line: {"ended", "said": text, "result": JSON in text, "took": seconds of its own}.
`ended` is done, raised, time, output, memory or killed if the program is the cause; held_up or lost if it is not: it
was still held up after `most_seconds`, or somebody else killed it or kept it from beginning. {"error": text} says that
no further program can be run here.

Each test runs in a fork of this process that is killed afterwards and that can start no other, so that nothing outlives
it. A fork sees what this process knows. That is never the expected output or result, because the caller compares; only
asserts run next to the program.
"""

import builtins
import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sandbox_clock
import sandbox_syscalls
import sandbox_walls

del sys.path[0]

# Modules that programs often import, as does LiveCodeBench's prelude.
_IMPORTED = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math"),
    *("operator", "random", "re", "statistics", "string", "typing"),
)
_FOLDERS = "gspo_mega_code_"

# Runs in the sandbox before any response's program does, and names every hole in the walls.
_PROBE = """
import ctypes, os, socket, signal, sys
holes = []
def must_fail(name, act):
    try:
        act()
    except OSError:
        return
    holes.append(name)
must_fail("a process", os.fork)
must_fail("a program", lambda: os.execv(sys.executable, [sys.executable, "-V"]))
must_fail("a socket", socket.socket)
must_fail("a local socket", lambda: socket.socket(socket.AF_UNIX))
must_fail("/proc", lambda: open(f"/proc/{os.getppid()}/environ").read())
must_fail("a signal", lambda: os.kill(%d, 0))
must_fail("a signal to its group", lambda: os.kill(0, 0))
must_fail("a signal to a group by number", lambda: os.killpg(os.getpgrp() or 1, 0))
must_fail("a signal to all", lambda: os.kill(-1, 0))
must_fail("a signal to process 1", lambda: os.kill(1, 0))
must_fail("a signal to its parent", lambda: os.kill(os.getppid() or 1, 0))
must_fail("a stop of itself", lambda: os.kill(os.getpid(), signal.SIGSTOP))
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
must_fail("a signal to a thread", lambda: call(200, os.getppid() or 1, 0))
must_fail("a signal to a thread of process 1", lambda: call(234, 1, 1, 0))
must_fail("a signal by a descriptor", lambda: call(434, os.getppid() or 1, 0))
must_fail("a queued signal", lambda: call(129, os.getppid() or 1, 0, 0))
os.kill(os.getpid(), 0)
must_fail("a file", lambda: open("%s/.gspo_mega_probe", "w"))
must_fail("/etc", lambda: os.listdir("/etc/ssl"))
must_fail("a mode", lambda: os.chmod(".", 0o777))
open("own", "w").write("x")
sys.stdout.write("holes: " + ", ".join(holes) if holes else "none")
"""


def main():
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in _IMPORTED:  # once, so that no test waits for them
        with contextlib.suppress(ImportError):
            __import__(name)
    server = os.getpid()
    home = os.getcwd()
    try:
        jail, words = _walls(settings)
        os.environ.clear()
        os.environ.update({"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"})
        if jail.name != "none":
            outcome = jail.run({"program": _PROBE % (server, home), "input": "", "seconds": 20, "wall_seconds": 60})
            if outcome["ended"] != "done" or outcome["said"] != "none":
                raise OSError(0, f"the walls have a hole: {outcome}")
    except OSError as error:
        _say(replies, {"error": error.strerror or str(error)})
        return
    _say(replies, {"ready": words})
    for line in sys.stdin.buffer:
        try:
            reply = jail.run(json.loads(line))
        except OSError as error:  # no process, descriptor or memory is left on the machine
            reply = {"error": f"{error.strerror or error}"}
        _say(replies, reply)


def _walls(settings):
    """Return a jail with the strongest walls that were asked for and that the kernel provides, and their name in words.
    Raises OSError if there are none.
    """
    wanted, refused = settings["walls"], []
    jail = Jail(settings)
    if wanted == "none":
        _remove_old_folders()
        return jail, "no walls"
    problem = sandbox_syscalls.problem()
    if problem:
        raise OSError(0, problem)
    if wanted in ("auto", "namespaces"):
        try:
            sandbox_walls.enter_name_spaces()
        except OSError as error:
            refused.append(f"name spaces: {error.strerror}")
        else:
            jail.name = "namespaces"
            return jail, "name spaces and seccomp"
    if wanted in ("auto", "landlock"):
        version = sandbox_walls.landlock_version()
        if version >= sandbox_walls.LEAST_LANDLOCK:
            _remove_old_folders()
            jail.name = "landlock"
            return jail, f"Landlock {version} and seccomp"
        refused.append(
            f"Landlock: version {sandbox_walls.LEAST_LANDLOCK} is needed, the kernel has {version}"
            if version
            else "Landlock: the kernel has none"
        )
    raise OSError(0, "; ".join(refused))


class Jail:
    """Where programs run, one at a time."""

    def __init__(self, settings):
        self.name, self._settings, self._proc = "none", settings, sandbox_clock.open_proc()
        with open("/proc/self/statm", encoding="ascii") as statm:
            self._used = int(statm.read().split()[0]) * resource.getpagesize()

    def run(self, asked):
        """Run one test and say how it ended."""
        folder = None if self.name == "namespaces" else tempfile.mkdtemp(prefix=_FOLDERS)
        try:
            return self._run(asked, folder)
        finally:
            if folder is not None:
                _remove(folder)

    def _run(self, asked, folder):
        given = os.memfd_create("input")
        with open(os.dup(given), "wb") as file:
            file.write(asked.get("input", "").encode("utf-8", "replace"))
        os.lseek(given, 0, os.SEEK_SET)
        output, to_output = os.pipe()
        result, to_result = os.pipe()
        begun, to_begun = os.pipe()
        child = os.fork()
        if child == 0:
            self._become_program(asked, folder, (given, to_output, to_result, to_begun))
        for end in (given, to_output, to_result, to_begun):
            os.close(end)
        name = os.read(begun, 32).decode()
        os.close(begun)
        clock = sandbox_clock.OwnTime(child, name, self._proc) if name else None
        ends = {"output": output, "result": result}
        return _Watch(self.name == "none", child, ends, asked, self._settings, folder, clock).outcome()

    def _become_program(self, asked, folder, ends):
        """In the fork: enter the sandbox, report it, run the program, and exit. Never returns."""
        code = 1
        try:
            sandbox_walls.libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            name = sandbox_clock.name_in(self._proc).encode()
            for number, end in zip((0, 1, 3, 4), ends):
                os.dup2(end, number + 20)
            nothing = os.open("/dev/null", os.O_WRONLY)
            os.dup2(nothing, 2)
            for number in (0, 1, 3, 4):
                os.dup2(number + 20, number)
            os.closerange(5, 1024)
            os.setsid()  # another group than the server's, too
            self._wall_in(folder)
            self._limit(asked["seconds"])
            if self.name != "none":
                sandbox_syscalls.restrict(sandbox_walls.libc)
            os.write(4, name)
            os.close(4)
            code = _run_program(asked)
        except MemoryError:
            code = 102
        except BaseException:
            code = 103
        os._exit(code)

    def _wall_in(self, folder):
        if self.name == "namespaces":
            folder = sandbox_walls.own_folder(self._settings["folder_bytes"])
            sandbox_walls.drop_capabilities()
        elif self.name == "landlock":
            sandbox_walls.restrict_with_landlock(folder)
            if os.geteuid() == 0:
                sandbox_walls.drop_capabilities()
        os.chdir(folder)
        os.environ["TMPDIR"] = os.environ["HOME"] = tempfile.tempdir = folder

    def _limit(self, seconds):
        memory = self._used + self._settings["memory_bytes"]
        whole = int(seconds) + 1
        for kind, value in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, self._settings["file_bytes"]),
            (resource.RLIMIT_CPU, whole),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            most = resource.getrlimit(kind)[1]
            least = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (least, least))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the bound is an error of the program's


class _Watch:
    """Reads what a test says until it ends, or ends it. `clock`: the test's own time; None if it could not begin."""

    def __init__(self, own_group, child, ends, asked, settings, folder, clock):
        self._own_group, self._child, self._folder, self._clock = own_group, child, folder, clock
        self._output, self._result = ends["output"], ends["result"]
        self._ends = {end: bytearray() for end in ends.values()}
        self._seconds, self._own_seconds = asked["seconds"], asked["wall_seconds"]
        self._deadline = time.monotonic() + asked.get("most_seconds", 10 * asked["wall_seconds"])
        self._most, self._folder_bytes = settings["output_bytes"], settings["folder_bytes"]

    def outcome(self):
        ended = self._read() if self._clock is not None else "lost"
        if ended is None and not self._has_ended():
            # It closed its ends of the pipes and goes on.
            ended = "held_up" if time.monotonic() > self._deadline else "killed"
        os.kill(self._child, signal.SIGKILL)
        if self._own_group:  # without walls it may have started others
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGKILL)
        _, status, used = os.wait4(self._child, 0)
        for end in self._ends:
            os.close(end)
        code = os.waitstatus_to_exitcode(status)
        computed = used.ru_utime + used.ru_stime
        if ended is None:
            if code == -signal.SIGXCPU or computed > self._seconds:
                ended = "time"
            elif code == -signal.SIGKILL:  # which it cannot send itself: the machine's memory is exhausted, say
                ended = "lost" if self._clock is not None and not self._own_group else "killed"
            else:
                ended = {0: "done", 101: "raised", 102: "memory"}.get(code, "killed")
        reply = {
            "ended": ended,
            "said": bytes(self._ends[self._output]).decode("utf-8", "replace"),
            "took": max(computed, self._clock.own if self._clock is not None else 0.0),
        }
        result = bytes(self._ends[self._result])
        if result and ended == "done":
            reply["result"] = result.decode("utf-8", "replace")
        return reply

    def _has_ended(self):
        """Return whether the process ends within a second of its own time, now that its pipes have ended."""
        watched = os.pidfd_open(self._child)
        until = self._clock.own + 1.0
        try:
            while not select.select([watched], [], [], sandbox_clock.LOOK_SECONDS)[0]:
                self._clock.look()
                if self._clock.own > until or time.monotonic() > self._deadline:
                    return False
            return True
        finally:
            os.close(watched)

    def _read(self):
        """Read until both pipes have ended and return None, or return why the test has to be ended."""
        open_ends = set(self._ends)
        while open_ends:
            self._clock.look(sandbox_clock.LOOK_SECONDS / 2)
            if self._clock.computed > self._seconds or self._clock.own > self._own_seconds:
                return "time"
            if time.monotonic() > self._deadline:
                return "held_up"
            left = max(0.005, self._own_seconds - self._clock.own)
            ready, _, _ = select.select(list(open_ends), [], [], min(left, sandbox_clock.LOOK_SECONDS))
            for end in ready:
                piece = os.read(end, 65536)
                if not piece:
                    open_ends.discard(end)
                self._ends[end] += piece
                if len(self._ends[end]) > self._most:
                    return "output"
            if self._folder is not None and not ready and _size(self._folder) > self._folder_bytes:
                return "output"
        self._clock.look()
        return None


def _run_program(asked):
    """Run the program and what is asked of it. Returns the exit code; what it says is in the pipes."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins
    sys.argv = ["program.py"]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "replace")
    code = 101
    sys.set_int_max_str_digits(0)  # the time for it is bounded as for anything else
    try:
        if asked.get("prelude"):
            exec(compile(asked["prelude"], "prelude.py", "exec"), module.__dict__)
        exec(compile(asked["program"], "program.py", "exec"), module.__dict__)
        _join_threads()
        if "call" in asked:
            call = asked["call"]
            value = _function(module, call["function"])(*call["arguments"])
            _write_result(value)
        elif "asserts" in asked:
            exec(compile(asked["asserts"], "tests.py", "exec"), module.__dict__)
            _write_result(True)
        code = 0
    except SystemExit as left:
        code = 0 if left.code in (None, 0) and not {"call", "asserts"} & asked.keys() else 101
    except MemoryError:
        code = 102
    except BaseException:
        code = 101
    sys.stdout.flush()
    return code


def _join_threads():
    """Wait for threads, as Python does at a program's end: many programs run entirely in a thread, for its larger
    stack.
    """
    if "threading" in sys.modules:
        threads = sys.modules["threading"]
        for one in threads.enumerate():
            if one is not threads.current_thread() and not one.daemon:
                one.join()


def _function(module, name):
    """Return the function of that name, or the method of a class `Solution`, which some collections use."""
    found = getattr(module, name, None)
    if found is None and hasattr(module, "Solution"):
        found = getattr(module.Solution(), name)
    if found is None:
        raise NameError(name)
    return found


def _write_result(value):
    sent = memoryview(json.dumps(value, default=list).encode())
    while sent:
        sent = sent[os.write(3, sent) :]


def _size(folder):
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _remove(folder):
    shutil.rmtree(folder, ignore_errors=True)


def _remove_old_folders():
    """Remove the folders of servers that were killed in the middle of a test."""
    place = tempfile.gettempdir()
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if name.startswith(_FOLDERS) and os.lstat(path).st_mtime < time.time() - 3600:
            _remove(path)


def _say(replies, message):
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
