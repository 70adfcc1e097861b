"""One SGLang server over two nodes: here two processes on one machine, each at a loopback address of its own. And one whose
experts and requests are divided over its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from rank_pool import RankPools
from router_ties import check_log_probs
from servers import STOP_SECONDS, Serve, run_config
from test_rollout_server import reference_log_probs
from waiting import alive, until

from gspo_mega.rollout.registration import read_secret
from gspo_mega.rollout.server.multinode import PartReport

PROMPT = [5, 6, 7, 8, 9]
# float32 on both sides.
LARGEST_DIFFERENCE = 1e-5


def generate(server: Serve) -> list[tuple[float, int]]:
    """(log-prob, token) of a sampled response."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    seen = server.registration()
    request = urllib.request.Request(f"{seen.address}/generate", json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {read_secret(server.attempt.api_key_file)}")
    request.add_header("Content-Type", "application/json")
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the tests' proxy is a dead one
    with directly.open(request, timeout=120) as answer:
        return [(entry[0], entry[1]) for entry in json.load(answer)["meta_info"]["output_token_logprobs"]]


def check_sampled(server: Serve, model: Path) -> None:
    """A sampled response has the log-probs that transformers gives it."""
    sampled = generate(server)
    tokens = [token for _, token in sampled]
    expected, found = reference_log_probs(model, PROMPT, tokens, 1.0), torch.tensor([one for one, _ in sampled])
    check_log_probs(model, PROMPT, tokens, found, expected, LARGEST_DIFFERENCE)


def test_experts_and_requests_are_divided_over_its_ranks(tmp_path, moe_model):
    """On one node: SGLang's processes of two would find each other's ports taken on one machine."""
    sizes = {"tensor": 2, "expert": 2, "attention_data": 2, "start_deadline_seconds": 1200.0}
    config = run_config(tmp_path, moe_model, server=sizes)
    server = Serve(config, tmp_path / "run")
    pools = RankPools()
    try:
        server.wait_for("ready")
        for _ in range(2):  # one for each group of the attention
            check_sampled(server, moe_model)
        assert controller_seconds(server, 3.0) < 0.5, "between requests the controller waits"
        assert published(pools, config, server, tmp_path)["verified"] == [["server-0", 1]]
    finally:
        pools.close()
        server.stop()


def controller_seconds(server: Serve, seconds: float) -> float:
    """Processor time that the controller of the server's data-parallel schedulers takes in so many seconds."""
    (pid,) = (pid for pid, command in server.processes().items() if "data_pa" in command)
    controller = psutil.Process(pid)
    before = sum(controller.cpu_times()[:2])
    time.sleep(seconds)
    return sum(controller.cpu_times()[:2]) - before


def published(pools: RankPools, config: Path, head: Serve, folder: Path) -> dict:
    """A changed model, broadcast from a trainer's rank to all ranks of the server."""
    ranks = pools(1)
    publish = {"deadline_seconds": 60.0, "bucket_bytes": 100_000, "method": "distributed"}
    arguments = {"config_path": str(config), "attempt": str(head.attempt.path), "parallel": {}, "publish": publish}
    ranks.run("publish_jobs:open_trainer", weights_dir=str(folder / "weights"), **arguments)
    (result,) = ranks.run("publish_jobs:publish", version=1, change="weight")
    ranks.run("publish_jobs:close_trainer")
    assert not result.get("error") and not result["failed"], result
    return result


def test_it_samples_takes_new_weights_and_is_one_server_when_a_part_dies(tmp_path, dense_model):
    config = run_config(
        tmp_path,
        dense_model,
        cluster={"num_rollout_nodes": 2},
        server={"tensor": 2, "num_nodes": 2, "start_deadline_seconds": 1200.0},
    )
    head = Serve(config, tmp_path / "run", words=("--part", "0", "--host", "127.0.0.1"))
    part = Serve(config, tmp_path / "run", attempt=head.attempt, words=("--part", "1", "--host", "127.0.0.2"))
    pools = RankPools()
    try:
        assert head.wait_for("ready").tensor_parallel == 2
        check_sampled(head, dense_model)

        # The group has the trainer's rank and both of the server's: rank 1 is in the other process.
        assert published(pools, config, head, tmp_path)["verified"] == [["server-0", 1]]

        # The end of the other node's process ends the whole server, which starts again as a whole.
        dead = part.sglang_pid()
        os.kill(dead, signal.SIGKILL)
        seen = head.wait_for("starting", generation=2)
        assert seen.error is not None and "its part 1 on 127.0.0.2: SGLang killed by SIGKILL" in seen.error
        until(
            lambda: (found := PartReport.read(head.attempt, 0, 1)) is not None and found.generation == 2, STOP_SECONDS
        )
        # In the order of a Slurm step: the signal comes to all.
        processes = [*head.processes(), *part.processes()]
        part.process.send_signal(signal.SIGTERM)
        assert head.stop() == 0 and part.process.wait(timeout=STOP_SECONDS) == 0
        assert head.registration().state == "stopped"
        assert not alive(processes)
    finally:
        pools.close()
        for serve in (head, part):
            serve.stop()
