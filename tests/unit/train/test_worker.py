import errno
import importlib.util
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gspo_mega.base.errors import CheckpointError, ConfigError, NumericsError, RankError
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.config import load_config
from gspo_mega.train.worker import ENTRY_POINTS, RankEnvironment, _keep_to_this_machine, _store_of_job, error_record

PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_ranks_place_is_read_from_what_torchrun_sets():
    assert RankEnvironment.read(PLACE) == RankEnvironment(rank=3, world_size=4, local_rank=1)


@pytest.mark.parametrize(
    ("master", "host", "nodes", "interface"),
    [
        ("127.0.0.1", "127.0.0.1", (1, 0), "lo"),
        ("localhost", "::1", (1, 0), "lo"),
        ("127.0.0.1", "10.0.0.7", (1, 0), None),
        ("10.0.0.7", "127.0.0.1", (1, 0), None),
        ("node1", "node1", (1, 0), None),
        # Nodes that a machine pretends to be have loopback addresses each.
        ("127.0.0.11", "127.0.0.11", (2, 0), None),
        ("127.0.0.11", "127.0.0.11", (1, 1), None),
    ],
)
def test_ranks_beside_their_servers_listen_on_the_loopback_alone(monkeypatch, master, host, nodes, interface):
    words = [f"server.host='{host}'", f"cluster.num_nodes={nodes[0]}", f"cluster.num_rollout_nodes={nodes[1]}"]
    config = load_config(Path(__file__).parents[3] / "configs/quickstart.yaml", words).config
    monkeypatch.setenv("MASTER_ADDR", master)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "undone")
        monkeypatch.delenv(variable)
    _keep_to_this_machine(config.cluster, config.server)
    assert [os.environ.get(variable) for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")] == [interface] * 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    _keep_to_this_machine(config.cluster, config.server)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "what the user says stands"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_by_which_a_server_reaches_this_machine(host):
    from gspo_mega.train.servers import local_address

    assert local_address(host) == host


def test_every_missing_variable_is_named():
    with pytest.raises(ConfigError, match="RANK, LOCAL_RANK, MASTER_PORT"):
        RankEnvironment.read({"WORLD_SIZE": "4", "LOCAL_RANK": "first", "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(ConfigError, match="RANK=4 is not below WORLD_SIZE=4"):
        RankEnvironment.read({**PLACE, "RANK": "4"})


@pytest.mark.parametrize(
    "error, is_user_error, code",
    [
        (NumericsError("loss is NaN"), True, 5),
        (RankError("peer is silent"), False, 7),
        (KeyError("x"), False, 7),
        (KeyboardInterrupt(), False, 7),
    ],
)
def test_a_record_tells_users_errors_from_defects(error, is_user_error, code):
    try:
        raise error
    except BaseException as caught:
        record = error_record(caught, 2)
    assert (record["rank"], record["is_user_error"], record["exit_code"]) == (2, is_user_error, code)
    assert record["text"] == str(error)
    assert "test_a_record_tells" in record["traceback"]


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5036: {}. This is typically"


def too_much_memory():
    torch.empty(2**60)


def too_much_in_numpy():
    np.zeros(2**55)


def chained():
    try:
        raise RuntimeError(GLOO.format("Connection closed by peer"))
    except RuntimeError as error:
        raise ValueError("no batch") from error


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (too_much_memory, "it ran out of memory: "),
        (too_much_in_numpy, "it ran out of memory: Unable to allocate"),
        (MemoryError(), "it ran out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "it ran out of memory: CUDA out of memory. Tried to"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "it ran out of memory: [Errno 12]"),
        (ImportError("libx.so: failed to map segment from shared object"), "it ran out of memory: libx.so"),
        (RuntimeError(GLOO.format("Connection reset by peer")), "another rank cannot be reached: [/pytorch"),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv"), "another rank"),
        (dist.DistBackendError("NCCL error in: x, ncclRemoteError: A call failed"), "another rank cannot be reached"),
        (dist.DistNetworkError("The client socket has timed out"), "another rank cannot be reached: The client"),
        (chained, "another rank cannot be reached: [/pytorch"),
        (RuntimeError("could not create a primitive"), "it ran out of memory: could not create a primitive"),
        (RuntimeError("could not create a primitive descriptor for a matmul primitive"), None),
        (RuntimeError("shape mismatch"), None),
        (KeyError("out of memory"), None),
        (ConnectionResetError("reset by peer"), None),
        (NumericsError("out of memory"), None),
    ],
)
def test_a_record_says_what_the_machine_did(act, fault):
    try:
        if isinstance(act, Exception):
            raise act
        act()
    except Exception as caught:
        record = error_record(caught, 2)
    assert (record["machine_fault"] or "").startswith(fault or "") and (record["machine_fault"] is None) == (
        fault is None
    )
    assert not record["is_user_error"] or fault is None
    assert len(record["machine_fault"] or "") < 400 and "Traceback" not in (record["machine_fault"] or "")


def test_entry_points_exist():
    for module, function in ENTRY_POINTS.values():
        source = importlib.util.find_spec(module)
        assert source is not None, f"{module} is missing"
        assert f"def {function}(" in Path(source.origin).read_text()


def run_worker(folder, code):
    """A process in which `code` uses `attempt`."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"from gspo_mega.base.run_folder import Attempt\nattempt = Attempt({str(folder)!r})\n{code}",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_a_failure_leaves_its_record_and_no_time_for_anything_else(tmp_path):
    attempt = RunFolder(tmp_path).new_attempt()
    code = """
import atexit, threading, time
from gspo_mega.base.errors import CheckpointError
from gspo_mega.train.worker import fail
atexit.register(lambda: time.sleep(60))
threading.Thread(target=time.sleep, args=(60,)).start()
fail(CheckpointError("torn"), 1, attempt)
"""
    assert run_worker(attempt.path, code).returncode == CheckpointError.exit_code
    assert read_json(attempt.error_file(1))["text"] == "torn"


@pytest.mark.parametrize("end", ["fail(ValueError('x'), 1, attempt)", "leave(7)"])
def test_an_end_takes_along_what_multiprocessing_started(tmp_path, end):
    attempt = RunFolder(tmp_path).new_attempt()
    # As a library may. It holds our end of the output open for as long as it lives.
    code = (
        "import multiprocessing\nfrom gspo_mega.train.worker import fail, leave\nmanager ="
        f" multiprocessing.get_context('spawn').Manager()\n{end}"
    )
    assert run_worker(attempt.path, code).returncode == 7


def test_a_record_that_cannot_be_written_does_not_keep_the_rank_alive(tmp_path):
    code = """
import logging
logging.basicConfig()
from gspo_mega.train.worker import fail
fail(ValueError("lost"), 0, attempt)
"""
    ended = run_worker(tmp_path / "no" / "such" / "0001", code)
    assert ended.returncode == 7
    assert "ValueError: lost" in ended.stderr and "could not be written" in ended.stderr


def test_the_shell_around_a_rank_needs_no_torch():
    code = "import sys, gspo_mega.train.worker; print([m for m in ('torch', 'numpy', 'megatron') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_a_rank_that_finds_no_other_says_how_long_it_waited(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    place = RankEnvironment(rank=1, world_size=2, local_rank=1)
    words = rf"rank 1 did not reach .* 127\.0\.0\.1:{port} within 0\.5 s \(cluster\.preflight_seconds\)"
    with pytest.raises(RankError, match=words):
        _store_of_job(place, timedelta(seconds=0.5))
