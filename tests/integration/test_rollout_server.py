"""The real SGLang server behind `gspo-mega serve`: its answers, its secrets, and its end."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from router_ties import check_log_probs
from servers import START_SECONDS, Serve, Unending, run_config
from tiny_models import EOS_TOKEN_ID, perturb
from waiting import alive, wait_gone

from gspo_mega.base.errors import PublishError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.client.server_client import InFlightRequest
from gspo_mega.rollout.registration import read_secret

ROOT = Path(__file__).parents[2]
PROMPT = (65, 66, 67, 68, 69)
# Of a process whose parent is gone; at once, on a free machine.
GONE_SECONDS = 60.0


def generate(server, params: SamplingParams, prompts=(PROMPT,)):
    """Completions of `prompts` from the server, all at once."""
    import asyncio

    async def both(pool):
        entry = await pool.acquire()
        calls = [
            entry.client.generate(p, params, request_id=str(i), deadline_seconds=60) for i, p in enumerate(prompts)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            await pool.release(entry)

    with server.pool() as pool:
        pool.wait_ready(1, deadline_seconds=60)
        return pool.loop.run(both(pool))


@functools.lru_cache(maxsize=8)
def by_transformers(model_folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, experts_implementation="eager")


def reference_log_probs(model_folder: Path, prompt, response, temperature):
    model = by_transformers(model_folder)
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt) + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def check_response(model_folder: Path, prompt, response, log_probs, temperature=1.0):
    """They are those that the model gives the response's tokens."""
    expected = reference_log_probs(model_folder, prompt, response, temperature)
    check_log_probs(model_folder, prompt, response, torch.tensor(log_probs), expected, 2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("which", ["dense_server", "moe_server"])
def test_log_probs_are_those_of_the_model_at_the_temperature(request, which, temperature):
    server = request.getfixturevalue(which)
    params = SamplingParams(32, temperature, 1.0, -1, (EOS_TOKEN_ID,))
    prompts = [tuple(range(10 + i, 20 + 3 * i)) for i in range(6)]
    for prompt, completion in zip(prompts, generate(server, params, prompts), strict=True):
        check_response(server.model, prompt, completion.token_ids, completion.log_probs, temperature)
        assert set(completion.weight_versions) == {0}


def test_the_end_token_is_part_of_the_response(dense_server):
    stop = tuple(range(0, 512, 2))
    for completion in generate(dense_server, SamplingParams(64, 1.0, 1.0, -1, stop), [PROMPT] * 8):
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] in stop
        assert len(completion.log_probs) == len(completion.token_ids)


def test_prompt_and_response_may_fill_the_context(dense_server):
    longest = tuple(range(3, 3 + dense_server.config.data.max_prompt_tokens))
    (completion,) = generate(dense_server, SamplingParams(64, 1.0, 1.0, -1, (EOS_TOKEN_ID,)), [longest])
    assert completion.finish_reason == "stop" or len(completion.token_ids) == 64


def test_routed_experts_come_back_for_every_token_but_the_last(moe_server):
    params = SamplingParams(12, 1.0, 1.0, -1, (EOS_TOKEN_ID,))
    for completion in generate(moe_server, params, [PROMPT] * 3):  # the later ones find their prompt in the cache
        assert completion.routed_experts.shape == (len(PROMPT) + len(completion.token_ids) - 1, 3, 2)
        assert (completion.routed_experts[..., 0] != completion.routed_experts[..., 1]).all()


REGISTERED_MODULES = """
import json, sys
from pathlib import Path
from gspo_mega.rollout.server import entry as server_entry
from gspo_mega.rollout.server.spec import ServerSpec
server_entry.server_arguments(ServerSpec.read(Path(sys.argv[1])))
from sglang.srt.models.registry import ModelRegistry
import sglang.srt.entrypoints.http_server, sglang.srt.model_executor.model_runner
unneeded = [name for name in ("megatron.core", "torch._inductor.compile_fx") if name in sys.modules]
print(json.dumps([{name: model.__module__ for name, model in ModelRegistry.models.items()}, unneeded]))
"""


@pytest.mark.parametrize(
    "which, architecture", [("dense_server", "Qwen3ForCausalLM"), ("moe_server", "Qwen3MoeForCausalLM")]
)
def test_only_the_models_architecture_is_imported(request, which, architecture):
    """The server's own start, up to SGLang's list of models: every entry is of the one module that was imported. Neither
    Megatron nor a compiler is, by anything.
    """
    serve = request.getfixturevalue(which).serve
    spec = re.search(r"--spec (\S+)", serve.processes()[serve.sglang_pid()])[1]
    listed = subprocess.run(
        [sys.executable, "-c", REGISTERED_MODULES, spec],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert listed.returncode == 0, listed.stderr
    modules, unneeded = json.loads(listed.stdout.splitlines()[-1])
    assert unneeded == []
    assert architecture in modules
    assert set(modules.values()) == {modules[architecture]}
    assert "Ignore import error when loading" not in serve.log()


def test_scheduler_and_detokenizer_begin_as_copies_of_the_process_that_imported_everything(dense_server):
    head = dense_server.serve.sglang_pid()
    children = [pid for pid, command in dense_server.serve.processes().items() if command.startswith("sglang::")]
    assert len(children) == 2

    def places(pid: int) -> set[str]:
        """The addresses of PyTorch's library in a process: random for each process that loads it itself."""
        return {
            line.split()[0]
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if line.endswith("libtorch_cpu.so")
        }

    assert places(head) and all(places(child) == places(head) for child in children)


def test_greedy_is_deterministic_and_equals_itself_batched(dense_server):
    greedy = SamplingParams(16, 0.0, 1.0, -1, (EOS_TOKEN_ID,))
    answers = generate(dense_server, greedy, [PROMPT] * 5) + generate(dense_server, greedy)
    assert len({tuple(a.token_ids) for a in answers}) == 1


def test_the_api_key_is_needed_and_shows_nowhere(dense_server):
    import urllib.error
    import urllib.request

    address = dense_server.serve.registration().address
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the tests' proxy answers nobody
    with pytest.raises(urllib.error.HTTPError) as refused:
        direct.open(address + "/model_info", timeout=60)
    assert refused.value.code == 401

    key = read_secret(dense_server.attempt.api_key_file)
    assert dense_server.attempt.api_key_file.stat().st_mode & 0o777 == 0o600
    log = dense_server.serve.log()
    assert re.search(r"'api_key': '\*\*\*'", log), "SGLang is expected to log its arguments at level info"
    commands = dense_server.serve.processes()
    assert len(commands) >= 4, commands
    shown = [log, dense_server.serve.output.read_text(), *commands.values()]
    for pid in commands:
        shown.append(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace"))
    assert not any(key in text for text in shown)


def test_weights_from_disk_change_what_is_sampled_and_checksums(dense_server, tmp_path):
    moved = perturb(dense_server.model, tmp_path / "v1", seed=1)
    params = SamplingParams(8, 0.0, 1.0, -1, (EOS_TOKEN_ID,))
    with dense_server.pool() as pool:
        pool.wait_ready(1, 60)
        (control,) = pool.controls()
        before = control.checksums(deadline_seconds=30)
        assert [len(rank) for rank in before] == [3 * 8 + 3]
        try:
            control.pause(deadline_seconds=30)
            control.update_from_disk(str(moved), 1, deadline_seconds=60)
            control.resume(deadline_seconds=30)
            assert control.weight_version(deadline_seconds=30) == 1
            after = control.checksums(deadline_seconds=30)
            assert all(before[0][name] != after[0][name] for name in before[0])
            assert [c.server_id for c in pool.servers_behind()] == ["server-0"]
            pool.commit(1, [(control.server_id, control.generation)])
            assert pool.servers_behind() == []
            completion = pool.loop.run(_one(pool, params))
            assert set(completion.weight_versions) == {1}
            check_response(moved, PROMPT, completion.token_ids, completion.log_probs)
            with pytest.raises(PublishError, match="server-0.*update_weights_from_disk"):
                control.update_from_disk(str(tmp_path / "absent"), 2, deadline_seconds=60)
        finally:
            dense_server.restore_weights()
        assert control.checksums(deadline_seconds=30) == before


async def _one(pool, params):
    entry = await pool.acquire()
    try:
        return await entry.client.generate(PROMPT, params, request_id="one", deadline_seconds=60)
    finally:
        await pool.release(entry)


def test_the_weight_checker_notices_reset_tensors(moe_server):
    with moe_server.pool() as pool:
        pool.wait_ready(1, 60)
        (control,) = pool.controls()
        try:
            control.snapshot(deadline_seconds=30)
            control.compare(deadline_seconds=30)
            control.snapshot(deadline_seconds=30)
            control.reset_tensors(deadline_seconds=30)
            with pytest.raises(PublishError, match="w13_weight"):
                control.compare(deadline_seconds=30)
            control.update_from_disk(str(moe_server.model), 0, deadline_seconds=60)
            control.compare(deadline_seconds=30)
        finally:
            moe_server.restore_weights()


def test_calls_out_of_turn_are_refused_with_the_servers_words(dense_server):
    with dense_server.pool() as pool:
        pool.wait_ready(1, 60)
        (control,) = pool.controls()
        with pytest.raises(PublishError, match="no weight-update session is open"):
            control.end_update(deadline_seconds=30)
        control.begin_update(deadline_seconds=30)
        control.end_update(deadline_seconds=30)
        control.set_weight_version(0, deadline_seconds=30)
        control.abort_all(deadline_seconds=30)
        control.flush_cache(deadline_seconds=30)
        with pytest.raises(PublishError, match="no answer within 0.001 s"):
            control.checksums(deadline_seconds=0.001)


def test_a_cache_is_flushed_as_soon_as_what_runs_has_ended(dense_server):
    with dense_server.pool() as pool:
        pool.wait_ready(1, 60)
        (control,) = pool.controls()
        started = threading.Event()
        meter = types.SimpleNamespace(add_report=lambda num_tokens, seconds, first: started.set())

        async def one():
            entry, flight = await pool.acquire(), InFlightRequest(60.0, meter)
            try:
                params = Unending(24, 1.0, 1.0, -1)
                return await entry.client.generate(
                    PROMPT, params, request_id="runs", deadline_seconds=60, report_tokens=1, flight=flight
                )
            finally:
                await pool.release(entry)

        running = pool.loop.submit(one())
        assert started.wait(60)
        control.flush_cache(deadline_seconds=60)
        assert len(running.result(timeout=60).token_ids) == 24


def test_a_killed_server_comes_back_with_the_current_weights_and_stopping_leaves_nothing(dense_model, tmp_path):
    moved = perturb(dense_model, tmp_path / "v3", seed=3)
    serve = Serve(run_config(tmp_path, dense_model, server={"drain_seconds": 600.0}), tmp_path / "run")
    try:
        serve.wait_for("ready")
        assert serve.registration().weight_version is None
        current = RunFolder(tmp_path / "run").current_weights_file
        current.parent.mkdir()
        atomic_write_json(current, {"weight_version": 3, "path": str(moved)})
        first = set(serve.processes()) - {serve.process.pid}
        os.kill(serve.sglang_pid(), signal.SIGKILL)
        again = serve.wait_for("ready", generation=2)
        assert (again.weight_version, again.generation) == (3, 2)
        assert "SIGKILL" in again.error
        wait_gone(first, GONE_SECONDS)

        family = set(serve.processes())
        assert len(family) >= 4
        assert serve.stop() == 0  # at once: nothing is open that it would drain
        assert alive(family) == []
        assert serve.registration().state == "stopped"
    finally:
        serve.stop()


def test_serve_killed_hard_takes_sglang_with_it(dense_model, tmp_path):
    serve = Serve(run_config(tmp_path, dense_model), tmp_path / "run")
    try:
        deadline = time.monotonic() + START_SECONDS
        while not any("sglang::scheduler" in command for command in serve.processes().values()):
            assert time.monotonic() < deadline and serve.process.poll() is None
            time.sleep(0.2)
        family = set(serve.processes())
        assert len(family) >= 3
        serve.process.kill()
        serve.process.wait()
        wait_gone(family, GONE_SECONDS)
    finally:
        serve.stop()


def test_an_unknown_option_ends_serve_at_once_with_the_nearest_name(dense_model, tmp_path):
    config = run_config(tmp_path, dense_model, server={"options": {"chunked_prefil_size": 512}})
    serve = Serve(config, tmp_path / "run")
    try:
        assert serve.process.wait(timeout=START_SECONDS) == 2
        assert "did you mean 'chunked_prefill_size'" in serve.output.read_text()
        registration = json.loads(serve.attempt.server_file("server-0").read_text())
        assert registration["state"] == "failed" and registration["generation"] == 1
        assert "chunked_prefill_size" in registration["error"]
    finally:
        serve.stop()
