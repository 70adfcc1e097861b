"""What happens to the copy that servers start from, from outside: its maker is found and stopped in the middle.

    copy_faults.py FOLDER    a copy on a file system that fills up meanwhile; in a mount name space of its own

prints one JSON object: the server's exit code, its registration, its log, and what of the copy is there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from quantized_models import make_blocks_model
from servers import Serve, run_config

from gspo_mega.base.run_folder import RunFolder

MIB = 2**20
# Embeddings and head of 40 MiB each: a copy takes long enough to be found under way.
ROWS = 40_000


def frozen_maker(serve: Serve, run: RunFolder, seconds: float = 300.0) -> int:
    """The process of `serve` that makes the copy, stopped (SIGSTOP) after it has written its first tensor, of many."""
    deadline = time.monotonic() + seconds
    while not any(f.stat().st_size > MIB for f in run.weights_dir.glob("start-*.converting/*.safetensors")):
        assert time.monotonic() < deadline and serve.process.poll() is None, serve.output.read_text()
        time.sleep(0.001)
    (maker,) = (pid for pid, command in serve.processes().items() if "spawn_main" in command)
    os.kill(maker, signal.SIGSTOP)
    # A write under way goes on until it is done, and the process stops behind it.
    while any(" T " not in stat.read_text() for stat in Path(f"/proc/{maker}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {maker} does not stop"
        time.sleep(0.001)
    assert not copies(run), "it was made before it could be stopped"
    return maker


def copies(run: RunFolder) -> list[Path]:
    """The copies that are whole."""
    return [path for path in run.weights_dir.glob("start-*") if path.is_dir() and path.suffix != ".converting"]


def fill_up(folder: Path) -> dict:
    model = make_blocks_model(folder / "model", vocab_size=ROWS)
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "none", disk], check=True)
    config = run_config(folder, model, run={"dir": str(disk)}, server={"quantization": "fp8_block"})
    run = RunFolder(disk / "run")
    serve = Serve(config, run.path)
    maker = frozen_maker(serve, run)
    seen = os.statvfs(disk)
    size = (seen.f_blocks - seen.f_bfree) * seen.f_bsize + MIB
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
    os.kill(maker, signal.SIGCONT)
    code = serve.process.wait(timeout=300)
    full = {"code": code, "error": serve.registration().error, "state": serve.registration().state}
    left = [path.name for path in run.weights_dir.glob("start-*.converting/*")]
    subprocess.run(["mount", "-o", "remount,size=600m", disk], check=True)
    again = Serve(config, run.path)
    while not copies(run) and again.process.poll() is None:
        time.sleep(0.05)
    again.stop()
    return {**full, "left": left, "whole": len(copies(run)), "log": serve.output.read_text()}


if __name__ == "__main__":
    print(json.dumps(fill_up(Path(sys.argv[1]))))
