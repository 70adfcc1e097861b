"""The trainer's and the servers' PyTorch and NCCL, compared before anything is published."""

import sys
from types import SimpleNamespace

import pytest
import torch

from gspo_mega.base.errors import PublishError
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.cli import main as command_line
from gspo_mega.cli import serve
from gspo_mega.cli.serve import record_software
from gspo_mega.sync import publish, servers
from gspo_mega.sync.servers import check_same_versions, loaded_versions, loaded_versions_of

OURS = {"torch": "2.14.1+cu130", "NCCL": "2.30.7"}


def test_the_same_release_passes_whatever_its_build(tmp_path):
    check_same_versions(tmp_path, OURS)
    record_software(tmp_path, "server-0", {"torch": "2.14.1", "NCCL": "2.30.7"})
    record_software(tmp_path, "server-1", OURS)
    check_same_versions(tmp_path, OURS)


def test_each_server_that_differs_is_named_with_both_versions(tmp_path):
    record_software(tmp_path, "server-0", OURS)
    record_software(tmp_path, "server-1", {"torch": "2.11.0", "NCCL": "2.28.9"})
    record_software(tmp_path, "server-2", {"torch": "2.14.1", "NCCL": None})
    with pytest.raises(PublishError) as caught:
        check_same_versions(tmp_path, OURS)
    lines = str(caught.value).splitlines()
    assert (
        "publish.method: distributed" in lines[0]
        and "publish.method: disk" in lines[-1]
        and "launch/env/gpu-server.txt" in lines[-1]
    )
    assert (
        lines[1]
        == "  server-1: torch 2.11.0 where the trainer has 2.14.1+cu130, NCCL 2.28.9 where the trainer has 2.30.7"
    )
    assert lines[2] == "  server-2: NCCL (none) where the trainer has 2.30.7" and len(lines) == 4


def test_another_python_is_asked_and_one_that_cannot_answer_is_named(tmp_path):
    assert (
        loaded_versions_of(sys.executable, 300.0) == loaded_versions()
        and loaded_versions()["torch"] == torch.__version__
    )
    mute = tmp_path / "python"
    mute.write_text("#!/bin/sh\nexit 3\n")
    mute.chmod(0o755)
    for python in (str(mute), str(tmp_path / "none")):
        with pytest.raises(PublishError, match=f"{python} does not report its PyTorch and NCCL"):
            loaded_versions_of(python, 300.0)


@pytest.mark.parametrize(
    ("method", "backend", "refused"),
    [("distributed", "nccl", True), ("distributed", "gloo", False), ("disk", "nccl", False)],
)
def test_the_publisher_compares_where_weights_go_through_nccl(tmp_path, monkeypatch, method, backend, refused):
    monkeypatch.setattr(publish, "loaded_versions", lambda: OURS)
    record_software(tmp_path, "server-0", {"torch": "2.14.1", "NCCL": "2.28.9"})
    publisher = publish.Publisher.__new__(publish.Publisher)
    publisher._settings, publisher._backend = SimpleNamespace(method=method), backend
    if not refused:
        publisher.check_servers(tmp_path)
        return
    with pytest.raises(PublishError, match="server-0: NCCL 2.28.9 where the trainer has 2.30.7"):
        publisher.check_servers(tmp_path)


@pytest.mark.parametrize(
    ("device", "method", "says"), [("gpu", "distributed", True), ("cpu", "distributed", False), ("gpu", "disk", False)]
)
def test_a_server_says_what_it_has_where_weights_go_through_nccl(tmp_path, monkeypatch, device, method, says):
    """`gspo-mega serve` runs in the server's own Python."""
    asked = []
    monkeypatch.setattr(serve, "device_here", lambda: device)
    monkeypatch.setattr(serve, "loaded_versions_of", lambda python, seconds: asked.append((python, seconds)) or OURS)
    attempt = RunFolder(tmp_path / "run").new_attempt()

    class Supervisor:
        def __init__(self, *_, **__):
            pass

        def run(self):
            for thread in serve.threading.enumerate():
                if thread.name.startswith("software"):
                    thread.join()
            return 0

    monkeypatch.setattr(serve, "ServerSupervisor", Supervisor)
    config = str(servers.Path(__file__).parents[3] / "configs/quickstart.yaml")
    words = [
        f"run.dir={tmp_path}",
        "run.name=run",
        "cluster.preflight_seconds=750",
        f"publish.method={method}",
        "--attempt",
        str(attempt.path),
        "--index",
        "3",
    ]
    assert command_line.main(["serve", config, *words]) == 0
    assert asked == ([(sys.executable, 750.0)] if says else [])
    assert read_json(attempt.software_dir / "server-3.json") == (OURS if says else None)
