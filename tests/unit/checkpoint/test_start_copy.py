"""Making the copy that servers start from: the maker ends with its parent, and no remains of others end a run."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_server_start import plain_folder, run
from waiting import until, wait_gone

from gspo_mega.base.errors import CheckpointError
from gspo_mega.checkpoint import served_folders as module
from gspo_mega.checkpoint.served_folders import CopyMaker, StartWeights, _make, start_folder
from gspo_mega.rollout.server.start_weights import CopyWait, StartCopy

ROOT = Path(__file__).parents[3]
BLOCKS = ("precision=bf16", "server.quantization=fp8_block")
MAKE = """
import sys, time
from pathlib import Path
from gspo_mega.checkpoint.served_folders import CopyMaker, StartWeights
from gspo_mega.config import load_config
if __name__ == "__main__":
    maker = CopyMaker(StartWeights.of(load_config(sys.argv[1], sys.argv[2:4]).config), Path(sys.argv[4]))
    while True:
        maker.look()
        time.sleep(0.1)
"""


def test_the_maker_ends_with_the_process_that_started_it(tmp_path):
    """It would otherwise go on writing, and hold its memory, when the launcher is killed."""
    model, script, weights = plain_folder(tmp_path / "model", 1), tmp_path / "make.py", tmp_path / "weights"
    script.write_text(MAKE)
    words = [str(ROOT / "configs/quickstart.yaml"), f"model.path={model}", "server.quantization=fp8_block"]
    command = [sys.executable, str(script), *words, str(weights / "start-x")]
    with (
        module._only_maker(weights, lambda: None),  # for which the maker waits
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent,
    ):
        assert parent.stderr is not None and "in the form that servers hold" in parent.stderr.readline()
        lists = [(task / "children").read_text() for task in Path(f"/proc/{parent.pid}/task").iterdir()]
        started = [Path("/proc", pid) for found in lists for pid in found.split()]
        assert started
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 20
    while left := [pid for pid in started if pid.exists() and "State:\tZ" not in (pid / "status").read_text()]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(int(pid.name), signal.SIGKILL)
        assert time.monotonic() < deadline + 1, left
        time.sleep(0.1)
    assert time.monotonic() < deadline, "the maker lived on"


def test_a_maker_that_hangs_is_named_and_ended(tmp_path):
    config, folder = run(tmp_path, plain_folder(tmp_path / "plain", 1), *BLOCKS)
    out, before = start_folder(StartWeights.of(config), folder), set(multiprocessing.active_children())
    wait = CopyWait(StartCopy(out, lambda: CopyMaker(StartWeights.of(config), out)), folder.new_attempt(), 1.0)
    (process,) = set(multiprocessing.active_children()) - before
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(CheckpointError, match="server-0, which makes it, got no further for 1 s"):
            until(lambda: wait.look() is None)
    finally:
        wait.end()
    assert not out.exists()
    wait_gone([process.pid], 60)


def make(config, folder) -> Path:
    """The maker in this process, which is faster, and must not end with its parent."""
    out = start_folder(StartWeights.of(config), folder)
    _make(StartWeights.of(config), out, lambda done, total: None)
    return out


def test_a_copy_is_made_once(tmp_path):
    config, folder = run(tmp_path, plain_folder(tmp_path / "plain", 1), *BLOCKS)
    file = make(config, folder) / "model.safetensors"
    before = file.stat().st_mtime_ns
    assert make(config, folder) == file.parent and file.stat().st_mtime_ns == before


def test_remains_of_another_conversion_are_discarded(tmp_path):
    config, folder = run(tmp_path, plain_folder(tmp_path / "plain", 1), *BLOCKS)
    part = start_folder(StartWeights.of(config), folder)
    part = part.with_name(part.name + ".converting")
    part.mkdir(parents=True)
    (part / "progress.jsonl").write_text('{"to": "something else"}\n')
    assert make(config, folder).is_dir() and not part.exists()


def test_two_makers_use_one_copy_and_the_second_says_how_far_the_first_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    config, folder = run(tmp_path, plain_folder(tmp_path / "plain", 1), *BLOCKS)
    out, said = start_folder(StartWeights.of(config), folder), []
    second = threading.Thread(
        target=lambda: _make(StartWeights.of(config), out, lambda done, total: said.append((done, total)))
    )
    with module._only_maker(out.parent, lambda: None):
        second.start()
        part = out.with_name(out.name + ".converting")
        part.mkdir()
        (part / "file").write_bytes(bytes(1000))
        until(lambda: (1000, 0) in said)
        (part / "file").unlink()
        part.rmdir()
        out.mkdir()
    second.join()
    assert list(out.iterdir()) == [], "it is taken as it is"


def test_a_file_that_cannot_be_written_whole_leaves_its_room(tmp_path):
    """A full disk has room for the report then. What the copy needs to go on is kept."""
    config, folder = run(tmp_path, plain_folder(tmp_path / "plain", 1), *BLOCKS)
    part = start_folder(StartWeights.of(config), folder)
    part = part.with_name(f"{part.name}.converting")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            make(config, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in part.iterdir()] == ["progress.jsonl"]
    assert make(config, folder).is_dir() and not part.exists()
