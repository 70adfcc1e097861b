import socket

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.launcher.prepare import free_port, rank_environments, reward_gpus, share_gpus, visible_gpus


def test_ranks_get_what_torchrun_would_give():
    environments = rank_environments(3, [])
    assert [e["RANK"] for e in environments] == [e["LOCAL_RANK"] for e in environments] == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in environments} == {e["LOCAL_WORLD_SIZE"] for e in environments} == {"3"}
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in environments}) == 1
    assert {e["OMP_NUM_THREADS"] for e in environments} == {"1"}
    assert all("CUDA_VISIBLE_DEVICES" not in e for e in environments)


def test_the_port_is_free_and_not_one_for_outgoing_connections():
    port = free_port()
    low = int(open("/proc/sys/net/ipv4/ip_local_port_range").read().split()[0])
    assert port < low


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_port_is_kept_for_who_listens_on_it(host, family):
    port = free_port(host)
    with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))  # as another run that looks for a port
    with (
        socket.create_server((host, port), family=family) as listener,  # as rank 0
        socket.create_connection((host, port), timeout=5),
    ):
        listener.accept()[0].close()


def test_gpus_are_those_named_or_those_there(tmp_path):
    for name in ("nvidia1", "nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}, tmp_path) == ["3", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


def test_ranks_and_servers_never_share_a_gpu():
    gpus = ["a", "b", "c", "d", "e", "f", "g"]
    ranks, servers = share_gpus(gpus, 2, num_servers=2, tensor=2)
    assert (ranks, servers) == (["a", "b"], [["c", "d"], ["e", "f"]])
    assert rank_environments(2, ranks)[1]["CUDA_VISIBLE_DEVICES"] == "a,b"


def test_too_few_gpus_is_said_before_the_start():
    with pytest.raises(PlanError, match="need 4 GPUs, and 3 are visible"):
        share_gpus(["0", "1", "2"], 2, num_servers=2, tensor=1)
    assert share_gpus([], 2, num_servers=2, tensor=1) == ([], [[], []])


def test_shared_gpus_are_the_ranks_own():
    assert share_gpus(["4", "5", "6", "7"], 4, 2, tensor=2, colocated=True) == (
        ["4", "5", "6", "7"],
        [["4", "5"], ["6", "7"]],
    )
    with pytest.raises(PlanError, match="need 6 GPUs"):
        share_gpus(["0", "1", "2", "3"], 4, 3, tensor=2, colocated=True)


def test_servers_of_reward_models_get_the_last_gpus():
    assert reward_gpus(list("01234567"), [2, 1]) == (list("01234"), [["5", "6"], ["7"]])
    assert reward_gpus(list("01"), []) == (list("01"), [])
    assert reward_gpus([], [2, 1]) == ([], [[], []])
    with pytest.raises(PlanError, match="the servers of reward.model need 3 GPUs, and 2 are visible"):
        reward_gpus(list("01"), [2, 1])
