"""Servers that wait for the copy that they start from: what is shown meanwhile, and what ends the wait. Real commands;
SGLang is not started, as no copy becomes whole before its server is asked to end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from copy_faults import ROWS, copies, frozen_maker
from quantized_models import make_blocks_model
from safetensors.torch import load_file
from servers import Serve, run_config
from waiting import alive, until, wait_gone

from gspo_mega.base.errors import CheckpointError, RolloutError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.hf_export import tensor_digest
from gspo_mega.cli.status import describe_run
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.pool import ServerPool

HERE = Path(__file__).parent
IN_A_NAME_SPACE = ["unshare", "--map-root-user", "--mount"]
PATIENCE_SECONDS = 300.0


def test_a_maker_that_is_killed_is_named_by_all_and_continued_by_the_next(tmp_path):
    model = make_blocks_model(tmp_path / "model", vocab_size=ROWS)
    config = run_config(tmp_path, model, server={"quantization": "fp8_block"})
    run, started = RunFolder(tmp_path / "run"), []

    def serve(index: int, attempt=None) -> Serve:
        started.append(Serve(config, run.path, index, attempt))
        return started[-1]

    def is_preparing(server: Serve) -> bool:
        seen = server.registration()
        return seen is not None and seen.is_preparing and seen.total_bytes > 0

    try:
        first = serve(0)
        waiting = serve(1, first.attempt)
        maker = frozen_maker(first, run)
        until(lambda: is_preparing(first) and is_preparing(waiting), PATIENCE_SECONDS)

        # Shown to the user, and to the trainer, whose wait ends as the copy stands still.
        what = "which server-0 makes: "
        shown = describe_run(run, time.time())["servers"]
        assert shown.startswith("2 starting (waiting for the copy start-blocks-") and what in shown, shown
        assert shown.endswith(" MiB)") and " of " in shown, shown
        loaded = load_config(config).config
        with (
            ServerPool(loaded.rollout, read_model_spec(model), first.attempt) as pool,
            pytest.raises(RolloutError, match=f"0 of 2 servers ready after 1 s.*{what}"),
        ):
            pool.wait_ready(2, 1.0)

        # A server that waits is killed: nobody else minds.
        waiting.process.kill()
        waiting.process.wait()
        before = first.registration().heartbeat
        until(lambda: first.registration().heartbeat > before, PATIENCE_SECONDS)
        assert is_preparing(first) and alive([maker])
        waiting = serve(1, first.attempt)
        until(lambda: waiting.registration().pid == waiting.process.pid and is_preparing(waiting), PATIENCE_SECONDS)

        # The maker is killed: all say so, long before server.start_deadline_seconds.
        os.kill(maker, signal.SIGKILL)
        for server, said in (
            (first, f"its maker, process {maker}, was killed by SIGKILL"),
            (waiting, f"server-0, which makes it, has ended: {tmp_path}/run/weights/start-"),
        ):
            assert server.process.wait(timeout=PATIENCE_SECONDS) == CheckpointError.exit_code
            seen = server.registration()
            assert seen.state == "failed" and said in seen.error, seen
        assert copies(run) == []

        # The next attempt continues, and what it makes is whole.
        again = serve(0)
        until(lambda: copies(run) or again.process.poll() is not None, PATIENCE_SECONDS)
        again.stop()
        (copy,) = copies(run)
        noted = json.loads((copy / "manifest.json").read_text())["tensors"]
        held = {name: t for file in copy.glob("*.safetensors") for name, t in load_file(file).items()}
        assert {name: note["sha256"] for name, note in noted.items()} == {n: tensor_digest(t) for n, t in held.items()}
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


def test_a_maker_ends_with_its_command(tmp_path):
    model = make_blocks_model(tmp_path / "model", vocab_size=ROWS)
    run = RunFolder(tmp_path / "run")
    serve = Serve(run_config(tmp_path, model, server={"quantization": "fp8_block"}), run.path)
    maker = frozen_maker(serve, run)
    assert serve.stop() == 0 and serve.registration().state == "stopped", serve.output.read_text()
    wait_gone([maker], PATIENCE_SECONDS)


def test_a_disk_that_fills_up_ends_the_server_with_that_reason(tmp_path):
    if subprocess.run(
        [*IN_A_NAME_SPACE, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, check=False
    ).returncode:
        pytest.skip("a small file system can be mounted neither by this user nor in a name space of its own")
    path = os.pathsep.join([str(HERE), str(HERE.parent / "support")])
    done = subprocess.run(
        [*IN_A_NAME_SPACE, sys.executable, str(HERE / "copy_faults.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["code"], seen["state"]) == (CheckpointError.exit_code, "failed"), seen
    assert "cannot be made: [Errno 28] No space left on device" in seen["error"], seen
    assert seen["left"] == ["progress.jsonl"] and seen["whole"] == 1, seen
