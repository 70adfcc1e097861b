"""kill -9 of the supervisor while ranks save: the writers that Megatron forks end with them, whatever they wait for.

Megatron-Core 0.19 forks none: its writers are threads, which end with their rank. There the test shows just that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path

from gspo_mega.base import processes

PATIENCE_SECONDS = 300.0
GONE_SECONDS = 60.0
# What every Python program of the run loads first: a rank's forks say who they are and then wait for ever. They come to
# that line after what is done at every fork.
WAITING_WRITERS = """
import multiprocessing.process
import os
import signal
import sys
from pathlib import Path

process = multiprocessing.process.BaseProcess
bootstrap = process._bootstrap

def wait_for_ever(self, *arguments, **options):
    if b"gspo_mega.train.worker" not in Path("/proc/self/cmdline").read_bytes():
        return bootstrap(self, *arguments, **options)
    Path(os.environ["GSPO_TEST_WRITERS"], str(os.getpid())).touch()
    while True:
        signal.pause()

process._bootstrap = wait_for_ever
"""


def test_a_killed_supervisor_leaves_no_writer_behind(ranks, tmp_path):
    marker = f"gspo-test-{uuid.uuid4()}"
    (writers := tmp_path / "writers").mkdir()
    (tmp_path / "sitecustomize.py").write_text(WAITING_WRITERS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "GSPO_TEST_WRITERS": str(writers),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GSPO_TEST_MARKER": marker,
    }
    command = [
        sys.executable,
        "-m",
        "gspo_mega",
        "train",
        str(ranks.config_file),
        f"run.dir={ranks.runs / 'orphans'}",
        "cluster.ranks_per_node=2",
    ]
    supervisor = subprocess.Popen(
        command,
        env=environment,
        cwd=ranks.config_file.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if metadata.version("megatron-core").startswith("0.19."):
            assert supervisor.wait(PATIENCE_SECONDS) == 0, supervisor.stderr.read()
            assert [*writers.iterdir()] == [], "a rank forked a process while it saved"
            return
        found = wait_for_writers(supervisor, writers)
        assert found <= set(of_the_run(marker))
        supervisor.kill()
        deadline = time.monotonic() + GONE_SECONDS
        while (left := of_the_run(marker)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == [], [(pid, command_of(pid), Path(f"/proc/{pid}/stat").read_text()) for pid in left]
    finally:
        for pid in of_the_run(marker):
            processes.send_signal(pid, signal.SIGKILL)
        supervisor.wait()


def wait_for_writers(supervisor: subprocess.Popen, folder: Path) -> set[int]:
    """Pids of what ranks forked, and what now waits."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := {int(file.name) for file in folder.iterdir()}):
        assert supervisor.poll() is None, supervisor.stderr.read()
        assert time.monotonic() < deadline, "no rank forked a writer"
        time.sleep(0.02)
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def of_the_run(marker: str) -> list[int]:
    found = []
    for pid in processes.parents():
        try:
            if marker.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found
