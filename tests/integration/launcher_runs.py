"""Launchers in processes of their own, with stand-ins for ranks and servers, and what is left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import yaml

from gspo_mega.base.run_folder import RunFolder

REPOSITORY = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("launcher_driver.py")
MAIN = Path(__file__).with_name("launcher_main.py")
# Of what happens at once on a free machine; half of what stopping in order may take (`stop_grace_seconds`).
DEADLINE_SECONDS = 30.0
# Waiting longer costs nothing where all is well.
PATIENCE_SECONDS = 300.0


def write_config(folder: Path, **sections: dict) -> Path:
    """A configuration of 2 ranks and 1 server, for stand-ins. `sections` are merged into it."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / "configs/models/quickstart_moe.json", model / "config.json")
    config = yaml.safe_load((REPOSITORY / "configs/quickstart.yaml").read_text())
    config["run"] = {"name": "demo", "dir": "runs"}
    config["model"] = {"path": str(model)}
    for number in ("clip_low", "clip_high"):
        config["objective"][number] = float(config["objective"][number])
    config["optimizer"]["lr"] = float(config["optimizer"]["lr"])
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


class Launched:
    """A launcher in a process of its own. All that it starts inherits `marker`, by which it is found again."""

    def __init__(self, folder: Path, behaviours: dict[str, str], stop_grace_seconds: float, work: str | None = None):
        self._start(
            folder,
            [
                str(DRIVER),
                str(folder / "run.yaml"),
                json.dumps(behaviours),
                str(stop_grace_seconds),
                *([work] if work else []),
            ],
        )

    @classmethod
    def command(cls, folder: Path, behaviours: dict[str, str], **streams) -> Launched:
        """`gspo-mega train` itself, with `streams` (and other arguments) of Popen's."""
        launched = cls.__new__(cls)
        launched._start(folder, [str(MAIN), str(folder / "run.yaml"), json.dumps(behaviours)], **streams)
        return launched

    def _start(self, folder: Path, arguments: list[str], **streams) -> None:
        self.marker = f"gspo-test-{uuid.uuid4()}"
        self.folder = RunFolder(folder / "runs" / "demo")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            text=True,
            cwd=folder,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
            env={
                **os.environ,
                "GSPO_TEST_MARKER": self.marker,
                "CUDA_VISIBLE_DEVICES": "",
            },
        )

    def wait_started(self, count: int = 3) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (attempt := self.folder.latest_attempt()) is None or len(list(attempt.path.glob("started *"))) < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the children did not start"
            time.sleep(0.02)

    def finish(self, timeout: float = PATIENCE_SECONDS) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def left_running(self) -> list[int]:
        """Pids of all processes, in whatever session and whoever their parent, that come from this launcher."""
        marker, left = self.marker.encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and marker in (entry / "environ").read_bytes():
                    left.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return left

    def leaves_nothing(self) -> None:
        """Kill the launcher; with it everything else has to go."""
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (left := self.left_running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
