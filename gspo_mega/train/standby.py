"""A process that has imported what a rank imports and waits to become one.

    python -m gspo_mega.train.standby --config FILE --attempt DIR --command train     (with a rank's variables)

The supervisor starts one per rank while a run trains (`launcher/standby.py`). It imports in a thread of low
priority, writes `standby/ready_<rank>.json` into the attempt's folder, and then waits at no cost: it has joined no
process group, has made no CUDA context, and has run no code of the user. When ranks have failed, the supervisor writes
one line of JSON to its input: {"arguments": those of a rank of the next attempt, "environment": variables}. This
process then writes `standby/start_<rank>.json` into the next attempt's folder and goes on as that rank (`worker.py`).
If what it has imported is no longer what a rank would import, it says why there and becomes a new process of the rank
by exec.

If its input ends without a line, nobody needs this process any more, and it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import gspo_mega
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.run_folder import Attempt, atomic_write_json
from gspo_mega.config import load_config
from gspo_mega.config.schema import Config
from gspo_mega.train import worker

# Its name in /proc until it becomes a rank, by which `ps` and drills tell it from one.
NAME = "gspo-standby"
# Added to the niceness of the thread that imports. On a core that a rank uses it gets a quarter of the time; with the
# lowest priority it would take minutes on a machine without a free core.
_NICER = 5
# In the order of a rank: the CPU backend enables Megatron to run on a CPU.
_FIRST = ("torch", "gspo_mega.cpu.backend")
# What a rank imports only when it first needs it, apart from the module of its command.
_LATER = (
    "gspo_mega.engine",
    "gspo_mega.checkpoint.load",
    "gspo_mega.checkpoint.save",
    "transformers.models.auto.tokenization_auto",
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Wait to become a rank. Does not return: the process ends as the rank does."""
    args = worker.parse_arguments(arguments)
    place = worker.RankEnvironment.read(os.environ)
    own_name = Path("/proc/self/comm")
    rank_name = own_name.read_text()
    own_name.write_text(NAME)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    imports = Imports(args.config, args.command, place)
    imports.start(Attempt(args.attempt).standby_ready_file(place.rank))
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    imports.finish()
    order = json.loads(line)
    next_arguments: list[str] = order["arguments"]
    os.environ.update(order["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the input of a rank
    given = worker.parse_arguments(next_arguments)
    why = imports.problem(given.config, given.command, worker.RankEnvironment.read(os.environ))
    start = {"used": why is None, "why": why, "ready_for_seconds": time.time() - imports.ready_at}
    start_file = Attempt(given.attempt).standby_start_file(place.rank)
    start_file.parent.mkdir(exist_ok=True)
    atomic_write_json(start_file, start)
    own_name.write_text(rank_name)
    if why is not None:
        os.execv(sys.executable, [sys.executable, "-m", "gspo_mega.train.worker", *next_arguments])
    worker.main(next_arguments)


class Imports:
    """What this process imports for the rank `place` of `command`, as the file `config` says."""

    def __init__(self, config: str, command: str, place: worker.RankEnvironment) -> None:
        self._files = source_files()
        self._config, self._command, self._place = config, command, place
        self._settings: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self.ready_at = 0.0

    def start(self, ready_file: Path) -> None:
        """Begin to import, in a thread, and write `ready_file` at its end. If an import fails, this process ends."""

        def run() -> None:
            began = time.monotonic()
            # Linux has a priority for each thread: only this one gets a lower one, which it could not raise again.
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
            try:
                self._import()
                self.ready_at = time.time()
                record = {"pid": os.getpid(), "seconds": time.monotonic() - began, "resident_bytes": resident_bytes()}
                ready_file.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_json(ready_file, record)
            except BaseException:  # the rank that imports the same says it to the user
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

        self._thread = threading.Thread(target=run, name="imports", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until everything is imported."""
        assert self._thread is not None
        self._thread.join()

    def _import(self) -> None:
        config = load_config(self._config, command=self._command).config
        self._settings = imported_by(config)
        module, _ = worker.ENTRY_POINTS[self._command]
        with uncollected():
            worker.set_variables_before_torch(
                self._place, config.precision, config.engine, config.fp8, opens_device=False
            )
            for name in (*_FIRST, module, *_LATER):
                importlib.import_module(name)

    def problem(self, config: str, command: str, place: worker.RankEnvironment) -> str | None:
        """Why this process may not become the rank `place` of `command`, in words; None if it may."""
        if (changed := differing_file(self._files, source_files())) is not None:
            return f"{changed} was changed after its imports"
        if (command, place) != (self._command, self._place):
            return f"it was prepared to be rank {self._place.rank} of {self._place.world_size} of {self._command}"
        if imported_by(load_config(config, command=command).config) != self._settings:
            return "settings that decide what is imported were changed"
        return None


def imported_by(config: Config) -> dict[str, Any]:
    """The settings on which it depends what a rank imports, and the variables that are read at these imports."""
    dumped = config.model_dump(mode="json", include={"precision", "engine", "fp8"})
    return {name: dumped.get(name) for name in ("precision", "engine", "fp8")}


def source_files() -> dict[str, tuple[int, int]]:
    """Size and time (nanoseconds) of every Python file of this package, and of the folders that hold the installed
    packages, by path. Installing a package changes the time of such a folder.
    """
    found = {}
    root = Path(gspo_mega.__file__).parent
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for path in (*root.rglob("*.py"), *map(Path, folders), Path(sys.executable)):
        try:
            status = path.stat()
        except OSError:
            continue
        found[str(path)] = (0 if path.is_dir() else status.st_size, status.st_mtime_ns)
    return found


def differing_file(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> str | None:
    """The first path with another size or time, or in one of the two only; None if there is none."""
    return next((path for path in sorted(before.keys() | now.keys()) if before.get(path) != now.get(path)), None)


def resident_bytes() -> int:
    """Memory of this process, with the pages that it shares with others."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
