"""Where the processes of a run on one machine listen: on its loopback and nowhere else."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import psutil
import pytest

from gspo_mega.rollout.pool import ServerPool


def listening(pids) -> set[tuple[str, int]]:
    """(address, port) that these processes listen on; UDP sockets that are bound count, too."""
    found = set()
    for pid in pids:
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN or (
                connection.type.name == "SOCK_DGRAM" and not connection.raddr
            ):
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def elsewhere(pids) -> set[tuple[str, int]]:
    return {(address, port) for address, port in listening(pids) if not ipaddress.ip_address(address).is_loopback}


def test_a_server_listens_on_its_address_alone(dense_server):
    server = dense_server.serve
    port = int(server.registration().address.rpartition(":")[2])
    assert ("127.0.0.1", port) in listening(server.processes())
    assert elsewhere(server.processes()) == set()


@pytest.fixture
def one_rank(tmp_path):
    """torch.distributed in this process, as rank 0 of a run has it."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_group_that_carries_weights_listens_on_the_runs_address_alone(dense_server, one_rank, monkeypatch, address):
    from gspo_mega.sync.broadcast import ServerGroup
    from gspo_mega.sync.broadcast_group import OwnTensors

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = listening([psutil.Process().pid])
    with dense_server.pool() as pool:
        pool.wait_ready(1, 60)
        (control,) = pool.controls()
        link = ServerGroup(OwnTensors(0), [control], address, "gloo", 60.0, 60.0)
        try:
            own = listening([psutil.Process().pid])
            assert own - before and {ip for ip, _ in own - before} <= {"127.0.0.1", "::1"}
            assert elsewhere(dense_server.serve.processes()) == set()
        finally:
            link.close()


def test_a_server_and_its_clients_on_ipv6(dense_model, tmp_path):
    """From the YAML to a sampled response, and the address by which the server reaches this machine."""
    from servers import Serve, run_config
    from tiny_models import EOS_TOKEN_ID

    from gspo_mega.config import load_config
    from gspo_mega.models.huggingface import read_model_spec
    from gspo_mega.rollout.client.completion import SamplingParams
    from gspo_mega.train.servers import local_address

    path = run_config(tmp_path, dense_model, server={"host": "::1", "start_deadline_seconds": 1200.0})
    config = load_config(path).config
    serve = Serve(path, tmp_path / "run", forked=True)
    try:
        serve.wait_for("ready")
        assert serve.registration().address.startswith("http://[::1]:")
        assert elsewhere(serve.processes()) == set()
        assert local_address(config.server.host) == "::1"
        with ServerPool(config.rollout, read_model_spec(dense_model), serve.attempt) as pool:
            (control,) = pool.controls()
            control.update_from_disk(str(Path(dense_model)), 1, deadline_seconds=60)
            pool.commit(1, [(control.server_id, control.generation)])

            async def one():
                entry = await pool.acquire()
                try:
                    return await entry.client.generate(
                        (5, 6, 7),
                        SamplingParams(4, 1.0, 1.0, -1, (EOS_TOKEN_ID,)),
                        request_id="one",
                        deadline_seconds=60,
                    )
                finally:
                    await pool.release(entry)

            assert set(pool.loop.run(one()).weight_versions) == {1}
    finally:
        serve.stop()
