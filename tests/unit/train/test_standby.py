"""A process that waits to become a rank: what it imports, at which priority, and when it may not become one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import gspo_mega
from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.config import load_config, render_config
from gspo_mega.config.precision import TRANSFORMER_ENGINE_VARIABLE
from gspo_mega.train import standby, worker
from gspo_mega.train.standby import Imports, differing_file, source_files

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
PLACE = worker.RankEnvironment(rank=1, world_size=2, local_rank=1)
NOTES_ITS_PRIORITY = "import os, threading\npriority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"


@pytest.fixture
def config(tmp_path):
    """config(*overrides) writes a resolved configuration and returns its path."""

    def write(*overrides: str) -> str:
        loaded = load_config(QUICKSTART, overrides, "train")
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(render_config(loaded.config))
        return str(path)

    return write


@pytest.fixture
def imports(config, tmp_path, monkeypatch):
    """Imports of a module of this test in place of all those of a rank."""
    (tmp_path / "standby_module.py").write_text(NOTES_ITS_PRIORITY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(standby, "_FIRST", ())
    monkeypatch.setattr(standby, "_LATER", ())
    monkeypatch.setitem(worker.ENTRY_POINTS, "train", ("standby_module", "priority"))
    monkeypatch.setenv(TRANSFORMER_ENGINE_VARIABLE, "before")
    yield Imports(config("precision=bf16"), "train", PLACE)
    sys.modules.pop("standby_module", None)


def test_it_imports_at_a_low_priority_and_says_when_it_is_ready(imports, tmp_path):
    ready = tmp_path / "standby" / "ready_1.json"
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    imports.start(ready)
    imports.finish()
    assert sys.modules["standby_module"].priority == min(before + 5, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before, "that of the rank's own thread stays"
    record = read_json(ready)
    assert record["pid"] == os.getpid() and record["resident_bytes"] > 2**20 and record["seconds"] >= 0
    assert os.environ[TRANSFORMER_ENGINE_VARIABLE] == "0", "as for a rank in bf16 without a GPU"


def test_what_it_may_not_become(imports, config, tmp_path, monkeypatch):
    imports.start(tmp_path / "standby" / "ready_1.json")
    imports.finish()
    same = config("precision=bf16", "train.num_steps=9", "optimizer.lr=1e-4")
    assert imports.problem(same, "train", PLACE) is None
    other = config("precision=bf16", "engine.transformer_engine=true")
    assert "settings that decide what is imported" in imports.problem(other, "train", PLACE)
    elsewhere = worker.RankEnvironment(rank=0, world_size=2, local_rank=0)
    assert imports.problem(same, "train", elsewhere) == "it was prepared to be rank 1 of 2 of train"
    edited = {**source_files(), str(Path(worker.__file__)): (1, 1)}
    monkeypatch.setattr(standby, "source_files", lambda: edited)
    assert imports.problem(same, "train", PLACE) == f"{worker.__file__} was changed after its imports"


def test_every_source_file_of_the_package_counts_and_so_does_an_installed_package():
    files = source_files()
    root = Path(gspo_mega.__file__).parent
    assert {str(path) for path in root.rglob("*.py")} <= files.keys()
    assert any(path.endswith("site-packages") for path in files) and sys.executable in files
    assert differing_file(files, files) is None
    less = {path: value for path, value in files.items() if path != worker.__file__}
    assert differing_file(files, less) == differing_file(less, files) == worker.__file__


# The whole program, which imports next to nothing and says what it would go on as.
PROGRAM = """
import json, os, sys
from gspo_mega.train import standby, worker
standby._FIRST = standby._LATER = ()
worker.ENTRY_POINTS["train"] = ("json", "loads")
def says(what):
    def say(*words):
        print(json.dumps([what, words[-1], os.environ["MASTER_PORT"], sys.stdin.buffer.read().decode()]), flush=True)
        os._exit(0)
    return say
worker.main, os.execv = says("rank"), says("exec")
standby.main(sys.argv[1:])
"""


def test_what_it_does_with_the_line_it_is_sent(config, tmp_path):
    """It becomes the rank, or by exec a new process of it; without a line it ends."""
    same, other = config("precision=bf16", "optimizer.lr=1e-4"), config("precision=fp32")
    running = []
    for name, next_config in (("rank", same), ("exec", other), ("end", None)):
        attempt, after = tmp_path / name / "0001", tmp_path / name / "0002"
        after.mkdir(parents=True)
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "14001"}
        words = ["--config", config("precision=bf16"), "--attempt", str(attempt), "--command", "train"]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **place},
        )
        running.append((process, Attempt(attempt), Attempt(after), next_config))
    for process, attempt, after, next_config in running:
        while not attempt.standby_ready_file(1).exists():
            assert process.poll() is None
            time.sleep(0.01)
        assert Path(f"/proc/{process.pid}/comm").read_text() == f"{standby.NAME}\n"
        if next_config is None:
            assert process.communicate() == (b"", None) and process.returncode == 0
            continue
        words = ["--config", next_config, "--attempt", str(after.path), "--command", "train"]
        order = {"arguments": words, "environment": {"MASTER_PORT": "14002"}}
        said, _ = process.communicate(json.dumps(order).encode() + b"\n")
        start = read_json(after.standby_start_file(1))
        if next_config == same:
            assert json.loads(said) == ["rank", words, "14002", ""] and start["used"] is True
        else:
            program = [sys.executable, "-m", "gspo_mega.train.worker", *words]
            assert json.loads(said) == ["exec", program, "14002", ""]
            assert (start["used"], start["why"]) == (False, "settings that decide what is imported were changed")
